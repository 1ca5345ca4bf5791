"""gradient_report: the numbers against plain torch, the order, the shards, the ways out."""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
from datetime import timedelta

import pytest
import torch
from torch import nn

from safeload.errors import PrecisionError
from safeload.gradients import GradientReport, gradient_report, merge_reports
from safeload.measuring import DECADES
from tests.ranks import on_ranks


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def _backward(model, seed=0):
    torch.manual_seed(seed)
    loss = model(torch.randn(4, 7)).square().mean()
    loss.backward()
    return loss


def _sick():
    """One parameter of each kind."""
    model = nn.ParameterDict(
        {
            "fine": torch.ones(3),
            "finer": torch.ones(3),
            "nan": torch.ones(3),
            "inf": torch.ones(3),
            "fp16": torch.ones(3).half(),
            "zero": torch.ones(3),
            "none": torch.ones(2, 2),
            "frozen": torch.ones(3),
        }
    )
    model["frozen"].requires_grad_(False)
    model["fine"].grad = torch.tensor([1.0, 0.0, -2.0])
    model["finer"].grad = torch.tensor([10.0, 0.0, 0.0])
    model["nan"].grad = torch.tensor([1.0, float("nan"), float("inf")])
    model["inf"].grad = torch.tensor([1.0, float("-inf"), 3.0])
    model["fp16"].grad = torch.ones(3).half()
    model["zero"].grad = torch.zeros(3)
    return model


def test_the_numbers_are_those_of_plain_torch():
    model = _net()
    _backward(model)
    rows = {row.name: row for row in gradient_report(model).rows}
    assert set(rows) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        row, gradient = rows[name], parameter.grad
        assert (row.min, row.max) == (gradient.min().item(), gradient.max().item())
        assert row.norm == pytest.approx(gradient.norm().item())
        assert row.zero_fraction == pytest.approx((gradient == 0).float().mean().item())
        assert (row.finite, row.nonfinite, row.health) == (True, 0, "ok")
        assert row.shape == tuple(parameter.shape)
        assert (row.weight_dtype, row.gradient_dtype) == ("float32", "float32")
        assert row.elements == row.local_elements == parameter.numel()


def test_the_sick_come_first_then_by_norm():
    report = gradient_report(_sick())
    assert [(row.name, row.health) for row in report.rows] == [
        ("inf", "not finite"),
        ("nan", "not finite"),
        ("fp16", "float16"),
        ("none", "none"),
        ("zero", "all zero"),
        ("finer", "ok"),
        ("fine", "ok"),
    ]
    rows = {row.name: row for row in report.rows}
    assert (rows["nan"].nonfinite, rows["inf"].nonfinite) == (2, 1)
    assert (rows["inf"].min, rows["inf"].max) == (-math.inf, 3.0)
    assert rows["none"].norm is None
    assert rows["none"].zero_fraction is None
    assert [row.name for row in report.sick] == ["inf", "nan", "fp16", "none", "zero"]


def test_a_frozen_parameter_that_has_a_gradient_is_shown():
    model = _sick()
    model["frozen"].grad = torch.ones(3)
    assert "frozen" in {row.name for row in gradient_report(model).rows}


def test_dict_and_json_are_plain_and_come_back_whole():
    report = gradient_report(_sick(), histogram=True)
    text = report.to_json()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read == json.loads(json.dumps(report.to_dict()))
    assert read["rows"][0]["min"] == "-inf"
    again = GradientReport.from_json(text)
    assert again.to_json() == text
    fine = [row for row in report.rows if row.name != "nan"]  # nan is not equal to itself
    assert [row for row in again.rows if row.name != "nan"] == fine


def test_the_table_has_every_row_and_says_how_many_need_a_look():
    text = str(gradient_report(_sick()))
    assert "5 of 7 need a look" in text
    for name in ("fine", "finer", "nan", "inf", "fp16", "zero", "none"):
        assert f" {name} " in text
    assert "no (2)" in text
    assert "66.7%" in text


def test_before_a_backward_every_row_says_none():
    report = gradient_report(_net())
    assert {row.health for row in report.rows} == {"none"}
    assert gradient_report(nn.Module()).rows == ()
    assert "0 of 0" in str(gradient_report(nn.Module()))


def test_lazy_and_meta_parameters_have_no_numbers():
    model = nn.ModuleDict({"lazy": nn.LazyLinear(2), "meta": nn.Linear(2, 2, device="meta")})
    model["meta"].weight.grad = torch.zeros(2, 2, device="meta")
    rows = {row.name: row for row in gradient_report(model, histogram=True).rows}
    assert rows["lazy.weight"].health == "none"
    assert rows["meta.weight"].norm is None
    assert rows["meta.weight"].health == "ok"


def test_sparse_complex_and_bfloat16_gradients():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 2, sparse=True)})
    model["embed"](torch.tensor([1, 1, 2])).sum().backward()
    model.register_parameter("wave", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    model.wave.grad = torch.tensor([3 + 4j, 0j])
    model.register_parameter("brain", nn.Parameter(torch.ones(2).bfloat16()))
    model.brain.grad = torch.tensor([0.5, -1.5]).bfloat16()
    rows = {row.name: row for row in gradient_report(model).rows}
    assert (rows["embed.weight"].max, rows["embed.weight"].zero_fraction) == (2.0, 0.8)
    assert rows["wave"].norm == 5.0
    assert (rows["wave"].elements, rows["wave"].zero_fraction) == (2, 0.5)
    assert (rows["brain"].min, rows["brain"].gradient_dtype) == (-1.5, "bfloat16")


def test_norms_that_float16_cannot_hold():
    model = nn.ParameterDict({"a": torch.ones(1000).half(), "b": torch.ones(1000).half()})
    model["a"].grad = torch.full((1000,), 60000.0).half()
    model["b"].grad = torch.full((1000,), 6e-8).half()
    rows = {row.name: row for row in gradient_report(model).rows}
    assert rows["a"].norm == pytest.approx(60000 * math.sqrt(1000), rel=1e-3)
    assert rows["b"].norm == pytest.approx(5.96e-8 * math.sqrt(1000), rel=1e-2)


def test_the_scale_of_a_scaler_is_taken_out_when_asked():
    model = _net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.manual_seed(0)
    scaler.scale(model(torch.randn(4, 7)).square().mean()).backward()
    scaled = gradient_report(model)
    plain = gradient_report(model, grad_scaler=scaler, histogram=True)
    assert (plain.scale, scaled.scale) == (1024.0, 1.0)
    by_name = {row.name: row for row in scaled.rows}
    assert all(row.norm == pytest.approx(by_name[row.name].norm / 1024) for row in plain.rows)
    assert "without the scale of 1024" in str(plain)
    assert gradient_report(model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)).scale == 1.0
    fresh = _net()
    _backward(fresh)
    assert {r.name: r.histogram for r in plain.rows} == {
        r.name: r.histogram for r in gradient_report(fresh, histogram=True).rows
    }


def test_the_histogram_counts_every_finite_nonzero_magnitude_once():
    model = nn.ParameterDict({"w": torch.ones(8)})
    model["w"].grad = torch.tensor([0.0, 1.0, -5.0, 20.0, 1e-30, 1e30, float("nan"), -3e-8])
    (row,) = gradient_report(model, histogram=True).rows
    counted = {DECADES[index]: count for index, count in enumerate(row.histogram) if count}
    assert counted == {-12: 1, -8: 1, 0: 2, 1: 1, 5: 1}


def test_after_accelerator_backward():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = _net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(4, 7)).square().mean())
    report = gradient_report(model)
    assert report.sick == ()
    assert len(report.rows) == 4
    optimizer.step()


def test_the_gradients_are_not_copied(monkeypatch):
    """The peak of what a report allocates is far below the gradients it looks at."""
    monkeypatch.setattr("safeload.measuring._PIECE", 1 << 16)
    model = nn.ParameterDict({"w": torch.ones(1 << 22)})
    model["w"].grad = torch.ones(1 << 22)
    with torch.profiler.profile(profile_memory=True) as profile:
        gradient_report(model)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 1 << 19  # one piece in float64; the gradient itself is 1 << 24 bytes


# --- the picture ---


def test_the_picture_is_a_png_of_one_line_a_layer(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra safeload[plots] is not installed")
    from PIL import Image

    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    for layer in model:
        layer(torch.randn(2, 3)).square().sum().backward()
    model[1].weight.grad[0, 0] = float("nan")
    path = gradient_report(model, histogram=True).save_png(tmp_path / "gradients.png")
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > 500
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # something is drawn


def test_layers_of_a_picture_are_added_up_and_put_together_where_there_are_too_many():
    from safeload.picturing import _by_layer

    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(40))
    for pair in model:
        pair(torch.randn(3, 2)).square().sum().backward()
    report = gradient_report(model, histogram=True)
    layers = _by_layer(report)
    assert list(layers) == [str(number) for number in range(40)]  # in natural order, not 0, 1, 10, 11
    counted = sum(sum(row.histogram) for row in report.rows)
    assert sum(sum(counts) for counts in layers.values()) == counted > 0


def test_a_picture_without_histograms_or_without_matplotlib_says_what_to_do(tmp_path, monkeypatch):
    model = _net()
    _backward(model)
    with pytest.raises(PrecisionError, match="histogram=True"):
        gradient_report(model).save_png(tmp_path / "x.png")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PrecisionError, match=r"safeload\[plots\]"):
        gradient_report(model, histogram=True).save_png(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


# --- several ranks ---


def _reference():
    """The report of one process that saw the batches of both ranks."""
    model = _net()
    for seed in range(2):
        torch.manual_seed(seed)
        (model(torch.randn(4, 7)).square().mean() / 2).backward()
    return {row.name: row for row in gradient_report(model, histogram=True).rows}


def _same_as(report, reference, strip=""):
    assert report.ranks == 2
    for row in report.rows:
        expected = reference[row.name.replace(strip, "")]
        assert row.shape == expected.shape, row
        assert row.norm == pytest.approx(expected.norm, rel=1e-4), row
        assert row.min == pytest.approx(expected.min, rel=1e-4, abs=1e-7)
        assert row.max == pytest.approx(expected.max, rel=1e-4, abs=1e-7)
        assert row.zero_fraction == expected.zero_fraction
        assert row.elements == expected.elements
    assert len(report.rows) == len(reference)


@on_ranks(2)
def test_shards_of_fsdp2_and_fsdp1_and_copies_of_ddp_are_put_together_over_the_group():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    rank = torch.distributed.get_rank()
    reference = _reference()
    fsdp2 = fully_shard(_net())
    fsdp1 = FullyShardedDataParallel(
        _net(),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    ddp = nn.parallel.DistributedDataParallel(_net())
    for model, strip in ((fsdp2, ""), (fsdp1, "_fsdp_wrapped_module."), (ddp, "module.")):
        _backward(model, seed=rank)
        local = gradient_report(model, histogram=True)
        assert local.ranks == 1
        together = gradient_report(
            model, histogram=True, group=torch.distributed.group.WORLD, timeout=timedelta(seconds=30)
        )
        _same_as(together, reference, strip)
        looked_at = sum(row.local_elements for row in local.rows)
        assert looked_at == 58 if model is ddp else looked_at < 58
    whole = math.sqrt(sum(row.norm**2 for row in reference.values()))
    flat = FullyShardedDataParallel(_net(), device_id=torch.device("cpu"), use_orig_params=False)
    _backward(flat, seed=rank)
    (row,) = gradient_report(flat, group=torch.distributed.group.WORLD, timeout=timedelta(seconds=30)).rows
    assert row.norm == pytest.approx(whole, rel=1e-4)
    assert row.local_elements == row.elements
    local = {row.name: row for row in gradient_report(fsdp2).rows}
    assert 0 < local["0.weight"].local_elements < 35
    assert f"{local['0.weight'].local_elements}/35 here" in str(gradient_report(fsdp2))


@on_ranks(2)
def test_a_report_on_one_rank_alone_does_not_wait_for_the_other():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_net())
    _backward(model)
    if torch.distributed.get_rank() == 0:
        assert gradient_report(model).sick == ()


def test_a_nan_on_one_shard_is_a_nan_of_the_whole():
    model = _net()
    _backward(model)
    fine = gradient_report(model)
    model[0].weight.grad[0, 0] = float("nan")
    sick = gradient_report(model)
    merged = merge_reports([fine, sick])
    assert merged.rows[0].name == "0.weight"
    assert (merged.rows[0].health, merged.rows[0].finite, merged.rows[0].nonfinite) == ("not finite", False, 1)
    assert math.isnan(merged.rows[0].norm)
    assert math.isnan(merge_reports([sick, fine]).rows[0].min)


def test_merging_takes_none_for_an_answer():
    model = _net()
    none = gradient_report(model)
    assert {row.health for row in merge_reports([none, none]).rows} == {"none"}
    _backward(model)
    some = gradient_report(model)
    merged = merge_reports([none, some])  # a rank whose shard is empty has no numbers
    assert {row.health for row in merged.rows} == {"ok"}
    assert dataclasses.replace(merged, ranks=1).rows == some.rows
