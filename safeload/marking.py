"""Receive a tower, keep FSDP and DDP away from it.

Two roads. The first needs no line in the user's code: FSDP1 and FSDP2 both skip a module that another composable API
has claimed ("replicate"), and that claim is private to torch, so it is read and written in this module alone. The
second is public: the modules, parameters or pattern that FSDP and Accelerate take as arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["is_marked", "mark", "spare_from_ddp", "unmark"]

_CLAIM: Final = "replicate"


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


def is_marked(module: nn.Module) -> bool:
    """Say whether FSDP passes this very module by.

    Args:
        module: Any module.
    """
    key, _ = _registry_key()
    return _CLAIM in (module.__dict__.get(key) or {})


def spare_from_ddp(wrapper: nn.Module, module: nn.Module, tower_class: type[nn.Module]) -> None:
    """Keep DDP's broadcasts off the towers while it takes a module in.

    They would write equal values over every tower, and so copy memory that the ranks of a host share. DDP reads
    `parameters_to_ignore` after this, when it first syncs.

    Args:
        wrapper: The module that is taking another in; nothing happens unless it is DDP.
        module: What it takes in.
        tower_class: The class that all towers have.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        return
    ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
    for prefix, part in module.named_modules():
        if isinstance(part, tower_class):
            lead = f"{prefix}." if prefix else ""
            ignored |= {lead + name for name, _ in part.named_parameters(remove_duplicate=False)}
            ignored |= {lead + name for name, _ in part.named_buffers(remove_duplicate=False)}
