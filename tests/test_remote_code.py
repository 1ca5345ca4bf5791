"""Code from the checkpoint runs only when asked for by name, on the source first, and then on every rank."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.ranks import on_ranks

CONFIG = """
from transformers import PretrainedConfig

class OddConfig(PretrainedConfig):
    model_type = "odd-tower"

    def __init__(self, width=3, **kwargs):
        self.width = width
        super().__init__(**kwargs)
"""
MODEL = """
import os
import torch
from transformers import PreTrainedModel
from .configuration_odd import OddConfig
from .scaling_odd import SCALE

with open(os.environ["ODD_LOG"], "a") as log:
    log.write(os.environ["RANK"])

class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = torch.nn.Linear(config.width, config.width)
        self.scale = SCALE
        self.post_init()

    def forward(self, x):
        return self.inner(x) * self.scale
"""


def write(folder):
    folder.mkdir(exist_ok=True)
    auto = {"AutoConfig": "configuration_odd.OddConfig", "AutoModel": "modeling_odd.OddModel"}
    config = {"model_type": "odd-tower", "architectures": ["OddModel"], "auto_map": auto, "width": 5}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_odd.py").write_text(CONFIG)
    (folder / "modeling_odd.py").write_text(MODEL)
    (folder / "scaling_odd.py").write_text("SCALE = 2.0\n")
    tensors = {"inner.weight": torch.randn(5, 5), "inner.bias": torch.randn(5)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@on_ranks(2)
def test_remote_code(tmp_path):
    import os

    from transformers import AutoModel

    from safeload import SafeLoadError, safe_from_pretrained

    os.environ["ODD_LOG"] = str(tmp_path / "log")
    os.environ["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    (tmp_path / "log").touch()
    if dist.get_rank() == 0:
        write(tmp_path / "odd")
    dist.barrier()
    with pytest.raises(SafeLoadError) as caught:
        safe_from_pretrained(AutoModel, tmp_path / "odd", verify="off")
    assert "trust_remote_code" in str(caught.value)
    assert (tmp_path / "log").read_text() == ""
    dist.barrier()
    tower = safe_from_pretrained(AutoModel, tmp_path / "odd", verify="off", trust_remote_code=True)
    assert type(tower).__name__ == "OddModel"
    assert "safeload" in type(tower).__module__, "each rank takes the code from its own verified copy"
    assert tower.scale == 2.0
    assert tower.config.width == 5
    total = tower.inner.weight.sum().clone()
    dist.all_reduce(total)
    assert torch.equal(total, 2 * tower.inner.weight.sum())
    dist.barrier()
    assert (tmp_path / "log").read_text() == "01", "the source imports first, the other ranks after it"


@pytest.mark.filterwarnings("ignore::safeload.UnverifiedWarning")
@pytest.mark.parametrize("name", ["modeling_odd.py", "scaling_odd.py", "config.json"])
def test_code_that_is_not_what_was_locked_never_runs(tmp_path, monkeypatch, name):
    from transformers import AutoModel

    from safeload import IntegrityError, safe_from_pretrained, write_lock

    monkeypatch.setenv("ODD_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "log").touch()
    write(tmp_path / "odd")
    write_lock(tmp_path / "odd", trust_remote_code=True)
    file = tmp_path / "odd" / name
    file.write_text(file.read_text() + "\n")
    with pytest.raises(IntegrityError, match=name):
        safe_from_pretrained(AutoModel, tmp_path / "odd", trust_remote_code=True)
    assert (tmp_path / "log").read_text() == ""
