"""Pickle files only by name, and even then nothing but tensors is unpickled, on the source rank alone."""

import os
import pickle
from pathlib import Path

import pytest

from tests.files import clip_single, clip_tensors, write
from tests.ranks import on_ranks
from tests.test_adversary import values_of

LIMIT_S = 60


def make_pickled(folder, *, sharded=False):
    """The same small tower as pickle, and no safetensors."""
    import json

    import torch

    names = list(clip_tensors())
    tensors = {
        name: torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(shape)
        for name, (shape, raw) in clip_tensors().items()
    }
    write(folder, {"config.json": clip_single()["config.json"]})
    parts = {f"pytorch_model-{n}.bin": names[n::2] for n in range(2)} if sharded else {"pytorch_model.bin": names}
    for name, part in parts.items():
        torch.save({tensor: tensors[tensor] for tensor in part}, folder / name)
    if sharded:
        weight_map = {tensor: name for name, part in parts.items() for tensor in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.filterwarnings("ignore:.*no expected digest")
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2, timeout_s=LIMIT_S)
def test_allowed_by_name_on_the_source_alone(sharded, tmp_path):
    import warnings

    import torch
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained
    from safeload.errors import UnsafeFormatError

    warnings.filterwarnings("ignore", message=".*no expected digest")
    folder = Path(tmp_path) / "tower"
    if dist.get_rank() == 0:
        make_pickled(folder, sharded=sharded)
    dist.barrier()
    with pytest.raises(UnsafeFormatError, match="allow_pickle=True"):
        safe_from_pretrained(CLIPVisionModel, folder)
    loads = []
    original = torch.load
    torch.load = lambda *args, **kwargs: loads.append(kwargs) or original(*args, **kwargs)
    try:
        tower = safe_from_pretrained(CLIPVisionModel, folder, allow_pickle=True)
    finally:
        torch.load = original
    assert values_of(tower) == {name: raw for name, (_, raw) in clip_tensors().items()}
    assert bool(loads) == (dist.get_rank() == 0)
    assert all(kwargs["weights_only"] for kwargs in loads)


@pytest.mark.parametrize("kind", ["class", "factory"])
@on_ranks(2, timeout_s=LIMIT_S)
def test_code_in_a_pickle_does_not_run(kind, tmp_path):
    import warnings

    import torch
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained
    from safeload.errors import CheckpointError

    warnings.filterwarnings("ignore", message=".*no expected digest")
    folder, trace = Path(tmp_path) / "tower", Path(tmp_path) / "trace"
    if dist.get_rank() == 0:
        make_pickled(folder)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb(str(trace))}, protocol=2))
    dist.barrier()
    with pytest.raises(CheckpointError):
        if kind == "class":
            safe_from_pretrained(CLIPVisionModel, folder, allow_pickle=True)
        else:
            safe_from_pretrained(lambda: torch.nn.Linear(2, 2), folder / "pytorch_model.bin", allow_pickle=True)
    assert not trace.exists()


@on_ranks(2, timeout_s=LIMIT_S)
def test_factory_from_a_pickle_file(tmp_path):
    import warnings

    import torch
    import torch.distributed as dist

    from safeload import safe_from_pretrained
    from safeload.errors import UnsafeFormatError

    warnings.filterwarnings("ignore", message=".*no expected digest")
    path = Path(tmp_path) / "tower.pt"
    if dist.get_rank() == 0:
        torch.save({"weight": torch.arange(4.0).reshape(2, 2), "bias": torch.ones(2)}, path)
    dist.barrier()

    def factory():
        return torch.nn.Linear(2, 2)

    with pytest.raises(UnsafeFormatError, match="weights_only=True"):
        safe_from_pretrained(factory, path)
    tower = safe_from_pretrained(factory, path, allow_pickle=True)
    assert torch.equal(tower.weight, torch.arange(4.0).reshape(2, 2))
