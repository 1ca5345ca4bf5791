"""Accelerate's `prepare` around towers, on two ranks: DDP, FSDP1 and FSDP2, trained, clipped, saved and loaded."""

from __future__ import annotations

import os

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from tests.protect_towers import Pair, assert_whole, pixels, protected, tensors_of
from tests.ranks import on_ranks

HAS_FSDP2 = Version(accelerate.__version__) >= Version("1.6")
WIDTHS = {"clip": 32, "seed": 8}


class Layered(Pair):
    """A pair whose wrap policy names layers that the tower has too."""

    _no_split_modules = ("Linear",)
    _tied_weights_keys = None


def enter_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """On CPU, Accelerate never enters its FSDP branch by itself."""
    accelerator.state.device = torch.device("cpu")
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP


def run(accelerator: Accelerator, kind: str, folder: str, *, plugin=None, together: bool = True) -> nn.Module:
    if plugin is not None:
        enter_fsdp(accelerator, plugin)
    tower = protected(kind)
    want = tensors_of(tower)
    places = {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()}
    torch.manual_seed(1)
    model = Layered(tower, WIDTHS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if together:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:  # FSDP1 gives the model new parameters
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))

    if plugin is not None and together:
        enter_fsdp(accelerator, plugin)  # on CPU, preparing resets the type; FSDP1 can't offload its state dict there

    def check() -> None:
        assert_whole(tower, want)
        assert {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()} == places

    check()
    model.train()
    losses = []
    for _ in range(3):
        loss = model(pixels(accelerator.process_index)).float().square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    check()
    assert losses[0] != losses[-1]
    state = accelerator.get_state_dict(model)
    assert not [name for name in state if "tower" in name]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    check()
    model(pixels(accelerator.process_index))
    check()
    return model


@pytest.mark.parametrize("kind", ["clip", "seed"])
@on_ranks(2)
def test_prepare_for_ddp(kind, tmp_path):
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    run(accelerator, kind, str(tmp_path))


@pytest.mark.skipif(not HAS_FSDP2, reason="accelerate has FSDP2 since 1.6")
@pytest.mark.parametrize("kind", ["clip", "seed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("efficient", [False, True])
@on_ranks(2)
def test_prepare_for_fsdp2(kind, efficient, checkpointing, tmp_path):
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=efficient,
        activation_checkpointing=checkpointing,
        state_dict_type="SHARDED_STATE_DICT",
    )
    model = run(accelerator, kind, str(tmp_path), plugin=plugin)
    assert isinstance(model, FSDPModule)


@pytest.mark.parametrize("kind", ["clip", "seed"])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@on_ranks(2)
def test_prepare_for_fsdp1(kind, orig, checkpointing, tmp_path):
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        use_orig_params=orig,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=checkpointing,
    )
    model = run(accelerator, kind, str(tmp_path), plugin=plugin, together=False)
    assert isinstance(model, FSDP)
