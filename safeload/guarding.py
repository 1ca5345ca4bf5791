"""Receive a kept tower, answer for it when the training stack calls: the methods that would change it do not.

`guard` gives the tower a subclass of its own class, as `fully_shard` does. Name, module and `isinstance` stay the same,
so registries, `save_pretrained` and wrap policies see the class they know. Three hooks that torch offers for every
module keep tensors and submodules from being replaced by assignment (`listening`). A glance runs before every use of
the tower (`entering`) and of any part of it (`glancing`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from safeload.answering import answer_checkpoint, destination_of, passed_by
from safeload.entering import entries_of
from safeload.errors import ProtectionError, TowerChangedError
from safeload.glancing import hook, mend_and_tell, unhook, warn
from safeload.keeping import RECORD, Protection, record_of
from safeload.listening import listen, place_parts, remove_part
from safeload.marking import comes_from_sharder, release
from safeload.mending import overwritten
from safeload.moving import move
from safeload.noticing import notice_outer_checkpoint
from safeload.shielding import shielded

__all__ = ["Guarded", "guard", "original_class", "record_of", "unguard"]

_FLAG: Final = "_is_hf_initialized"  # transformers initialises no module and no tensor that carries it
_COPIED: Final = "_safeload_copied_from"
_CLASSES: Final[dict[type[nn.Module], type[nn.Module]]] = {}  # towers of one class share one guarded class


class Guarded(nn.Module):
    """What the subclass of every protected tower adds to the tower's own class."""

    _safeload_original: type[nn.Module]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse the class that `fully_shard` gives: with it come hooks that cast the tower's inputs."""
        if name == "__class__" and issubclass(value, FSDPModule):
            release(self)
            return
        super().__setattr__(name, value)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> RemovableHandle:
        """Take hooks of anyone but FSDP and DeepSpeed."""
        refused = comes_from_sharder(hook)
        return RemovableHandle(OrderedDict()) if refused else super().register_forward_pre_hook(hook, **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> RemovableHandle:
        """Take hooks of anyone but FSDP and DeepSpeed."""
        refused = comes_from_sharder(hook)
        return RemovableHandle(OrderedDict()) if refused else super().register_forward_hook(hook, **options)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow a move to another real device, as one move of the verified values. Casts and moves to meta pass by."""
        protection = record_of(self)
        mend_and_tell(protection)
        move(protection, fn)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call the function on every module; what it writes to verified tensors does not land."""
        protection = record_of(self)
        with shielded([kept.verified for kept in protection.kept]) as stopped:
            super().apply(fn)
        mend_and_tell(protection)
        if stopped:
            warn(protection, f"{len(stopped)} writes of apply({getattr(fn, '__name__', fn)!r}) were kept off it")
        return self

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode: no dropout, no statistics that move."""
        protection = record_of(self)
        mend_and_tell(protection)
        notice_outer_checkpoint(self, protection)
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse to become trainable."""
        if requires_grad:
            protection = record_of(self)
            raise ProtectionError(
                f"tower {protection.name!r} is protected and stays frozen: requires_grad_(True) was called on it. "
                "To train it, call safeload.unfreeze(tower) first.",
                tower=protection.name,
            )
        return super().requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the tower's own state dict, and nothing to the state dict of a model it is part of."""
        record_of(self).settle()
        mend_and_tell(record_of(self))
        destination, prefix = destination_of(args, kwargs)
        if destination is not None and prefix:
            return destination
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Keep the verified values: whatever the checkpoint has for the tower gives way to the tower's own tensors."""
        protection = record_of(self)
        protection.settle()
        mend_and_tell(protection)
        answer_checkpoint(protection, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Name the modules; for DeepSpeed there are none."""
        return iter(()) if passed_by() else super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Name the children; for DeepSpeed and for a distributed state dict that is loaded there are none."""
        return iter(()) if passed_by() else super().named_children()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Name the parameters; for DeepSpeed and for a distributed state dict that is loaded there are none."""
        return iter(()) if passed_by() else super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Name the buffers; for DeepSpeed and for a distributed state dict that is loaded there are none."""
        return iter(()) if passed_by() else super().named_buffers(*args, **kwargs)

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Initialise nothing: an outer `from_pretrained` of transformers calls this for every module of the tower."""

    def __copy__(self) -> Any:
        """Share everything with this one, as a shallow copy of any module does, the protection too."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.__dict__[_COPIED] = self  # whose tensors they are: it lives as long as its copies
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the tower, protected like this one."""
        record_of(self).settle()
        protection, original = record_of(self), original_class(self)
        own_way = getattr(original, "__deepcopy__", None)
        if own_way is not None:
            twin = own_way(self, memo)
        else:
            twin = original.__new__(original)
            memo[id(self)] = twin
            twin.__dict__.update(
                copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in (RECORD, _COPIED)}, memo)
            )
        return _protect_again(twin, protection.name, protection.origin, protection.fingerprints, protection.report)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the tower's own class; unpickling compares all values with their fingerprints, and protects."""
        record_of(self).settle()
        protection, original = record_of(self), original_class(self)
        state = {key: value for key, value in self.__dict__.items() if key not in (RECORD, _COPIED)}
        facts = (protection.name, protection.origin, protection.fingerprints, protection.report)
        return (_blank, (original,), (state, facts), None, None, _revive)


def original_class(tower: Any) -> type[nn.Module]:
    """Return the class a protected tower had before, and has again when it is unfrozen."""
    original: type[nn.Module] = type(tower)._safeload_original
    return original


def _protect_again(twin: nn.Module, name: str, origin: str, fingerprints: dict[str, str], report: Any) -> nn.Module:
    from safeload.protecting import protect

    return protect(twin, name=name, origin=origin, fingerprints=fingerprints, report=report)


def _blank(original: type[nn.Module]) -> nn.Module:
    return original.__new__(original)


def _revive(tower: nn.Module, pickled: tuple[dict[str, Any], tuple[str, str, dict[str, str], Any]]) -> None:
    state, facts = pickled
    tower.__setstate__(state)  # type: ignore[no-untyped-call]
    _protect_again(tower, *facts)
    changes = overwritten(record_of(tower), depth="full")
    if changes:
        raise TowerChangedError(
            f"tower {facts[0]!r} was pickled with other values than it was verified with: {changes}",
            tower=facts[0],
            changes=changes,
        )


def _guarded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original in _CLASSES:
        return _CLASSES[original]
    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_safeload_original": original,
        **entries_of(original),
    }
    _CLASSES[original] = type(original.__name__, (Guarded, original), names)
    return _CLASSES[original]


def guard(module: nn.Module, protection: Protection) -> None:
    """Give a module the guarded subclass of its class, and its record.

    Args:
        module: The tower, frozen and in evaluation mode.
        protection: Its record.
    """
    listen()
    for part in module.modules():
        part.__dict__[_FLAG] = True
    for kept in protection.kept:
        setattr(kept.tensor, _FLAG, True)
    module.__dict__[RECORD] = protection
    module.__class__ = _guarded_class(type(module))
    root, *rest = protection.parts
    protection.parts = (dataclasses.replace(root, kind=type(module)), *rest)
    place_parts(module, protection)
    hook(module)


def unguard(module: nn.Module) -> Protection:
    """Give a protected tower its own class back.

    Args:
        module: The tower.

    Returns:
        The record it had.
    """
    protection = record_of(module)
    module.__class__ = original_class(module)
    del module.__dict__[RECORD]
    for part in module.modules():
        remove_part(part)
    unhook(module)
    return protection
