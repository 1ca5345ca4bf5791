"""Look at a checkpoint without loading it: verify it, write a lock for it, list what is in it.

The same stages as a load, up to the verdict, but nothing is copied and no model is built. Ranks: any one process.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safeload.digests import Digest, Manifest, Verification
from safeload.errors import SourceError
from safeload.examining import Contents, examine
from safeload.hubs import Repo, find_cached, is_repo_id
from safeload.locking import LOCK_NAME, Lock, format_lock
from safeload.pinning import ManifestLike
from safeload.reading import copy_hashed, open_regular
from safeload.resolving import Checkpoint, resolve
from safeload.sealing import OnBytes, SealedCheckpoint, SealedFile, seal
from safeload.verifying import UnverifiedWarning, VerifyMode, expect, verify, vouch

__all__ = ["Inspection", "inspect_checkpoint", "verify_checkpoint", "write_lock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a checkpoint holds: its files with their digests, and its tensors; `verification` says who vouches."""

    checkpoint: Checkpoint
    files: tuple[SealedFile, ...]
    contents: Contents
    verification: Verification


def verify_checkpoint(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    mode: VerifyMode = "strict",
    manifest: ManifestLike | None = None,
    manifest_sha256: str | None = None,
    on_bytes: OnBytes | None = None,
) -> Verification:
    """Verify a checkpoint without loading it.

    Every file that a load would open is read, and every other file that the expected digests name and that is there.
    Of a repository the files in the cache are verified; nothing is downloaded but the Hub's list of digests.

    Args:
        path_or_repo: A folder, a .safetensors file, or the id of a repository.
        revision: Branch, tag or commit of a repository.
        subfolder: Folder below it.
        variant: As in `from_pretrained`.
        cache_dir: The Hub cache.
        token: For private and gated repositories.
        local_files_only: Make no request; the digests kept in the cache are used.
        allow_pickle: Verify `.bin` weights where there are no others; they are hashed, never unpickled.
        mode: "strict" raises where there is no expected digest, "auto" warns.
        manifest: A lock, or sha256 by name.
        manifest_sha256: The sha256 that the lock itself must have.
        on_bytes: Called with the weight bytes read so far and their total.

    Returns:
        What was compared, and against whom.

    Raises:
        SourceError: Not found, unreadable or ambiguous.
        IntegrityError: A file is not what it should be.
        UnverifiedError: "strict" and there is no expected digest.
        CheckpointError: A malformed file.

    Ranks: any one process; no process group is used.
    """
    where: dict[str, Any] = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    checkpoint = _resolve_cached(
        os.fspath(path_or_repo),
        where,
        revision=revision,
        subfolder=subfolder,
        variant=variant,
        allow_pickle=allow_pickle,
    )
    expected = expect(checkpoint, verify=mode, manifest=manifest, manifest_sha256=manifest_sha256, ask=True)
    with _read(checkpoint, expected, on_bytes) as sealed:
        others = _hash_others(expected, sealed.names)
        verification = verify(expected, {**sealed.digests, **others}, mode=mode)
        examine(sealed)
    return verification


def inspect_checkpoint(
    path_or_repo: str | os.PathLike[str], *, on_bytes: OnBytes | None = None, **where: Any
) -> Inspection:
    """List what a checkpoint holds, without loading it.

    Args:
        path_or_repo: As in `verify_checkpoint`.
        on_bytes: Called with the weight bytes read so far and their total.
        **where: `revision`, `subfolder`, `variant`, `cache_dir`, `token`, `local_files_only`, as in `from_pretrained`.

    Returns:
        Files, tensors, and who vouches for them.

    Raises:
        SourceError: Not found, unreadable or ambiguous.
        IntegrityError: A file is not what it should be.
        CheckpointError: A malformed file.

    Ranks: any one process.
    """
    checkpoint = resolve(path_or_repo, **where)
    expected = expect(checkpoint)
    with warnings.catch_warnings(), _read(checkpoint, expected, on_bytes) as sealed:
        warnings.simplefilter("ignore", UnverifiedWarning)  # the result says so
        verification = verify(expected, sealed.digests)
        return Inspection(
            checkpoint=checkpoint, files=sealed.files, contents=examine(sealed), verification=verification
        )


def write_lock(
    path_or_repo: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    allow_pickle: bool = False,
    on_bytes: OnBytes | None = None,
    **where: Any,
) -> Path:
    """Write the digests of the files that a load opens, from bytes that were verified where anybody vouches for them.

    Args:
        path_or_repo: As in `verify_checkpoint`. A repository is downloaded where it is not in the cache.
        output: The lock to write. None is `SHA256SUMS` in the folder, or here for a repository.
        force: Replace a lock that is there.
        allow_pickle: Lock `.bin` weights where there are no others.
        on_bytes: Called with the weight bytes read so far and their total.
        **where: `revision`, `subfolder`, `variant`, `cache_dir`, `token`, `local_files_only`, as in `from_pretrained`.

    Returns:
        The path of the lock, in the format of `sha256sum`, with `# repo:` and `# revision:` where they are known.

    Raises:
        SourceError: Not found, unreadable or ambiguous; or there is a lock already.
        IntegrityError: A file is not what the Hub, or what it left on disk, says.
        CheckpointError: A malformed file.

    Ranks: any one process.
    """
    checkpoint = resolve(path_or_repo, allow_pickle=allow_pickle, **where)
    path = Path(output) if output is not None else (Path() if checkpoint.repo else checkpoint.folder) / LOCK_NAME
    if path.exists() and not force:
        raise SourceError(f"{path}: there is a lock already; force=True (--force) replaces it.", path=str(path))
    expected = vouch(checkpoint, ask=True)
    with _read(checkpoint, expected, on_bytes) as sealed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnverifiedWarning)
            verify(expected, sealed.digests)
        examine(sealed)
    if not expected.entries:
        warnings.warn(
            f"{path}: TRUST ON FIRST USE. Nobody vouches for {checkpoint.origin}: the lock pins the files as they are "
            "now, right or wrong.",
            UnverifiedWarning,
            stacklevel=2,
        )
    entries = {file.name: Digest(algorithm="sha256", hex=file.sha256) for file in sealed.files}
    lock = Lock(
        path=str(path),
        entries=MappingProxyType(entries),
        repo_id=checkpoint.repo_id or expected.repo_id,
        commit=checkpoint.commit or expected.commit,
    )
    _replace(path, format_lock(lock, verified=expected.provenance))
    return path


def _resolve_cached(origin: str, where: Mapping[str, Any], **wanted: Any) -> Checkpoint:
    """Resolve a repository to what is in the cache, also where requests may be made: verifying downloads nothing."""
    if Path(origin).expanduser().exists() or not is_repo_id(origin):
        return resolve(origin, **where, **wanted)
    repo = Repo(
        repo_id=origin,
        revision=wanted.pop("revision"),
        cache_dir=Path(where["cache_dir"]) if where["cache_dir"] is not None else None,
        token=where["token"],
        local_files_only=where["local_files_only"],
    )
    snapshot = find_cached(repo)
    checkpoint = resolve(snapshot.folder, **wanted)
    return replace(checkpoint, origin=origin, repo=repo, commit=snapshot.commit)


@contextmanager
def _read(checkpoint: Checkpoint, expected: Manifest, on_bytes: OnBytes | None) -> Iterator[SealedCheckpoint]:
    """Hash the files where they are: nothing is loaded from them, so that no copy is needed."""
    with seal(checkpoint, expected, memory="mapped", on_bytes=on_bytes) as sealed:
        yield sealed


def _hash_others(expected: Manifest, done: tuple[str, ...]) -> dict[str, Mapping[str, str]]:
    """Hash the other files that are named and there; a cache holds only what was once asked for."""
    digests: dict[str, Mapping[str, str]] = {}
    for name, digest in expected.entries.items():
        path = expected.folder / name
        if name not in done and os.path.lexists(path):
            file = open_regular(path, name=name)
            try:
                digests[name] = copy_hashed(file, None, git_sha1=digest.algorithm == "git-sha1")
            finally:
                os.close(file.fd)
    return digests


def _replace(path: Path, text: str) -> None:
    """Write a whole file or none."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".safeload-") as folder:
            whole = Path(folder) / path.name
            whole.write_text(text, encoding="utf-8", newline="\n")
            os.chmod(whole, 0o644)
            os.replace(whole, path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be written: {error.strerror}.", path=str(path)) from error
