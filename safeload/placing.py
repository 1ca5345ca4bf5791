"""Check a rank's module against the plan, and put the received bytes into it.

Receives a module that this rank's constructor made (its tensors may be on meta), the plan of the source rank and
memory for every segment. Gives the module filled: dtype, shape, strides and aliases come from the plan, never from
the module. Nothing stays unfilled and nothing stays on meta.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from safeload.errors import CheckpointError
from safeload.listing import NamedTensor, list_tensors
from safeload.mapping import ALIGN_BYTES
from safeload.planning import LoadPlan, TensorSpec

__all__ = ["Placement", "allocate", "check_module", "is_one_piece", "place", "tensors_of"]

_LISTED = 20
# One piece is for `safeload.populating`, which has to try some of the pages to know which kind of them costs less: of a
# smaller tower too few are left then. And it has a price: one tensor that somebody keeps keeps all of it in memory.
_ONE_PIECE_BYTES: Final = 32 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What was put into a module.

    Attributes:
        tensors: How many tensors, ties counted once.
        size_bytes: Bytes of memory behind them.
        device: Where they are.
    """

    tensors: int
    size_bytes: int
    device: str


def allocate(load_plan: LoadPlan, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Allocate memory for every segment, without touching it.

    Args:
        load_plan: The source's plan.
        device: Where the tower will live.

    Returns:
        One uint8 tensor `[size_bytes]` per segment, uninitialised.

    Ranks: every rank that receives.
    """
    if is_one_piece(load_plan, device):
        return _allocate_as_one(load_plan)
    return tuple(torch.empty(segment.size_bytes, dtype=torch.uint8, device=device) for segment in load_plan.segments)


def is_one_piece(load_plan: LoadPlan, device: torch.device) -> bool:
    """Say whether `allocate` maps memory for the tower alone, in one piece.

    Args:
        load_plan: The source's plan.
        device: Where the tower will live.
    """
    return device.type == "cpu" and load_plan.size_bytes >= _ONE_PIECE_BYTES and sys.platform == "linux"


def _allocate_as_one(load_plan: LoadPlan) -> tuple[torch.Tensor, ...]:
    """Allocate one piece of memory, which may be given huge pages: see `safeload.populating`."""
    begins, end = [], 0
    for segment in load_plan.segments:
        begins.append(end)
        end += -(-segment.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pieces = zip(begins, load_plan.segments, strict=True)
    return tuple(
        torch.frombuffer(memory, dtype=torch.uint8, count=segment.size_bytes, offset=begin) for begin, segment in pieces
    )


def _differences(ours: dict[str, NamedTensor], load_plan: LoadPlan) -> dict[str, str]:
    planned = {spec.name: spec for spec in load_plan.tensors}
    found = {name: f"on the source rank only ({spec.kind})" for name, spec in planned.items() if name not in ours}
    found |= {name: f"on this rank only ({item.kind})" for name, item in ours.items() if name not in planned}
    for name, spec in planned.items():
        item = ours.get(name)
        if item is None:
            continue
        if item.kind != spec.kind:
            found[name] = f"a {spec.kind} on the source rank, a {item.kind} on this rank"
        elif spec.kind == "parameter" and tuple(item.tensor.shape) != spec.shape:
            found[name] = f"shape {list(spec.shape)} on the source rank, {list(item.tensor.shape)} on this rank"
    return found


def check_module(module: nn.Module, load_plan: LoadPlan) -> None:
    """Compare the module that this rank constructed with the plan.

    Shapes of parameters must agree; those of buffers and attributes may differ, since a buffer may be sized by the
    load.

    Args:
        module: What this rank's constructor made.
        load_plan: The source's plan.

    Raises:
        CheckpointError: Names, kinds or parameter shapes differ; `mismatched` lists all of them.

    Ranks: every rank that receives.
    """
    found = _differences({item.name: item for item in list_tensors(module)}, load_plan)
    if found:
        lines = [f"{name}: {what}" for name, what in sorted(found.items())]
        more = f" (+{len(lines) - _LISTED} more)" if len(lines) > _LISTED else ""
        raise CheckpointError(
            f"{type(module).__name__} as constructed here is not the one that the source rank loaded: "
            f"{'; '.join(lines[:_LISTED])}{more}. Construct the same class with the same code on every rank",
            mismatched=found,
        )


def _tensor(spec: TensorSpec, segments: tuple[torch.Tensor, ...], device: torch.device) -> torch.Tensor:
    dtype = spec.torch_dtype
    if spec.segment < 0:
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)
    raw = segments[spec.segment]
    if spec.offset_bytes:
        raw = raw[spec.offset_bytes :]
    odd_bytes = raw.numel() % dtype.itemsize
    if odd_bytes:
        raw = raw[:-odd_bytes]
    if spec.offset_bytes % dtype.itemsize:  # a view into foreign memory that torch cannot address: give it its own
        raw = raw.clone()
    return raw.view(dtype).as_strided(spec.shape, spec.strides)


def tensors_of(
    load_plan: LoadPlan, segments: tuple[torch.Tensor, ...], *, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors of a plan by name, as views of the memory of its segments.

    Args:
        load_plan: The source's plan.
        segments: One uint8 tensor `[size_bytes]` per segment, on `device`.
        device: Where the segments are.

    Ranks: local.
    """
    return {spec.name: _tensor(spec, segments, device) for spec in load_plan.tensors}


def _put(owners: Mapping[str, nn.Module], spec: TensorSpec, value: torch.Tensor) -> None:
    path, _, leaf = spec.name.rpartition(".")
    owner = owners[path]
    if spec.kind == "parameter":
        owner._parameters[leaf] = value  # type: ignore[assignment]
    elif spec.kind == "buffer":
        owner._buffers[leaf] = value
    else:
        vars(owner)[leaf] = value


def _as_kind(spec: TensorSpec, tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Make it a Parameter where it is one, with the flags that the class's own library has put on it."""
    if spec.kind != "parameter":
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=False)
    vars(parameter).update(vars(before))
    return parameter


def place(
    module: nn.Module, load_plan: LoadPlan, segments: tuple[torch.Tensor, ...], *, device: torch.device
) -> Placement:
    """Put the tensors into the module.

    Args:
        module: A module that `check_module` has passed.
        load_plan: The source's plan.
        segments: One filled uint8 tensor `[size_bytes]` per segment, on `device`. The module's tensors become views of
            them and keep them alive.
        device: Where the segments are.

    Returns:
        What was placed. Tied names share one object, as on the source.

    Raises:
        CheckpointError: A tensor of the module is on meta after all.

    Ranks: every rank that receives; on the source too where the tower moves to another device.
    """
    ours = {item.name: item.tensor for item in list_tensors(module)}
    owners = dict(module.named_modules(remove_duplicate=False))
    made: dict[str, torch.Tensor] = {}
    for spec in load_plan.tensors:
        if spec.same_as is None:
            made[spec.name] = _as_kind(spec, _tensor(spec, segments, device), ours[spec.name])
        else:
            made[spec.name] = made[spec.same_as]
        _put(owners, spec, made[spec.name])
    meta = sorted(item.name for item in list_tensors(module) if item.tensor.is_meta)
    if meta:
        raise CheckpointError(f"still on the meta device after the load: {', '.join(meta)}", missing=meta)
    own = sum(spec.same_as is None for spec in load_plan.tensors)
    return Placement(tensors=own, size_bytes=load_plan.size_bytes, device=str(device))
