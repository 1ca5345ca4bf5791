"""The demo: what a nested `from_pretrained` gives on each rank, and what safeload gives in its place.

Light to import: torch and transformers are imported by the ranks alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from safeload.demo_records import WAYS, DemoResult, LoadRow, Setting, TrainRow
from safeload.spawning import run_ranks

__all__ = ["run_demo"]

_TIMEOUT: Final = timedelta(minutes=10)
_RANKS_MODULE: Final = "safeload.demo_ranks"
# What Accelerate sets for FSDP training with RAM-efficient loading; transformers reads it.
_FSDP_ENVIRONMENT: Final = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


def run_demo(
    *, tower: str | None = None, ranks: int = 2, on_step: Callable[[str], Any] = lambda text: None
) -> DemoResult:
    """Run the demo: its own processes, on the CPU, nothing left behind.

    Args:
        tower: Folder or repository of a tower; None makes a small one.
        ranks: Number of processes.
        on_step: Told what is going on.

    Returns:
        What was seen on each rank.

    Raises:
        SafeLoadError: The tower cannot be loaded.
        PeerError: A process failed in a way that nobody expects, or was late.
    """
    with tempfile.TemporaryDirectory(prefix="safeload-demo-") as work:
        on_step("preparing: importing torch and transformers")
        setting: Setting = _run("prepare", tower, work, ranks=1, env={})[0]
        plain: list[LoadRow] = []
        for way in WAYS:  # in processes of their own: a load should not find what another one has left
            on_step(f"{way} with plain from_pretrained inside, on {ranks} ranks")
            plain += _run("load_plainly", setting, way, ranks=ranks)
        safe: list[tuple[LoadRow, TrainRow, dict[str, Any]]] = []
        for way in WAYS:
            on_step(f"{way} with safeload inside, on {ranks} ranks, then a few steps under FSDP2")
            safe += _run("load_safely", setting, way, ranks=ranks)
    return DemoResult(
        setting=setting,
        ranks=ranks,
        plain=tuple(plain),
        safe=tuple(row for row, _, _ in safe),
        trained=tuple(trained for _, trained, _ in safe),
        report=safe[0][2],
    )


def _run(name: str, *args: Any, ranks: int, env: Mapping[str, str] = _FSDP_ENVIRONMENT) -> tuple[Any, ...]:
    function = f"{_RANKS_MODULE}.{name}"
    return run_ranks(function, *args, ranks=ranks, timeout=_TIMEOUT, env=env, preload=[_RANKS_MODULE])
