"""Receive a kept tower, answer for it when the training stack calls: the methods that would change it do not.

`guard` gives the tower a subclass of its own class, as `fully_shard` does. Name, module and `isinstance` stay the same,
so registries, `save_pretrained` and wrap policies see the class they know. Three hooks that torch offers for every
module keep tensors and submodules from being replaced by assignment. A glance runs before every forward.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules import module as nn_module

from safeload.errors import ProtectionError, TowerChangedError
from safeload.keeping import Kept, Protection, mend, overwritten, untouched
from safeload.marking import release, spare_from_ddp
from safeload.moving import move
from safeload.shielding import shielded

__all__ = ["Guarded", "guard", "original_class", "record_of", "unguard"]

_RECORD: Final = "_safeload_protection"
_NUMBER: Final = "_safeload_number"
_PART: Final = "_safeload_part"
_FLAG: Final = "_is_hf_initialized"  # transformers initialises no module and no tensor that carries it
_NUMBERS: Final = itertools.count()
_NUMBERED: Final[weakref.WeakValueDictionary[int, Protection]] = weakref.WeakValueDictionary()
_CLASSES: Final[dict[type[nn.Module], type[nn.Module]]] = {}  # towers of one class share one guarded class


class Guarded(nn.Module):
    """What the subclass of every protected tower adds to the tower's own class."""

    _safeload_original: type[nn.Module]
    _safeload_number: int

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse the class that `fully_shard` gives: with it come hooks that cast the tower's inputs."""
        if name == "__class__" and issubclass(value, FSDPModule):
            release(self)
            return
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Follow a move to another real device, as one move of the verified values. Casts and moves to meta pass by."""
        protection = record_of(self)
        mend(protection)
        move(protection, fn)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call the function on every module; what it writes to verified tensors does not land."""
        protection = record_of(self)
        with shielded([kept.verified for kept in protection.kept]) as stopped:
            super().apply(fn)
        mend(protection)
        if stopped:
            _warn(protection, f"{len(stopped)} writes of apply({getattr(fn, '__name__', fn)!r}) were kept off it")
        return self

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode: no dropout, no statistics that move."""
        mend(record_of(self))
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
        mend(record_of(self))
        destination, prefix = _destination_of(args, kwargs)
        if destination is not None and prefix:
            return destination
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Keep the verified values: whatever the checkpoint has for the tower gives way to the tower's own tensors."""
        protection = record_of(self)
        mend(protection)
        _answer_checkpoint(protection, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Name the children; to a distributed state dict that is loaded a tower has none."""
        return iter(()) if _asked_what_to_load() else super().named_children()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Name the parameters; to a distributed state dict that is loaded a tower has none."""
        hidden = not recurse and _asked_what_to_load()
        return iter(()) if hidden else super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name the buffers; to a distributed state dict that is loaded a tower has none."""
        hidden = not recurse and _asked_what_to_load()
        return iter(()) if hidden else super().named_buffers(prefix, recurse, remove_duplicate)

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Initialise nothing: an outer `from_pretrained` of transformers calls this for every module of the tower."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the tower, protected like this one."""
        protection, original = record_of(self), original_class(self)
        own_way = getattr(original, "__deepcopy__", None)
        if own_way is not None:
            twin = own_way(self, memo)
        else:
            twin = original.__new__(original)
            memo[id(self)] = twin
            twin.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != _RECORD}, memo))
        return _protect_again(twin, protection.name, protection.origin, protection.fingerprints, protection.report)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the tower's own class; unpickling compares all values with their fingerprints, and protects."""
        protection, original = record_of(self), original_class(self)
        state = {key: value for key, value in self.__dict__.items() if key != _RECORD}
        facts = (protection.name, protection.origin, protection.fingerprints, protection.report)
        return (_blank, (original,), (state, facts), None, None, _revive)


def record_of(tower: Any) -> Protection:
    """Return the record of a protected tower."""
    record: Protection = tower.__dict__[_RECORD]
    return record


def original_class(tower: Any) -> type[nn.Module]:
    """Return the class a protected tower had before, and has again when it is unfrozen."""
    original: type[nn.Module] = type(tower)._safeload_original
    return original


def _asked_what_to_load() -> bool:
    """Say whether `torch.distributed.checkpoint` asks, about to load: it walks modules by itself, past `state_dict()`.

    It would demand the tower's keys, which no state dict has. The names in it are private and looked at here only.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_globals.get("__name__") != dcp_state_dict.__name__:
        return False
    while frame is not None and frame.f_code.co_name in ("recurse", "_iterate_valid_model_state"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_load_model_state_dict"


def _warn(protection: Protection, what: str) -> None:
    warnings.warn(
        f"tower {protection.name!r} is protected: {what}. It still has its verified values; to change or train it, "
        "call safeload.unfreeze(tower) first.",
        stacklevel=3,
    )


def _destination_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    named = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
    return named.get("destination"), named.get("prefix") or ""


def _answer_checkpoint(protection: Protection, state_dict: dict[str, Any], prefix: str) -> None:
    brought = {key: state_dict.pop(key) for key in [key for key in state_dict if key.startswith(prefix)]}
    persistent = {prefix + kept.name: kept for kept in protection.kept if kept.persistent}
    conflicts = sorted(key for key, value in brought.items() if not _brings_the_same(persistent.get(key), value))
    state_dict.update({key: kept.tensor for key, kept in persistent.items()})
    if not conflicts:
        return
    protection.conflicts.extend(conflicts)
    message = (
        f"the checkpoint has other values for {len(conflicts)} tensors of tower {protection.name!r} (from "
        f"{protection.origin}): {', '.join(conflicts)}. The verified values were kept. To use the checkpoint's, call "
        "safeload.unfreeze(tower) before loading it."
    )
    if not prefix:
        raise ProtectionError(message, tower=protection.name)
    warnings.warn(message, stacklevel=4)


def _brings_the_same(kept: Kept | None, value: Any) -> bool:
    if kept is None:
        return False
    if value is kept.tensor:
        return True
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta or value.shape != kept.verified.shape:
        return False
    return value.dtype == kept.verified.dtype and torch.equal(value.detach().to(kept.verified.device), kept.verified)


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


def glance(protection: Protection) -> None:
    """Look at every tensor's identity, form and count of changes, mend what can be mended, refuse what cannot.

    The first time, and after anything that may have changed the tower, a few values of every tensor are compared too.

    Args:
        protection: The tower's record.

    Raises:
        TowerChangedError: Values were overwritten, or a tensor was sharded.
    """
    if not protection.armed and untouched(protection):
        return
    happened = mend(protection)
    trainable = sorted(name for name, how in happened.items() if "made trainable" in how)
    if trainable:
        _warn(protection, f"{len(trainable)} of its parameters had been made trainable and were frozen again")
    changes = overwritten(protection, depth="glimpse" if protection.armed else "versions")
    changes |= {
        kept.name: "replaced by a " + type(present).__name__
        for kept in protection.kept
        if (present := kept.table.get(kept.key)) is not kept.tensor
    }
    if changes:
        listed = "; ".join(f"{name}: {how}" for name, how in sorted(changes.items()))
        raise TowerChangedError(
            f"tower {protection.name!r} is not what was verified: {listed}. Load it again with safe_from_pretrained, "
            "or call safeload.unfreeze(tower) before a stage that trains it.",
            tower=protection.name,
            changes=changes,
        )
    protection.armed = False


def _before_forward(tower: Guarded, args: Any) -> None:
    if torch.compiler.is_compiling():
        _glance_while_tracing(tower._safeload_number)
        any(parameter.requires_grad for parameter in tower.parameters())  # read it: traced again when one changes
    else:
        glance(record_of(tower))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _glance_while_tracing(number: int) -> bool:
    """Glance when a compiler traces the forward, and so before it first runs; nothing of it is left in the graph."""
    protection = _NUMBERED.get(number)
    if protection is not None:
        glance(protection)
    return True


def _guarded_class(original: type[nn.Module]) -> type[nn.Module]:
    if original in _CLASSES:
        return _CLASSES[original]
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_safeload_original": original,
    }
    _CLASSES[original] = type(original.__name__, (Guarded, original), names)
    return _CLASSES[original]


class _Part:
    """The mark on each module of a tower: the tower's record, and what the module is called in it."""

    __slots__ = ("path", "protection")

    def __init__(self, protection: Protection, path: str) -> None:
        self.protection = protection
        self.path = path

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied part of a tower is an ordinary module."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_no_part, ())


def _no_part() -> None:
    return None


def _part_of(module: nn.Module) -> tuple[Protection, str] | None:
    part = module.__dict__.get(_PART)
    return None if part is None else (part.protection, part.path)


def _replaces_itself(module: nn.Module) -> bool:
    """Say whether the module's own code is assigning: rotary embeddings renew their buffers in their own forward."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == nn_module.__name__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_locals.get("self") is module


def _on_tensor(module: nn.Module, key: str, value: Any) -> Any:
    """Answer torch when a tensor is assigned to a module of a tower: the verified one stays."""
    found = _part_of(module)
    if found is None:
        return None
    protection, path = found
    name = f"{path}.{key}" if path else key
    for kept in protection.kept:
        if kept.name == name:
            return kept.tensor
    raise ProtectionError(
        f"tower {protection.name!r} is protected: a new tensor {name!r} cannot be added to it. Call "
        "safeload.unfreeze(tower) first.",
        tower=protection.name,
    )


def _on_buffer(module: nn.Module, key: str, value: Any) -> Any:
    if module.__dict__.get(_PART) is None or _replaces_itself(module):
        return None
    return _on_tensor(module, key, value)


def _only_wraps(value: Any, present: nn.Module) -> bool:
    """Say whether a module adds no tensors to the one that it holds, as activation checkpointing and compiling do."""
    if not isinstance(value, nn.Module) or not any(child is present for child in value.children()):
        return False
    own = {id(tensor) for tensor in (*present.parameters(), *present.buffers())}
    return all(id(tensor) in own for tensor in (*value.parameters(), *value.buffers()))


def _look_again(wrapper: nn.Module, module: nn.Module) -> None:
    """Have the towers in a module looked at before their next forward: FSDP has put hooks on them."""
    if isinstance(wrapper, FullyShardedDataParallel):
        for tower in module.modules():
            if isinstance(tower, Guarded):
                record_of(tower).armed = True


def _on_module(module: nn.Module, key: str, value: Any) -> Any:
    """Answer torch when a module takes another in: the tower's own modules stay, and DDP is told of the towers.

    A wrapper without tensors of its own is left out in silence: checkpointing a frozen layer changes no value.
    """
    found = _part_of(module)
    if found is None:
        if isinstance(value, nn.Module):
            spare_from_ddp(module, value, Guarded)
            _look_again(module, value)
        return None
    protection, path = found
    present = module._modules.get(key)
    if value is present:
        return None
    if present is not None and _only_wraps(value, present):
        return present
    name = f"{path}.{key}" if path else key
    raise ProtectionError(
        f"tower {protection.name!r} is protected: its module {name!r} would be replaced by a {type(value).__name__}. "
        "Leave the tower out (with PEFT: exclude_modules), or call safeload.unfreeze(tower) first to change it.",
        tower=protection.name,
    )


@functools.cache
def _listen() -> None:
    """Register the three hooks for the life of the process; they cost one dictionary look-up for any other module."""
    nn_module.register_module_parameter_registration_hook(_on_tensor)
    nn_module.register_module_buffer_registration_hook(_on_buffer)
    nn_module.register_module_module_registration_hook(_on_module)


def guard(module: nn.Module, protection: Protection) -> None:
    """Give a module the guarded subclass of its class, and its record.

    Args:
        module: The tower, frozen and in evaluation mode.
        protection: Its record.
    """
    _listen()
    for path, part in module.named_modules():
        part.__dict__[_PART] = _Part(protection, path)
        part.__dict__[_FLAG] = True
    for kept in protection.kept:
        setattr(kept.tensor, _FLAG, True)
    module.__dict__[_RECORD] = protection
    module.__dict__[_NUMBER] = number = next(_NUMBERS)
    _NUMBERED[number] = protection
    original = type(module)
    module.__class__ = _guarded_class(original)
    protection.parts = tuple((part, type(module) if kind is original else kind) for part, kind in protection.parts)
    _drop_hook(module)  # a copy and an unpickled tower bring theirs
    module.register_forward_pre_hook(_before_forward)


def unguard(module: nn.Module) -> Protection:
    """Give a protected tower its own class back.

    Args:
        module: The tower.

    Returns:
        The record it had.
    """
    protection = record_of(module)
    module.__class__ = original_class(module)
    del module.__dict__[_RECORD], module.__dict__[_NUMBER]
    for part in module.modules():
        part.__dict__.pop(_PART, None)
    _drop_hook(module)
    return protection


def _drop_hook(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is _before_forward]:
        del hooks[number]
