"""Master weights in float32: the trainable parameters of a model, cast where they are.

Receives a model; changes the dtype of its trainable parameters and nothing else. Promises that every Parameter stays
the same object, so that optimizers, ties and hooks that know it stay right, and that either all are cast or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from safeload.optimizing import each_of, is_moment
from safeload.rewrapping import (
    cast_flat_unit,
    check_ddp,
    check_flat_units,
    check_fully_sharded,
    ddp_wrappers,
    describe_shard,
    flat_units,
    local_part,
    rebuild_ddp,
    refresh_fully_sharded,
    refusal,
)
from safeload.walking import ParameterRow, is_lazy, parameter_rows

__all__ = ["upcast_trainable"]


def upcast_trainable(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> list[str]:
    """Cast the parameters that require grad to float32, in place. Frozen ones are untouched; twice is as once.

    Call it after adapters are added and after a checkpoint is loaded, best before the optimizer is built and the model
    is wrapped. On a wrapped model it works too: DDP gets new gradient buckets, FSDP1 and FSDP2 are
    cast shard by shard.

    Args:
        model: The model to train.
        dtype: `torch.float32` or `torch.float64`. Nothing is ever cast to a narrower dtype.
        optimizer: One, or several, that have taken steps already: moments are cast with their parameters.

    Returns:
        The names of the parameters that were cast, as in `model.named_parameters()`.

    Raises:
        PrecisionError: Nothing was changed, and why: float8 and integer weights that require grad, a tensor subclass of
            a quantiser; FSDP1 with frozen weights in the same flat tensor, with gradients or inside a step; DDP with a
            mixed precision of its own or a communication hook.

    Ranks: no communication; to be called on every rank that holds the model.
    """
    if dtype not in (torch.float32, torch.float64):
        raise refusal(f"dtype={dtype!r} is not a dtype for master weights", fix="dtype=torch.float32 or torch.float64")
    rows = [row for row in parameter_rows(model) if _is_narrower(row.parameter, dtype)]
    narrow = {id(row.parameter) for row in rows}
    _check_kinds(rows)
    units = check_flat_units(flat_units(model), narrow)
    check_fully_sharded(model)
    wrappers = ddp_wrappers([row.parameter for row in rows])
    for wrapper in wrappers:
        check_ddp(wrapper)
    # nothing was changed up to here, and nothing is refused from here on
    for unit in units:
        cast_flat_unit(unit, dtype)
    flat = {id(parameter) for unit in units for parameter in unit.parameters}
    _cast_all([row.parameter for row in rows if id(row.parameter) not in flat], dtype)
    if rows:
        refresh_fully_sharded(model)
    for wrapper in wrappers:
        rebuild_ddp(wrapper)
    if optimizer is not None:
        _cast_moments(optimizer)
    return [row.name for row in rows]


def _is_narrower(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    if not parameter.requires_grad or is_lazy(parameter) or parameter.dtype in (torch.complex64, torch.complex128):
        return False
    return not parameter.dtype.is_floating_point or parameter.dtype.itemsize < dtype.itemsize


def _check_kinds(rows: list[ParameterRow]) -> None:
    odd = [row.name for row in rows if row.parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32)]
    if odd:
        raise refusal(
            "float8 and integer weights mean nothing without the scales of their quantiser; a cast makes them wrong",
            odd,
            fix="freeze them (requires_grad_(False)) and train an adapter, or dequantise them",
        )
    strange = [row.name for row in rows if type(local_part(row.parameter).data) is not torch.Tensor]
    if strange:
        raise refusal(
            "they are of a tensor subclass whose insides safeload does not know",
            strange,
            fix="cast them by what made them, before training",
        )


def _cast_all(parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast each where it is. Those that looked at the same memory (a tie without one object) do so afterwards."""
    shared: dict[tuple[Any, ...], torch.Tensor] = {}
    for parameter in parameters:
        local = local_part(parameter)
        key = (local.data_ptr(), local.storage_offset(), local.shape, local.stride())
        cast = shared.get(key) if local.data_ptr() else None
        if cast is None:
            cast = shared[key] = parameter.detach().to(dtype)
        _put(parameter, cast)


def _put(parameter: nn.Parameter, cast: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = cast
    describe_shard(parameter, cast)
    if gradient is not None:
        parameter.grad = gradient.to(cast.dtype)


def _cast_moments(optimizer: Any) -> None:
    inner = [getattr(each, "optimizer", each) for each in each_of(optimizer)]
    for parameter, state in (item for each in inner for item in each.state.items()):
        for key, value in state.items() if isinstance(state, dict) else ():
            if (
                parameter.requires_grad
                and is_moment(value, parameter)
                and value.dtype.itemsize < parameter.dtype.itemsize
            ):
                state[key] = value.to(parameter.dtype)
