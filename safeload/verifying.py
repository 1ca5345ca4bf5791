"""Where expected digests come from, best first, and the comparison with what was read.

Receives a `Checkpoint` and gives the `Manifest` to hold it to: `pinned` by the caller, `hub` as the Hub says now,
`cache` and `local` as the Hub said at the download, or `none`. Later receives the digests of the sealed bytes and gives
a `Verification`, or an error that names the files. `none` is said aloud, once, or refused by `verify="strict"`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from safeload.caching import Kept, read_cache, read_local_dir
from safeload.comparing import compare, require_covered, require_nothing_else
from safeload.digests import Digest, Manifest, Provenance, Verification, digest_of_all
from safeload.errors import UnverifiedError
from safeload.hubs import is_offline, list_digests, probe
from safeload.indexes import listed
from safeload.pinning import ManifestLike, pin
from safeload.resolving import Checkpoint

__all__ = [
    "Digest",
    "Manifest",
    "ManifestLike",
    "Provenance",
    "UnverifiedWarning",
    "Verification",
    "VerifyMode",
    "expect",
    "verify",
    "vouch",
]

VerifyMode = Literal["auto", "strict", "off"]

_HOW_TO_LOCK = (
    'Make a lock once, where you trust the files: "safeload lock {origin}", and pass manifest= or keep it beside them.'
)


class UnverifiedWarning(UserWarning):
    """Files were loaded for which there was no expected digest."""


def expect(
    checkpoint: Checkpoint,
    *,
    verify: VerifyMode = "auto",
    manifest: ManifestLike | None = None,
    manifest_sha256: str | None = None,
    ask: bool = False,
    strict_folder: bool = False,
) -> Manifest:
    """Find the best expected digests there are for a checkpoint.

    Args:
        checkpoint: What will be loaded.
        verify: "strict" refuses when there are none; "off" looks for none.
        manifest: The path of a lock in the format of `sha256sum`, sha256 by name, or a `SignedManifest`. Otherwise
            `SHA256SUMS` beside the files is taken when it is there.
        manifest_sha256: The sha256 that the lock itself must have.
        ask: Ask the Hub about a repository's files also where the cache has digests of them.
        strict_folder: Refuse a folder that holds other files than those that the manifest names.

    Returns:
        The manifest; its provenance is "none" when nobody vouches for the files.

    Raises:
        SourceError: The lock is not there, or names files that are not there.
        CheckpointError: The lock is malformed.
        IntegrityError: The lock is not the pinned one or is of another commit, a needed file is in no manifest, or,
            with `strict_folder`, the folder holds more.
        UnverifiedError: "strict" or `strict_folder`, and there is no expected digest.

    Ranks:
        Source rank only.
    """
    if verify == "off":
        return Manifest(provenance="none", source="nothing (verify='off')", folder=checkpoint.folder)
    found = pin(checkpoint, manifest, manifest_sha256) or vouch(checkpoint, ask=ask)
    require_covered(found, checkpoint.names)
    if (verify == "strict" or strict_folder) and not found.entries:
        raise _unverified(checkpoint.origin, checkpoint.names)
    if strict_folder:
        require_nothing_else(found)
    return found


def vouch(checkpoint: Checkpoint, *, ask: bool = False) -> Manifest:
    """Find the best expected digests that somebody other than the caller gives.

    Args:
        checkpoint: What will be loaded.
        ask: Ask the Hub about a repository's files also where the cache has digests of them.

    Returns:
        The manifest; "none" when nobody vouches for the files.

    Raises:
        SourceError: The Hub was asked and did not answer, and nothing is kept on disk.

    Ranks:
        Source rank only.
    """
    return (
        _from_hub(checkpoint)
        or (_ask_hub(checkpoint) if ask else None)
        or _kept(checkpoint, "cache", read_cache(checkpoint.folder))
        or _ask_hub(checkpoint)
        or _kept(checkpoint, "local", _read_local(checkpoint))
        or Manifest(provenance="none", source="nothing", folder=checkpoint.folder)
    )


def verify(manifest: Manifest, digests: Mapping[str, Mapping[str, str]], *, mode: VerifyMode = "auto") -> Verification:
    """Hold the digests of what was read to a manifest.

    Args:
        manifest: What they should be.
        digests: By name, then by algorithm, in hexadecimal: `SealedCheckpoint.digests`.
        mode: "strict" refuses files without an expected digest; "auto" warns.

    Returns:
        What was compared, and against whom.

    Raises:
        IntegrityError: A digest differs, all of those that do are listed; or a file is not in the manifest.
        UnverifiedError: "strict" and there is no expected digest.

    Ranks:
        Source rank only.
    """
    require_covered(manifest, digests)
    compare(manifest, digests)
    unchecked = tuple(name for name in digests if name not in manifest.entries)
    if unchecked and mode == "strict":
        raise _unverified(str(manifest.folder), unchecked)
    if unchecked and mode == "auto":
        text = f"{manifest.folder}: no expected digest for {listed(unchecked)}: loaded as they are. "
        warnings.warn(text + _HOW_TO_LOCK.format(origin=manifest.folder), UnverifiedWarning, stacklevel=2)
    checked = tuple(name for name in digests if name in manifest.entries)
    return Verification(
        provenance=manifest.provenance,
        source=manifest.source,
        checked=checked,
        corruption_only=tuple(name for name in checked if manifest.entries[name].algorithm == "git-sha1"),
        unchecked=unchecked,
        digest=digest_of_all({name: algorithms["sha256"] for name, algorithms in digests.items()}),
    )


def _unverified(origin: str, names: tuple[str, ...]) -> UnverifiedError:
    return UnverifiedError(
        f"{origin}: asked to be strict, and no expected digest for {listed(names)}. "
        + _HOW_TO_LOCK.format(origin=origin),
        path=origin,
        provenance="none",
    )


def _from_hub(checkpoint: Checkpoint) -> Manifest | None:
    if checkpoint.repo is None or not checkpoint.listing:
        return None
    return Manifest(
        provenance="hub",
        source=f"the Hub's listing of {checkpoint.repo_id} at {checkpoint.commit}",
        folder=checkpoint.folder,
        repo_id=checkpoint.repo_id,
        commit=checkpoint.commit,
        entries=checkpoint.listing,
    )


def _ask_hub(checkpoint: Checkpoint) -> Manifest | None:
    """Ask now, where the files were in the cache and nothing there says what they should be."""
    if checkpoint.repo is None or checkpoint.commit is None or is_offline(checkpoint.repo):
        return None
    prefix = f"{checkpoint.subfolder}/" if checkpoint.subfolder else ""
    probe(checkpoint.repo)
    listing = list_digests(checkpoint.repo, checkpoint.commit)
    below = {name.removeprefix(prefix): digest for name, digest in listing.items() if name.startswith(prefix)}
    return _from_hub(replace(checkpoint, listing=MappingProxyType(below)))


def _kept(checkpoint: Checkpoint, provenance: Provenance, kept: Kept | None) -> Manifest | None:
    if kept is None:
        return None
    return Manifest(
        provenance=provenance,
        source=kept.source,
        folder=checkpoint.folder,
        repo_id=checkpoint.repo_id,
        commit=checkpoint.commit or kept.commit,
        entries=MappingProxyType(dict(kept.digests)),
    )


def _read_local(checkpoint: Checkpoint) -> Kept | None:
    if checkpoint.subfolder:
        root = Path(checkpoint.origin).expanduser()
        return read_local_dir(root, below=checkpoint.subfolder) or read_local_dir(checkpoint.folder)
    return read_local_dir(checkpoint.folder)
