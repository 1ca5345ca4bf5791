"""Receive what torch tells of every assignment to a module, keep the tensors and modules of towers in their places.

torch calls three public hooks whenever a parameter, buffer or module is assigned to any module, and takes
what they return. For a module of a tower that is what it has already. They also tell when DDP and FSDP take a model in.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, Final

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules import module as nn_module

from safeload.errors import ProtectionError
from safeload.keeping import RECORD, Kept, Part, Protection, rebase, record_of
from safeload.marking import spare_from_ddp
from safeload.mending import only_wraps

__all__ = ["PART", "listen", "place_parts", "remove_part"]

PART: Final = "_safeload_part"
_REPLICA: Final = "_is_replica"  # set by nn.DataParallel on the copies it makes for one forward: they are not the tower
_DEPTH: Final = 20  # frames between the call of a module and what its code does
_SETTERS: Final = (nn_module.__name__, "safeload.guarding")  # where `__setattr__` and `register_buffer` are defined


class _Mark:
    """The mark on each module of a tower: the tower's record, what the module is called, and what is in it."""

    __slots__ = ("kept", "parts", "path", "protection")

    def __init__(self, protection: Protection, path: str, kept: tuple[Kept, ...], parts: tuple[Part, ...]) -> None:
        self.protection = protection
        self.path = path
        self.kept = kept
        self.parts = parts

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied part of a tower is an ordinary module; its values leave the tower now."""
        self.protection.settle()

    def __reduce__(self) -> tuple[Any, ...]:
        """As for a copy."""
        self.protection.settle()
        return (_no_part, ())


def _no_part() -> None:
    return None


def _part_of(module: nn.Module) -> tuple[Protection, str] | None:
    part = module.__dict__.get(PART)
    if part is None or _REPLICA in module.__dict__:
        return None
    return part.protection, part.path


def _replaces_itself(module: nn.Module) -> bool:
    """Say whether the module's own code is assigning while it is called, as rotary embeddings renew their buffers.

    Not while a state dict is loaded into it: batch norms do that in code of their own.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _SETTERS:
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not module:
        return False
    for _ in range(_DEPTH):
        if frame is None or (frame.f_code.co_name in ("_call_impl", "forward") and frame.f_locals["self"] is module):
            return frame is not None
        frame = frame.f_back
    return False


def _kept(protection: Protection, path: str, key: str) -> Kept | None:
    name = f"{path}.{key}" if path else key
    return next((kept for kept in protection.kept if kept.name == name), None)


def _on_tensor(module: nn.Module, key: str, value: Any) -> Any:
    """Answer torch when a tensor is assigned to a module of a tower: the verified one stays."""
    found = _part_of(module)
    if found is None:
        return None
    protection, path = found
    kept = _kept(protection, path, key)
    if kept is not None:
        return kept.tensor
    name = f"{path}.{key}" if path else key
    raise ProtectionError(
        f"tower {protection.name!r} is protected: a new tensor {name!r} cannot be added to it. Call "
        "safeload.unfreeze(tower) first.",
        tower=protection.name,
    )


def _on_buffer(module: nn.Module, key: str, value: Any) -> Any:
    """As for any tensor; but what a module's own code gives itself is the tower's own doing, and is taken."""
    found = _part_of(module)
    if found is None:
        return None
    if not _replaces_itself(module):
        return _on_tensor(module, key, value)
    kept = _kept(*found, key)
    if kept is not None and value is not None:
        kept.renewed = True
        kept.tensor = value
        rebase(kept, value.detach())
        found[0].samples.clear()
    return None


def _look_again(wrapper: nn.Module, module: nn.Module) -> None:
    """Have the towers in a module looked at before their next forward: FSDP has put hooks on them."""
    if isinstance(wrapper, FullyShardedDataParallel):
        for tower in module.modules():
            if RECORD in tower.__dict__:
                record_of(tower).armed = True


def _on_module(module: nn.Module, key: str, value: Any) -> Any:
    """Answer torch when a module takes another in: the tower's own modules stay, and DDP is told of the towers.

    A wrapper without tensors of its own is left out in silence: checkpointing a frozen layer changes no value.
    """
    found = _part_of(module)
    if found is None:
        if isinstance(value, nn.Module):
            spare_from_ddp(module, value, RECORD)
            _look_again(module, value)
        return None
    protection, path = found
    present = module._modules.get(key)
    if value is present:
        return None
    if present is not None and only_wraps(value, present):
        return present
    name = f"{path}.{key}" if path else key
    raise ProtectionError(
        f"tower {protection.name!r} is protected: its module {name!r} would be replaced by a {type(value).__name__}. "
        "Leave the tower out (with PEFT: exclude_modules), or call safeload.unfreeze(tower) first to change it.",
        tower=protection.name,
    )


@functools.cache
def listen() -> None:
    """Register the three hooks for the life of the process; they cost one dictionary look-up for any other module."""
    nn_module.register_module_parameter_registration_hook(_on_tensor)
    nn_module.register_module_buffer_registration_hook(_on_buffer)
    nn_module.register_module_module_registration_hook(_on_module)


def place_parts(tower: nn.Module, protection: Protection) -> None:
    """Mark every module of a tower as part of it.

    Args:
        tower: The tower.
        protection: Its record.
    """
    tensors: dict[int, list[Kept]] = {}
    for kept in protection.kept:
        tensors.setdefault(id(kept.owner()), []).append(kept)
    known = {id(part.module()): part for part in protection.parts}
    within: dict[int, dict[int, None]] = {}
    for path, part in tower.named_modules():
        inside = _inside(part, within)
        part.__dict__[PART] = _Mark(
            protection,
            path,
            tuple(kept for each in inside for kept in tensors.get(each, ())),
            tuple(known[each] for each in inside),
        )


def _inside(part: nn.Module, found: dict[int, dict[int, None]]) -> dict[int, None]:
    """Return the ids of what `part.modules()` lists, in its order; `found` keeps them, so that each is listed once."""
    if id(part) not in found:
        inside = {id(part): None}
        for child in part._modules.values():
            inside |= {} if child is None else _inside(child, found)
        found[id(part)] = inside
    return found[id(part)]


def remove_part(part: nn.Module) -> None:
    """Take the mark off a module.

    Args:
        part: The module.
    """
    part.__dict__.pop(PART, None)
