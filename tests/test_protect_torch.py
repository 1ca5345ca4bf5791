"""torch.compile, averaged copies, optimizers and distributed state dicts around protected towers."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from safeload.checking import check_towers
from safeload.errors import TowerChangedError
from safeload.protecting import frozen_towers, tower_state
from tests.protect_towers import Pair, assert_whole, features, pixels, protected, tensors_of
from tests.ranks import on_ranks

WIDTHS = {"clip": 32, "seed": 8}


def pair(kind: str = "clip") -> tuple[Pair, dict[str, torch.Tensor]]:
    tower = protected(kind)
    return Pair(tower, WIDTHS[kind]), tensors_of(tower)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["clip", "seed"])
def test_the_outer_model_compiles_to_one_graph(dynamo, kind):
    model, want = pair(kind)
    expected = model(pixels())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(pixels()), expected)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]
    compiled(pixels()).sum().backward()
    assert_whole(model.tower, want)
    assert list(frozen_towers(compiled)) == ["_orig_mod.tower"]
    assert not [name for name in compiled.state_dict() if "tower" in name]


@pytest.mark.parametrize("kind", ["clip", "seed"])
def test_the_tower_compiles_without_a_graph_break(dynamo, kind):
    model, want = pair(kind)
    expected = model(pixels())
    model.tower = torch.compile(model.tower, backend="aot_eager", fullgraph=True)
    assert torch.allclose(model(pixels()), expected)
    assert not dynamo["graph_break"]
    assert list(frozen_towers(model)) == ["tower._orig_mod"]
    assert not [name for name in model.state_dict() if "tower" in name]
    assert_whole(model.tower._orig_mod, want)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler here; aot_eager is tried above")
def test_the_outer_model_compiles_with_inductor(dynamo):
    model, want = pair("seed")
    expected = model(pixels())
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(pixels()), expected, atol=1e-5)
    compiled(pixels()).sum().backward()
    assert all(p.grad is None for p in model.tower.parameters())
    assert_whole(model.tower, want)
    check_towers(model)


@on_ranks(2)
def test_compiled_sharded_trained_and_checked():
    for kind in ("clip", "seed"):
        model, want = pair(kind)
        compiled = torch.compile(sharded(model), backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            compiled(pixels()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            check_towers(compiled)
        assert_whole(model.tower, want)
        with torch.no_grad():
            next(model.tower.parameters()).add_(dist.get_rank())
        with pytest.raises(TowerChangedError, match="overwritten in place on rank 1"):
            check_towers(compiled)


def test_export_holds_the_verified_values():
    model, want = pair()
    expected = model(pixels())
    exported = torch.export.export(model, (pixels(),))
    assert torch.allclose(exported.module()(pixels()), expected, atol=1e-5)
    assert_whole(model.tower, want)


def test_a_compiled_model_says_the_same_of_a_changed_tower(dynamo):
    model, _ = pair()
    next(model.tower.parameters()).data.view(-1)[0] += 1
    with pytest.raises(Exception, match=r"TowerChangedError: tower 'clip'.*overwritten in place.*unfreeze"):
        torch.compile(model, backend="aot_eager")(pixels())


@pytest.mark.parametrize("what", ["outer", "tower"])
def test_a_compiled_tower_that_is_made_trainable_gets_no_gradients(dynamo, what):
    model, want = pair()
    if what == "outer":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        run = model
        model.tower = torch.compile(model.tower, backend="aot_eager", fullgraph=True)
    run(pixels())
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"made trainable.*unfreeze"):
        run(pixels()).sum().backward()
    tower = next(iter(frozen_towers(model).values()))
    assert all(p.grad is None for p in tower.parameters())
    assert_whole(tower, want)


@pytest.mark.parametrize("kind", ["clip", "seed"])
def test_an_averaged_copy_keeps_the_tower(kind):
    model, want = pair(kind)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(pixels()).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    averaged(pixels())
    assert_whole(averaged.module.tower, want)
    assert_whole(model.tower, want)


def test_averaged_integer_buffers_are_noticed_and_named():
    """With `use_buffers=True` torch averages position ids as integers: rounding takes them down by one."""
    model, _ = pair()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    with pytest.raises(TowerChangedError, match=r"position_ids: overwritten in place.*unfreeze"):
        averaged(pixels())
    model(pixels())


def optimizers():
    yield torch.optim.SGD, {"weight_decay": 0.5, "momentum": 0.9}
    yield torch.optim.AdamW, {"weight_decay": 0.5}
    yield torch.optim.AdamW, {"weight_decay": 0.5, "foreach": True}
    yield torch.optim.Adagrad, {"weight_decay": 0.5}


def test_optimizers_given_all_parameters_leave_the_tower():
    for kind, options in optimizers():
        model, want = pair()
        optimizer = kind(model.parameters(), lr=0.1, **options)
        model.zero_grad(set_to_none=False)
        for _ in range(3):
            model(pixels()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert_whole(model.tower, want)


def test_an_update_that_does_reach_the_tower_is_named():
    """Weight decay on a gradient that somebody made by hand: it cannot be prevented, so it is noticed and named."""
    model, _ = pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    name, parameter = next(iter(model.tower.named_parameters()))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(TowerChangedError, match=rf"{name}: overwritten in place"):
        model(pixels())


def sharded(model: Pair) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.head:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_flat(model: Pair) -> nn.Module:
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)


WRAPS = {"fsdp1": sharded_flat, "fsdp2": sharded, "ddp": DistributedDataParallel, "bare": lambda model: model}


@pytest.mark.parametrize("wrap", sorted(WRAPS))
@on_ranks(2)
def test_distributed_state_dicts(wrap, tmp_path):
    for kind in ("clip", "seed"):
        model, want = pair(kind)
        seen = features(model.tower, pixels())
        wrapped = WRAPS[wrap](model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.5)
        wrapped(pixels()).square().sum().backward()
        optimizer.step()
        sharded_state, sharded_optimizer = dsd.get_state_dict(wrapped, optimizer)
        assert sorted(sharded_state) == ["head.0.bias", "head.0.weight", "head.1.bias", "head.1.weight"]
        assert not [name for name in sharded_optimizer["state"] if "tower" in name]
        whole = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        full = dsd.get_model_state_dict(wrapped, options=dsd.StateDictOptions(full_state_dict=True))
        full_optimizer = dsd.get_optimizer_state_dict(
            wrapped, optimizer, options=dsd.StateDictOptions(full_state_dict=True)
        )
        assert sorted(full) == sorted(sharded_state)
        folder = tmp_path / f"{kind}"
        dcp.save({"model": sharded_state, "optimizer": sharded_optimizer}, checkpoint_id=folder)
        dcp.load({"model": sharded_state, "optimizer": sharded_optimizer}, checkpoint_id=folder)
        dsd.set_state_dict(wrapped, optimizer, model_state_dict=sharded_state, optim_state_dict=sharded_optimizer)
        source = dist.get_rank() == 0
        dsd.set_model_state_dict(wrapped, full if source else {}, options=whole)
        dsd.set_optimizer_state_dict(wrapped, optimizer, full_optimizer if source else {}, options=whole)
        assert_whole(model.tower, want)
        assert torch.equal(features(model.tower, pixels()), seen)
        wrapped(pixels()).square().sum().backward()
        optimizer.step()
        assert_whole(model.tower, want)


@on_ranks(2)
def test_a_distributed_state_dict_with_other_values_is_reported():
    model, want = pair()
    wrapped = sharded(model)
    state = dsd.get_model_state_dict(wrapped, options=dsd.StateDictOptions(full_state_dict=True))
    state |= {f"tower.{name}": value * 2 for name, value in model.tower.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = dsd.StateDictOptions(full_state_dict=True, strict=False)
        dsd.set_model_state_dict(wrapped, state, options=options)
    assert_whole(model.tower, want)
    print([str(w.message) for w in caught], tower_state(model.tower).conflicts)
    assert tower_state(model.tower).conflicts
