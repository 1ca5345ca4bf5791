"""Make towers to measure with: CLIP vision towers of several sizes with seeded random weights, float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safeload.errors import SafeLoadError

__all__ = ["SIZES", "make_sharded_tower", "make_tower"]

SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "0.01B": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4},
    "0.3B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1B": {"hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16},
    "6B": {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48, "num_attention_heads": 25},
}
_SHARD: Final = "1500MB"
_MOST_SHARDS: Final = 4


def make_tower(folder: Path, size: str) -> Path:
    """Write a tower; leave one that is there.

    Args:
        folder: Where; it is made below it, by the name of the size.
        size: One of `SIZES`.

    Returns:
        The tower's folder.

    Raises:
        SafeLoadError: There is no such size.
    """
    return _write(folder / f"clip-vision-{size}", _sizes_of(size), _SHARD)


def make_sharded_tower(folder: Path, size: str, shards: int) -> Path:
    """Write a tower of so many shards of about the same size; leave one that is there.

    Args:
        folder: Where; it is made below it, by its size and number of shards.
        size: One of `SIZES`; a tower of four shards has about as many layers. 1B gives shards of 1.07 GB.
        shards: From 1 to 4.

    Returns:
        The tower's folder.

    Raises:
        SafeLoadError: There is no such size, or no such number of shards.
    """
    if not 1 <= shards <= _MOST_SHARDS:
        raise SafeLoadError(f"{shards} shards: expected 1 to {_MOST_SHARDS}")
    sizes = _sizes_of(size)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layers = sizes["num_hidden_layers"] // _MOST_SHARDS + 1
    layer_bytes = 4 * (4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner)
    # A shard may end early by as much as the largest tensor, and the first holds what is in no layer as well.
    room_bytes = layers * layer_bytes + 4 * hidden * (inner + 1024)
    sizes = {**sizes, "num_hidden_layers": layers * shards}
    target = _write(folder / f"clip-vision-{size}-in-{shards}", sizes, room_bytes)
    found = len(list(target.glob("*.safetensors")))
    if found != shards:
        raise SafeLoadError(f"{target}: {found} shards were written, expected {shards}")
    return target


def _sizes_of(size: str) -> Mapping[str, int]:
    if size not in SIZES:
        raise SafeLoadError(f"size {size!r}: expected one of {', '.join(SIZES)}")
    return SIZES[size]


def _write(target: Path, sizes: Mapping[str, int], shard: str | int) -> Path:
    import torch
    from torch import nn
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from safeload.peers import hash_files

    if (target / "SHA256SUMS").exists():
        return target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = CLIPVisionModel(CLIPVisionConfig(patch_size=14, image_size=224, **sizes))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(target, max_shard_size=shard)
    files = sorted(target.iterdir())
    sums = hash_files([str(path) for path in files])
    lines = [f"{sha256}  {path.name}\n" for sha256, path in zip(sums, files, strict=True)]
    (target / "SHA256SUMS").write_text("".join(lines), encoding="ascii")
    return target
