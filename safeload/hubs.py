"""The only door to huggingface_hub: repo id -> one commit, its files on disk, and what the Hub says of them.

Everything is taken at one commit. A pinned commit whose files are in the cache makes no request. Whatever the client
raises becomes a `SourceError` that says what was looked for. Only calls that huggingface_hub 0.26 and 2.x share.
"""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from safeload.digests import Digest
from safeload.errors import SafeLoadError, SourceError

__all__ = [
    "Repo",
    "Snapshot",
    "fetch",
    "find_cached",
    "is_commit",
    "is_offline",
    "is_repo_id",
    "list_digests",
    "locate",
    "probe",
]

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# By name, as huggingface_hub 0.x raises those of requests and 1.x and 2.x those of httpx.
_OUTAGES: Final = {"ConnectionError", "TransportError", "Timeout", "OfflineModeIsEnabled"}
_ANSWER_S: Final = 10.0  # what the client itself allows by default
_REPO_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repo:
    """A repository as the caller named it."""

    repo_id: str
    revision: str | None = None
    cache_dir: Path | None = None
    token: str | bool | None = None
    local_files_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One commit on disk: `folder` holds its files; `listing` is what the Hub said of all of them, if it was asked."""

    folder: Path
    commit: str
    listing: Mapping[str, Digest] | None


def is_repo_id(text: str) -> bool:
    """Say whether `text` can be the id of a repository, `name` or `owner/name`, rather than a path.

    Args:
        text: What the caller wrote.

    Returns:
        Whether the Hub could have a repository of this name.
    """
    return bool(_REPO_ID.fullmatch(text)) and not text.startswith((".", "-")) and ".." not in text and len(text) <= 96  # noqa: PLR2004


def is_commit(revision: str | None) -> bool:
    """Say whether a revision is a full commit id, which cannot move.

    Args:
        revision: As in from_pretrained.

    Returns:
        Whether it is 40 hexadecimal digits.
    """
    return revision is not None and bool(_COMMIT.fullmatch(revision))


def is_offline(repo: Repo) -> bool:
    """Say whether no request may be made: `local_files_only`, or HF_HUB_OFFLINE.

    Args:
        repo: What the caller asked for.

    Returns:
        Whether to stay off the network.
    """
    from huggingface_hub import constants

    return repo.local_files_only or bool(constants.HF_HUB_OFFLINE)


def find_cached(repo: Repo) -> Snapshot:
    """Find a commit in the cache, with no request.

    Args:
        repo: The repository; a branch or tag means the commit it had when the cache last asked.

    Returns:
        The snapshot. It may be partial: the cache keeps what was once asked for.

    Raises:
        SourceError: The cache has no such commit.
    """
    storage = _storage(repo)
    revision = repo.revision or "main"
    commit = revision if is_commit(revision) else _read_ref(storage / "refs" / revision)
    folder = storage / "snapshots" / (commit or "")
    if not commit or not folder.is_dir():
        raise SourceError(
            f"{repo.repo_id} at {revision}: not in the cache {storage.parent}, and nothing is downloaded here "
            "(local_files_only, HF_HUB_OFFLINE, or a check of what there is).",
            path=repo.repo_id,
            looked_for=[str(folder if commit else storage / "refs" / revision)],
        )
    return Snapshot(folder=folder, commit=commit, listing=None)


def locate(repo: Repo, *, small: Sequence[str]) -> Snapshot:
    """Ask the Hub which commit a revision is, once, and what is in it; fetch its small files.

    Args:
        repo: The repository.
        small: Patterns of the small files, relative to the repository.

    Returns:
        The snapshot with the Hub's listing. Where the Hub cannot be reached but the cache has the revision: the cached
        snapshot, without a listing and with a warning.

    Raises:
        SourceError: No such repository or revision, no access, or no connection and nothing cached.
    """
    try:
        probe(repo)
    except SourceError as error:
        if not _is_outage(error.__cause__):
            raise
        return _cached_instead(repo, error)
    with _translated(repo):
        folder = _download(repo, small)
    return Snapshot(folder=folder, commit=folder.name, listing=list_digests(repo, folder.name))


def probe(repo: Repo) -> None:
    """Ask the Hub for a repository, once: the client's other calls retry for half a minute, or fall back in silence.

    Args:
        repo: The repository.

    Raises:
        SourceError: No such repository or revision, no access, or no answer.
    """
    from huggingface_hub import HfApi

    with _translated(repo):
        HfApi(token=repo.token).model_info(repo.repo_id, revision=repo.revision, timeout=_ANSWER_S)


def _cached_instead(repo: Repo, outage: SourceError) -> Snapshot:
    try:
        cached = find_cached(repo)
    except SourceError:
        raise outage from outage.__cause__
    warnings.warn(f"{outage.message} Using commit {cached.commit} of the cache.", stacklevel=2)
    return cached


def fetch(repo: Repo, commit: str, names: Sequence[str]) -> None:
    """Have files of a commit in the cache; those that are there already cost nothing.

    Args:
        repo: The repository.
        commit: The full commit id.
        names: The files, relative to the repository.

    Raises:
        SourceError: The Hub does not give them.
    """
    with _translated(repo, names):
        _download(replace(repo, revision=commit), [glob.escape(name) for name in names])


def list_digests(repo: Repo, commit: str) -> dict[str, Digest]:
    """Ask the Hub for the digest and size of every file of a commit.

    Args:
        repo: The repository.
        commit: The full commit id.

    Returns:
        By name: sha256 for LFS and Xet files, git's blob id for the others.

    Raises:
        SourceError: The Hub does not answer.
    """
    from huggingface_hub import HfApi

    digests: dict[str, Digest] = {}
    with _translated(repo):
        for file in HfApi(token=repo.token).list_repo_tree(repo.repo_id, recursive=True, revision=commit):
            lfs, blob_id = getattr(file, "lfs", None), getattr(file, "blob_id", None)
            if lfs is not None:  # blob_id is then that of the pointer
                digests[file.path] = Digest(algorithm="sha256", hex=lfs.sha256.lower(), size_bytes=lfs.size)
            elif blob_id is not None:  # a folder has none
                size_bytes = getattr(file, "size", None)
                digests[file.path] = Digest(algorithm="git-sha1", hex=blob_id.lower(), size_bytes=size_bytes)
    return digests


def _download(repo: Repo, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo.repo_id,
            revision=repo.revision,
            cache_dir=repo.cache_dir,
            token=repo.token,
            allow_patterns=list(patterns),
        )
    )


def _storage(repo: Repo) -> Path:
    from huggingface_hub import constants

    cache = Path(repo.cache_dir or constants.HF_HUB_CACHE).expanduser()
    return cache / f"models--{repo.repo_id.replace('/', '--')}"


def _read_ref(path: Path) -> str | None:
    try:
        commit = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


@contextmanager
def _translated(repo: Repo, names: Sequence[str] = ()) -> Iterator[None]:
    try:
        yield
    except SafeLoadError:
        raise
    except Exception as error:  # the client raises a dozen kinds of errors of its own and of its HTTP library
        what = f"{repo.repo_id} at {repo.revision or 'main'}" + (f", files {', '.join(names)}" if names else "")
        raise SourceError(
            f"{what}: {_explain(error, repo)} ({type(error).__name__}: {_first_line(error)})",
            path=repo.repo_id,
            looked_for=list(names),
        ) from error


def _explain(error: Exception, repo: Repo) -> str:
    advice: dict[str, str] = {
        "GatedRepoError": f"access has to be asked for at the page of {repo.repo_id}, then log in or pass token=.",
        "RepositoryNotFoundError": "no folder and no repository of that name; if it is private, log in or pass token=.",
        "RevisionNotFoundError": "no such revision.",
        "EntryNotFoundError": "no such file.",
        "HFValidationError": "neither a folder nor a valid repository id.",
        "OfflineModeIsEnabled": "not in the cache, and HF_HUB_OFFLINE is set.",
        "LocalEntryNotFoundError": "the Hub did not give it, and the cache does not have it.",
    }
    for kind in type(error).__mro__:
        if kind.__name__ in advice:
            return advice[kind.__name__]
    status = _status(error)
    if status is not None:
        return f"the Hub answered {status}."
    return "the Hub cannot be reached." if _is_outage(error) else "the download failed."


def _is_outage(error: BaseException | None) -> bool:
    """Say whether it is the connection or the server that failed, rather than the Hub that answered no."""
    status = _status(error)
    if status is not None:
        return status >= 500  # noqa: PLR2004
    return bool(_OUTAGES & {kind.__name__ for kind in type(error).__mro__})


def _status(error: BaseException | None) -> int | None:
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
