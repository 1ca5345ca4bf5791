"""The lock: `SHA256SUMS` in the format of coreutils, with `# repo:` and `# revision:` comments. Pure, bounded.

Receives the bytes of a lock and gives a `Lock`, or the other way. Only what `sha256sum --strict -c` also accepts is
accepted, and less: plain relative names, each once. Upper-case digests and CRLF line ends are fine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from safeload.digests import Digest
from safeload.errors import CheckpointError
from safeload.indexes import MAX_JSON_BYTES, MAX_TENSORS, is_plain_name

__all__ = ["LOCK_NAME", "Lock", "format_lock", "parse_lock"]

LOCK_NAME: Final = "SHA256SUMS"

_LINE: Final = re.compile(r"([0-9A-Fa-f]{64}) [ *](.+)")
_COMMENT: Final = re.compile(r"#\s*(repo|revision):\s*(\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A parsed lock: digests by name, and the repository and commit it was made from, when it says so."""

    path: str
    entries: Mapping[str, Digest]
    repo_id: str | None = None
    commit: str | None = None


def parse_lock(raw: bytes, *, path: str) -> Lock:
    """Parse a lock.

    Args:
        raw: The whole file.
        path: The file's name, for messages.

    Returns:
        The lock.

    Raises:
        CheckpointError: A line that is not one, a name that is not plain or comes twice, or nothing in it.
    """
    if len(raw) > MAX_JSON_BYTES or raw.count(b"\n") > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(raw)} bytes are too many for a lock.", path=path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}.", path=path) from error
    entries: dict[str, Digest] = {}
    comments: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        line = line.removesuffix("\r")  # noqa: PLW2901  a lock that went through Windows
        if line.startswith("#"):
            if comment := _COMMENT.fullmatch(line):
                comments[comment[1]] = comment[2]
            continue
        name, digest = _parse_line(line, where=f"{path} line {number}", path=path)
        if name in entries:
            raise CheckpointError(f"{path} line {number}: {name!r} is named twice.", path=path)
        entries[name] = digest
    if not entries:
        raise CheckpointError(f"{path}: names no file.", path=path)
    return Lock(
        path=path,
        entries=MappingProxyType(entries),
        repo_id=comments.get("repo"),
        commit=comments.get("revision"),
    )


def _parse_line(line: str, *, where: str, path: str) -> tuple[str, Digest]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise CheckpointError(
            f"{where}: expected 64 hexadecimal digits of sha256, two spaces and a name; got {line[:100]!r}.", path=path
        )
    digest, name = match.groups()
    if not is_plain_name(name):
        raise CheckpointError(f"{where}: {name!r} is not a plain relative name.", path=path)
    return name, Digest(algorithm="sha256", hex=digest.lower())


def format_lock(lock: Lock, *, verified: str = "none") -> str:
    """Write a lock as text that `sha256sum --strict -c` accepts.

    Args:
        lock: All its digests are sha256, its names plain.
        verified: Who vouched for the files when they were locked, for people who read it.

    Returns:
        The text, comments first, names sorted.
    """
    facts = {"repo": lock.repo_id, "revision": lock.commit, "verified against": verified}
    comments = [f"# {key}: {value}\n" for key, value in facts.items() if value]
    return "".join(comments + [f"{digest.hex}  {name}\n" for name, digest in sorted(lock.entries.items())])
