"""Receive a module with verified values, give the same object back: frozen, evaluating, unknown to FSDP, guarded.

Promise P6: whatever the training stack does afterwards, the tower's storage, values, dtype, evaluation mode and buffers
stay what was verified; what cannot be prevented is noticed before it is used, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from safeload.casting import remove_boundary
from safeload.errors import ProtectionError
from safeload.forking import settle_before_forks
from safeload.guarding import Guarded, guard, unguard
from safeload.keeping import Originals, Protection, keep, record_of
from safeload.marking import mark, unmark
from safeload.mending import mend

__all__ = ["frozen_towers", "protect", "tower_state", "unfreeze", "unprotect"]


def protect(
    module: nn.Module,
    *,
    origin: str,
    name: str = "",
    fingerprints: Mapping[str, str] | None = None,
    report: Any = None,
    originals: Originals | None = None,
    verdict: Callable[[], None] | None = None,
) -> nn.Module:
    """Freeze a module for good and keep the training stack off it.

    Args:
        module: The tower, its verified values in place on a real device.
        origin: Where it was loaded from.
        name: What to call it in messages; its class's name unless given.
        fingerprints: `safeload.fingerprinting.fingerprint` of its tensors by name, where the loader knows them already.
            The others are computed here, which reads each tensor once at the speed of memory.
        report: Whatever the loader wants to find again at `tower_state(tower).report`.
        originals: Gives the verified tensors by name where they are also in memory that the module does not use;
            nothing is read now, then.
        verdict: Where the tower has not been verified yet: waits for it and raises if it failed. The tower's first use
            calls it.

    Returns:
        The same object. Its class is now a subclass of the class it had, with the same name.

    Raises:
        ProtectionError: It is protected already, or a tensor is sharded, quantised, sparse or on the meta device.
    """
    name = name or type(module).__name__
    if isinstance(module, Guarded):
        raise ProtectionError(f"tower {name!r} is protected already.", stage="protect", tower=name)
    module.requires_grad_(False)
    if any(part.training for part in module.modules()):
        module.eval()
    protection = keep(module, name=name, origin=origin, fingerprints=fingerprints, originals=originals)
    protection.report = report
    if verdict is not None:
        protection.verdict = verdict
        settle_before_forks(protection)
    guard(module, protection)
    mark(module)
    return module


def unprotect(module: nn.Module) -> None:
    """Take the protection off a module whose bytes were refused after all: it is no tower. It stays frozen.

    Args:
        module: What `protect` was called on; nothing is done where that did not come to its end.
    """
    if isinstance(module, Guarded):
        unguard(module)
        unmark(module)
        remove_boundary(module)


def frozen_towers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the protected towers in a model.

    Args:
        model: Any module, wrapped or not. A tower in a plain Python list is not part of it and is not found.

    Returns:
        The towers by qualified name; the name is "" where the model itself is a tower.

    Raises:
        ProtectionError: This is no module.
    """
    if not isinstance(model, nn.Module):
        raise ProtectionError(f"model is a {type(model).__name__}: expected an nn.Module. Pass the model itself.")
    return {name: part for name, part in model.named_modules() if isinstance(part, Guarded)}


def tower_state(module: nn.Module) -> Protection:
    """Return the record of a protected tower. Its `report` is free for the loader.

    Args:
        module: A protected tower.

    Raises:
        ProtectionError: The module is not protected.
    """
    if not isinstance(module, Guarded):
        raise ProtectionError(f"this {type(module).__name__} is not a protected tower.")
    return record_of(module)


@torch.no_grad()
def unfreeze(tower: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Lift the protection for a stage that trains the tower.

    Its values are copied into memory of its own. Call it before the model is wrapped or given to an optimizer. With the
    protection go `cast_inputs=True` and the errors about dtypes: autocast or FSDP's mixed precision casts for a tower
    that trains, and would not know of them.

    Args:
        tower: A protected tower.
        dtype: For its floating-point tensors. None casts float16, which a gradient scaler refuses to train, to float32
            and leaves other dtypes.

    Returns:
        The same object, an ordinary module of its own class: trainable, in training mode, part of the state dict.

    Raises:
        ProtectionError: The module is not a protected tower.
    """
    protection = tower_state(tower)
    protection.settle()
    mend(protection)
    unprotect(tower)
    for tensor in {id(kept.tensor): kept.tensor for kept in protection.kept}.values():
        target = tensor.dtype
        if tensor.is_floating_point():
            target = dtype or (torch.float32 if tensor.dtype == torch.float16 else tensor.dtype)
        tensor.data = tensor.detach().clone().to(target)
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            tensor.requires_grad_(True)
    return tower.train()
