"""What a checkpoint says of itself, without loading it.

Receives a folder, a file or the id of a repository; gives `ModelFacts` from the headers of its safetensors files and
its config.json. Reads no weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from huggingface_hub import get_safetensors_metadata, hf_hub_download

from safeload.errors import SourceError
from safeload.headers import parse_header, parse_header_size
from safeload.hubs import is_repo_id

__all__ = ["ModelFacts", "read_model"]

_FLOATING: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checkpoint says of itself: elements by floating dtype, and which towers its config has."""

    name: str
    dtypes: Mapping[str, int]
    towers: tuple[str, ...] = ()


def read_model(path_or_repo: str) -> ModelFacts:
    """Read what a checkpoint says of itself, from the headers of its files alone.

    Args:
        path_or_repo: A folder, a .safetensors file, or the id of a repository on the Hub.

    Returns:
        Its dtypes and towers.

    Raises:
        SourceError: Not found, not reachable, or nothing in it says what dtype it has.
        CheckpointError: A malformed file.
    """
    path = Path(path_or_repo)
    if path.exists():
        return _read_local(path)
    if not is_repo_id(path_or_repo):
        raise SourceError(f"{path_or_repo}: no such folder or file", path=path_or_repo)
    try:
        counts = get_safetensors_metadata(path_or_repo).parameter_count
        config = json.loads(Path(hf_hub_download(path_or_repo, "config.json")).read_text())
    except Exception as error:  # a library's many ways to say no
        raise SourceError(
            f"{path_or_repo!r} is no file or folder here, and the Hub did not answer for it: {error}", path=path_or_repo
        ) from error
    return _facts(path_or_repo, {str(dtype): count for dtype, count in counts.items()}, config)


def _read_local(path: Path) -> ModelFacts:
    counts: dict[str, int] = {}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            start, size = stream.read(512), file.stat().st_size
            length = parse_header_size(start, path=str(file), size_bytes=size)
            stream.seek(8)
            header = parse_header(stream.read(length), path=str(file), size_bytes=size)
        for entry in header.tensors:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    config = path / "config.json"
    said = json.loads(config.read_text()) if config.is_file() else {}
    facts = _facts(str(path), counts, said)
    if not facts.dtypes:
        raise SourceError(f"{path} has no safetensors file and no config.json with a dtype.", path=str(path))
    return facts


def _facts(name: str, counts: Mapping[str, int], config: Mapping[str, Any]) -> ModelFacts:
    dtypes = {_FLOATING[dtype]: count for dtype, count in counts.items() if dtype in _FLOATING}
    said = config.get("dtype") or config.get("torch_dtype")
    if not dtypes and said:
        dtypes = {str(said): 0}
    kinds = [key.removesuffix("_config") for key, value in config.items() if key.endswith("_config") and value]
    towers = tuple(f"{kind}_tower" for kind in kinds if kind in ("vision", "audio"))
    return ModelFacts(name=name, dtypes=dtypes, towers=towers)
