"""Names and small JSON files that nobody vouches for -> records. Pure, bounded, no input or output.

Receives raw bytes; gives plain JSON objects and `WeightIndex`. A key given twice, nesting and sizes beyond the caps,
and names that leave the folder are a `CheckpointError` that names the file.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from safeload.errors import CheckpointError

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_JSON_DEPTH",
    "MAX_TENSORS",
    "WeightIndex",
    "describe_junk",
    "fold_name",
    "is_plain_name",
    "is_text",
    "listed",
    "parse_index",
    "parse_json",
]

MAX_TENSORS: Final = 100_000  # safetensors needs about 3 s to open a million, transformers minutes
MAX_JSON_BYTES: Final = 25 * 1000**2
MAX_JSON_DEPTH: Final = 64  # the deepest published config nests below ten; Python's parser gives up near a thousand

_SHOWN: Final = 10
_SHOWN_LENGTH: Final = 200
_DRIVE: Final = re.compile(r"[A-Za-z]:")
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightIndex:
    """An index of shards: `weight_map` from tensor name to shard, and `shards` sorted, each named once."""

    path: str
    shards: tuple[str, ...]
    weight_map: Mapping[str, str]


def fold_name(name: str) -> str:
    """Fold case and Unicode form, to say which name was probably meant; never to decide which file is taken.

    Args:
        name: A file's name.

    Returns:
        The folded name.
    """
    return unicodedata.normalize("NFC", name).casefold()


def listed(names: Iterable[str]) -> str:
    """Write names for a message: all of a few, the first of many, none of them endless.

    Args:
        names: File or tensor names.

    Returns:
        Text.
    """
    all_names = [name if len(name) <= _SHOWN_LENGTH else f"{name[:_SHOWN_LENGTH]}..." for name in names]
    more = f" and {len(all_names) - _SHOWN} more" if len(all_names) > _SHOWN else ""
    return ", ".join(all_names[:_SHOWN]) + more


def is_plain_name(name: object) -> bool:
    """Say whether `name` is a relative path that stays in its folder and is written the one plain way.

    Args:
        name: What an index, a manifest or a config gave as a file name.

    Returns:
        False for absolute paths, `..`, `.`, doubled or trailing slashes, backslashes, drive letters, control
        characters, text that is not valid UTF-8, and anything that is not text.
    """
    if not isinstance(name, str) or not name or not name.isprintable() or "\\" in name or _DRIVE.match(name):
        return False
    return not name.startswith("/") and str(PurePosixPath(name)) == name and ".." not in PurePosixPath(name).parts


def describe_junk(start: bytes) -> str | None:
    """Recognise what is often found in place of weights, by its first bytes.

    Args:
        start: The first 512 bytes or so of the file.

    Returns:
        What the file really is and what to do, or None when it is nothing known.
    """
    head = start[:512].lstrip()
    if head.startswith(b"version https://git-lfs"):
        return 'a Git LFS pointer, not the weights: run "git lfs pull" in the folder it was cloned to'
    if head[:1] == b"<" and (b"<html" in head.lower() or b"<!doctype" in head.lower()):
        return "an HTML page, not the weights: the download got an error or a login page; download it again"
    if start[8:9] != b"{" and start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        return "a pickle (torch.save) under another name: convert it with safetensors.torch.save_file"
    return None


def parse_json(raw: bytes, *, path: str) -> dict[str, Any]:
    """Parse a small JSON file whose outermost value is an object.

    Args:
        raw: The whole file.
        path: The file's name, for messages.

    Returns:
        The object.

    Raises:
        CheckpointError: Not UTF-8, not JSON, not an object, a key given twice, or beyond the caps of size and depth.
    """
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {len(raw)} bytes of JSON; at most {MAX_JSON_BYTES} are read.", path=path)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except RecursionError as error:
        raise CheckpointError(f"{path}: JSON nested too deep.", path=path) from error
    except ValueError as error:
        junk = describe_junk(raw)
        raise CheckpointError(f"{path}: {junk or f'not valid JSON: {error}'}.", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}.", path=path)
    if _deeper_than(value, MAX_JSON_DEPTH):
        raise CheckpointError(f"{path}: JSON nested deeper than {MAX_JSON_DEPTH} levels.", path=path)
    return value


def parse_index(raw: bytes, *, path: str) -> WeightIndex:
    """Parse `*.safetensors.index.json`.

    Args:
        raw: The whole file.
        path: The file's name, for messages.

    Returns:
        The index; every shard name is plain, relative and ends in a known suffix.

    Raises:
        CheckpointError: Not such an index, or a shard name that leaves the folder.
    """
    value = parse_json(raw, path=path)
    weight_map = value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: "weight_map" is not a non-empty object of tensor name to file.', path=path)
    if not isinstance(value.get("metadata"), dict):
        raise CheckpointError(
            f'{path}: "metadata" is not an object; transformers cannot load such an index.', path=path
        )
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(weight_map)} tensors; at most {MAX_TENSORS} are taken.", path=path)
    bad = sorted({repr(shard) for shard in weight_map.values() if not _is_shard_name(shard)})
    if bad:
        raise CheckpointError(
            f"{path}: weight_map names {listed(bad)}; a shard is a .safetensors file in the same folder, "
            "by its plain relative name.",
            path=path,
        )
    unreadable = sorted(name.encode("unicode_escape").decode() for name in weight_map if not is_text(name))
    if unreadable:
        raise CheckpointError(f"{path}: tensor names that are not valid text: {unreadable[:5]}.", path=path)
    return WeightIndex(
        path=path, shards=tuple(sorted(set(weight_map.values()))), weight_map=MappingProxyType(dict(weight_map))
    )


def _is_shard_name(name: object) -> bool:
    return is_plain_name(name) and str(name).endswith(_WEIGHT_SUFFIXES)


def is_text(name: str) -> bool:
    """Say whether `name` can be written as UTF-8; JSON can carry halves of surrogate pairs that cannot.

    Args:
        name: Text out of a JSON file.

    Returns:
        Whether it is proper text.
    """
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is given twice")
    return unique


def _deeper_than(value: object, depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(depth + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True
