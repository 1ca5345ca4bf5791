"""Receive a tower, keep FSDP and DDP away from it, without a line in the user's code.

FSDP1 and FSDP2 both skip a module that another composable API has claimed ("replicate"). That claim is private to
torch, so it is read and written in this module alone. Where a wrap policy matches modules inside a tower, FSDP leaves
their tensors alone but still adds hooks that cast what goes in and out; `release` takes those off again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["comes_from_sharder", "is_marked", "mark", "release", "spare_from_ddp", "unmark"]

_CLAIM: Final = "replicate"
_SHARDERS: Final = ("torch.distributed.fsdp", "deepspeed.")
_HOOK_TABLES: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class _Claims(OrderedDict[str, Any]):
    """The registry of one module. A copied or pickled part of a tower is an ordinary module: the claim stays behind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[str, Any]:
        return OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())


def _registry_key() -> tuple[str, type]:
    """Return torch's private attribute name for claims, and the class of a claim.

    `torch.distributed._composable.contract` is private: a test fails loudly when it moves. Without it the public road
    (`ignored_modules`, `ignored_parameters`) remains.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    return REGISTRY_KEY, RegistryItem


def mark(module: nn.Module) -> None:
    """Claim a module and everything in it, so that FSDP1 and FSDP2 pass it by in every wrap, nested ones included.

    Args:
        module: The tower.
    """
    key, item = _registry_key()
    for part in module.modules():
        claims = _Claims(part.__dict__.get(key) or {})
        claims[_CLAIM] = item()
        part.__dict__[key] = claims


def unmark(module: nn.Module) -> None:
    """Lift the claim from a module and everything in it.

    Args:
        module: The tower.
    """
    key, _ = _registry_key()
    for part in module.modules():
        claims = part.__dict__.get(key)
        if isinstance(claims, _Claims):
            claims.pop(_CLAIM, None)
            if not claims:
                del part.__dict__[key]


def comes_from_sharder(hook: Any) -> bool:
    """Say whether a forward hook is one of FSDP or DeepSpeed, which cast and gather.

    Args:
        hook: The function, a bound method or a partial.
    """
    function = getattr(hook, "func", hook)  # partial
    function = getattr(function, "__func__", function)  # bound method
    return str(getattr(function, "__module__", "")).startswith(_SHARDERS)


def release(part: nn.Module) -> None:
    """Take off what FSDP or DeepSpeed put on a module of a tower: its class, state and casting hooks.

    Args:
        part: A module of a tower. Hooks of anyone else stay.
    """
    for number in [
        n for name in _HOOK_TABLES[::2] for n, hook in getattr(part, name).items() if comes_from_sharder(hook)
    ]:
        for name in _HOOK_TABLES:
            getattr(part, name).pop(number, None)
    if isinstance(part, FSDPModule):
        part.__class__ = type(part).__bases__[1]
    if "fully_shard" in part.__dict__.get(_registry_key()[0], {}):
        _forget_state(part)


def _forget_state(part: nn.Module) -> None:
    """Undo what `fully_shard` wrote down for a module; both places are private to torch and touched here only."""
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import STATE_KEY

    part.__dict__.pop(STATE_KEY, None)
    part.__dict__[_registry_key()[0]].pop("fully_shard", None)
    _composable_state._module_state_mapping.pop(part, None)


def is_marked(module: nn.Module) -> bool:
    """Say whether FSDP passes this very module by.

    Args:
        module: Any module.
    """
    key, _ = _registry_key()
    return _CLAIM in (module.__dict__.get(key) or {})


def spare_from_ddp(wrapper: nn.Module, module: nn.Module, record: str) -> None:
    """Keep DDP's broadcasts off the towers while it takes a module in.

    They would write equal values over every tower, and so copy memory that the ranks of a host share. DDP reads
    `parameters_to_ignore` after this, when it first syncs.

    Args:
        wrapper: The module that is taking another in; nothing happens unless it is DDP.
        module: What it takes in.
        record: Name of the attribute that every tower has.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        return
    ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
    for prefix, part in module.named_modules():
        if record in part.__dict__:
            lead = f"{prefix}." if prefix else ""
            ignored |= {lead + name for name, _ in part.named_parameters(remove_duplicate=False)}
            ignored |= {lead + name for name, _ in part.named_buffers(remove_duplicate=False)}
