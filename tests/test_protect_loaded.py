"""Towers that `safe_from_pretrained` brings in, inside an outer model's `__init__`, on two ranks, then trained."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import CLIPVisionModel

from safeload import check_towers, frozen_towers, load_report, safe_from_pretrained, unfreeze
from tests.protect_towers import Outer, assert_whole, make_clip, outer_config, pixels, tensors_of
from tests.ranks import on_ranks
from tests.test_protect_outer import fsdp_environment


@pytest.mark.parametrize("environment", ["plain", "fsdp"])
@on_ranks(2)
def test_loaded_inside_an_outer_from_pretrained_and_trained_under_fsdp2(environment, tmp_path):
    rank = dist.get_rank()
    want = tensors_of(make_clip(3))
    Outer.towers = {}
    if rank == 0:
        make_clip(3).save_pretrained(tmp_path / "tower")
        Outer(outer_config()).save_pretrained(tmp_path / "outer")
    dist.barrier()

    def load():
        return safe_from_pretrained(CLIPVisionModel, tmp_path / "tower", verify="off")

    Outer.towers = {"tower": load, "holder": load}
    for build in (lambda: Outer(outer_config()), lambda: Outer.from_pretrained(tmp_path / "outer")):
        with fsdp_environment(rank) if environment == "fsdp" else contextlib.nullcontext():
            model = build()
        assert sorted(frozen_towers(model)) == ["holder.inner.deep", "tower"]
        assert check_towers(model).ranks == 2
        assert load_report(model.tower)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        ids = torch.arange(6).view(1, 6)
        for _ in range(2):
            seen = model.projector(model(input_ids=ids).last_hidden_state) + model.tower(pixels()).pooler_output.mean()
            seen.square().sum().backward()
            optimizer.step()
        for tower in frozen_towers(model).values():
            assert_whole(tower, want)
        check_towers(model)
    unfreeze(model.tower)
    assert list(frozen_towers(model)) == ["holder.inner.deep"]
    model.tower = load()
    assert_whole(model.tower, want)
    check_towers(model)
