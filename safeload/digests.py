"""Records of expected digests: `Digest`, `Manifest`, and `Verification`, the outcome of holding files to one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["Digest", "Manifest", "Provenance", "Verification", "digest_of_all", "digest_of_etag"]

Provenance = Literal["pinned", "hub", "cache", "local", "none"]

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHA1: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The expected digest of one file: `algorithm` "sha256" or "git-sha1", `hex` in lower case, size when known.

    git-sha1 is git's blob id, which the Hub gives for small files: good against corruption, not against forgery.
    """

    algorithm: Literal["sha256", "git-sha1"]
    hex: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the files of a folder should be.

    `provenance` says who vouches: the caller ("pinned"), the Hub just now ("hub"), what the Hub said when the files
    were downloaded, kept beside them ("cache", "local"), or nobody ("none"). `source` is where it was read, as text;
    `entries` the digests by name, relative to `folder`.
    """

    provenance: Provenance
    source: str
    folder: Path = Path()
    repo_id: str | None = None
    commit: str | None = None
    entries: Mapping[str, Digest] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was compared with what.

    `checked` are the names whose digest agreed, `corruption_only` those among them that only git's sha1 vouches for,
    `unchecked` those with no expected digest. `digest` is one sha256 for the whole load.
    """

    provenance: Provenance
    source: str
    checked: tuple[str, ...]
    corruption_only: tuple[str, ...]
    unchecked: tuple[str, ...]
    digest: str

    def to_fields(self) -> dict[str, object]:
        """Return the record as plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def digest_of_etag(etag: str) -> Digest | None:
    """Read the digest that the Hub's client keeps as an etag, as the name of a blob or in a metadata file.

    Args:
        etag: 64 hexadecimal digits are a sha256, 40 a git blob id.

    Returns:
        The digest, or None when it is neither.
    """
    if _SHA256.fullmatch(etag):
        return Digest(algorithm="sha256", hex=etag)
    return Digest(algorithm="git-sha1", hex=etag) if _SHA1.fullmatch(etag) else None


def digest_of_all(sha256_by_name: Mapping[str, str]) -> str:
    """One sha256 for a set of files: over the sorted lines `sha256  name`, as `sha256sum` prints them.

    Args:
        sha256_by_name: The files' digests.

    Returns:
        The digest in hexadecimal.
    """
    lines = sorted(f"{digest}  {name}\n" for name, digest in sha256_by_name.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()
