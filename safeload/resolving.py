"""Repo id, folder or file -> the files that a load needs, by name.

Receives what the caller wrote in place of `pretrained_model_name_or_path`; gives a `Checkpoint`: where the files are,
what they are called, and which of them are weights. Weight files are not opened here, only named, so nothing said here
can be outdated by the time `sealing` opens them. Which shards are loaded is read later, from the sealed index.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from safeload.choosing import (
    ANY_NAME,
    CONFIG_NAMES,
    HOW_TO_CONVERT,
    INDEX_PATTERNS,
    PICKLE_SUFFIXES,
    Choice,
    Wanted,
    choose_files,
)
from safeload.digests import Digest
from safeload.errors import CheckpointError, SourceError, UnsafeFormatError
from safeload.hubs import Repo, Snapshot, fetch, find_cached, is_commit, is_offline, is_repo_id, locate
from safeload.indexes import MAX_JSON_BYTES, is_plain_name, parse_index
from safeload.reading import open_regular

__all__ = ["Checkpoint", "require_known_weights", "resolve", "resolve_folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a load needs, by name; no weight file has been opened yet.

    `folder` holds the files; `small` are the JSON (and, where allowed, Python) files; exactly one of `weights` and
    `index` is set. `load_as` are the names under which transformers and diffusers look for `weights` or `index`.
    Names are relative to `folder`, which is already the `subfolder`. `origin` is what the caller wrote. `repo` and
    `commit` are set for a repository of the Hub, `listing` to what the Hub says of the files when it was just asked.
    """

    origin: str
    folder: Path
    small: tuple[str, ...]
    weights: str | None
    index: str | None
    load_as: tuple[str, ...]
    subfolder: str = ""
    variant: str | None = None
    repo: Repo | None = None
    commit: str | None = None
    listing: Mapping[str, Digest] | None = None
    pickled: bool = False

    @property
    def repo_id(self) -> str | None:
        """The id of the repository, for a repository of the Hub."""
        return self.repo.repo_id if self.repo else None

    @property
    def names(self) -> tuple[str, ...]:
        """All the names known before the index is read."""
        return (*self.small, *(name for name in (self.weights, self.index) if name))


def resolve(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Find the files that a load of this checkpoint needs.

    Args:
        pretrained_model_name_or_path: A folder, one .safetensors file, or the id of a repository.
        revision: Branch, tag or commit of a repository.
        subfolder: Plain relative folder below it.
        variant: As in from_pretrained: "fp16" takes `model.fp16.safetensors`.
        cache_dir: The Hub cache; None is the usual one.
        token: For private and gated repositories.
        local_files_only: Make no request.
        allow_pickle: Take `.bin` files where there is nothing safer.
        trust_remote_code: Take the repository's Python files too.

    Returns:
        The checkpoint, by name.

    Raises:
        SourceError: Not found or ambiguous; says what was looked for and where.
        UnsafeFormatError: Only pickle files are there.

    Ranks:
        Source rank only; no other rank looks at the checkpoint.
    """
    origin = os.fspath(pretrained_model_name_or_path)
    if subfolder and not is_plain_name(subfolder):
        raise SourceError(f"subfolder={subfolder!r} is not a plain relative path.", path=origin)
    wanted = Wanted(
        subfolder=subfolder, variant=variant, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code
    )
    local = Path(origin).expanduser()
    mode = _mode_of(local)
    if mode is not None and stat.S_ISDIR(mode):
        return resolve_folder(local / subfolder, wanted, origin=origin)
    if mode is not None:
        return _resolve_file(local, origin=origin, allow_pickle=allow_pickle)
    if not is_repo_id(origin):
        raise SourceError(f"{origin}: no such folder or file.", path=origin, looked_for=[str(local.absolute())])
    repo = Repo(
        repo_id=origin,
        revision=revision,
        cache_dir=Path(cache_dir) if cache_dir is not None else None,
        token=token,
        local_files_only=local_files_only,
    )
    return _resolve_repo(repo, wanted)


def _resolve_repo(repo: Repo, wanted: Wanted) -> Checkpoint:
    """Take one commit of a repository: from the cache alone if it may not or need not be asked for."""
    if is_offline(repo):
        snapshot = find_cached(repo)
        return _in_snapshot(repo, snapshot, wanted)
    if is_commit(repo.revision):
        try:
            cached = _in_snapshot(repo, find_cached(repo), wanted)
        except SourceError:
            pass  # not in the cache, or not all of it
        else:
            if "config.json" in cached.small and not _missing_shards(cached):
                return cached
    prefix = f"{wanted.subfolder}/" if wanted.subfolder else ""
    patterns = [f"{glob.escape(prefix)}{name}" for name in (*CONFIG_NAMES, *INDEX_PATTERNS)]
    snapshot = locate(repo, small=patterns + ([f"{glob.escape(prefix)}*.py"] if wanted.trust_remote_code else []))
    if snapshot.listing is None:
        return _in_snapshot(repo, snapshot, wanted)
    listing = {name[len(prefix) :]: digest for name, digest in snapshot.listing.items() if name.startswith(prefix)}
    choice = choose_files([name for name in listing if "/" not in name], wanted, where=f"{repo.repo_id}/{prefix}")
    folder = snapshot.folder / wanted.subfolder
    checkpoint = _checkpoint(choice, wanted, origin=repo.repo_id, folder=folder)
    checkpoint = replace(checkpoint, repo=repo, commit=snapshot.commit, listing=MappingProxyType(listing))
    fetch(repo, snapshot.commit, [f"{prefix}{name}" for name in _needed(checkpoint)])
    return checkpoint


def _in_snapshot(repo: Repo, snapshot: Snapshot, wanted: Wanted) -> Checkpoint:
    checkpoint = resolve_folder(snapshot.folder / wanted.subfolder, wanted, origin=repo.repo_id)
    return replace(checkpoint, repo=repo, commit=snapshot.commit)


def _missing_shards(checkpoint: Checkpoint) -> list[str]:
    return [name for name in _needed(checkpoint) if not (checkpoint.folder / name).exists()]


def _needed(checkpoint: Checkpoint) -> tuple[str, ...]:
    """All files to have on disk. The index is only peeked at; its sealed bytes decide which shards are loaded."""
    if checkpoint.index is None:
        return checkpoint.names
    file = open_regular(checkpoint.folder / checkpoint.index, name=checkpoint.index)
    with open(file.fd, "rb") as stream:
        index = parse_index(stream.read(MAX_JSON_BYTES + 1), path=str(file.path))
    return (*checkpoint.names, *index.shards)


def resolve_folder(folder: Path, wanted: Wanted, *, origin: str) -> Checkpoint:
    """Choose the files of a local folder.

    Args:
        folder: The folder that holds the files.
        wanted: How to choose.
        origin: What the caller wrote.

    Returns:
        The checkpoint, by name.

    Raises:
        SourceError: No weights there, or more than one candidate.
        UnsafeFormatError: Only pickle files are there.

    Ranks:
        Source rank only.
    """
    choice = choose_files(_list_names(folder, origin), wanted, where=str(folder))
    return _checkpoint(choice, wanted, origin=origin, folder=folder)


def _checkpoint(choice: Choice, wanted: Wanted, *, origin: str, folder: Path) -> Checkpoint:
    return Checkpoint(
        origin=origin,
        folder=folder,
        small=choice.small,
        weights=choice.weights,
        index=choice.index,
        load_as=choice.load_as,
        pickled=choice.pickled,
        subfolder=wanted.subfolder,
        variant=wanted.variant,
    )


def _resolve_file(path: Path, *, origin: str, allow_pickle: bool) -> Checkpoint:
    pickled = path.name.endswith(PICKLE_SUFFIXES)
    if pickled and not allow_pickle:
        raise UnsafeFormatError(
            f"{origin}: a pickle file, which can run code when loaded. {HOW_TO_CONVERT}", path=origin
        )
    if not pickled and path.suffix != ".safetensors":
        raise SourceError(f"{origin}: neither a folder nor a .safetensors file.", path=origin)
    return Checkpoint(
        origin=origin,
        folder=path.parent,
        small=(),
        weights=path.name,
        index=None,
        load_as=("pytorch_model.bin",) if pickled else ANY_NAME,
        pickled=pickled,
    )


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ELOOP, EACCES, ENAMETOOLONG, a NUL in the name
        raise SourceError(f"{path}: cannot be looked at: {error}.", path=str(path)) from error


def _list_names(folder: Path, origin: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        raise SourceError(f"{origin}: cannot list {folder}: {error.strerror}.", path=str(folder)) from error


def require_known_weights(config: object, checkpoint: Checkpoint) -> None:
    """Refuse a config that sends transformers to weights other than the ones that were chosen.

    Args:
        config: The parsed `config.json`.
        checkpoint: What was chosen.

    Raises:
        CheckpointError: `transformers_weights` names another file.
    """
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named is not None and named not in (checkpoint.weights, checkpoint.index):
        chosen = checkpoint.weights or checkpoint.index
        raise CheckpointError(
            f"config.json: transformers_weights names {named!r}, which is not the file that was chosen ({chosen}): "
            "rename the file to model.safetensors and drop the key.",
            path="config.json",
        )
