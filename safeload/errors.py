"""The error tree. Every error of safeload is one of these, on every rank.

    SafeLoadError(Exception)        base of all; carries rank, host and stage
    +-- SourceError                 not found, unreadable, ambiguous; says what was looked for and where
    |   +-- UnsafeFormatError       only pickle files there; says how to convert
    +-- IntegrityError              path, algorithm, expected, actual, provenance
    |   +-- UnverifiedError         verify="strict" and no expected digest
    +-- CheckpointError             malformed header, index or manifest; missing, unexpected, mismatched tensors
    +-- GroupError                  the ranks could not work together
    |   +-- MismatchedCallError     ranks called with other towers or arguments, or in another order
    |   +-- PeerError               a foreign failure elsewhere; failures: {rank: text}
    +-- ProtectionError             the tower would be trained, sharded or cast
    |   +-- TowerChangedError       names of tensors, and what happened to each
    +-- PrecisionError              the parameters that break the rule, and the call that mends them

A message says what, where, what was expected and what was got, and what to do. An error that happened on one rank is
rebuilt on the others from plain JSON fields (`to_fields`, `from_fields`), so that it keeps its class and its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "CheckpointError",
    "GroupError",
    "IntegrityError",
    "MismatchedCallError",
    "PeerError",
    "PrecisionError",
    "ProtectionError",
    "SafeLoadError",
    "SourceError",
    "TowerChangedError",
    "UnsafeFormatError",
    "UnverifiedError",
    "from_fields",
]


class SafeLoadError(Exception):
    """Base of all errors of safeload.

    Args:
        message: What happened, where, expected and got, and what to do.
        rank: Global rank on which it happened, when known.
        host: Name of the host of that rank, when known.
        stage: The stage of the load: "resolve", "verify", "seal", "build", "plan", "broadcast", "place", "protect"...
        data: The fields named in the class's `data_fields`; JSON values only. They become attributes.
    """

    data_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, message: str, *, rank: int | None = None, host: str | None = None, stage: str | None = None, **data: Any
    ) -> None:
        super().__init__(message)
        unknown = sorted(set(data) - set(self.data_fields))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no data field named {', '.join(unknown)}")
        self.message = message
        self.rank, self.host, self.stage = rank, host, stage
        for name in self.data_fields:
            setattr(self, name, data.get(name))

    def __str__(self) -> str:
        """Return the message, led by where it happened: `[rank 0 on host a, stage verify] ...`."""
        where = [] if self.rank is None else [f"rank {self.rank}" + (f" on {self.host}" if self.host else "")]
        where += [] if self.stage is None else [f"stage {self.stage}"]
        return f"[{', '.join(where)}] {self.message}" if where else self.message

    def to_fields(self) -> dict[str, Any]:
        """Return the error as plain JSON values, from which `from_fields` rebuilds it on another rank."""
        data = {name: getattr(self, name) for name in self.data_fields}
        return {
            "class": type(self).__name__,
            "message": self.message,
            "rank": self.rank,
            "host": self.host,
            "stage": self.stage,
            "data": data,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the same fields, so that an error survives the way out of a worker process."""
        return (from_fields, (self.to_fields(),))


class SourceError(SafeLoadError):
    """The checkpoint was not found, is unreadable or is ambiguous."""

    data_fields: ClassVar[tuple[str, ...]] = ("path", "looked_for")


class UnsafeFormatError(SourceError):
    """Only pickle files are there."""


class IntegrityError(SafeLoadError):
    """A file's bytes are not those that were expected."""

    data_fields: ClassVar[tuple[str, ...]] = ("path", "algorithm", "expected", "actual", "provenance")


class UnverifiedError(IntegrityError):
    """`verify="strict"` and there is no expected digest."""


class CheckpointError(SafeLoadError):
    """A malformed header, index or manifest; missing, unexpected or mismatched tensors, all of them listed."""

    data_fields: ClassVar[tuple[str, ...]] = ("path", "missing", "unexpected", "mismatched")


class GroupError(SafeLoadError):
    """The ranks could not work together."""


class MismatchedCallError(GroupError):
    """Ranks called with other towers or other arguments, or in another order. `calls`: {rank: what it called}."""

    data_fields: ClassVar[tuple[str, ...]] = ("calls",)


class PeerError(GroupError):
    """A failure that is not ours, on this or on another rank. `failures`: {rank: text}."""

    data_fields: ClassVar[tuple[str, ...]] = ("failures",)


class ProtectionError(SafeLoadError):
    """The tower would be trained, sharded or cast."""

    data_fields: ClassVar[tuple[str, ...]] = ("tower",)


class TowerChangedError(ProtectionError):
    """Tensors of a tower are not what was verified. `changes`: {tensor name: what happened}."""

    data_fields: ClassVar[tuple[str, ...]] = ("tower", "changes")


class PrecisionError(SafeLoadError):
    """Parameters break the rule of mixed precision. `parameters`: {name: what is wrong}; `fix`: the call to make."""

    data_fields: ClassVar[tuple[str, ...]] = ("parameters", "fix")


def _tree(root: type[SafeLoadError]) -> dict[str, type[SafeLoadError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_fields(fields: Mapping[str, Any]) -> SafeLoadError:
    """Rebuild an error that another rank wrote with `SafeLoadError.to_fields`.

    Args:
        fields: What `to_fields` returned. Data keys that this version does not know are dropped.

    Returns:
        An error of the same class; `SafeLoadError` itself where the class name is unknown here.
    """
    kind = _tree(SafeLoadError).get(fields["class"], SafeLoadError)
    data = {name: value for name, value in (fields.get("data") or {}).items() if name in kind.data_fields}
    return kind(fields["message"], rank=fields.get("rank"), host=fields.get("host"), stage=fields.get("stage"), **data)
