"""The wrappers of torch (DDP, FSDP1, FSDP2) after the dtype of what they wrap has changed.

Each keeps dtypes of its own: DDP in its gradient buckets (after a cast it goes on without an error and no longer
averages the gradients), FSDP1 in its flat tensors, FSDP2 in its groups. torch has no public call to tell them, so all
use of its private names for that is here. `check_*` look before anything is changed and say why not; the rest changes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from safeload.errors import PrecisionError

__all__ = [
    "FlatUnit",
    "cast_flat_unit",
    "check_ddp",
    "check_flat_units",
    "check_fully_sharded",
    "ddp_wrappers",
    "describe_shard",
    "flat_units",
    "fully_sharded",
    "local_part",
    "rebuild_ddp",
    "refresh_fully_sharded",
    "refusal",
    "reshard",
    "whole_shapes",
]

_DDP_NAMES: Final = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_ddp_init_helper",
    "_comm_hooks",
)
_FLAT_NAMES: Final = ("flat_param", "_use_orig_params", "_use_sharded_views", "init_flat_param_attributes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnit:
    """One FSDP1 wrap: its handle, its flat tensor, and the Parameters that look into it (itself without them)."""

    name: str
    handle: Any
    flat: Any
    parameters: tuple[nn.Parameter, ...]


def refusal(why: str, names: Iterable[str] = (), *, fix: str) -> PrecisionError:
    """Return the error of a cast that was not begun."""
    parameters = dict.fromkeys(names, why)
    listed = f" It is about: {', '.join(parameters)}." if parameters else ""
    return PrecisionError(
        f"The trainable parameters were not cast, and nothing was changed: {why}.{listed} Instead: {fix}.",
        stage="precision",
        parameters=parameters,
        fix=fix,
    )


def _require(owner: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise refusal(
            f"torch {torch.__version__} has no {type(owner).__name__}.{missing[0]}, by which the wrapper learns of"
            " a new dtype",
            fix="call safeload.upcast_trainable(model) before the model is wrapped",
        )


# --- DDP ---


def ddp_wrappers(parameters: Iterable[nn.Parameter]) -> list[DistributedDataParallel]:
    """Return every DDP of this process that reduces gradients of one of these parameters, wherever it is held.

    Callers often hold the inner module (`trainer.model`), from which its wrapper cannot be reached; to leave it alone
    would end the averaging of gradients without an error.
    """
    wanted = {id(parameter) for parameter in parameters}
    if not wanted or not torch.distributed.is_available():
        return []
    # `type`, not `isinstance`: the latter asks `__class__`, which lazy proxies answer by importing things
    if any(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects()):
        gc.collect()  # one that was thrown away is not to be woken up
    held = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in held if any(id(parameter) in wanted for parameter in each.parameters())]


def check_ddp(wrapper: DistributedDataParallel) -> None:
    """Refuse a DDP whose buckets cannot be built again.

    Raises:
        PrecisionError: It has a mixed precision of its own, a communication hook, or another torch's insides.
    """
    _require(wrapper, _DDP_NAMES)
    before = "call safeload.upcast_trainable(model) before DistributedDataParallel(model)"
    if getattr(wrapper, "mixed_precision", None) is not None:
        raise refusal("DDP was built with mixed_precision=, which keeps copies in another dtype", fix=before)
    if wrapper._comm_hooks:
        raise refusal("DDP has a communication hook, which its new buckets would not have", fix=before)


def rebuild_ddp(wrapper: DistributedDataParallel) -> None:
    """Build the gradient buckets of a DDP again, as its constructor does, for the dtypes its parameters have now.

    Ranks: no communication; on every rank, before its next forward.
    """
    ddp: Any = wrapper  # untyped inside
    ddp.reducer = None  # its hooks sit on gradient accumulators that went with the old dtype
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp.static_graph = False  # `_set_static_graph` does nothing when it is set
        ddp._set_static_graph()


# --- FSDP1 ---


def flat_units(model: nn.Module) -> list[FlatUnit]:
    """Return the FSDP1 wraps of a model that hold parameters; none without FSDP1."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = []
    for name, module in model.named_modules():
        handle: Any = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        _require(handle, _FLAT_NAMES)
        originals = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
        units.append(FlatUnit(name=name, handle=handle, flat=handle.flat_param, parameters=tuple(originals)))
    return units


def whole_shapes(model: nn.Module) -> dict[int, torch.Size]:
    """Return, by id, the shape of each parameter that FSDP1 has cut, of which only a flat piece is here."""
    shapes: dict[int, torch.Size] = {}
    for unit in flat_units(model):
        if unit.handle._use_orig_params:
            shapes |= {id(each): shape for each, shape in zip(unit.parameters, unit.flat._shapes, strict=True)}
        elif unit.handle.uses_sharded_strategy:
            shapes[id(unit.flat)] = torch.Size([unit.flat._sharded_size.numel() * unit.handle.world_size])
    return shapes


def check_flat_units(units: Sequence[FlatUnit], narrow: set[int]) -> list[FlatUnit]:
    """Return the FSDP1 wraps to cast, after a look at all of them.

    Args:
        units: As from `flat_units`.
        narrow: The ids of the parameters to cast.

    Raises:
        PrecisionError: One holds frozen parameters beside trainable ones, gradients, or is gathered just now.
    """
    chosen = [unit for unit in units if any(id(parameter) in narrow for parameter in unit.parameters)]
    before = "call safeload.upcast_trainable(model) before FullyShardedDataParallel(model)"
    for unit in chosen:
        where = f"FSDP1 wrap {unit.name or '(root)'}"
        if not all(parameter.requires_grad for parameter in unit.parameters):
            raise refusal(f"{where} holds frozen and trainable parameters in one flat tensor of one dtype", fix=before)
        if any(parameter.grad is not None for parameter in unit.parameters):
            raise refusal(f"{where} holds gradients", fix="optimizer.zero_grad() first")
        if _is_gathered(unit.flat):
            raise refusal(f"{where} is gathered", fix="call it between two steps, not inside of one")
    return chosen


def _is_gathered(flat: Any) -> bool:
    local = getattr(flat, "_local_shard", None)  # there from the first forward on
    return local is not None and local.data_ptr() != flat.data.data_ptr()


def cast_flat_unit(unit: FlatUnit, dtype: torch.dtype) -> None:
    """Cast the flat tensor of an FSDP1 wrap; the Parameters that look into it stay and look into the new one."""
    unit.flat.grad = None  # zero_grad() took the views into it away, which is how FSDP1 knows that it is spent
    unit.flat.data = unit.flat.data.to(dtype)
    if hasattr(unit.flat, "_local_shard"):
        unit.handle.init_flat_param_attributes()  # before the first forward FSDP1 calls it itself
    if unit.handle._use_orig_params:
        unit.handle._use_sharded_views()


# --- FSDP2 ---


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of this rank of a DTensor, and any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def describe_shard(parameter: Any, cast: Any) -> None:
    """Finish `parameter.data = cast` for a DTensor, which keeps its shard and what it is in Python as well."""
    if hasattr(cast, "_local_tensor"):
        parameter._local_tensor, parameter._spec = cast._local_tensor, cast._spec


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules of a model that `fully_shard` was called on."""
    if not torch.distributed.is_available():
        return []
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return []
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Give FSDP2 modules their shards back: after a forward without backward the root still holds gathered copies."""
    for module in fully_sharded(model):
        module.reshard()


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.10 or so: one group a module
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def check_fully_sharded(model: nn.Module) -> None:
    """Refuse FSDP2 modules that cannot be told of a new dtype.

    Raises:
        PrecisionError: Another torch's insides.
    """
    for module in fully_sharded(model):
        _require(module, ("_get_fsdp_state",))
        for group in _groups(module):
            _require(group, ("_init_mp_dtypes", "fsdp_params"))


def refresh_fully_sharded(model: nn.Module) -> None:
    """Tell FSDP2 that its shards have another dtype. It reads that once, at the first forward."""
    for module in fully_sharded(model):
        for group in _groups(module):
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
            if hasattr(group, "_orig_dtype"):  # it has run already
                group._init_mp_dtypes()
                for parameter in group.fsdp_params:
                    _drop_gathered(parameter)


def _drop_gathered(parameter: Any) -> None:
    """Drop the buffer into which FSDP2 gathers a parameter, where it is of the dtype the parameter had before."""
    dtype = parameter.param_dtype or parameter.orig_dtype
    if any(gathered.dtype != dtype for gathered in parameter.all_gather_outputs):
        parameter.all_gather_outputs = []
        del parameter._unsharded_param
