"""nn.DataParallel, which the HF Trainer takes for several devices in one process, copies a model for each forward."""

from __future__ import annotations

import torch
from torch import nn

from safeload import safe_from_pretrained
from safeload.checking import check_towers
from tests.towers import assert_equal_towers, clip_folder


class Outer(nn.Module):
    def __init__(self, folder):
        super().__init__()
        from transformers import CLIPVisionModel

        self.tower = safe_from_pretrained(CLIPVisionModel, folder, verify="off")
        self.head = nn.Linear(64, 2)

    def forward(self, pixels):
        return self.head(self.tower(pixels).last_hidden_state.mean(1))


def replicate(network: nn.Module) -> nn.Module:
    """Copy a model as torch.nn.parallel.replicate does, which itself needs an accelerator."""
    modules = list(network.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, copy in copies.items():
        for key, child in module._modules.items():
            setattr(copy, key, copies[child])
        for key, parameter in module._parameters.items():
            setattr(copy, key, None if parameter is None else parameter.clone())
        for key, buffer in module._buffers.items():
            setattr(copy, key, None if buffer is None else buffer.clone())
    return copies[network]


def test_a_replica_computes_the_same_and_the_tower_stays(tmp_path):
    from transformers import CLIPVisionModel

    model = Outer(clip_folder(tmp_path))
    replica = replicate(model)
    pixels = torch.rand(2, 3, 32, 32)
    out = replica(pixels)
    assert torch.equal(out, model(pixels))
    out.sum().backward()
    assert model.head.weight.grad is not None
    check_towers(model)
    assert_equal_towers(model.tower, CLIPVisionModel.from_pretrained(tmp_path))
