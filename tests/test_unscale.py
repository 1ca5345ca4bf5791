"""The report: "Attempting to unscale FP16 gradients". Each way into it, found before the first step and mended."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from safeload.casting import install_boundary_casts
from safeload.errors import PrecisionError
from safeload.gradients import gradient_report
from safeload.precision import PrecisionWarning, check_precision
from safeload.protecting import frozen_towers, protect
from safeload.upcasting import upcast_trainable
from tests.ranks import on_ranks

UNSCALE = "Attempting to unscale FP16 gradients"


@functools.lru_cache(maxsize=1)
def _tower_weights():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)).half()


class Projected(nn.Module):
    """A LLaVA in small: a protected float16 tower, a projector and a head."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        tower = protect(copy.deepcopy(_tower_weights()), name="vision_tower", origin="a test")
        torch.manual_seed(2)
        self.vision_tower = tower
        self.projector = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(dtype)
        self.lm_head = nn.Linear(8, 3).to(dtype)

    def forward(self, pixels):
        return self.lm_head(self.projector(self.vision_tower(pixels)))


def _loss(model):
    torch.manual_seed(3)
    pixels, target = torch.randn(16, 6), torch.randn(16, 3)
    with torch.autocast("cpu", torch.float16):
        out = model(pixels)
    return (out.float() - target).square().mean()


def _step(model, optimizer, scaler):
    loss = _loss(model)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def _trains_on(model, step, steps=12):
    """Losses are finite and fall, and the tower is to the bit what it was, in float16."""
    losses = [step() for _ in range(steps)]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < 0.8 * losses[0]
    (tower,) = frozen_towers(model).values()
    for mine, original in zip(tower.parameters(), _tower_weights().parameters(), strict=True):
        assert mine.dtype is torch.float16
        assert torch.equal(mine, original)


def _found(model, mixed_precision="fp16", **options):
    """What check_precision finds, which never is the tower."""
    with pytest.raises(PrecisionError, match=UNSCALE) as raised:
        check_precision(model, mixed_precision, **options)
    assert raised.value.parameters
    assert not any("vision_tower" in name for name in raised.value.parameters)
    assert "vision_tower" not in str(raised.value)
    return set(raised.value.parameters)


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)


def _everything(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_plain_loop():
    model, scaler = Projected(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(ValueError, match=UNSCALE):
        _step(failing := Projected(), _optimizer(failing), torch.amp.GradScaler("cpu"))
    assert _found(model, grad_scaler=scaler) == _everything(model)
    optimizer = _optimizer(model)  # built before the upcast, and right after it
    assert set(upcast_trainable(model)) == _everything(model)
    report = check_precision(model, "fp16", grad_scaler=scaler, optimizer=optimizer)
    assert [(tower.name, dict(tower.dtypes)) for tower in report.towers] == [("vision_tower", {"float16": 72})]
    _trains_on(model, lambda: _step(model, optimizer, scaler))


@pytest.fixture
def accelerator():
    """Accelerate gives a scaler to accelerators alone; this is its fp16 on a CPU, set by hand where it looks."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    made = Accelerator(cpu=True)
    made.state._mixed_precision = "fp16"
    made.native_amp, made.scaler = True, torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert made.mixed_precision == "fp16"
    yield made
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


def _accelerated_step(accelerator, model, optimizer):
    torch.manual_seed(3)
    pixels, target = torch.randn(16, 6), torch.randn(16, 3)
    loss = (model(pixels).float() - target).square().mean()
    accelerator.backward(loss)
    half = accelerator.unwrap_model(model).lm_head.weight.dtype is torch.float16
    assert {row.health for row in gradient_report(model).rows} == {"float16" if half else "ok"}
    accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_accelerate_fp16_in_two_lines(accelerator):
    failing = Projected()
    prepared = accelerator.prepare(failing, _optimizer(failing))
    with pytest.raises(ValueError, match=UNSCALE):
        _accelerated_step(accelerator, *prepared)
    assert _found(prepared[0], accelerator, optimizer=prepared[1]) == _everything(failing)

    accelerator.free_memory()
    model = Projected()
    upcast_trainable(model)
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    check_precision(model, accelerator, optimizer=optimizer)
    _trains_on(model, lambda: _accelerated_step(accelerator, model, optimizer))


def test_a_resume_that_brings_float16_back():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    saved = {key: value.half() for key, value in Projected().state_dict().items()}  # a checkpoint made for inference
    model = Projected(torch.float32)
    assert check_precision(model, "fp16").findings == ()
    optimizer = _optimizer(model)
    _step(model, optimizer, scaler)
    moments = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict(saved, assign=True)
    optimizer = _optimizer(model)
    optimizer.load_state_dict(moments)
    assert _found(model, optimizer=optimizer) == _everything(model)
    with pytest.raises(ValueError, match=UNSCALE):
        _step(model, optimizer, scaler)
    optimizer.zero_grad()
    upcast_trainable(model, optimizer=optimizer)
    check_precision(model, "fp16", optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _trains_on(model, lambda: _step(model, optimizer, scaler))


def test_a_resume_over_an_optimizer_that_is_not_built_again_is_found_too():
    model = Projected(torch.float32)
    optimizer = _optimizer(model)
    model.load_state_dict({key: value.half() for key, value in model.state_dict().items()}, assign=True)
    with pytest.raises(PrecisionError, match="no longer the model's") as raised:
        check_precision(model, "fp16", optimizer=optimizer)
    assert _everything(model) < set(raised.value.parameters)


def test_transformers_loads_a_half_checkpoint_in_half(tmp_path):
    """With transformers 5 that is the default, with 4 it is `torch_dtype="auto"`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).half().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, torch_dtype="auto")
    assert _found(model) == _everything(model)
    upcast_trainable(model)
    check_precision(model, "fp16")
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(16)[None]
    losses = []
    for _ in range(5):
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def _with_adapter(**options):
    peft = pytest.importorskip("peft", reason="peft is not installed; it is in the extra safeload[test]")
    base = Projected()
    config = peft.LoraConfig(
        r=2, target_modules=["projector.0", "projector.2"], init_lora_weights="gaussian", **options
    )
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False)


def _fails_and_is_mended(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(ValueError, match=UNSCALE):
        _step(model, _optimizer(model), scaler)
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    cast = upcast_trainable(model)
    optimizer = _optimizer(model)
    report = check_precision(model, "fp16", grad_scaler=scaler, optimizer=optimizer)
    assert dict(report.frozen)["float16"] > 0
    assert upcast_trainable(model) == []
    _trains_on(model, lambda: _step(model, optimizer, scaler), steps=20)
    return set(cast)


def test_a_peft_adapter_made_in_float16():
    model = _with_adapter()
    found = _found(model)
    assert found == _everything(model)
    assert all("lora_" in name for name in found)
    assert _fails_and_is_mended(model) == found
    kept = {p.dtype for name, p in model.named_parameters() if not p.requires_grad}
    assert kept == {torch.float16}  # the adapters' base weights as well as the tower


def test_modules_to_save():
    model = _with_adapter(modules_to_save=["lm_head"])
    found = _found(model)
    assert {name for name in found if "modules_to_save" in name}
    assert _fails_and_is_mended(model) == found


def test_an_adapter_added_later_is_found_by_the_next_check():
    model = _with_adapter()
    upcast_trainable(model)
    check_precision(model, "fp16")
    peft = pytest.importorskip("peft", reason="peft is not installed; it is in the extra safeload[test]")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["projector.0"]))
    model.base_model.set_adapter("second")
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data = parameter.data.half()
    assert all(".second." in name for name in _found(model))
    upcast_trainable(model)
    check_precision(model, "fp16")


# --- bfloat16 ---


def test_an_update_that_a_bfloat16_weight_loses_and_a_float32_one_keeps():
    """1.0 and steps of 1/1024: half a unit in the last place of bfloat16 at 1.0 is 1/256, so not one of them lands."""
    for upcast in (False, True):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        if upcast:
            upcast_trainable(model)
        else:
            with pytest.warns(PrecisionWarning, match="rounded away"):
                check_precision(model, "bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / 1024)
        for _ in range(1024):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.weight.item() == (0.0 if upcast else 1.0)


# --- the Trainer ---


class _Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixels": torch.randn(6, generator=generator), "labels": torch.randn(3, generator=generator)}


class _WithLoss(Projected):
    def forward(self, pixels, labels=None):
        out = super().forward(pixels)
        return {"loss": (out.float() - labels).square().mean(), "logits": out}


@pytest.fixture
def trainer_of(tmp_path):
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    def make(model, callbacks, fp16=True, **options):
        AcceleratorState._reset_state(reset_partial_state=True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            per_device_train_batch_size=16,
            max_steps=8,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy=options.pop("save_strategy", "no"),
            report_to=[],
            disable_tqdm=True,
            max_grad_norm=1.0,
            bf16=not fp16,
            **options,
        )
        arguments.fp16 = fp16  # refused in the constructor without an accelerator
        if hasattr(arguments, "mixed_precision"):
            arguments.mixed_precision = "fp16" if fp16 else "bf16"
        trainer = Trainer(model=model, args=arguments, train_dataset=_Data(), callbacks=callbacks)
        if fp16:
            made = trainer.accelerator
            made.state._mixed_precision = "fp16"
            made.native_amp, made.scaler = True, torch.amp.GradScaler("cpu", init_scale=1024.0)
        return trainer

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def _losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_without_the_callback_fails_as_reported(trainer_of):
    with pytest.raises(ValueError, match=UNSCALE):
        trainer_of(_WithLoss(), []).train()


def test_the_callback_mends_and_the_trainer_trains(trainer_of):
    from safeload.integrations.trainer import PrecisionCallback

    model = _WithLoss()
    trainer = trainer_of(model, [PrecisionCallback()])
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}  # before any optimizer is built
    trainer.train()
    losses = _losses(trainer)
    assert losses[-1] < 0.8 * losses[0]
    (tower,) = frozen_towers(model).values()
    assert {p.dtype for p in tower.parameters()} == {torch.float16}


def test_the_callback_can_only_check(trainer_of):
    from safeload.integrations.trainer import PrecisionCallback

    model = _WithLoss()
    with pytest.raises(PrecisionError, match=UNSCALE):
        trainer_of(model, [PrecisionCallback(upcast=False)]).train()
    assert model.lm_head.weight.dtype is torch.float16


def test_the_callback_mends_what_comes_between_construction_and_training(trainer_of):
    from safeload.integrations.trainer import PrecisionCallback

    model = _WithLoss(torch.float32)
    trainer = trainer_of(model, [PrecisionCallback()])
    trainer.create_optimizer()
    model.projector.half()  # a resume, a late adapter
    trainer.train()
    assert _losses(trainer)[-1] < 0.8 * _losses(trainer)[0]


def test_the_callback_lets_bf16_train_in_float32(trainer_of):
    from safeload.integrations.trainer import PrecisionCallback

    model = _WithLoss(torch.bfloat16)
    install_boundary_casts(model.vision_tower)  # float16 under autocast to bfloat16
    trainer = trainer_of(model, [PrecisionCallback()], fp16=False)
    trainer.train()
    assert model.lm_head.weight.dtype is torch.float32


def test_the_callback_leaves_a_deepspeed_model_alone():
    from safeload.integrations.trainer import PrecisionCallback

    class Arguments:
        fp16, bf16, deepspeed = True, False, "ds.json"

    model = Projected()
    callback = PrecisionCallback()
    callback.on_init_end(Arguments(), None, None, model=model)
    callback.on_train_begin(Arguments(), None, None, model=model)
    assert model.lm_head.weight.dtype is torch.float16


# --- wrapped, in two ranks ---


def _wrapped(kind, model):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@on_ranks(2)
def test_a_wrapped_model_with_a_protected_tower_is_found_mended_and_trains_on():
    for kind in ("ddp", "fsdp1", "fsdp2"):
        model = _wrapped(kind, Projected())
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), _optimizer(model)
        found = _found(model, grad_scaler=scaler, optimizer=optimizer)
        assert set(upcast_trainable(model)) == found == _everything(model)
        check_precision(model, "fp16", grad_scaler=scaler, optimizer=optimizer)
        _trains_on(model, lambda: _step(model, optimizer, scaler))  # noqa: B023 - called within the turn
