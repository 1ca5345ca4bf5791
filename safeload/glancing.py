"""Receive the record of a tower, look at it before every use, mend what can be mended, refuse what cannot.

Whoever calls a part of a tower by itself (`clip.get_image_features`, `vae.encode`, `tower.encoder`) is met by a hook on
that part, which looks at what is in it; inside a call of the tower or of a part, which has been looked at, these hooks
return at once. They leave nothing in a compiled graph: while a compiler traces, the same glance runs, at that time.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import TowerChangedError
from safeload.keeping import Protection, record_of
from safeload.listening import PART
from safeload.mending import altered, displaced, mend, overwritten, untouched
from safeload.sampling import agrees

__all__ = ["glance", "glance_while_tracing", "hook", "mend_and_tell", "unhook", "warn"]

_is_exporting: Final = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7 brought it
_NUMBER: Final = "_safeload_number"
_NUMBERS: Final = itertools.count()
_NUMBERED: Final[weakref.WeakValueDictionary[int, Protection]] = weakref.WeakValueDictionary()


def warn(protection: Protection, what: str, *, stacklevel: int = 3) -> None:
    """Warn of something that was done to a tower and did not change it.

    Args:
        protection: The tower's record.
        what: What was done.
        stacklevel: Of the caller's caller by default.
    """
    warnings.warn(
        f"tower {protection.name!r} is protected: {what}. It still has its verified values; to change or train it, "
        "call safeload.unfreeze(tower) first.",
        stacklevel=stacklevel,
    )


def mend_and_tell(protection: Protection) -> dict[str, str]:
    """Mend, and warn where parameters had been made trainable: who did that expects them to learn.

    Args:
        protection: The tower's record.

    Returns:
        As `mend`.
    """
    happened = mend(protection)
    trainable = [name for name, how in happened.items() if "made trainable" in how]
    if trainable:
        what = f"{len(trainable)} of its parameters had been made trainable and were frozen again"
        warn(protection, what, stacklevel=4)
    return happened


def glance(protection: Protection) -> None:
    """Look at every tensor's identity, form and count of changes, mend what can be mended, refuse what cannot.

    A few values of every tensor are compared too: each time where the tower is in the host's memory; elsewhere the
    first time, and after anything that may have changed it.

    Args:
        protection: The tower's record.

    Raises:
        TowerChangedError: Values were overwritten, or a tensor was sharded.
        SafeLoadError: The verdict was still out, and the tower is not the expected one.
    """
    protection.settle()
    if protection.armed or not untouched(protection.kept, protection.parts):
        _look_closely(protection)
    elif not agrees(protection, "", protection.kept):
        protection.armed = True
        _look_closely(protection)


def _look_closely(protection: Protection) -> None:
    mend_and_tell(protection)
    changes = overwritten(protection, depth="glimpse" if protection.armed else "versions")
    whole = protection.parts[0].module() is not None  # else somebody took a part, and dropped the rest
    looked_at = [kept for kept in protection.kept if whole or kept.owner() is not None]
    changes |= {kept.name: how for kept in looked_at if (how := altered(kept)) is not None}
    changes |= displaced(protection)
    if changes:
        listed = "; ".join(f"{name}: {how}" for name, how in sorted(changes.items()))
        raise TowerChangedError(
            f"tower {protection.name!r} is not what was verified: {listed}. Load it again with safe_from_pretrained, "
            "or call safeload.unfreeze(tower) before a stage that trains it.",
            tower=protection.name,
            changes=changes,
        )
    protection.armed = False


class _Leaving:
    """A hook for one call of a part: the thread is outside again, whether the call succeeds or not."""

    def __init__(self, protection: Protection, part: nn.Module) -> None:
        self._within, self._thread = protection.within, get_ident()
        self._within.add(self._thread)
        self._handle = part.register_forward_hook(self, always_call=True)

    def __call__(self, part: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == self._thread:  # another thread in the same part runs this too
            self._within.discard(self._thread)
            self._handle.remove()


def _before_part(part: nn.Module, args: Any) -> None:
    mark = part.__dict__.get(PART)
    if mark is None:  # a copied part of a tower is an ordinary module
        return
    if torch.compiler.is_compiling():
        glance_while_tracing(part)
        return
    protection, me = mark.protection, get_ident()
    if me in protection.inside or me in protection.within:
        return
    same = protection.verdict is None and not protection.armed and untouched(mark.kept, mark.parts)
    if same and not agrees(protection, mark.path, mark.kept):
        same, protection.armed = False, True
    if not same:
        glance(protection)
    if part._modules:
        _Leaving(protection, part)


def _before_state_dict(part: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Wait for the verdict, and raise where the bytes were refused: the values leave the tower."""
    mark = part.__dict__.get(PART)
    if mark is not None:
        mark.protection.settle()


def glance_while_tracing(part: nn.Module) -> None:
    """Have a compiler glance at the tower when it traces a call of one of its modules.

    Args:
        part: The tower or one of its modules, called while `torch.compiler.is_compiling()`.
    """
    if _is_exporting():  # its tensors stand in for the tower's, which are not to be looked at from here
        return
    _glance_at_number(part.__dict__[_NUMBER])
    any(  # read it: traced again when one changes
        parameter is not None and parameter.requires_grad for parameter in part._parameters.values()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _glance_at_number(number: int) -> bool:
    """Glance when a compiler traces the forward, and so before it first runs; nothing of it is left in the graph."""
    protection = _NUMBERED.get(number)
    if protection is not None:
        glance(protection)
    return True


def hook(tower: nn.Module) -> None:
    """Have the parts of a tower looked at before they are called by themselves, and settled before they are saved.

    Args:
        tower: A module that has its record and its parts' marks already.
    """
    number = next(_NUMBERS)
    _NUMBERED[number] = record_of(tower)
    for part in tower.modules():
        _unhook_one(part)  # a copy and an unpickled tower bring theirs
        part.__dict__[_NUMBER] = number
        if part is not tower and part.__dict__[PART].kept:
            part.register_forward_pre_hook(_before_part)
            if record_of(tower).verdict is not None:
                part.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]


def unhook(tower: nn.Module) -> None:
    """Undo `hook`.

    Args:
        tower: Any module.
    """
    for part in tower.modules():
        _unhook_one(part)


def _unhook_one(part: nn.Module) -> None:
    part.__dict__.pop(_NUMBER, None)
    for hooks, ours in ((part._forward_pre_hooks, _before_part), (part._state_dict_pre_hooks, _before_state_dict)):
        for number in [number for number, hooked in hooks.items() if hooked is ours]:
            del hooks[number]
