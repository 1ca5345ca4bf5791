"""Receive a verified module, keep a record of every tensor in it, notice and mend what is done to them.

`keep` writes down which object hangs where and holds a second reference to each tensor's storage. `mend` puts tensors
that were replaced, cast, moved or unfrozen back: the verified storage is still there, so nothing is read again.
`changed` names those whose values were overwritten, which cannot be mended from here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import ProtectionError
from safeload.fingerprinting import fingerprint, glimpse
from safeload.marking import release

__all__ = ["Kept", "Protection", "keep", "mend", "overwritten", "rebase", "untouched"]

_TABLES: Final = {"parameter": "_parameters", "buffer": "_buffers"}
_PLAIN: Final = (torch.Tensor, nn.Parameter)


@dataclass(slots=True, kw_only=True)
class Kept:
    """One tensor of the tower: where it hangs, the object that hangs there, and its verified storage."""

    name: str
    kind: str
    persistent: bool
    owner: weakref.ref[nn.Module]
    key: str
    tensor: torch.Tensor
    verified: torch.Tensor
    pointer: int
    nbytes: int
    version: int
    fingerprint: str
    glimpse: bytes = b""

    @property
    def table(self) -> dict[str, Any]:
        """The dictionary of the owning module in which the tensor hangs; empty when the module is gone."""
        owner = self.owner()
        return {} if owner is None else getattr(owner, _TABLES[self.kind])


@dataclass(kw_only=True, eq=False)
class Protection:
    """All that is known of one protected tower. It refers to tensors, never to modules: no cycle keeps a tower alive.

    `report` is free for the loader: what `load_report` returns. `mended` lists, in order, what was put back and why.
    `conflicts` lists checkpoint keys that brought other values for the tower.
    """

    name: str
    origin: str
    kept: tuple[Kept, ...]
    parts: tuple[tuple[weakref.ref[nn.Module], type[nn.Module]], ...]
    report: Any = None
    armed: bool = True
    mended: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def fingerprints(self) -> dict[str, str]:
        """The verified fingerprint of every tensor, by name."""
        return {kept.name: kept.fingerprint for kept in self.kept}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A record belongs to its own tensors: a copy of a part of a tower is an ordinary module."""
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """As for a copy: `protect` makes a new record for an unpickled tower."""
        return (_no_record, ())


def _no_record() -> None:
    return None


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of in-place changes that torch keeps for a tensor; -1 where it keeps none."""
    return -1 if tensor.is_inference() else tensor._version


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, bool, torch.Tensor]]:
    """Yield kind, key, persistent and tensor for everything that hangs on this very module."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield "parameter", key, True, parameter
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield "buffer", key, key not in module._non_persistent_buffers_set, buffer


def _refuse_unfit(name: str, tensor: torch.Tensor, tower: str) -> None:
    problem = None
    if type(tensor) not in _PLAIN:
        problem = f"is a {type(tensor).__name__}; sharded and quantised tensors cannot be protected"
    elif tensor.is_meta:
        problem = "has no data (meta device)"
    elif tensor.layout is not torch.strided:
        problem = f"has the layout {tensor.layout}; only dense tensors can be protected"
    if problem:
        raise ProtectionError(
            f"tensor {name!r} of tower {tower!r} {problem}. Load the tower outside device contexts, before sharding.",
            stage="protect",
            tower=tower,
        )


def keep(module: nn.Module, *, name: str, origin: str, fingerprints: Mapping[str, str] | None) -> Protection:
    """Write down every parameter and buffer of a module. Tensor attributes are left out: classes use them as caches.

    Args:
        module: The tower, with its verified values in place.
        name: What to call it in messages.
        origin: Where it was loaded from.
        fingerprints: `fingerprint` of tensors by name, where the loader knows them; the others are computed here.

    Returns:
        The record.

    Raises:
        ProtectionError: A tensor is sharded, quantised, sparse or on the meta device.
    """
    known = dict(fingerprints or {})
    aliases: dict[int, torch.Tensor] = {}
    kept = []
    for prefix, owner in module.named_modules():
        for kind, key, persistent, tensor in _tensors_of(owner):
            full = f"{prefix}.{key}" if prefix else key
            _refuse_unfit(full, tensor, name)
            verified = aliases.setdefault(id(tensor), tensor.detach())
            kept.append(
                Kept(
                    name=full,
                    kind=kind,
                    persistent=persistent,
                    owner=weakref.ref(owner),
                    key=key,
                    tensor=tensor,
                    verified=verified,
                    pointer=tensor.data_ptr(),
                    nbytes=tensor.untyped_storage().nbytes(),
                    version=version_of(tensor),
                    fingerprint=known.get(full) or fingerprint(tensor),
                )
            )
    parts = tuple((weakref.ref(part), type(part)) for part in module.modules())
    protection = Protection(name=name, origin=origin, kept=tuple(kept), parts=parts)
    _take_glimpses(protection)
    return protection


def _take_glimpses(protection: Protection) -> None:
    for kept, seen in zip(protection.kept, glimpse([kept.verified for kept in protection.kept]), strict=True):
        kept.glimpse = seen


def _differs(kept: Kept) -> str | None:
    """Say how the tensor that hangs in the module differs from the verified one in form, or None."""
    tensor, verified = kept.tensor, kept.verified
    if tensor.data_ptr() == verified.data_ptr() and tensor.dtype == verified.dtype and tensor.shape == verified.shape:
        return None if tensor.stride() == verified.stride() else "its strides were changed"
    if tensor.device != verified.device:
        return f"moved to {tensor.device}"
    if tensor.dtype != verified.dtype:
        return f"cast to {tensor.dtype}"
    if tensor.numel() != verified.numel():
        return f"emptied or resized to {list(tensor.shape)}"
    return "given other storage"


def _mend_one(kept: Kept) -> str | None:
    """Put one tensor back; say what had happened to it, or None when nothing had."""
    table, happened = kept.table, None
    present = table.get(kept.key)
    if present is not kept.tensor:
        if present is not None and type(present) not in _PLAIN:
            return None  # sharded behind our back: `describe` names it, nothing here may fight the owner
        happened = "removed" if present is None else "replaced"
        table[kept.key] = kept.tensor
    how = _differs(kept)
    if how is not None:
        kept.tensor.data = kept.verified
        happened = f"{happened}, {how}" if happened else how
    if kept.tensor.requires_grad:
        kept.tensor.requires_grad_(False)
        happened = f"{happened}, made trainable" if happened else "made trainable"
    return happened


def untouched(protection: Protection) -> bool:
    """Say, quickly, whether nothing has to be mended or looked at: about a third of a microsecond a tensor.

    Args:
        protection: The tower's record.
    """
    for kept in protection.kept:
        tensor, owner = kept.tensor, kept.owner()
        if (
            owner is None
            or getattr(owner, _TABLES[kept.kind]).get(kept.key) is not tensor
            or tensor.data_ptr() != kept.pointer
            or tensor.dtype is not kept.verified.dtype
            or tensor.requires_grad
            or version_of(tensor) != kept.version
        ):
            return False
    for reference, kind in protection.parts:
        part = reference()
        if part is None or part.training or type(part) is not kind:
            return False
    return True


@torch.no_grad()
def mend(protection: Protection) -> dict[str, str]:
    """Put replaced, cast, moved, emptied and unfrozen tensors back, and evaluation mode; reads and copies no weights.

    Args:
        protection: The tower's record. What was mended is added to `protection.mended`.

    Returns:
        What had happened, by tensor name; empty when nothing had.
    """
    happened = {kept.name: how for kept in protection.kept if (how := _mend_one(kept)) is not None}
    for reference, _ in protection.parts:
        part = reference()
        if part is not None:
            part.training = False
            release(part)
    protection.mended.extend(f"{name}: {how}" for name, how in happened.items())
    return happened


def _overwritten(kept: Kept) -> str | None:
    if kept.verified.untyped_storage().nbytes() != kept.nbytes:
        return "emptied: its storage was freed"
    if fingerprint(kept.verified) != kept.fingerprint:
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
    suspects = {kept.name for kept in protection.kept if _is_suspect(kept)}
    if depth == "full":
        suspects = {kept.name for kept in protection.kept}
    elif depth == "glimpse":
        whole = [kept for kept in protection.kept if kept.name not in suspects]
        seen = glimpse([kept.verified for kept in whole])
        suspects |= {kept.name for kept, now in zip(whole, seen, strict=True) if now != kept.glimpse}
    return {
        kept.name: how for kept in protection.kept if kept.name in suspects and (how := _overwritten(kept)) is not None
    }


def _is_suspect(kept: Kept) -> bool:
    return version_of(kept.tensor) != kept.version or kept.verified.untyped_storage().nbytes() != kept.nbytes


def rebase(kept: Kept, moved: torch.Tensor) -> None:
    """Let a tensor of the tower have new storage with the same values, as after a move to another device.

    Args:
        kept: The record of the tensor; its `tensor` keeps its identity where torch allows that.
        moved: The same values.
    """
    kept.tensor.data = moved
    kept.verified = kept.tensor.detach()
    kept.pointer = kept.verified.data_ptr()
    kept.nbytes = kept.verified.untyped_storage().nbytes()
    kept.version = version_of(kept.tensor)
