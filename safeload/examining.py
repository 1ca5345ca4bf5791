"""Look into the sealed files before any library loads them: headers, index, and whether the two agree.

Receives a `SealedCheckpoint`; gives `Contents`, the tensors there are and where. What another reader would pass over in
silence is a `CheckpointError`: a tensor that the index does not name, or names in another shard, or that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from safeload.errors import CheckpointError
from safeload.headers import Header, TensorEntry
from safeload.indexes import MAX_TENSORS, WeightIndex, listed
from safeload.sealing import SealedCheckpoint, SealedFile

__all__ = ["Contents", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the weight files hold, by their headers; empty for pickle files, which have none."""

    headers: tuple[Header, ...]

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """All tensors, sorted by name."""
        return tuple(sorted((t for header in self.headers for t in header.tensors), key=lambda t: t.name))


def examine(sealed: SealedCheckpoint) -> Contents:
    """Check the headers of all weight files, and hold them to the index.

    Args:
        sealed: The sealed files.

    Returns:
        What they hold.

    Raises:
        CheckpointError: A malformed file, or files and index that disagree; all disagreements are listed.

    Ranks:
        Source rank only.
    """
    if sealed.checkpoint.pickled:
        return Contents(headers=())
    contents = Contents(headers=tuple(_header_of(file) for file in sealed.weight_files))
    count = sum(len(header.tensors) for header in contents.headers)
    if count > MAX_TENSORS:
        raise CheckpointError(
            f"{sealed.checkpoint.folder}: {count} tensors; at most {MAX_TENSORS} are taken.",
            path=str(sealed.checkpoint.folder),
        )
    if sealed.index is not None:
        _check_index(contents, sealed.index, path=str(sealed.checkpoint.folder / sealed.index.path))
    return contents


def _header_of(file: SealedFile) -> Header:
    if isinstance(file.header, Header):
        return file.header
    raise file.header or CheckpointError(f"{file.name}: not a safetensors file.", path=file.name)


def _check_index(contents: Contents, index: WeightIndex, *, path: str) -> None:
    weight_map = index.weight_map
    found: dict[str, str] = {}
    twice: list[str] = []
    for shard, header in zip(index.shards, contents.headers, strict=True):
        for tensor in header.tensors:
            twice += [tensor.name] if tensor.name in found else []
            found[tensor.name] = shard
    missing = sorted(set(weight_map) - set(found))
    unexpected = sorted(set(found) - set(weight_map))
    misplaced = sorted(name for name, shard in weight_map.items() if name in found and found[name] != shard)
    if twice or missing or unexpected or misplaced:
        problems = {
            "in the index but in no shard": missing,
            "in a shard but not in the index": unexpected,
            "in another shard than the index says": misplaced,
            "in two shards": sorted(twice),
        }
        text = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
        raise CheckpointError(
            f"{path}: the index and the shards disagree: {text}. Download all of them again, at one commit.",
            path=path,
            missing=missing,
            unexpected=unexpected,
            mismatched=sorted({*misplaced, *twice}),
        )
