"""Let a tower's library load a checkpoint whose bytes are still being read, and find out where they are to go.

A library that takes weights as they are only hangs views of the mapped file into the module: it reads the header and no
weight. So it may run at the beginning, on memory that holds nothing but headers, while the weights are still being read
and hashed. A cast, its one common wish to see weights, is answered with memory that is filled later.

That it did not look at weights is not left to trust. Its work is thrown away, and done again when all bytes are there,
unless
- every parameter and every persistent buffer is a view of a weight file, or such a cast of one;
- no torch operation read or wrote memory of a weight file, or of a cast (`_Watching`);
- the kernel knows of no page of either that this process has seen, but the first of each tensor: the safetensors
  library touches those.

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

from safeload.examining import Contents
from safeload.filling import Filling
from safeload.headers import Header
from safeload.listing import bytes_from
from safeload.mapping import Arena, Mapped, mapped_now, view
from safeload.planning import LoadPlan, plan, reorder, segment_beginnings
from safeload.reading import announce
from safeload.routing import Cast, Wanted
from safeload.sealing import SealedCheckpoint
from safeload.staging import stage

__all__ = ["Built", "Early", "Place", "build_while_reading", "survey_loaded"]

_SPARE_BYTES: Final = 64 * 1024**2  # for what classes compute themselves: position tables, buffers
_ONE_THREAD: Final = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers 5 casts in threads, where `_Watching` does not reach
_SEARCHES: Final = 32  # a search of this process's mappings costs milliseconds
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a segment of the plan is: `block` is a weight file by number, the arena coming last; `offset` in it."""

    block: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A tower on the source rank.

    Attributes:
        module: Its tensors may be views of memory that is being filled.
        load_plan: Its plan.
        places: Where every segment is; None where they are in memory of the module's own, which cannot be shared.
        comes_from: For each segment the weight file, and the begin and end in it, that it is filled from; None for
            one that is there already.
        arena: What is in no file as it is needed.
    """

    module: nn.Module
    load_plan: LoadPlan
    places: tuple[Place, ...] | None
    comes_from: tuple[tuple[int, int, int] | None, ...]
    arena: Arena | None

    def freeze(self) -> None:
        """Seal the arena, when all is there."""
        if self.arena is not None:
            self.arena.freeze()


class _LookedError(Exception):
    """The library cannot do without the weights."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers a cast of file memory with arena memory to be filled, and stops any other use of file memory."""

    def __init__(self, fds: Sequence[int], arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fds, self._arena = (*fds, arena.fd), arena
        self._mapped = Mapped(spans=())
        self._elsewhere: set[int] = set()
        self._searches = 0
        self.looked = False
        self.cast: list[torch.UntypedStorage] = []  # keeps their mapping, so that the kernel can be asked about it
        self.casts: list[list[Cast]] = [[] for _ in fds]
        self._views: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_view = self._views.get(func)
        if is_view is None:
            is_view = self._views[func] = _is_view(func)
        if is_view or _is_safetensors_probe(func, args):
            return func(*args, **given)
        if func is torch.ops.aten._to_copy.default and _is_plain_cast(args[0], given):
            later = self._defer(args[0], given["dtype"])
            if later is not None:
                return later
        for tensor in _cpu_tensors((args, given)):
            if self._locate(tensor) is not None:
                self.looked = True
                raise _LookedError(f"{func} on weights")
        return func(*args, **given)

    def _locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (file, offset) of a tensor; the arena is the last file."""
        address, size_bytes = tensor.data_ptr(), tensor.element_size()
        found = self._mapped.locate(address, size_bytes)
        storage = tensor.untyped_storage()._cdata
        if found is None and storage not in self._elsewhere:
            self._searches += 1
            if self._searches > _SEARCHES:
                self.looked = True
                raise _LookedError("too many tensors to search for")
            self._mapped = mapped_now(self._fds)
            found = self._mapped.locate(address, size_bytes)
            if found is None:
                self._elsewhere.add(storage)
        return found

    def _defer(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        found = self._locate(tensor)
        if found is None or found[0] == len(self.casts) or found[1] % tensor.element_size():
            return None
        target = self._arena.reserve(tensor.numel() * dtype.itemsize)
        if target is None:
            return None
        number, begin = found
        end = begin + tensor.numel() * tensor.element_size()
        self.cast.append(tensor.untyped_storage())  # not the tensor: a cast in place gives it another storage
        self.casts[number].append(
            Cast(begin=begin, end=end, source_dtype=tensor.dtype, target=target, target_dtype=dtype)
        )
        flat = view(self._arena.mapping, target, tensor.numel() * dtype.itemsize)
        return flat.view(dtype).view(tensor.shape)

    def refuse_looked(self, filling: Filling, contents: Contents) -> None:
        """Raise if anything has looked at memory that was not filled, as far as this can tell and the kernel."""
        known = mapped_now(self._fds)
        looked = self.looked or known.looked_at(len(self.casts))
        for number, header in enumerate(contents.headers if filling.copies else ()):
            looked |= known.looked_at(number, filled_bytes=filling.header_bytes[number], probed=_beginnings(header))
        if looked:
            raise _LookedError("weights were looked at")


def _is_view(func: Any) -> bool:
    """Whether an operation gives another view of its argument, or a copy of its reference, and reads no value."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _is_safetensors_probe(func: Any, args: Any) -> bool:
    """Whether this looks at one byte: `torch.asarray`, by which safetensors wraps memory, does so to guess a dtype."""
    return func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.uint8


def _cpu_tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.numel():
                yield value
        elif isinstance(value, tuple | list | dict):
            yield from _cpu_tensors(value)


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
def _watching(mode: _Watching | None) -> Iterator[None]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """A module that was built while its weights are being read; whether it may stay is still to be found out."""

    module: nn.Module
    filling: Filling
    contents: Contents
    arena: Arena
    mode: _Watching | None

    def survey(self) -> Built | None:
        """Find out where all its bytes go to, and whether its library has looked at any before they were there.

        Returns:
            The tower, whose weights are there when the filling has finished; None where the library looked at weights,
            so that it has to be run again when all of them are there. Nothing is left of this try then.
        """
        fds = self.filling.memory_fds
        jobs = self.mode.casts if self.mode else [[] for _ in fds]
        with _given_up_on(self.arena) as tried:
            load_plan, places = _survey(self.module, fds, self.arena)
            comes_from = _comes_from(places, load_plan, jobs)
            if self.mode is not None:
                _refuse_dependent(load_plan, comes_from)
                self.mode.refuse_looked(self.filling, self.contents)
        if tried.failed:
            return None
        self.filling.want(_wanted(places, load_plan, jobs, self.filling), self.arena.backed())
        order = sorted(range(len(places)), key=lambda number: comes_from[number] or (-1, number, 0))
        return Built(
            module=self.module,
            load_plan=reorder(load_plan, order),  # sent as they are read
            places=tuple(places[number] for number in order),
            comes_from=tuple(comes_from[number] for number in order),
            arena=self.arena,
        )


@dataclass(slots=True)
class _Try:
    failed: bool = False


@contextlib.contextmanager
def _given_up_on(arena: Arena) -> Iterator[_Try]:
    """Say that it failed, whatever the library raises: it is told again by the second run, if it is no lack of weights.

    Lack of memory, and what is no error but an exit, are raised.
    """
    tried = _Try()
    try:
        yield tried
    except BaseException as error:
        arena.close()
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            raise
        tried.failed = True


def build_while_reading(
    build: Callable[[SealedCheckpoint], nn.Module], filling: Filling, contents: Contents, *, casts: bool
) -> Early | None:
    """Build the tower while its weights are being read, if its library can do without them until then.

    Args:
        build: Builds the module from the checkpoint, as far as it is there.
        filling: The reading; it is told what is wanted, by `Early.survey`.
        contents: What the headers say.
        casts: Whether a dtype was asked for.

    Returns:
        The module; None where the library failed, so that it has to be run again when all weights are there.

    Ranks: source only.
    """
    fds = filling.memory_fds
    arena = Arena(2 * sum(file.size_bytes for file in filling.seen.weight_files) + _SPARE_BYTES)
    mode = _Watching(fds, arena) if casts or filling.copies else None  # a mapped file may be looked at
    if not filling.copies:
        for fd, header in zip(fds, contents.headers, strict=True):
            announce(fd, _beginnings(header))  # where the safetensors library will look
    with _given_up_on(arena) as tried, _watching(mode):
        module = build(filling.seen)
    return None if tried.failed else Early(module=module, filling=filling, contents=contents, arena=arena, mode=mode)


def _refuse_dependent(load_plan: LoadPlan, comes_from: Sequence[Any]) -> None:
    """Refuse a module that holds weights in memory of its own: what it took was not there yet."""
    for spec in load_plan.tensors:
        if spec.persistent and spec.segment >= 0 and comes_from[spec.segment] is None:
            raise _LookedError(f"{spec.name} is a copy")


def _beginnings(header: Header) -> tuple[int, ...]:
    return tuple(_LENGTH_BYTES + header.header_bytes + tensor.begin for tensor in header.tensors if tensor.size_bytes)


def survey_loaded(module: nn.Module, sealed: SealedCheckpoint, *, shares: bool) -> Built:
    """Plan a tower that was built when all its weights were there.

    Args:
        module: The tower.
        sealed: The checkpoint.
        shares: Whether the tensors are to be found in memory that can be shared; what is in no file as it is needed is
            copied into the arena then.

    Returns:
        The tower.

    Ranks: source only.
    """
    if not shares:
        with stage("plan"):
            load_plan = plan(module)
        nothing = (None,) * len(load_plan.segments)
        return Built(module=module, load_plan=load_plan, places=None, comes_from=nothing, arena=None)
    arena = Arena(_SPARE_BYTES)
    try:
        with stage("plan"):
            load_plan, places = _survey(module, [file.fd for file in sealed.weight_files], arena)
    except BaseException:
        arena.close()
        raise
    nothing = (None,) * len(places)
    return Built(module=module, load_plan=load_plan, places=places, comes_from=nothing, arena=arena)


def _survey(module: nn.Module, fds: Sequence[int], arena: Arena) -> tuple[LoadPlan, tuple[Place, ...]]:
    """Plan the module and find the place of each segment; what is in none of the files is copied into the arena."""
    load_plan = plan(module)
    known = mapped_now([*fds, arena.fd])
    alignments = _alignments(load_plan)
    places = []
    for number, tensor in enumerate(segment_beginnings(module, load_plan)):
        size_bytes = load_plan.segments[number].size_bytes
        found = known.locate(tensor.data_ptr(), size_bytes)
        if found is None or found[1] % alignments[number]:
            found = len(fds), arena.put(bytes_from(tensor, size_bytes).numpy().data)
        places.append(Place(block=found[0], offset_bytes=found[1]))
    arena.cut()
    return load_plan, tuple(places)


def _comes_from(places: Sequence[Place], load_plan: LoadPlan, casts: Sequence[Sequence[Cast]]) -> Any:
    by_target = {cast.target: (number, cast.begin, cast.end) for number, of in enumerate(casts) for cast in of}
    arena = len(casts)
    return tuple(
        by_target.get(place.offset_bytes)
        if place.block == arena
        else (place.block, place.offset_bytes, place.offset_bytes + segment.size_bytes)
        for place, segment in zip(places, load_plan.segments, strict=True)
    )


def _alignments(load_plan: LoadPlan) -> dict[int, int]:
    """Return what each segment's address must be a multiple of."""
    found: dict[int, int] = {}
    for spec in load_plan.tensors:
        found[spec.segment] = max(spec.torch_dtype.itemsize, found.get(spec.segment, 1))
    return found


def _wanted(
    places: Sequence[Place], load_plan: LoadPlan, jobs: Sequence[Sequence[Cast]], filling: Filling
) -> tuple[Wanted, ...]:
    ranges = [[(0, size)] for size in filling.header_bytes]
    for place, segment in zip(places, load_plan.segments, strict=True):
        if place.block < len(ranges):
            ranges[place.block].append((place.offset_bytes, place.offset_bytes + segment.size_bytes))
    return tuple(
        Wanted(ranges=_merged(sorted(spans)), casts=tuple(sorted(of, key=lambda cast: cast.begin)))
        for spans, of in zip(ranges, jobs, strict=True)
    )


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
