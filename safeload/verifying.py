"""Where expected digests come from, and the comparison with what was read.

Receives a `Checkpoint` and gives the `Manifest` to hold it to; later receives the digests of the bytes that were sealed
and gives a `Verification`, or an error that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Digest", "Manifest", "Provenance", "Verification"]

Provenance = Literal["pinned", "hub", "cache", "local", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The expected digest of one file: `algorithm` "sha256" or "git-sha1", `hex` in lower case, size when known."""

    algorithm: str
    hex: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the files should be: `provenance` says who vouches, `source` where that was read, `entries` by name."""

    provenance: Provenance
    source: str
    entries: Mapping[str, Digest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome: every file of the load that was `checked`, against whom, and the digest of the whole."""

    provenance: Provenance
    source: str
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    digest: str
