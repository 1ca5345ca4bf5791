"""Receive the record of a tower, notice what was done to it, put back what can be put back.

`mend` puts tensors that were replaced, cast, moved, emptied or made trainable back: their verified storage is still
there, so nothing is read or copied. `overwritten` names those whose values were written over, which are lost here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from safeload.fingerprinting import fingerprint, glimpse
from safeload.keeping import PLAIN, TABLES, Kept, Part, Protection, version_of
from safeload.marking import release

__all__ = ["altered", "displaced", "is_mendable", "mend", "only_wraps", "overwritten", "untouched"]


def _form(kept: Kept) -> str | None:
    """Say how the tensor's form differs from that of the verified one, or None."""
    tensor, verified = kept.tensor, kept.verified
    if tensor.device != verified.device:
        return f"moved to {tensor.device}"
    if tensor.dtype != verified.dtype:
        return f"cast to {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.numel() != verified.numel():
        return f"emptied or resized to {list(tensor.shape)}"
    if tensor.data_ptr() != verified.data_ptr():
        return "given other storage"
    return "its strides were changed" if tensor.stride() != verified.stride() else None


def _presence(kept: Kept) -> str | None:
    """Say whether another object hangs in the tensor's place, or None."""
    present = kept.table.get(kept.key)
    if present is kept.tensor or kept.renewed:
        return None
    if present is None:
        return "removed" if kept.owner() is not None else "its module is gone"
    if type(present) in PLAIN:
        return "replaced"
    return f"replaced by a {type(present).__name__}" + (" (sharded)" if type(present).__name__ == "DTensor" else "")


def altered(kept: Kept) -> str | None:
    """Say what happened to a tensor's place, form and freedom from gradients, without looking at its values.

    Args:
        kept: The record of the tensor.

    Returns:
        For instance "replaced" or "cast to float16, made trainable"; None where nothing happened.
    """
    trainable = "made trainable" if kept.tensor.requires_grad else None
    happened = [what for what in (_presence(kept), _form(kept), trainable) if what]
    return ", ".join(happened) or None


def is_mendable(kept: Kept) -> bool:
    """Say whether the tensor's place may be written to: not where its module is gone or it was sharded by somebody.

    Args:
        kept: The record of the tensor.
    """
    present = kept.table.get(kept.key)
    return kept.owner() is not None and (present is None or type(present) in PLAIN)


def _mend_one(kept: Kept) -> str | None:
    """Put one tensor back; say what had happened to it, or None when nothing had or it can't be put back."""
    happened = altered(kept)
    if happened is None or not is_mendable(kept):
        return None
    kept.table[kept.key] = kept.tensor
    if _form(kept) is not None:
        kept.tensor.data = kept.verified
    if kept.tensor.requires_grad:
        kept.tensor.requires_grad_(False)
    return happened


def untouched(tensors: Iterable[Kept], parts: Iterable[Part]) -> bool:
    """Say, quickly, whether nothing has to be mended or looked at: about a third of a microsecond a tensor.

    Args:
        tensors: Of a tower's record, all or those of one part.
        parts: The modules that hold them.
    """
    for kept in tensors:
        tensor, owner = kept.tensor, kept.owner()
        if (
            owner is None
            or getattr(owner, TABLES[kept.kind]).get(kept.key) is not tensor
            or tensor.data_ptr() != kept.pointer
            or tensor.dtype is not kept.verified.dtype
            or tensor.requires_grad
            or version_of(tensor) != kept.version
        ):
            return False
    for part in parts:
        module = part.module()
        if module is None or module.training or type(module) is not part.kind:
            return False
        parent = None if part.parent is None else part.parent()
        if parent is not None and parent._modules.get(part.key) is not module:
            return False
    return True


def displaced(protection: Protection) -> dict[str, str]:
    """Name the modules that something else hangs in the place of, put there behind the guard.

    Args:
        protection: The tower's record.

    Returns:
        What happened, by module name.
    """
    changes = {}
    for part in protection.parts:
        module, parent = part.module(), part.parent() if part.parent else None
        present = None if parent is None else parent._modules.get(part.key)
        if parent is None or (module is not None and present is module):
            continue
        if present is None or module is None or not only_wraps(present, module):
            how = "removed" if present is None else f"replaced by a {type(present).__name__}"
            changes[part.path] = f"this module was {how}"
    return changes


def only_wraps(value: Any, present: nn.Module) -> bool:
    """Say whether a module adds no tensors to the one that it holds, as activation checkpointing and compiling do.

    Args:
        value: What may be a wrapper.
        present: What it may wrap.
    """
    if not isinstance(value, nn.Module) or not any(child is present for child in value.children()):
        return False
    own = {id(tensor) for tensor in (*present.parameters(), *present.buffers())}
    return all(id(tensor) in own for tensor in (*value.parameters(), *value.buffers()))


@torch.no_grad()
def mend(protection: Protection) -> dict[str, str]:
    """Put replaced, cast, moved, emptied and unfrozen tensors back, and evaluation mode; reads and copies no weights.

    Args:
        protection: The tower's record. What was mended is added to `protection.mended`.

    Returns:
        What had happened, by tensor name; empty when nothing had.
    """
    happened = {kept.name: how for kept in protection.kept if (how := _mend_one(kept)) is not None}
    for part in protection.parts:
        module = part.module()
        if module is not None:
            module.training = False
            release(module)
    protection.mended.extend(f"{name}: {how}" for name, how in happened.items())
    return happened


def _overwritten(protection: Protection, kept: Kept) -> str | None:
    if kept.verified.untyped_storage().nbytes() != kept.nbytes:
        return "emptied: its storage was freed"
    if fingerprint(kept.verified) != protection.fingerprint_of(kept):
        return "overwritten in place"
    kept.version = version_of(kept.tensor)
    return None


def overwritten(protection: Protection, *, depth: str) -> dict[str, str]:
    """Name the tensors whose values are no longer the verified ones.

    Args:
        protection: The tower's record, mended before.
        depth: "versions" looks at torch's counts of in-place changes, which writes through `.data` do not touch;
            "glimpse" compares a few values of every tensor too; "full" reads every tensor once. A count that moved
            while the values did not (a broadcast of equal values) is not a change.

    Returns:
        What happened, by tensor name.
    """
    verified = [kept for kept in protection.kept if not kept.renewed]
    suspects = verified if depth == "full" else [kept for kept in verified if _is_suspect(kept)]
    if depth == "glimpse":
        unsuspected = [kept for kept in verified if not _is_suspect(kept)]
        protection.take_glimpses()
        seen = glimpse([kept.verified for kept in unsuspected])
        suspects += [kept for kept, now in zip(unsuspected, seen, strict=True) if now != kept.glimpse]
    return {kept.name: how for kept in suspects if (how := _overwritten(protection, kept)) is not None}


def _is_suspect(kept: Kept) -> bool:
    return version_of(kept.tensor) != kept.version or kept.verified.untyped_storage().nbytes() != kept.nbytes
