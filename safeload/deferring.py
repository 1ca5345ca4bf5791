"""Let a tower's library load a checkpoint whose bytes are still being read, and find out where they are to go.

A library that takes weights as they are only hangs views of the mapped file into the module: it reads the header and no
weight. So it may run at the beginning, on memory that holds nothing but headers, while the weights are still being read
and hashed. A cast, its one common wish to see weights, is answered with memory that is filled later (`_Casting`).

Whether it did look at weights is not left to trust: the kernel is asked which pages this process has seen. Where it
looked, or failed, its work is thrown away and done again when all bytes are there.

Receives what builds the module, and a `Filling`. Gives the module, its plan, and the place of every segment: a weight
file or the arena, which holds what is in no file as it is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from safeload.filling import Cast, Filling, Wanted
from safeload.mapping import Arena, Mapped, mapped_now
from safeload.planning import LoadPlan, plan, segment_views
from safeload.sealing import SealedCheckpoint

__all__ = ["Built", "Place", "build_on", "build_while_reading"]

_SPARE_BYTES: Final = 64 * 1024**2  # for what classes compute themselves: position tables, buffers
_ONE_THREAD: Final = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers 5 casts in threads, where `_Casting` does not reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a segment of the plan is: `block` is a weight file by number, the arena coming last; `offset` in it."""

    block: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A tower on the source rank: its module, the plan, and the place of every segment. `arena` is sealed memory."""

    module: nn.Module
    load_plan: LoadPlan
    places: tuple[Place, ...]
    arena: Arena


class _Casting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers a cast of file memory with arena memory to be filled, and notes what is to be filled with what."""

    def __init__(self, fds: Sequence[int], arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fds, self._arena = tuple(fds), arena
        self._mapped = Mapped(spans=())
        self.casts: dict[int, list[Cast]] = {number: [] for number in range(len(self._fds))}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and _is_plain_cast(args[0], given):
            later = self._defer(args[0], given["dtype"])
            if later is not None:
                return later
        return func(*args, **given)

    def _defer(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        size_bytes = tensor.numel() * tensor.element_size()
        found = self._mapped.locate(tensor.data_ptr(), size_bytes)
        if found is None:
            self._mapped = mapped_now(self._fds)
            found = self._mapped.locate(tensor.data_ptr(), size_bytes)
        if found is None or found[1] % tensor.element_size():
            return None
        target = self._arena.reserve(tensor.numel() * dtype.itemsize)
        if target is None:
            return None
        number, begin = found
        cast = Cast(
            begin=begin, end=begin + size_bytes, source_dtype=tensor.dtype, target=target, target_dtype=dtype
        )
        self.casts[number].append(cast)
        flat = torch.frombuffer(self._arena.mapping, dtype=dtype, count=tensor.numel(), offset=target)
        return flat.view(tensor.shape)


def _is_plain_cast(tensor: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether a copy changes the dtype of dense memory on the cpu, and nothing else."""
    there, dtype = given.get("device"), given.get("dtype")
    return (
        dtype not in (None, tensor.dtype)
        and tensor.device.type == "cpu"
        and (there is None or torch.device(there).type == "cpu")
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not given.get("pin_memory")
        and tensor.dtype.is_floating_point
        and dtype.is_floating_point
    )


@contextlib.contextmanager
def _casting(mode: _Casting | None) -> Iterator[None]:
    if mode is None:
        yield
        return
    before = os.environ.get(_ONE_THREAD)
    os.environ[_ONE_THREAD] = "1"
    try:
        with mode:
            yield
    finally:
        if before is None:
            del os.environ[_ONE_THREAD]
        else:
            os.environ[_ONE_THREAD] = before


def build_while_reading(
    build: Callable[[SealedCheckpoint], nn.Module], filling: Filling, *, casts: bool
) -> Built | None:
    """Build the tower while its weights are being read, if its library can do without them until then.

    Args:
        build: Builds the module from the checkpoint, as far as it is there.
        filling: The reading; it is told what is wanted.
        casts: Whether a dtype was asked for.

    Returns:
        The tower, whose weights are there when the filling has finished; None where the library looked at weights or
        failed, so that it has to be run again when all of them are there. Nothing is left of this try then.

    Ranks: source only.
    """
    fds = filling.memory_fds
    arena = Arena(2 * sum(file.size_bytes for file in filling.seen.weight_files) + _SPARE_BYTES)
    mode = _Casting(fds, arena) if casts else None
    built = None
    try:
        with _casting(mode):
            module = build(filling.seen)
        built = _survey(module, fds, arena)
        if _looked(filling, arena):
            built = None
    except Exception:  # told again by the second run, if it is not that the weights were missing
        built = None
    if built is None:
        arena.close()
        return None
    filling.want(_wanted(built, mode, filling), arena.fd)
    return built


def build_on(build: Callable[[SealedCheckpoint], nn.Module], sealed: SealedCheckpoint) -> Built:
    """Build the tower when all its weights are there.

    Args:
        build: Builds the module from the checkpoint.
        sealed: The checkpoint.

    Returns:
        The tower. What is not in a file as it is needed was copied into the arena.

    Ranks: source only.
    """
    arena = Arena(_SPARE_BYTES)
    try:
        module = build(sealed)
        return _survey(module, [file.fd for file in sealed.weight_files], arena)
    except BaseException:
        arena.close()
        raise


def _survey(module: nn.Module, fds: Sequence[int], arena: Arena) -> Built:
    """Plan the module and find the place of each segment; what is in none of the files is copied into the arena."""
    load_plan = plan(module)
    known = mapped_now([*fds, arena.fd])
    alignments = _alignments(load_plan)
    places = []
    for number, segment in enumerate(segment_views(module, load_plan)):
        found = known.locate(segment.data_ptr(), segment.numel())
        if found is None or found[1] % alignments[number]:
            found = len(fds), arena.put(memoryview(segment.numpy()))
        places.append(Place(block=found[0], offset_bytes=found[1]))
    arena.cut()
    return Built(module=module, load_plan=load_plan, places=tuple(places), arena=arena)


def _alignments(load_plan: LoadPlan) -> dict[int, int]:
    """Return what each segment's address must be a multiple of."""
    found: dict[int, int] = {}
    for spec in load_plan.tensors:
        found[spec.segment] = max(spec.torch_dtype.itemsize, found.get(spec.segment, 1))
    return found


def _looked(filling: Filling, arena: Arena) -> bool:
    """Whether this process has looked at weights; a file that is not copied may be looked at."""
    known = mapped_now([*filling.memory_fds, arena.fd])
    ahead = filling.header_bytes if filling.copies else ()
    files = any(known.looked_at(number, beyond_bytes=size) for number, size in enumerate(ahead))
    return files or known.looked_at(len(filling.memory_fds), beyond_bytes=0)


def _wanted(built: Built, mode: _Casting | None, filling: Filling) -> tuple[Wanted, ...]:
    ranges = [[(0, size)] for size in filling.header_bytes]
    for place, segment in zip(built.places, built.load_plan.segments, strict=True):
        if place.block < len(ranges):
            ranges[place.block].append((place.offset_bytes, place.offset_bytes + segment.size_bytes))
    casts = mode.casts if mode else {}
    return tuple(
        Wanted(
            ranges=_merged(sorted(spans)), casts=tuple(sorted(casts.get(number, ()), key=lambda cast: cast.begin))
        )
        for number, spans in enumerate(ranges)
    )


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
