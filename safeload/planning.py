"""Turn the source's finished module into a plan that every rank can check and fill, without opening a file.

Receives a module whose tensors are all there. Gives a `LoadPlan`: names, kinds, shapes, dtypes, strides, aliases and
the order of the bytes. It travels as JSON. Receivers allocate from the plan, never from their own module, so that a
rank whose module says another dtype cannot reinterpret what it is sent.

Memory is planned by *segment*: the smallest range of bytes that holds a tensor, or several that overlap. Tied and
overlapping tensors share a segment, so that each byte is sent once and aliases are aliases again on every rank.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import CheckpointError
from safeload.listing import Kind, bytes_from, lay_out, list_tensors, refuse_special

__all__ = ["LoadPlan", "Segment", "TensorSpec", "plan", "reorder", "segment_beginnings", "segment_views"]

_PLAN_FORMAT: Final = 3


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
        columns = {name: [getattr(spec, name) for spec in self.tensors] for name in _SPEC_FIELDS}
        sizes = [segment.size_bytes for segment in self.segments]
        fields = {"format": _PLAN_FORMAT, "tensors": columns, "segments": sizes}
        return json.dumps(fields, separators=(",", ":")).encode()

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
                tensors=_specs_of(fields["tensors"]),
                segments=tuple(Segment(size_bytes=size_bytes) for size_bytes in fields["segments"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the plan that the source rank sent cannot be read: {error!r}") from error


def _specs_of(columns: Mapping[str, Sequence[Any]]) -> tuple[TensorSpec, ...]:
    """Read the fields of all tensors: a list for each field, which takes half the bytes that a row of names would."""
    lengths = {len(columns[name]) for name in _SPEC_FIELDS}
    if len(lengths) != 1:
        raise ValueError(f"lists of {sorted(lengths)} values for as many tensors")
    kinds, dtypes, segments = columns["kind"], columns["dtype"], columns["segment"]
    shapes, strides, offsets_bytes = columns["shape"], columns["strides"], columns["offset_bytes"]
    persistent, same_as = columns["persistent"], columns["same_as"]
    return tuple(
        TensorSpec(
            name=name,
            kind=kinds[number],
            dtype=dtypes[number],
            shape=tuple(shapes[number]),
            strides=tuple(strides[number]),
            segment=segments[number],
            offset_bytes=offsets_bytes[number],
            persistent=persistent[number],
            same_as=same_as[number],
        )
        for number, name in enumerate(columns["name"])
    )


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
    tensors = tuple(list_tensors(module))
    refuse_special(tensors)
    sizes, places = lay_out([item.tensor for item in tensors])
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
    return LoadPlan(tensors=tuple(specs), segments=tuple(Segment(size_bytes=size_bytes) for size_bytes in sizes))


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
    return LoadPlan(
        tensors=tuple(_in_segment(spec, numbers[spec.segment]) for spec in load_plan.tensors),
        segments=tuple(load_plan.segments[old] for old in order),
    )


def _in_segment(spec: TensorSpec, segment: int) -> TensorSpec:
    """Do what `dataclasses.replace` does, which takes twice as long."""
    return TensorSpec(
        name=spec.name,
        kind=spec.kind,
        dtype=spec.dtype,
        shape=spec.shape,
        strides=spec.strides,
        segment=segment,
        offset_bytes=spec.offset_bytes,
        persistent=spec.persistent,
        same_as=spec.same_as,
    )


def segment_beginnings(module: nn.Module, load_plan: LoadPlan) -> tuple[torch.Tensor, ...]:
    """Return for every segment the first of the module's tensors that begins where the segment does.

    Args:
        module: The module that `load_plan` was made from, unchanged since.
        load_plan: What `plan(module)` returned.

    Ranks: source only.
    """
    found: dict[int, torch.Tensor] = {}
    for item, spec in zip(list_tensors(module), load_plan.tensors, strict=True):
        if spec.segment >= 0 and spec.offset_bytes == 0:
            found.setdefault(spec.segment, item.tensor)
    return tuple(found[number] for number in range(len(load_plan.segments)))


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
