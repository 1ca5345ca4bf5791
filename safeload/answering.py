"""Receive what the training stack asks of a tower's state dict, answer for the verified values.

An outer state dict holds nothing of a tower. A checkpoint that is loaded gives way to the tower's own tensors; where it
brings other values, that is reported by name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.nn.modules import module as nn_module

from safeload.errors import ProtectionError
from safeload.keeping import Kept, Protection

__all__ = ["answer_checkpoint", "brings_the_same", "destination_of", "passed_by", "report_conflicts"]


_WALKERS: Final = (nn_module.__name__, "safeload.guarding")  # where `parameters`, `named_modules`... are defined


def passed_by() -> bool:
    """Say whether somebody is asking for the parts of a tower who has to find none.

    DeepSpeed would partition them, and broadcast over them. `torch.distributed.checkpoint`, about to load, walks
    modules by itself, past `state_dict()`, and would demand keys that no state dict has; its names are private, and
    looked at here only.
    """
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _WALKERS:
        frame = frame.f_back
    if frame is None:
        return False
    name = str(frame.f_globals.get("__name__"))
    if name != dcp_state_dict.__name__:
        return name.startswith("deepspeed.")
    while frame is not None and frame.f_code.co_name in ("recurse", "_iterate_valid_model_state"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_load_model_state_dict"


def destination_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    """Return the `destination` and `prefix` of a call of `state_dict`; both are there when an outer model calls.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    named = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
    return named.get("destination"), named.get("prefix") or ""


def answer_checkpoint(protection: Protection, state_dict: dict[str, Any], prefix: str) -> None:
    """Put the tower's own tensors in place of what a checkpoint has for it, and report other values.

    Args:
        protection: The tower's record.
        state_dict: What is loaded; changed in place.
        prefix: Name of the tower in it, with a dot; "" where it is loaded into the tower itself.

    Raises:
        ProtectionError: Other values, or unknown keys, were to be loaded into the tower itself.
    """
    brought = {key: state_dict.pop(key) for key in [key for key in state_dict if key.startswith(prefix)]}
    known = {prefix + kept.name: kept for kept in protection.kept}
    conflicts = sorted(key for key, value in brought.items() if not brings_the_same(known.get(key), value))
    state_dict.update({key: kept.tensor for key, kept in known.items() if kept.persistent})
    if conflicts:
        unknown = [key for key in conflicts if key not in known]
        report_conflicts(protection, conflicts, unknown=unknown, refuse=not prefix)


def report_conflicts(
    protection: Protection, conflicts: list[str], *, unknown: Collection[str] = (), refuse: bool
) -> None:
    """Say which keys of a checkpoint brought other values for a tower, which won, and how to choose.

    Args:
        protection: The tower's record; the keys are added to its `conflicts`.
        conflicts: The keys, as in the checkpoint.
        unknown: Those of them that are no tensor of the tower: misspelt, or of another version of its class.
        refuse: Raise; else warn. Loading into the tower itself is refused.

    Raises:
        ProtectionError: `refuse` was given.
    """
    protection.conflicts.extend(conflicts)
    tower = f"tower {protection.name!r} (from {protection.origin})"
    other = [key for key in conflicts if key not in unknown]
    said = [f"has other values for {len(other)} tensors of {tower}: {', '.join(other)}"] if other else []
    if unknown:
        said.append(f"names {len(unknown)} tensors that {tower} does not have: {', '.join(unknown)}")
    message = (
        f"the checkpoint {'; it '.join(said)}. The verified values were kept. To use the checkpoint's, call "
        "safeload.unfreeze(tower) before loading it."
    )
    if refuse:
        raise ProtectionError(message, tower=protection.name)
    warnings.warn(message, stacklevel=5)


def brings_the_same(kept: Kept | None, value: Any) -> bool:
    """Say whether a value of a checkpoint is the tower's own, in dtype and every bit.

    Args:
        kept: The tower's record of the tensor; None where it has no such tensor.
        value: What the checkpoint has.
    """
    if kept is None:
        return False
    if value is kept.tensor:
        return True
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta or value.shape != kept.verified.shape:
        return False
    return value.dtype == kept.verified.dtype and torch.equal(value.detach().to(kept.verified.device), kept.verified)
