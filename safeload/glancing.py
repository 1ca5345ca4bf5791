"""Receive the record of a tower, look at it before every forward, mend what can be mended, refuse what cannot.

The hook leaves nothing in a compiled graph: while a compiler traces it, the same glance runs once, at that time.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import TowerChangedError
from safeload.keeping import Protection, record_of
from safeload.mending import altered, mend, overwritten, untouched

__all__ = ["glance", "hook", "unhook", "warn"]

_NUMBER: Final = "_safeload_number"
_NUMBERS: Final = itertools.count()
_NUMBERED: Final[weakref.WeakValueDictionary[int, Protection]] = weakref.WeakValueDictionary()


def warn(protection: Protection, what: str) -> None:
    """Warn of something that was done to a tower and did not change it.

    Args:
        protection: The tower's record.
        what: What was done.
    """
    warnings.warn(
        f"tower {protection.name!r} is protected: {what}. It still has its verified values; to change or train it, "
        "call safeload.unfreeze(tower) first.",
        stacklevel=3,
    )


def glance(protection: Protection) -> None:
    """Look at every tensor's identity, form and count of changes, mend what can be mended, refuse what cannot.

    The first time, and after anything that may have changed the tower, a few values of every tensor are compared too.

    Args:
        protection: The tower's record.

    Raises:
        TowerChangedError: Values were overwritten, or a tensor was sharded.
        SafeLoadError: The verdict was still out, and the tower is not the expected one.
    """
    protection.settle()
    if not protection.armed and untouched(protection):
        return
    happened = mend(protection)
    trainable = sorted(name for name, how in happened.items() if "made trainable" in how)
    if trainable:
        warn(protection, f"{len(trainable)} of its parameters had been made trainable and were frozen again")
    changes = overwritten(protection, depth="glimpse" if protection.armed else "versions")
    changes |= {kept.name: how for kept in protection.kept if (how := altered(kept)) is not None}
    if changes:
        listed = "; ".join(f"{name}: {how}" for name, how in sorted(changes.items()))
        raise TowerChangedError(
            f"tower {protection.name!r} is not what was verified: {listed}. Load it again with safe_from_pretrained, "
            "or call safeload.unfreeze(tower) before a stage that trains it.",
            tower=protection.name,
            changes=changes,
        )
    protection.armed = False


def _before_forward(tower: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        _glance_while_tracing(tower.__dict__[_NUMBER])
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


def hook(tower: nn.Module) -> None:
    """Have a tower looked at before every forward.

    Args:
        tower: A module that has its record already.
    """
    unhook(tower)  # a copy and an unpickled tower bring theirs
    number = next(_NUMBERS)
    tower.__dict__[_NUMBER] = number
    _NUMBERED[number] = record_of(tower)
    tower.register_forward_pre_hook(_before_forward)


def unhook(tower: nn.Module) -> None:
    """Undo `hook`.

    Args:
        tower: Any module.
    """
    tower.__dict__.pop(_NUMBER, None)
    hooks = tower._forward_pre_hooks
    for number in [number for number, hooked in hooks.items() if hooked is _before_forward]:
        del hooks[number]
