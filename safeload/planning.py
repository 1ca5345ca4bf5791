"""Turn the source's finished module into a plan that every rank can check and fill, without opening a file.

Receives a module whose tensors are all there. Gives a `LoadPlan`: names, kinds, shapes, dtypes, strides, aliases and
the order of the bytes. It travels as JSON. Receivers allocate from the plan, never from their own module, so that a
rank whose module says another dtype cannot reinterpret what it is sent.

Memory is planned by *segment*: the smallest range of bytes that holds a tensor, or several that overlap. Tied and
overlapping tensors share a segment, so that each byte is sent once and aliases are aliases again on every rank.
"""

from __future__ import annotations

import bisect
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Final, Literal

import torch
from torch import nn

from safeload.errors import CheckpointError

__all__ = [
    "LoadPlan",
    "NamedTensor",
    "Segment",
    "TensorSpec",
    "bytes_from",
    "list_tensors",
    "named_tensors",
    "plan",
    "reorder",
    "segment_beginnings",
    "segment_views",
]

Kind = Literal["parameter", "buffer", "attribute"]
_Found = tuple[str, Kind, torch.Tensor, bool]  # the fields of a NamedTensor
_PLAN_FORMAT: Final = 2
_MODULES_OWN: Final = frozenset(vars(nn.Module()))  # attributes that every module has: tables of tensors, hooks, flags
_PLAIN_TYPES: Final = (torch.Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor that a module holds: a parameter, a buffer, or a plain attribute such as a rotary table."""

    name: str
    kind: Kind
    tensor: torch.Tensor
    persistent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the tower.

    Attributes:
        name: Qualified name in the module.
        kind: "parameter", "buffer" or "attribute" (a tensor held as a plain attribute).
        dtype: Name of the torch dtype, "float16".
        shape: Sizes, in elements.
        strides: In elements.
        segment: Index into `LoadPlan.segments`.
        offset_bytes: Where the tensor begins in its segment.
        persistent: Whether it is in the module's own state dict.
        same_as: Name of the first tensor that is the very same object (a tie); None for the first.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    segment: int
    offset_bytes: int
    persistent: bool
    same_as: str | None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        dtype = _dtype_named(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"the plan gives {self.name} the dtype {self.dtype!r}, which this torch does not know"
            )
        return dtype


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _dtype_named(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


_SPEC_FIELDS: Final = tuple(field.name for field in fields_of(TensorSpec))
_SEGMENT: Final = _SPEC_FIELDS.index("segment")
_row_of: Final = operator.attrgetter(*_SPEC_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of bytes that is sent once."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All tensors of a tower and the bytes behind them.

    Attributes:
        tensors: In the module's own order.
        segments: In the order in which they are sent.
    """

    tensors: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that one rank receives."""
        return sum(segment.size_bytes for segment in self.segments)

    def to_json(self) -> bytes:
        """Return the plan as JSON bytes."""
        rows = [_row_of(spec) for spec in self.tensors]
        sizes = [segment.size_bytes for segment in self.segments]
        return json.dumps({"format": _PLAN_FORMAT, "tensors": rows, "segments": sizes}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> LoadPlan:
        """Read what `to_json` wrote on another rank.

        Raises:
            CheckpointError: The bytes are not a plan of this version of safeload.
        """
        try:
            fields = json.loads(raw)
            if fields["format"] != _PLAN_FORMAT:
                raise CheckpointError(
                    f"the source rank sent a plan of format {fields['format']}, this rank reads {_PLAN_FORMAT}: "
                    "install the same version of safeload on every rank"
                )
            return cls(
                tensors=tuple(map(_spec_of, fields["tensors"])),
                segments=tuple(Segment(size_bytes=size_bytes) for size_bytes in fields["segments"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the plan that the source rank sent cannot be read: {error!r}") from error


def _spec_of(row: Sequence[Any]) -> TensorSpec:
    """Read one row of what `_row_of` gives."""
    name, kind, dtype, shape, strides, segment, offset_bytes, persistent, same_as = row
    return TensorSpec(
        name=name,
        kind=kind,
        dtype=dtype,
        shape=tuple(shape),
        strides=tuple(strides),
        segment=segment,
        offset_bytes=offset_bytes,
        persistent=persistent,
        same_as=same_as,
    )


def _own_tensors(module: nn.Module) -> Iterator[_Found]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, "parameter", parameter, True
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, "buffer", buffer, name not in module._non_persistent_buffers_set
    for name, value in vars(module).items():
        if name not in _MODULES_OWN and isinstance(value, torch.Tensor):
            yield name, "attribute", value, False


def list_tensors(module: nn.Module) -> Iterator[_Found]:
    """Yield the fields of what `named_tensors` returns, for who needs them once.

    Args:
        module: Any module.

    Ranks: local.
    """
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, kind, tensor, persistent in _own_tensors(child):
            yield f"{prefix}.{name}" if prefix else name, kind, tensor, persistent


def named_tensors(module: nn.Module) -> tuple[NamedTensor, ...]:
    """List every tensor that a module and its children hold, ties under each of their names.

    Args:
        module: Any module.

    Returns:
        In the module's own order; a submodule that is reachable by several names is listed under each of them.

    Ranks: local.
    """
    return tuple(
        NamedTensor(name=name, kind=kind, tensor=tensor, persistent=persistent)
        for name, kind, tensor, persistent in list_tensors(module)
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first element and of the end of its last, gaps included."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _refuse_special(tensors: tuple[NamedTensor, ...]) -> None:
    """Raise where a tensor is not plain strided memory: its bytes would not be its value."""
    bad = {
        item.name: f"{type(item.tensor).__name__}, {item.tensor.layout}, {item.tensor.device}"
        for item in tensors
        if type(item.tensor) not in _PLAIN_TYPES
        or item.tensor.layout is not torch.strided
        or item.tensor.is_quantized
        or item.tensor.is_conj()
        or item.tensor.is_neg()
        or item.tensor.is_meta
    }
    if bad:
        listed = "; ".join(f"{name} ({what})" for name, what in sorted(bad.items()))
        raise CheckpointError(
            f"{len(bad)} tensors of the tower are not plain dense tensors with data, and cannot be sent as bytes: "
            f"{listed}. Quantised and sharded towers are not supported: load the tower in a floating dtype",
            mismatched=bad,
        )


def _ranges(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge the byte ranges of all tensors where they overlap; sorted by address."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _layout(spans: Sequence[tuple[int, int]]) -> tuple[tuple[Segment, ...], list[tuple[int, int]]]:
    """Give each tensor its (segment index, offset in bytes); segments in the order in which the module names them."""
    ranges = _ranges(spans)
    starts = [start for start, _ in ranges]
    numbers: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for start, stop in spans:
        if start == stop:
            places.append((-1, 0))
            continue
        found = bisect.bisect_right(starts, start) - 1
        number = numbers.setdefault(found, len(numbers))
        places.append((number, start - starts[found]))
    segments = tuple(Segment(size_bytes=ranges[found][1] - ranges[found][0]) for found in numbers)
    return segments, places


def plan(module: nn.Module) -> LoadPlan:
    """Plan how a finished module is sent.

    Args:
        module: A module whose every tensor has data, all on the cpu.

    Returns:
        The plan. A tensor without elements has segment -1.

    Raises:
        CheckpointError: A tensor is on meta, quantised, sparse, sharded or of a subclass; all of them are named.

    Ranks: source only.
    """
    tensors = named_tensors(module)
    _refuse_special(tensors)
    segments, places = _layout([_span(item.tensor) for item in tensors])
    first: dict[int, str] = {}
    specs = []
    for item, (segment, offset_bytes) in zip(tensors, places, strict=True):
        original = first.setdefault(id(item.tensor), item.name)
        specs.append(
            TensorSpec(
                name=item.name,
                kind=item.kind,
                dtype=_name_of(item.tensor.dtype),
                shape=tuple(item.tensor.shape),
                strides=item.tensor.stride(),
                segment=segment,
                offset_bytes=offset_bytes,
                persistent=item.persistent,
                same_as=None if original == item.name else original,
            )
        )
    return LoadPlan(tensors=tuple(specs), segments=segments)


def reorder(load_plan: LoadPlan, order: Sequence[int]) -> LoadPlan:
    """Change the order in which the segments are sent.

    Args:
        load_plan: A plan.
        order: The number of every segment, in the new order.

    Returns:
        The same plan with its segments in that order.

    Ranks: source only.
    """
    numbers = {old: new for new, old in enumerate(order)} | {-1: -1}
    rows = (_row_of(spec) for spec in load_plan.tensors)
    return LoadPlan(
        tensors=tuple(_spec_of((*row[:_SEGMENT], numbers[row[_SEGMENT]], *row[_SEGMENT + 1 :])) for row in rows),
        segments=tuple(load_plan.segments[old] for old in order),
    )


def segment_beginnings(module: nn.Module, load_plan: LoadPlan) -> tuple[torch.Tensor, ...]:
    """Return for every segment the first of the module's tensors that begins where the segment does.

    Args:
        module: The module that `load_plan` was made from, unchanged since.
        load_plan: What `plan(module)` returned.

    Ranks: source only.
    """
    found: dict[int, torch.Tensor] = {}
    for (_, _, tensor, _), spec in zip(list_tensors(module), load_plan.tensors, strict=True):
        if spec.segment >= 0 and spec.offset_bytes == 0:
            found.setdefault(spec.segment, tensor)
    return tuple(found[number] for number in range(len(load_plan.segments)))


def bytes_from(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """Return memory from the beginning of a tensor on, as flat bytes.

    Args:
        tensor: On the cpu.
        size_bytes: How much of it; not beyond the tensor's storage.

    Returns:
        uint8 `[size_bytes]`, a view.

    Ranks: local.
    """
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.data_ptr() - storage.data_ptr()
    return storage[start : start + size_bytes]


def segment_views(module: nn.Module, load_plan: LoadPlan) -> tuple[torch.Tensor, ...]:
    """Return the module's own memory, segment by segment, as flat bytes.

    Args:
        module: The module that `load_plan` was made from, unchanged since, on the cpu.
        load_plan: What `plan(module)` returned.

    Returns:
        One uint8 tensor `[size_bytes]` per segment, a view: it is valid as long as the module's tensors are.

    Ranks: source only.
    """
    begin = zip(segment_beginnings(module, load_plan), load_plan.segments, strict=True)
    return tuple(bytes_from(tensor, segment.size_bytes) for tensor, segment in begin)
