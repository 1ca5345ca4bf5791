"""Digests that the caller vouches for: a lock given as `manifest=`, or `SHA256SUMS` beside the files.

Receives a `Checkpoint` and what the caller pinned; gives a `Manifest` of provenance "pinned". A lock is taken whole or
refused: the pinned lock, of this repository and commit, its files all there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from safeload.digests import Digest, Manifest
from safeload.errors import CheckpointError, IntegrityError, SourceError
from safeload.indexes import MAX_JSON_BYTES, listed
from safeload.locking import LOCK_NAME, Lock, parse_lock
from safeload.reading import open_regular
from safeload.resolving import Checkpoint
from safeload.signing import SignedManifest, read_signed

__all__ = ["ManifestLike", "pin"]

ManifestLike = str | os.PathLike[str] | Mapping[str, str] | SignedManifest


def pin(checkpoint: Checkpoint, manifest: ManifestLike | None, manifest_sha256: str | None) -> Manifest | None:
    """Read the digests that the caller pinned.

    Args:
        checkpoint: What will be loaded.
        manifest: The path of a lock, sha256 by name, or a signature; None looks for `SHA256SUMS` beside local files.
        manifest_sha256: The sha256 that the lock itself must have.

    Returns:
        The manifest, or None when nothing is pinned.

    Raises:
        SourceError: The lock is not there, or names files that are not there.
        CheckpointError: The lock is malformed, or names nothing in this folder.
        IntegrityError: Not the pinned lock, or one of another repository or commit.

    Ranks:
        Source rank only.
    """
    if isinstance(manifest, Mapping):
        lock, below = _lock_of(manifest), ""
    elif isinstance(manifest, SignedManifest):
        lock, below = read_signed(manifest), ""
    else:
        found = [(Path(manifest), "")] if manifest is not None else _locks_beside(checkpoint)
        if not found:
            if manifest_sha256 is not None:
                raise SourceError(
                    f"{checkpoint.origin}: manifest_sha256 is given, but there is no manifest= and no {LOCK_NAME}.",
                    path=checkpoint.origin,
                    looked_for=[LOCK_NAME],
                )
            return None
        path, below = found[0]
        lock = parse_lock(_read_lock(path, manifest_sha256), path=str(path))
    prefix = f"{checkpoint.subfolder}/"
    if checkpoint.subfolder and any(name.startswith(prefix) for name in lock.entries):
        below = prefix  # the lock is of the folder above, or of the whole repository
    _check_commit(lock, checkpoint)
    entries = {name.removeprefix(below): digest for name, digest in lock.entries.items() if name.startswith(below)}
    _check_present(checkpoint, lock, entries)
    return Manifest(
        provenance="pinned",
        source=lock.path,
        folder=checkpoint.folder,
        repo_id=checkpoint.repo_id,
        commit=checkpoint.commit,
        entries=MappingProxyType(entries),
    )


def _locks_beside(checkpoint: Checkpoint) -> list[tuple[Path, str]]:
    """Find `SHA256SUMS` in a local folder: beside the files, else in the folder whose subfolder they are in."""
    if checkpoint.repo is not None:
        return []
    below = checkpoint.subfolder
    places = [(checkpoint.folder, "")] + ([(Path(checkpoint.origin).expanduser(), f"{below}/")] if below else [])
    return [(folder / LOCK_NAME, prefix) for folder, prefix in places if os.path.lexists(folder / LOCK_NAME)]


def _lock_of(manifest: Mapping[str, str]) -> Lock:
    lines = "".join(f"{digest.removeprefix('sha256:')}  {name}\n" for name, digest in manifest.items())
    return parse_lock(lines.encode("utf-8", "surrogatepass"), path="manifest=")


def _read_lock(path: Path, manifest_sha256: str | None) -> bytes:
    file = open_regular(path, name=path.name)
    with open(file.fd, "rb") as stream:
        raw = stream.read(MAX_JSON_BYTES + 1)
    actual = hashlib.sha256(raw).hexdigest()
    if manifest_sha256 is not None and actual != manifest_sha256.lower().removeprefix("sha256:"):
        raise IntegrityError(
            f"{path}: sha256 is {actual}, manifest_sha256 is {manifest_sha256}: not the lock that was pinned.",
            path=str(path),
            algorithm="sha256",
            expected=manifest_sha256.lower(),
            actual=actual,
            provenance="pinned",
        )
    return raw


def _check_commit(lock: Lock, checkpoint: Checkpoint) -> None:
    for what, locked, got in (
        ("repository", lock.repo_id, checkpoint.repo_id),
        ("commit", lock.commit, checkpoint.commit),
    ):
        if locked and got and locked != got:
            raise IntegrityError(
                f"{checkpoint.origin}: {what} {got}, but {lock.path} is of {what} {locked}. Pass "
                f"revision={lock.commit!r}, or make a new lock once the new files were reviewed.",
                path=checkpoint.origin,
                algorithm=what,
                expected=locked,
                actual=got,
                provenance="pinned",
            )


def _check_present(checkpoint: Checkpoint, lock: Lock, entries: Mapping[str, Digest]) -> None:
    if not entries:
        raise CheckpointError(f"{lock.path}: names no file below {checkpoint.folder}.", path=lock.path)
    absent = [name for name in entries if not os.path.lexists(checkpoint.folder / name)]
    if absent and checkpoint.repo is None:  # a cache holds only what was asked for
        raise SourceError(
            f"{checkpoint.folder}: {lock.path} names {listed(absent)}, not there.",
            path=str(checkpoint.folder / absent[0]),
            looked_for=absent,
        )
