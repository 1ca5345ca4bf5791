"""The HF Trainer, PEFT and what training scripts do with transformers models, around protected towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from safeload.checking import check_towers
from safeload.errors import ProtectionError, TowerChangedError
from safeload.protecting import frozen_towers, unfreeze
from tests.protect_towers import Outer, Pair, assert_whole, outer_config, pixels, protected, tensors_of
from tests.ranks import on_ranks
from tests.test_protect_accelerate import HAS_FSDP2, enter_fsdp

WIDTHS = {"clip": 32, "seed": 8}


class Answering(Pair):
    """A pair that gives the loss that the Trainer wants."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = super().forward(images)
        return {"loss": nn.functional.mse_loss(logits.float(), labels), "logits": logits}


class Sharded(Answering):
    """Its wrap policy names layers that the tower has too."""

    _no_split_modules = ("Linear",)
    _tied_weights_keys = None


def examples() -> list[dict[str, torch.Tensor]]:
    return [{"images": pixels(seed)[0], "labels": torch.ones(4) * seed} for seed in range(8)]


def training_arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    """Return what both trainings have in common: they save at the second step, and decay what they may."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        weight_decay=0.5,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )


def _help_the_older_stack_to_resume(folder: Path) -> None:
    """With this torch its own way of resuming on CPU fails, tower or not: a device called cpu:0, states of numpy."""
    if Version(accelerate.__version__) >= Version("1.10"):
        return
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
    )
    if dist.get_rank() == 0:
        for file in folder.glob("checkpoint-*/rng_state*"):
            file.unlink()
    dist.barrier()


@pytest.mark.skipif(not HAS_FSDP2, reason="accelerate has FSDP2 since 1.6")
@pytest.mark.parametrize("efficient", [False, True])
@on_ranks(2)
def test_the_trainer_under_fsdp2_trains_saves_evaluates_and_resumes(efficient, tmp_path):
    for steps in (2, 4):
        tower = protected()
        want = tensors_of(tower)
        model = Sharded(tower)
        places = {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()}
        args = training_arguments(
            tmp_path,
            steps,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": ["Linear"],
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "cpu_ram_efficient_loading": efficient,
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        )
        trainer = Trainer(model=model, args=args, train_dataset=examples(), eval_dataset=examples())
        # on CPU the Trainer's accelerator takes DDP, whatever its arguments say
        enter_fsdp(trainer.accelerator, FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
        trainer.is_fsdp_enabled = True
        trainer.train(resume_from_checkpoint=steps > 2)
        assert all(isinstance(p, DTensor) for p in model.head.parameters())
        assert_whole(tower, want)
        assert {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()} == places
        check_towers(model)
        dist.barrier()


@pytest.mark.parametrize("kind", ["clip", "seed"])
@on_ranks(2)
def test_the_trainer_trains_saves_evaluates_and_resumes(kind, tmp_path):
    tower = protected(kind)
    want = tensors_of(tower)
    places = {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()}

    def trainer(model: nn.Module, steps: int) -> Trainer:
        args = training_arguments(tmp_path / "out", steps, max_grad_norm=1.0, logging_steps=1, bf16=kind == "clip")
        return Trainer(model=model, args=args, train_dataset=examples(), eval_dataset=examples())

    model = Answering(tower, WIDTHS[kind])
    before = model.head[0].weight.detach().clone()
    first = trainer(model, 2)
    first.train()
    first.evaluate()
    assert_whole(tower, want)
    assert {name: (id(p), p.data_ptr()) for name, p in tower.named_parameters()} == places
    assert not torch.equal(model.head[0].weight, before)
    dist.barrier()
    _help_the_older_stack_to_resume(tmp_path / "out")
    again = Answering(protected(kind), WIDTHS[kind])
    trainer(again, 4).train(resume_from_checkpoint=True)
    assert_whole(again.tower, want)
    check_towers(again)


def peft_model(tower: nn.Module, **options):
    """An outer Llama whose attention layers have the names that the tower's have: q_proj, v_proj."""
    from peft import LoraConfig, get_peft_model

    Outer.towers = {"tower": lambda: tower}
    try:
        model = Outer(outer_config())
    finally:
        Outer.towers = {}
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


peft = pytest.importorskip("peft", reason="PEFT is an extra")


def test_peft_that_would_reach_into_the_tower_is_refused_and_says_how():
    tower = protected()
    want = tensors_of(tower)
    with pytest.raises(ProtectionError, match=r"tower 'clip'.*_proj.*exclude_modules.*unfreeze"):
        peft_model(tower)
    assert_whole(tower, want)


def test_peft_beside_the_tower_is_harmless():
    tower = protected()
    want = tensors_of(tower)
    model = peft_model(tower, exclude_modules=r".*tower.*")
    model.train()
    assert_whole(tower, want)
    assert list(frozen_towers(model)) == ["base_model.model.tower"]
    assert [name for name, p in model.named_parameters() if p.requires_grad]
    ids = torch.arange(6).view(1, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    seen = model.base_model.model.tower(pixels()).pooler_output
    (model(input_ids=ids).last_hidden_state.sum() + seen.sum()).backward()
    optimizer.step()
    assert_whole(tower, want)
    model.merge_and_unload()
    assert_whole(tower, want)
    check_towers(model)


def test_peft_goes_into_a_tower_that_is_unfrozen():
    model = peft_model(unfreeze(protected()))
    assert [name for name, _ in model.named_parameters() if "tower" in name and "lora" in name]


def test_prepare_model_for_kbit_training_is_mended_before_use():
    tower = protected("seed", dtype=torch.bfloat16)
    want = tensors_of(tower)
    model = Pair(tower, 8)
    model.is_loaded_in_8bit = True
    model.get_input_embeddings = lambda: model.head
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    with pytest.raises(TowerChangedError, match=r"cast to float32"):
        check_towers(model)
    tower(pixels().bfloat16())
    assert_whole(tower, want)
    check_towers(model)
    model(pixels())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    tower = protected()
    want = tensors_of(tower)
    Outer.towers = {"tower": lambda: tower}
    try:
        model = Outer(outer_config())
    finally:
        Outer.towers = {}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    ids = torch.arange(6).view(1, 6)
    (model(input_ids=ids).last_hidden_state.sum() + tower(pixels()).pooler_output.sum()).backward()
    assert_whole(tower, want)
    tower.gradient_checkpointing_enable()
    tower(pixels())
    assert_whole(tower, want)


def test_the_private_names_of_transformers_are_where_they_were():
    """What an outer `from_pretrained` asks; when it moves, the outer tests say what that costs."""
    from transformers.modeling_utils import PreTrainedModel

    assert callable(PreTrainedModel._initialize_weights)
    model = protected()
    assert all(part._is_hf_initialized for part in model.modules())
    assert all(p._is_hf_initialized for p in model.parameters())
