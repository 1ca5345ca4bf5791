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

from tests.protect_towers import Pair, assert_whole, make_clip, pixels, protected, tensors_of
from tests.ranks import on_ranks, run_on_ranks

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


def _save_and_load(with_tower, how, folder):
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    model = Layered(protected() if with_tower else make_clip().requires_grad_(False))
    tower = model.tower
    want = tensors_of(tower)
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        use_orig_params=True, sync_module_states=False, cpu_ram_efficient_loading=False, state_dict_type=how
    )
    if not with_tower:
        plugin.ignored_modules = [tower]
    enter_fsdp(accelerator, plugin)
    wrapped = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.5)
    wrapped(pixels()).square().mean().backward()
    optimizer.step()
    optimizer = accelerator.prepare(optimizer)
    enter_fsdp(accelerator, plugin)  # preparing resets it on CPU
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    if with_tower:
        assert_whole(tower, want)


def test_save_state_with_fsdp1_and_sharded_state_dicts(tmp_path):
    results = run_on_ranks(2, _save_and_load, True, "SHARDED_STATE_DICT", str(tmp_path))
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()


def test_save_state_with_fsdp1_and_full_state_dicts_ends_as_it_does_without_a_tower(tmp_path):
    """On CPU torch reads storage that it has freed (offload_to_cpu), and rank 0 ends by a signal, tower or not."""
    ends = []
    for with_tower in (False, True):
        results = run_on_ranks(2, _save_and_load, with_tower, "FULL_STATE_DICT", str(tmp_path / str(with_tower)))
        ends.append(results[0].exit_status)
    assert ends[0] == ends[1], ends


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
