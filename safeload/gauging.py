"""What this machine can do at best: seconds for so many bytes, by one core, or from rank to rank; and what it is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch

from safeload.spawning import run_ranks

__all__ = ["limits_s", "machine", "send_between_two", "versions", "write_all"]

_SAMPLE_BYTES: Final = 256 * 1024**2
_WRITE_BYTES: Final = 4 * 1024**2
_TIMES: Final = 3
_TIMEOUT: Final = timedelta(minutes=10)
_PACKAGES: Final = (
    "safeload",
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "blake3",
    "tensorizer",
    "fastsafetensors",
    "runai-model-streamer",
)


def limits_s(size_bytes: int, *, sample_bytes: int = _SAMPLE_BYTES) -> dict[str, float]:
    """Return the seconds that each of this machine's own limits sets for so many bytes: best of three.

    Args:
        size_bytes: Bytes.
        sample_bytes: Measured with at most so many, and scaled.
    """
    sample = min(size_bytes, sample_bytes)
    filled = torch.ones(sample, dtype=torch.uint8)
    other = torch.ones(sample, dtype=torch.uint8)
    raw = filled.numpy().data
    ways: dict[str, Callable[[], object]] = {
        "copy between pages that are there": lambda: other.copy_(filled),
        "copy into fresh pages": lambda: torch.empty(sample, dtype=torch.uint8).copy_(filled),
        "sha256": lambda: hashlib.sha256(raw).digest(),
    }
    try:
        from blake3 import blake3

        ways["blake3"] = lambda: blake3(raw).digest()
    except ImportError:
        pass
    if hasattr(os, "memfd_create"):
        ways["copy into fresh sealed memory"] = lambda: _fill_memory(raw)
    found = {name: min(_timed(way) for _ in range(_TIMES)) for name, way in ways.items()}
    found["gloo, one rank to another on this machine"] = _gloo_s(sample)
    return {name: seconds * size_bytes / sample for name, seconds in found.items()}


def _fill_memory(raw: memoryview) -> None:
    fd = os.memfd_create("bench")
    try:
        write_all(fd, raw, len(raw))
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, size_bytes: int) -> None:
    """Write to memory from its beginning on, 4 MiB at a time.

    Args:
        fd: The memory.
        data: What to write, again and again.
        size_bytes: How much in all.
    """
    os.ftruncate(fd, size_bytes)
    at = 0
    while at < size_bytes:
        begin = at % len(data)
        at += os.pwrite(fd, data[begin : begin + min(_WRITE_BYTES, size_bytes - at)], at)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _gloo_s(sample_bytes: int) -> float:
    env = {"OMP_NUM_THREADS": "1"}
    return float(max(run_ranks(f"{__name__}.send_between_two", sample_bytes, ranks=2, timeout=_TIMEOUT, env=env)))


def send_between_two(size_bytes: int) -> float:
    """Return the seconds of one broadcast between pages that are there: best of three.

    Args:
        size_bytes: Bytes, in one tensor.

    Ranks: both ranks of the default group.
    """
    import torch.distributed as dist

    wire = torch.ones(size_bytes, dtype=torch.uint8)
    dist.broadcast(wire, 0)
    found = []
    for _ in range(_TIMES):
        dist.barrier()
        found.append(_timed(lambda: dist.broadcast(wire, 0)))
    return min(found)


def machine() -> dict[str, Any]:
    """Return what this machine is, and how busy it was in the last minute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cores": cores, "system": platform.platform(), "machine": platform.machine(), "load_at_end": load}


def versions() -> dict[str, str]:
    """Return the versions of what was measured and of what it stands on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
