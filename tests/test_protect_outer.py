"""Outer `from_pretrained` around protected towers, with and without the towers' keys in its checkpoint."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from safeload.protecting import frozen_towers, tower_state
from tests.protect_towers import Outer, assert_whole, features, outer_config, pixels, protected, tensors_of

PLACES = {"tower": "tower", "many": "many.1", "holder": "holder.inner.deep"}
TOWERS = {"tower": ("seed", 0), "many": ("seed", 1), "holder": ("seed", 2), "listed": ("seed", 3), "clip": ("clip", 4)}


@contextlib.contextmanager
def fsdp_environment(rank: int):
    """The variables of `accelerate launch --use_fsdp` with efficient loading, as rank `rank` of a host sees them."""
    values = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "LOCAL_RANK": str(rank)}
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture
def towers(monkeypatch):
    """Loaded before the outer model's contexts; each construction takes copies, which are protected towers again."""
    made = {name: protected(kind, seed) for name, (kind, seed) in TOWERS.items()}
    monkeypatch.setattr(Outer, "towers", {name: partial(copy.deepcopy, tower) for name, tower in made.items()})
    return {name: tensors_of(tower) for name, tower in made.items()}


def check(model: Outer, want) -> None:
    parts = dict(model.named_modules())
    for name in TOWERS:
        tower = model.listed[0] if name == "listed" else parts[PLACES.get(name, name)]
        assert_whole(tower, want[name])
        assert torch.isfinite(features(tower, pixels())).all()
        assert_whole(tower, want[name])
    assert sorted(frozen_towers(model)) == ["clip", "holder.inner.deep", "many.1", "tower"]


def save_outer(folder, *, sharded: bool, with_towers: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    model = Outer(outer_config())
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    if with_towers:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for prefix, tower in frozen_towers(model).items():
            state |= {f"{prefix}.{name}": value.clone() * 3 for name, value in tower.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model.state_dict()


@pytest.mark.parametrize("keys", ["complete", "sharded", "with_towers"])
@pytest.mark.parametrize("environment", ["plain", "fsdp_rank_0", "fsdp_rank_1"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:the checkpoint has other values")
def test_towers_are_whole_after_an_outer_from_pretrained(tmp_path, towers, keys, environment, dtype):
    state = save_outer(tmp_path, sharded=keys == "sharded", with_towers=keys == "with_towers")
    assert (keys == "sharded") == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    around = contextlib.nullcontext() if environment == "plain" else fsdp_environment(int(environment[-1]))
    options = {} if dtype is None else {"torch_dtype": dtype}
    with around:
        model = Outer.from_pretrained(tmp_path, **options)
    check(model, towers)
    if environment == "plain":
        have = model.state_dict()
        assert all(torch.equal(have[name], value.to(have[name].dtype)) for name, value in state.items())
        assert dtype in (None, have["projector.weight"].dtype)


@pytest.mark.parametrize("environment", ["plain", "fsdp_rank_1"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_other_values_in_the_outer_checkpoint_are_reported_by_name(tmp_path, towers, environment, dtype):
    save_outer(tmp_path, sharded=False, with_towers=True)
    around = contextlib.nullcontext() if environment == "plain" else fsdp_environment(1)
    with around, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Outer.from_pretrained(tmp_path, **({} if dtype is None else {"torch_dtype": dtype}))
    said = [str(w.message) for w in caught if "the checkpoint has other values" in str(w.message)]
    assert len(said) == 4
    for name, tower in frozen_towers(model).items():
        keys = sorted(f"{name}.{key}" for key, value in tower.state_dict().items() if value.any())
        assert tower_state(tower).conflicts == keys
        [mine] = [text for text in said if ", ".join(keys) in text]
        assert "The verified values were kept" in mine
        assert "unfreeze" in mine
    check(model, towers)


def test_the_same_values_in_the_outer_checkpoint_are_silent(tmp_path, towers):
    state = save_outer(tmp_path, sharded=False, with_towers=False)
    model = Outer(outer_config())
    for prefix, tower in frozen_towers(model).items():
        state |= {f"{prefix}.{name}": value.clone() for name, value in tower.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint has other values")
        check(Outer.from_pretrained(tmp_path), towers)


def test_nothing_of_the_towers_is_missing_or_saved(tmp_path, towers):
    save_outer(tmp_path, sharded=False, with_towers=False)
    saved = load_file(tmp_path / "model.safetensors")
    assert not [name for name in saved if name.split(".")[0] in TOWERS]
    model, info = Outer.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check(model, towers)


def test_the_outer_constructor_alone_leaves_towers_whole(towers):
    check(Outer(outer_config()), towers)
