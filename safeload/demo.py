"""The demo: what a nested `from_pretrained` gives on each rank, and what safeload gives in its place.

Light to import: torch and transformers are imported by the ranks alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from safeload.demo_records import DemoResult
from safeload.spawning import run_ranks

if TYPE_CHECKING:
    from safeload.demo_records import Setting

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
        on_step(f"plain from_pretrained on {ranks} ranks")
        plain = _run("load_plainly", setting, ranks=ranks)
        on_step(f"safeload on {ranks} ranks, then a few steps under FSDP2")
        safe = _run("load_safely", setting, ranks=ranks)
    return DemoResult(
        setting=setting,
        ranks=ranks,
        plain=tuple(row for rows in zip(*plain, strict=True) for row in rows),
        safe=tuple(row for rows in zip(*(loads for loads, _, _ in safe), strict=True) for row in rows),
        trained=tuple(trained for _, trained, _ in safe),
        report=safe[0][2],
    )


def _run(name: str, *args: Any, ranks: int, env: Mapping[str, str] = _FSDP_ENVIRONMENT) -> tuple[Any, ...]:
    function = f"{_RANKS_MODULE}.{name}"
    return run_ranks(function, *args, ranks=ranks, timeout=_TIMEOUT, env=env, preload=[_RANKS_MODULE])
