"""`check_towers` and `restore_towers`: every change is named, with what happened and on which ranks."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from safeload.checking import check_towers, plain_name, restore_towers
from safeload.errors import ProtectionError, TowerChangedError
from safeload.fingerprinting import fingerprint
from safeload.protecting import protect, tower_state, unfreeze
from tests.protect_towers import Pair, assert_whole, pixels, protected, tensors_of
from tests.ranks import on_ranks


def replace_parameter(tower):
    tower.conv._parameters["weight"] = nn.Parameter(torch.zeros_like(tower.conv.weight))


def replace_buffer(tower):
    tower._buffers["signs"] = torch.zeros(8)


def remove(tower):
    del tower.conv._parameters["weight"]


def cast(tower):
    tower.conv.weight.data = tower.conv.weight.data.half()


def empty(tower):
    tower.conv.weight.data = torch.empty(0)


def swap_storage(tower):
    tower.conv.weight.data = tower.conv.weight.data.clone()


def meta(tower):
    tower.conv._parameters["weight"] = nn.Parameter(torch.empty_like(tower.conv.weight, device="meta"))


def train(tower):
    tower.conv.weight.requires_grad = True


def shard(tower):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tower.conv._parameters["weight"] = nn.Parameter(distribute_tensor(tower.conv.weight.detach(), mesh))


def write(tower):
    with torch.no_grad():
        tower.conv.weight.mul_(2)


def write_one_value_through_data(tower):
    tower.conv.weight.data.view(-1)[3] += 1e-3


def write_buffer(tower):
    tower.norm.running_mean.add_(1)


def free(tower):
    tower.conv.weight.untyped_storage().resize_(0)


def replace_module(tower):
    tower._modules["drop"] = nn.Identity()


# name -> what is done, which tensor it is done to, what is said of it, whether it can be put back
CHANGES = {
    "replaced": (replace_parameter, "tower.conv.weight", "replaced", True),
    "replaced buffer": (replace_buffer, "tower.signs", "replaced", True),
    "removed": (remove, "tower.conv.weight", "removed", True),
    "cast": (cast, "tower.conv.weight", "cast to float16", True),
    "emptied": (empty, "tower.conv.weight", "emptied or resized to [0]", True),
    "other storage": (swap_storage, "tower.conv.weight", "given other storage", True),
    "meta": (meta, "tower.conv.weight", "replaced", True),
    "trainable": (train, "tower.conv.weight", "made trainable", True),
    "written": (write, "tower.conv.weight", "overwritten in place", False),
    "one value": (write_one_value_through_data, "tower.conv.weight", "overwritten in place", False),
    "written buffer": (write_buffer, "tower.norm.running_mean", "overwritten in place", False),
    "freed": (free, "tower.conv.weight", "emptied: its storage was freed", False),
    "module": (replace_module, "tower.drop", "this module was replaced by a Identity", False),
}


def model() -> tuple[Pair, dict[str, torch.Tensor]]:
    tower = protected("seed")
    return Pair(tower, 8), tensors_of(tower)


@on_ranks(2)
def test_every_change_is_named_with_its_ranks_on_every_rank():
    for where in ("rank 1", "every rank"):
        for label, (change, name, said, mendable) in CHANGES.items():
            outer, want = model()
            assert check_towers(outer).ranks == 2
            if where == "every rank" or dist.get_rank() == 1:
                change(outer.tower)
            with pytest.raises(TowerChangedError, match="unfreeze") as caught:
                check_towers(outer)
            assert caught.value.changes == {name: f"{said} on {where}"}, label
            mended = restore_towers(outer)
            if mendable:
                assert mended == ([name] if where == "every rank" or dist.get_rank() == 1 else [])
                assert_whole(outer.tower, want)
                check_towers(outer)
            else:
                with pytest.raises(TowerChangedError):
                    check_towers(outer)


@on_ranks(2)
def test_a_sharded_tensor_is_named_and_not_fought_over():
    outer, _ = model()
    shard(outer.tower)
    with pytest.raises(TowerChangedError, match=r"tower\.conv\.weight: replaced by a DTensor \(sharded\) on every"):
        check_towers(outer)
    assert restore_towers(outer) == []
    with pytest.raises(TowerChangedError, match="sharded"):
        outer.tower(pixels())


@on_ranks(2)
def test_towers_that_were_verified_with_different_values_are_told_apart():
    outer = Pair(protected("seed", seed=dist.get_rank()), 8)
    with pytest.raises(TowerChangedError, match=r"verified with different values.*on rank 0.*on rank 1") as caught:
        check_towers(outer)
    assert list(caught.value.changes) == ["tower"]


@on_ranks(2)
def test_a_tower_that_one_rank_unfroze_is_named():
    outer, _ = model()
    outer.other = protected("clip")
    if dist.get_rank() == 1:
        unfreeze(outer.other)
    with pytest.raises(TowerChangedError, match="other: not protected on rank 1"):
        check_towers(outer)


@on_ranks(2)
def test_a_check_while_sharded_and_trained():
    outer, _ = model()
    fully_shard(outer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(outer.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        outer(pixels()).sum().backward()
        optimizer.step()
        check = check_towers(outer)
    assert [(tower.name, tower.tensors) for tower in check.towers] == [("tower", 10)]
    assert check.towers[0].size_bytes == sum(t.nbytes for t in [*outer.tower.parameters(), *outer.tower.buffers()])


def test_a_check_of_one_process_names_changes_without_ranks():
    outer, _ = model()
    assert check_towers(outer).ranks == 1
    write(outer.tower)
    with pytest.raises(TowerChangedError) as caught:
        check_towers(outer.tower)
    assert caught.value.changes == {"conv.weight": "overwritten in place"}


@pytest.mark.parametrize("call", [check_towers, restore_towers])
def test_a_model_without_towers_is_refused(call):
    with pytest.raises(ProtectionError, match="no protected tower"):
        call(nn.Linear(1, 1))


def test_names_are_given_without_wrappers():
    assert plain_name("_fsdp_wrapped_module._orig_mod.a._checkpoint_wrapped_module.b") == "a.b"
    assert plain_name("_orig_mod") == ""
    assert plain_name("module.tower") == "module.tower"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("size", [0, 1, 3, 4095, 4096 * 8, 4096 * 8 * 3 + 5])
def test_any_changed_value_changes_the_fingerprint(dtype, size):
    torch.manual_seed(size)
    values = (torch.randn(size) * 50).to(dtype)
    first = fingerprint(values)
    assert first == fingerprint(values.clone())
    assert first.startswith(f"{str(dtype)[6:]}[{size}]:")
    for place in {0, size // 2, size - 1} if size else ():
        changed = values.clone()
        changed[place] = changed[place] == 0 if dtype != torch.complex64 else changed[place] + 1
        if not torch.equal(changed, values):
            assert fingerprint(changed) != first


def test_fingerprints_tell_shapes_dtypes_and_orders_apart():
    values = torch.arange(12.0)
    seen = {fingerprint(values), fingerprint(values.view(3, 4)), fingerprint(values.flip(0)), fingerprint(values.int())}
    assert len(seen) == 4
    assert fingerprint(values.view(3, 4).t().contiguous().t()) == fingerprint(values.view(3, 4))
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(4))
    with torch.device("meta"):
        assert fingerprint(values) in seen


def test_a_check_costs_less_than_hashing_the_weights():
    values = torch.randn(8 * 2**20)

    def best(fn) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(lambda: fingerprint(values)) < best(lambda: hashlib.sha256(values.numpy().data).digest())


def test_known_fingerprints_are_taken_from_the_loader():
    """The loader may have them already; then a wrong one is found by the first check."""
    tower = protected("seed")
    known = tower_state(tower).fingerprints
    again = protect(unfreeze(tower), origin="here", fingerprints={**known, "conv.weight": "float32[1]:00"})
    with pytest.raises(TowerChangedError) as caught:
        check_towers(again)
    assert list(caught.value.changes) == ["conv.weight"]
