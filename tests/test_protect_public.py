"""The public road: the towers as arguments for FSDP1, FSDP2 and Accelerate, each tried without torch's private mark."""

from __future__ import annotations

import os
import re

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from safeload.errors import ProtectionError
from safeload.ignoring import ignored_modules, ignored_modules_pattern, ignored_parameters
from safeload.marking import unmark
from safeload.protecting import frozen_towers
from tests.protect_towers import Pair, assert_whole, pixels, protected, tensors_of
from tests.ranks import on_ranks
from tests.test_protect_accelerate import Layered, enter_fsdp

ACCELERATE = Version(accelerate.__version__)


def unmarked(kind: type[Pair] = Pair) -> tuple[Pair, dict[str, torch.Tensor]]:
    tower = protected()
    unmark(tower)
    return kind(tower), tensors_of(tower)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(pixels()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_ignored_modules_for_fsdp1():
    model, want = unmarked()
    wrapped = FSDP(model, device_id=torch.device("cpu"), ignored_modules=ignored_modules(model))
    train(wrapped)
    assert_whole(model.tower, want)
    assert ignored_modules(wrapped) == [model.tower]


@on_ranks(2)
def test_ignored_parameters_for_fsdp2():
    model, want = unmarked()
    ignored = ignored_parameters(model)
    assert ignored == set(model.tower.parameters())
    mesh = init_device_mesh("cpu", (2,))
    for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
        fully_shard(part, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    train(model)
    assert_whole(model.tower, want)
    assert all(isinstance(p, DTensor) for p in model.head.parameters())


@pytest.mark.parametrize("form", ["modules", "pattern"])
@on_ranks(2)
def test_ignored_modules_for_accelerate_with_fsdp1(form):
    if form == "pattern" and Version("1.10") > ACCELERATE:
        return  # the pattern is taken since accelerate 1.10
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    model, want = unmarked(Layered)
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        use_orig_params=True,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
        ignored_modules=ignored_modules(model) if form == "modules" else ignored_modules_pattern(model),
    )
    enter_fsdp(accelerator, plugin)
    wrapped = accelerator.prepare(model)
    train(wrapped)
    assert_whole(next(iter(frozen_towers(wrapped).values())), want)


@pytest.mark.skipif(Version("1.10") > ACCELERATE, reason="accelerate passes ignored modules to FSDP2 since 1.10")
@pytest.mark.parametrize("form", ["modules", "pattern"])
@pytest.mark.parametrize("efficient", [False, True])
@on_ranks(2)
def test_ignored_modules_for_accelerate_with_fsdp2(form, efficient):
    model, want = unmarked(Layered)
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=efficient,
        ignored_modules=ignored_modules(model) if form == "modules" else ignored_modules_pattern(model),
    )
    enter_fsdp(accelerator, plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    wrapped(pixels()).square().mean().backward()
    optimizer.step()
    assert_whole(model.tower, want)
    assert all(isinstance(p, DTensor) for p in model.head.parameters())


class Peft(nn.Module):
    """The names that PEFT gives: base_model.model.*"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"vision": protected(), "audio": protected("seed"), "head": nn.Linear(2, 2)})
        self.vision = nn.Linear(2, 2)


WRAPS = {
    "bare": lambda model: model,
    "peft": Peft,
    "compiled": torch.compile,
    "peft compiled": lambda model: torch.compile(Peft(torch.compile(model))),
    "data parallel": nn.DataParallel,
}


@pytest.mark.parametrize("made_in", sorted(WRAPS))
@pytest.mark.parametrize("used_in", sorted(WRAPS))
def test_the_pattern_matches_the_towers_and_nothing_else(made_in, used_in):
    model = Deep()
    pattern = ignored_modules_pattern(WRAPS[made_in](model))
    wrapped = WRAPS[used_in](model)
    matched = [part for name, part in wrapped.named_modules() if re.fullmatch(pattern, name)]
    assert matched == [model.model["vision"], model.model["audio"]]


def test_the_pattern_matches_a_tower_that_is_compiled_itself():
    model = Deep()
    tower = model.model["vision"]
    pattern = ignored_modules_pattern(model)
    model.model["vision"] = torch.compile(tower)
    matched = [part for name, part in model.named_modules() if re.fullmatch(pattern, name)]
    assert tower in matched
    assert ignored_modules_pattern(model) == pattern


@pytest.mark.parametrize("ask", [ignored_modules, ignored_parameters, ignored_modules_pattern])
def test_zero_matches_are_an_error(ask):
    with pytest.raises(ProtectionError, match="no protected tower"):
        ask(nn.Linear(2, 2))


def test_a_tower_alone_has_no_pattern():
    with pytest.raises(ProtectionError, match="itself a tower"):
        ignored_modules_pattern(protected())
