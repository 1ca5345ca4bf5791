"""Nothing that surrounds the caller reaches a tower's constructor, and all of it is back afterwards."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers.modeling_utils
from accelerate import init_empty_weights
from torch import nn

from safeload.ambient import clean_contexts, pristine, unfilled_meta

CPU = torch.device("cpu")
VERSION_5 = int(transformers.__version__.split(".")[0]) >= 5


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def no_ties():
    from transformers.initialization import no_tie_weights

    return no_tie_weights()


def no_init_weights():
    home = transformers.modeling_utils
    if VERSION_5:
        import transformers.initialization as home
    return home.no_init_weights()


AMBIENT = {
    "meta device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "default dtype": lambda: default_dtype(torch.float16),
    "init_empty_weights": init_empty_weights,
    "init_empty_weights with buffers": lambda: init_empty_weights(include_buffers=True),
    "inference mode": torch.inference_mode,
    "no_init_weights": no_init_weights,
}


@pytest.mark.parametrize("name", AMBIENT)
def test_a_constructor_inside_is_as_if_nothing_surrounded_it(name):
    torch.manual_seed(0)
    want = nn.Linear(4, 4)
    with AMBIENT[name](), clean_contexts(device=CPU):
        torch.manual_seed(0)
        got = nn.Linear(4, 4)
    assert got.weight.device == CPU
    assert got.weight.dtype == torch.float32
    assert not got.weight.is_inference()
    assert torch.equal(got.weight, want.weight)


@pytest.mark.parametrize("name", AMBIENT)
def test_the_context_is_back_afterwards_also_after_an_error(name):
    def probe():
        return str(nn.Linear(2, 2).weight.device), torch.get_default_dtype(), torch.is_inference_mode_enabled()

    with AMBIENT[name]():
        before = probe()
        with pytest.raises(ZeroDivisionError), clean_contexts(device=CPU):
            raise ZeroDivisionError
        assert probe() == before


@pytest.mark.skipif(not VERSION_5, reason="transformers 4 has no no_tie_weights")
def test_ties_are_made_inside_an_outer_models_init_context():
    with no_ties():
        patched = transformers.modeling_utils.PreTrainedModel.tie_weights
        with clean_contexts(device=CPU):
            inside = transformers.modeling_utils.PreTrainedModel.tie_weights
        assert transformers.modeling_utils.PreTrainedModel.tie_weights is patched
    assert inside is transformers.modeling_utils.PreTrainedModel.tie_weights
    assert inside is not patched


def test_the_fsdp_environment_is_off_inside_and_on_again(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "1")
    with clean_contexts(device=CPU):
        assert os.environ["ACCELERATE_USE_FSDP"] == "false"
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "1"


def test_an_environment_that_is_not_set_stays_so(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    with clean_contexts(device=CPU):
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert "ACCELERATE_USE_FSDP" not in os.environ


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    with clean_contexts(device=CPU):
        torch.rand(100)
    assert torch.equal(torch.rand(3), want)


def test_what_is_on_meta_is_left_unfilled_and_all_else_is_filled():
    def build():
        torch.manual_seed(3)
        here = nn.Linear(4, 4, device="cpu")
        there = nn.Conv2d(3, 5, 2)
        nn.init.normal_(tensor=there.weight)
        nn.init.trunc_normal_(there.bias)
        nn.init.normal_(here.bias, std=2.0)
        return here, there, torch.rand(2, device="cpu")

    with torch.device("meta"):
        filled = build()
        with unfilled_meta():
            unfilled = build()
    for ours, theirs in zip(unfilled[0].parameters(), filled[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [(p.shape, p.is_meta, p.requires_grad) for p in unfilled[1].parameters()] == [
        (p.shape, p.is_meta, p.requires_grad) for p in filled[1].parameters()
    ]
    assert unfilled[1].weight.is_meta
    assert torch.equal(unfilled[2], filled[2])  # the random state has gone on as it would have


def test_initialisers_of_meta_tensors_are_met_by_the_mode():
    """Fails when torch no longer offers its initialisers to modes: then peers fill on meta again, which is slow."""
    weight = torch.empty(3, 3, device="meta")
    version = weight._version
    with torch.device("meta"), unfilled_meta():
        nn.init.kaiming_uniform_(weight)
        assert nn.init.normal_(weight) is weight
        assert nn.init.uniform_(tensor=weight) is weight
    assert weight._version == version


def test_pristine_keeps_what_it_cannot_find():
    def mine():
        """Do nothing."""

    assert pristine(mine, module="nowhere", qualname="nothing") is mine


def test_every_patched_function_is_still_where_it_is_looked_for():
    """Fails loudly when torch or transformers move what `clean_contexts` restores."""
    from safeload.ambient import _candidates

    found = {qualname for _, _, qualname in _candidates()}
    assert {"Module.register_parameter", "PreTrainedModel.tie_weights", "kaiming_uniform_"} <= found
    for owner, name, qualname in _candidates():
        assert vars(owner)[name].__qualname__ == qualname


def test_threads_that_build_at_the_same_time_leave_everything_as_it_was():
    before = {name: value for name, value in vars(nn.init).items() if callable(value)}

    def build(dtype):
        for _ in range(50):
            with clean_contexts(device=torch.device("cpu"), dtype=dtype):
                assert nn.Linear(2, 2).weight.dtype == dtype

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(build, (torch.float16, torch.float32, torch.float64)))
    assert torch.get_default_dtype() == torch.float32
    assert {name: value for name, value in vars(nn.init).items() if callable(value)} == before
