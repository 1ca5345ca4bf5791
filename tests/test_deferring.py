"""A library may run before its weights are there only if it can do without them; whether it can is found out."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.ranks import run_on_ranks

WIDTH = 512


def _sums(tower, given):
    tower.table = given["layer.weight"].sum(0)


def _sums_bytes(tower, given):
    tower.table = torch.tensor(given["layer.weight"].numpy().sum(0))


def _lists(tower, given):
    tower.table = torch.tensor(given["layer.weight"][:, 0].tolist())


def _copies(tower, given):
    given["layer.weight"] = given["layer.weight"].clone()


def _writes(tower, given):
    given["layer.weight"].mul_(2)


def _transposes(tower, given):
    given["layer.weight"] = given["layer.weight"].t()


def _casts(tower, given):
    given.update({name: value.to(torch.bfloat16) for name, value in given.items()})


def _casts_and_sums(tower, given):
    tower.table = given["layer.weight"].to(torch.float64).sum(0)


HABITS = {
    "none": lambda tower, given: None,
    "transposes": _transposes,
    "casts": _casts,
    "sums": _sums,
    "sums bytes": _sums_bytes,
    "lists": _lists,
    "copies": _copies,
    "writes": _writes,
    "casts and sums": _casts_and_sums,
}
EARLY = ["none", "transposes", "casts"]


class Tower(nn.Module):
    """Takes its weights as they are; what it does beside that is its habit."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(WIDTH).float(), persistent=False)

    def load_state_dict(self, state_dict, *args, **kwargs):
        given = dict(state_dict)
        HABITS[self.habit](self, given)
        return super().load_state_dict(given, *args, **kwargs)


def _folder(tmp_path):
    torch.manual_seed(3)
    tensors = {"layer.weight": torch.randn(WIDTH, WIDTH), "layer.bias": torch.randn(WIDTH)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def _load(folder, habit, dtype):
    from safetensors.torch import load_file

    from safeload import load_report, safe_from_pretrained

    make = functools.partial(Tower, habit)
    tower = safe_from_pretrained(make, folder, verify="off", dtype=dtype, device="cpu")
    expected = make()
    expected.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    expected = expected if dtype is None else expected.to(dtype)
    for name in ("layer.weight", "layer.bias", "table"):
        ours = tower.get_parameter(name) if name != "table" else tower.table
        theirs = expected.get_parameter(name) if name != "table" else expected.table
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    return load_report(tower).built


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_values_are_right_on_every_road(tmp_path, habit, dtype):
    result = run_on_ranks(1, _load, _folder(tmp_path), habit, dtype, store="none")[0]
    assert result.ok, result.describe()
    if dtype is None or habit not in ("casts", "transposes"):  # for these two either road is right
        assert result.value == ("early" if habit in EARLY else "late")


@pytest.mark.parametrize("memory", ["mapped", "sealed"])
def test_where_the_library_will_look_is_announced_for_a_file_that_it_maps(tmp_path, monkeypatch, memory):
    from safeload import deferring, safe_from_pretrained
    from safeload.mapping import can_map

    if not can_map():
        pytest.skip("nothing is built while it is read on this system")
    announced = []
    monkeypatch.setattr(deferring, "announce", lambda fd, places: announced.extend(places))
    make = functools.partial(Tower, "none")
    safe_from_pretrained(make, _folder(tmp_path), verify="off", memory=memory, device="cpu")
    size_bytes = (tmp_path / "model.safetensors").stat().st_size
    bias = size_bytes - 4 * WIDTH * (WIDTH + 1)
    assert sorted(announced) == ([bias, bias + 4 * WIDTH] if memory == "mapped" else [])
