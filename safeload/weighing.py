"""Time a load, and weigh it: every rank begins it together, and looks at every page of what it was given.

Receives functions that load; gives seconds and bytes of this rank. What a load is given must not depend on what the one
before it has freed: `let_malloc_map` once, before any, and `give_back_memory` between them see to that.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from safeload.advising import libc
from safeload.metering import MemoryMeter, pss_bytes

__all__ = ["give_back_memory", "let_malloc_map", "time_once", "weigh_once"]

# What mallopt(3) is told, by the numbers that glibc's malloc.h gives its parameters. Setting either of them ends what
# that page calls dynamic adjustment: a freed block of up to 32 MiB raises the size from which blocks are mapped by
# themselves from 128 KiB to its own, and the free memory that is kept at the heap's end to twice that.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1024**2  # mapped by themselves: a tower's weights, and not what python and libraries use again
_KEPT_BYTES: Final = 64 * 1024**2  # of small memory: the most that dynamic adjustment comes to


def let_malloc_map() -> None:
    """Have glibc map every large tensor by itself for good, as a fresh process does, and as a training's loads find it.

    Otherwise it learns from what is freed to keep it: a way would be given the pages of the one before, already faulted
    in, and would seem to need neither the time nor the memory. Small memory is kept until `give_back_memory`.

    Ranks: local.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc().mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc().mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_memory() -> None:
    """Let nothing of the load before count for the next one: what it has freed goes back to the system.

    Ranks: every rank of the default group.
    """
    import torch.distributed as dist

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        libc().malloc_trim(0)
    dist.barrier()


def time_once(load: Callable[[], nn.Module | None]) -> dict[str, float]:
    """Load and measure the time; nothing else runs meanwhile.

    Args:
        load: Gives a tower, or None where there is nothing to look at.

    Returns:
        `seconds`, until all ranks hold a tower whose every page has been read; `returned_s`, until the call returned on
        this one; `cpu_s`, this process's processor time.

    Ranks: every rank of the default group.
    """
    import torch.distributed as dist

    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    module = load()
    returned = time.perf_counter() - start
    if module is not None:
        _touch(module)
    cpu_s = time.process_time() - start_cpu
    dist.barrier()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "returned_s": returned, "cpu_s": cpu_s}


def weigh_once(load: Callable[[], nn.Module | None]) -> dict[str, float]:
    """Load and measure the memory, in a load of its own: looking at memory takes time.

    Args:
        load: Gives a tower, or None where there is nothing to look at.

    Returns:
        `loaded_bytes`, of the tower's tensors; `pss_bytes` and `peak_bytes`, how much more memory this process holds
        than before, while all ranks hold what they have loaded and at its most.

    Ranks: every rank of the default group.
    """
    import torch.distributed as dist

    before = pss_bytes() or 0
    with MemoryMeter() as meter:
        dist.barrier()
        module = load()
        loaded_bytes = _touch(module) if module is not None else 0
        dist.barrier()
        meter.stop()  # all ranks still hold what they have loaded
        dist.barrier()
    return {
        "loaded_bytes": float(loaded_bytes),
        "pss_bytes": float(max(0, (meter.after_bytes or 0) - before)),
        "peak_bytes": float(max(0, (meter.peak_bytes or 0) - before)),
    }


def _touch(module: nn.Module) -> int:
    """Read a value of every page; wait for a verdict that is still out."""
    size_bytes = 0
    for value in (*module.parameters(), *module.buffers()):
        raw = value.detach().reshape(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)
        raw[:: mmap.PAGESIZE].sum()
        size_bytes += value.nbytes
    module.state_dict()
    return size_bytes
