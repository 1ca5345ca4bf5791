"""DeepSpeed ZeRO-2 and ZeRO-3, with and without `zero.Init`, around protected towers: on CPU, two ranks, gloo."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys

import pytest
import torch

from safeload.checking import check_towers
from safeload.errors import ProtectionError
from safeload.protecting import protect
from tests.protect_towers import Pair, assert_whole, make_clip, pixels, protected, tensors_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not a dependency: pip install deepspeed"
)


def import_deepspeed():
    """Import it for CPU, without its shared-memory extension, which would be compiled for minutes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    return deepspeed


def config(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }


@pytest.mark.parametrize("kind", ["clip", "seed"])
@pytest.mark.parametrize(("stage", "init"), [(2, False), (3, False), (3, True)])
@on_ranks(2, timeout_s=110)
def test_the_tower_is_whole_under_zero(stage, init, kind, tmp_path):
    deepspeed = import_deepspeed()
    tower = protected(kind)
    want = tensors_of(tower)
    places = {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()}
    around = deepspeed.zero.Init(config_dict_or_path=config(stage)) if init else contextlib.nullcontext()
    with around:
        model = Pair(tower, 32 if kind == "clip" else 8)
        model.compute_dtype = torch.float32
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trainable, lr=0.1, weight_decay=0.5), config=config(stage)
    )
    engine.train()
    losses = []
    for _ in range(3):
        loss = engine(pixels()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[0] != losses[-1]
    assert_whole(tower, want)
    assert {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()} == places
    assert not [p for p in tower.parameters() if hasattr(p, "ds_id")]
    if stage == 3:
        assert all(hasattr(p, "ds_id") for p in model.head.parameters())
    engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path))
    engine(pixels())
    assert_whole(tower, want)
    check_towers(model)


@on_ranks(2, timeout_s=110)
def test_a_tower_that_zero_has_partitioned_is_refused():
    deepspeed = import_deepspeed()
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        tower = make_clip()
    with pytest.raises(ProtectionError, match=r"partitioned by DeepSpeed ZeRO-3.*zero\.Init"):
        protect(tower, origin="inside zero.Init")
