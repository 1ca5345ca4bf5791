"""Expected digests that the Hub's client left on disk when it downloaded: good against corruption, offline.

Whoever can write the files can write these too, so they protect against disks, networks and accidents, not people.
Receives a folder; gives digests by name relative to it, and where they were found; None when there are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safeload.digests import Digest, digest_of_etag
from safeload.errors import CheckpointError
from safeload.hubs import is_commit
from safeload.indexes import MAX_JSON_BYTES, is_plain_name, parse_json

__all__ = ["Kept", "read_cache", "read_local_dir", "storage_of"]

_TREE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Digests found on disk, `source` saying where; `commit` is the one they belong to, when all agree on it."""

    source: str
    commit: str | None
    digests: Mapping[str, Digest]


def storage_of(folder: Path) -> tuple[Path, str, str] | None:
    """Recognise a folder inside a Hub cache: `<storage>/snapshots/<commit>[/subfolder]`.

    Args:
        folder: Any folder, as the caller wrote it; links are not followed.

    Returns:
        The storage folder, the commit, and the path below the snapshot; None when it is something else.
    """
    parts = Path(os.path.abspath(folder)).parts
    for place in range(1, len(parts) - 1):
        if parts[place] == "snapshots" and is_commit(parts[place + 1]) and parts[place - 1].startswith("models--"):
            below = PurePosixPath(*parts[place + 2 :])
            return Path(*parts[:place]), parts[place + 1], "" if below == PurePosixPath() else str(below)
    return None


def read_cache(folder: Path) -> Kept | None:
    """Read what the Hub cache keeps about one of its snapshots.

    Args:
        folder: A snapshot folder or one below it.

    Returns:
        The digests of `trees/<commit>.json`, else those that the snapshot's links carry in the name of their target.
    """
    place = storage_of(folder)
    if place is None:
        return None
    storage, commit, below = place
    tree = storage / "trees" / f"{commit}.json"
    digests = _read_tree(tree)
    if digests:
        return Kept(source=str(tree), commit=commit, digests=_below(digests, below))
    links = dict(_read_links(storage / "snapshots" / commit))
    source = f"the names of the blobs in {storage}"
    return Kept(source=source, commit=commit, digests=_below(links, below)) if links else None


def read_local_dir(folder: Path, *, below: str = "") -> Kept | None:
    """Read what `hf download --local-dir` keeps beside the files.

    Args:
        folder: The folder that was downloaded to.
        below: A plain relative subfolder of it; the names given are relative to that.

    Returns:
        The digests in `.cache/huggingface`, or None.
    """
    base = folder / ".cache" / "huggingface"
    digests: dict[str, Digest] = {}
    commits: set[str] = set()
    for path in sorted((base / "download").rglob("*.metadata")):
        name = path.relative_to(base / "download").as_posix().removesuffix(".metadata")
        lines = _read_bounded(path).decode("utf-8", "replace").split("\n")
        digest = digest_of_etag(lines[1].strip()) if len(lines) > 1 else None
        if digest is not None:
            digests[name] = digest
            commits.add(lines[0].strip())
    commit = commits.pop() if len(commits) == 1 else None
    if not digests:
        return None
    if commit and is_commit(commit):  # the tree adds sizes, so that a short file is refused before it is read
        tree = _read_tree(base / "trees" / f"{commit}.json")
        digests |= {
            name: digest for name, digest in tree.items() if name in digests and digest.hex == digests[name].hex
        }
    return Kept(source=str(base / "download"), commit=commit, digests=_below(digests, below))


def _read_tree(path: Path) -> dict[str, Digest]:
    """Read `trees/<commit>.json`; empty when there is none or it is not of the version known here."""
    try:
        tree = parse_json(_read_bounded(path), path=str(path))
    except CheckpointError:
        return {}
    files = tree.get("files")
    if tree.get("format_version") != _TREE_VERSION or not isinstance(files, dict):
        return {}
    entries = {name: _tree_digest(entry) for name, entry in files.items() if is_plain_name(name)}
    return {name: digest for name, digest in entries.items() if digest is not None}


def _tree_digest(entry: Any) -> Digest | None:
    if not isinstance(entry, dict):
        return None
    is_lfs = bool(entry.get("lfs_sha256"))
    digest = digest_of_etag(str(entry.get("lfs_sha256" if is_lfs else "blob_id")))
    size = entry.get("lfs_size" if is_lfs else "size")
    if digest is None or (digest.algorithm == "sha256") != is_lfs or type(size) is not int or size < 0:
        return None
    return Digest(algorithm=digest.algorithm, hex=digest.hex, size_bytes=size)


def _read_links(snapshot: Path) -> Iterator[tuple[str, Digest]]:
    for parent, folders, files in os.walk(snapshot):
        folders.sort()
        for name in files:
            path = Path(parent, name)
            try:
                # One hop: in a shared store the blob is itself a link, to a name that is not the content's digest.
                target = os.readlink(path)
            except OSError:
                continue
            digest = digest_of_etag(os.path.basename(target))
            if digest is not None:
                yield path.relative_to(snapshot).as_posix(), digest


def _below(digests: Mapping[str, Digest], folder: str) -> dict[str, Digest]:
    prefix = f"{folder}/" if folder else ""
    return {name[len(prefix) :]: digest for name, digest in digests.items() if name.startswith(prefix)}


def _read_bounded(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(fd, "rb") as file:
            return file.read(MAX_JSON_BYTES + 1)
    except OSError:
        return b""
