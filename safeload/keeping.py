"""Receive a verified module, keep a record of every tensor in it.

The record says which object hangs where, and holds a second reference to each tensor's storage: what is replaced, cast
or emptied later can be put back from it without reading anything again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from safeload.errors import ProtectionError, SafeLoadError
from safeload.fingerprinting import fingerprint, glimpse

__all__ = [
    "PLAIN",
    "RECORD",
    "TABLES",
    "Kept",
    "Originals",
    "Part",
    "Protection",
    "keep",
    "rebase",
    "record_of",
    "version_of",
]

TABLES: Final = {"parameter": "_parameters", "buffer": "_buffers"}
PLAIN: Final = (torch.Tensor, nn.Parameter)

Originals = Callable[[], Mapping[str, torch.Tensor]]


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
    renewed: bool = False  # the module's own code gave it another value, as rotary embeddings do in their forward

    @property
    def table(self) -> dict[str, Any]:
        """The dictionary of the owning module in which the tensor hangs; empty when the module is gone."""
        owner = self.owner()
        return {} if owner is None else getattr(owner, TABLES[self.kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module of the tower: its name, itself, the class it had, and where it hangs; the tower hangs nowhere."""

    path: str
    module: weakref.ref[nn.Module]
    kind: type[nn.Module]
    parent: weakref.ref[nn.Module] | None
    key: str


@dataclass(kw_only=True, eq=False)
class Protection:
    """All that is known of one protected tower. It refers to tensors, never to modules: no cycle keeps a tower alive.

    `report` is free for the loader: what `load_report` returns. `mended` lists, in order, what was put back and why.
    `conflicts` lists checkpoint keys that brought other values for the tower. `originals` gives the verified tensors
    by name where they are also in memory that the module does not use. `verdict` waits until the tower's bytes have
    been verified, and raises where they are not the expected ones; None where that is over. `refused` is what it
    raised; `settling` lets one thread ask. `inside` holds the threads that are in a call of the tower, `within` those
    in a call of a part of it. `samples` holds what `sampling` compares before every use, by part.
    """

    name: str
    origin: str
    kept: tuple[Kept, ...]
    parts: tuple[Part, ...]
    report: Any = None
    armed: bool = True
    mended: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    originals: Originals | None = None
    verdict: Callable[[], None] | None = None
    refused: SafeLoadError | None = None
    settling: Any = field(default_factory=threading.RLock)
    inside: set[int] = field(default_factory=set)
    within: set[int] = field(default_factory=set)
    samples: dict[str, Any] = field(default_factory=dict)

    def settle(self) -> None:
        """Wait for the verdict, if it is still out. It is asked for once, and what it raises is raised at every use.

        Raises:
            SafeLoadError: The tower's bytes are not the expected ones, or could not be verified.
        """
        if self.verdict is not None:
            with self.settling:
                self._settle()

    def _settle(self) -> None:
        if self.refused is not None:
            raise self.refused.with_traceback(None)
        try:
            if self.verdict is not None:  # another thread may have been first
                self.verdict()
        except SafeLoadError as error:
            self.refused = error
            raise
        self.verdict = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """The verified fingerprint of every tensor, by name; without those that the tower itself has renewed."""
        return {kept.name: self.fingerprint_of(kept) for kept in self.kept if not kept.renewed}

    def fingerprint_of(self, kept: Kept) -> str:
        """Return the verified fingerprint of one tensor."""
        if not kept.fingerprint and self.originals is not None:
            kept.fingerprint = fingerprint(self.originals()[kept.name])
        return kept.fingerprint

    def take_glimpses(self) -> None:
        """Take the glimpses that have not been taken, of the originals where those can still be had."""
        due = [kept for kept in self.kept if not kept.glimpse]
        originals = {} if self.originals is None or not due else self.originals()
        seen = glimpse([originals.get(kept.name, kept.verified) for kept in due])
        for kept, values in zip(due, seen, strict=True):
            kept.glimpse = values

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A record belongs to its own tensors: a copy of a part of a tower is an ordinary module."""
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """As for a copy: `protect` makes a new record for an unpickled tower."""
        return (_no_record, ())


def _no_record() -> None:
    return None


RECORD: Final = "_safeload_protection"


def record_of(tower: Any) -> Protection:
    """Return the record of a protected tower.

    Args:
        tower: A module that `guard` was called on.
    """
    record: Protection = tower.__dict__[RECORD]
    return record


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of in-place changes that torch keeps for a tensor; -1 where it keeps none.

    Args:
        tensor: Any tensor.
    """
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
    if type(tensor) not in PLAIN:
        problem = f"is a {type(tensor).__name__}; sharded and quantised tensors cannot be protected"
    elif hasattr(tensor, "ds_id"):
        problem = "is partitioned by DeepSpeed ZeRO-3; build the tower outside deepspeed.zero.Init"
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


def keep(
    module: nn.Module,
    *,
    name: str,
    origin: str,
    fingerprints: Mapping[str, str] | None,
    originals: Originals | None = None,
) -> Protection:
    """Write down every parameter and buffer of a module. Tensor attributes are left out: classes use them as caches.

    Args:
        module: The tower, with its verified values in place.
        name: What to call it in messages.
        origin: Where it was loaded from.
        fingerprints: `fingerprint` of tensors by name, where the loader knows them; the others are computed here.
        originals: Gives the verified tensors by name, where they are kept in memory that the module does not use. No
            value is read now, then, but when it is first needed.

    Returns:
        The record.

    Raises:
        ProtectionError: A tensor is sharded, quantised, sparse or on the meta device.
    """
    known = dict(fingerprints or {})
    aliases: dict[int, torch.Tensor] = {}
    prints: dict[int, str] = {}
    kept = []
    named = dict(module.named_modules())
    for prefix, owner in named.items():
        for kind, key, persistent, tensor in _tensors_of(owner):
            full = f"{prefix}.{key}" if prefix else key
            _refuse_unfit(full, tensor, name)
            verified = aliases.setdefault(id(tensor), tensor.detach())
            prints[id(tensor)] = known.get(full) or prints.get(id(tensor)) or ("" if originals else fingerprint(tensor))
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
                    fingerprint=prints[id(tensor)],
                )
            )
    protection = Protection(name=name, origin=origin, kept=tuple(kept), parts=_parts_of(named), originals=originals)
    if originals is None:
        protection.take_glimpses()
    return protection


def _parts_of(named: Mapping[str, nn.Module]) -> tuple[Part, ...]:
    found = []
    for path, part in named.items():
        home, _, key = path.rpartition(".")
        parent = weakref.ref(named[home]) if path else None
        found.append(Part(path=path, module=weakref.ref(part), kind=type(part), parent=parent, key=key))
    return tuple(found)


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
