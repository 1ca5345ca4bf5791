"""check_precision: what it finds, before the first step, and how it says it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from safeload.errors import PrecisionError, from_fields
from safeload.gradients import gradient_report
from safeload.precision import PrecisionWarning, check_precision
from safeload.protecting import protect
from safeload.upcasting import upcast_trainable


class Outer(nn.Module):
    """A frozen float16 tower, a projector and a language model of two layers."""

    def __init__(self, projector=torch.float32, layers=torch.float32, protected=False):
        super().__init__()
        self.vision_tower = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).half().requires_grad_(False).eval()
        if protected:
            protect(self.vision_tower, name="vision", origin="a test")
        self.projector = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 6)).to(projector)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)).to(layers)
        self.norm = nn.LayerNorm(6)


@pytest.mark.parametrize("ask", [lambda x: check_precision(x, mixed_precision="no"), upcast_trainable, gradient_report])
@pytest.mark.parametrize("what", [None, "model", [nn.Linear(1, 1)]])
def test_what_is_no_module_is_a_typed_error(ask, what):
    with pytest.raises(PrecisionError, match=rf"model is a {type(what).__name__}.*nn\.Module"):
        ask(what)


def test_a_right_model_passes_and_its_tower_is_listed_with_its_dtype():
    report = check_precision(Outer(protected=True), mixed_precision="fp16")
    assert report.findings == ()
    assert [(tower.name, tower.dtypes) for tower in report.towers] == [("vision_tower", (("float16", 56),))]
    assert report.frozen == (("float16", 56),)
    assert dict(report.trainable) == {"float32": sum(p.numel() for p in Outer().parameters() if p.requires_grad)}
    assert "vision_tower" in str(report)
    assert "float16" in str(report)
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))


def test_the_error_groups_by_module_counts_and_says_the_call():
    model = Outer(projector=torch.float16, layers=torch.float16, protected=True)
    with pytest.raises(PrecisionError) as raised:
        check_precision(model, mixed_precision="fp16", grad_scaler=torch.amp.GradScaler("cpu"))
    text = str(raised.value)
    assert "projector: float16, 4 parameters, 96 elements" in text
    assert "layers: float16, 4 parameters, 84 elements" in text
    assert "Attempting to unscale FP16 gradients" in text
    assert "safeload.upcast_trainable(model)" in text
    assert "vision_tower" not in text
    expected = {name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16}
    assert set(raised.value.parameters) == expected
    assert len(expected) == 8
    assert raised.value.stage == "precision"
    assert from_fields(json.loads(json.dumps(raised.value.to_fields()))).parameters == raised.value.parameters


def test_layers_of_a_list_with_an_odd_member_each_are_one_line():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(30))
    for layer in model.layers:
        layer.weight.requires_grad_(False)
        layer.bias.data = layer.bias.data.half()
    with pytest.raises(PrecisionError) as raised:
        check_precision(model, mixed_precision="fp16")
    assert "  layers.*.bias: float16, 30 parameters, 90 elements" in str(raised.value)
    assert len(raised.value.parameters) == 30


def test_a_long_error_is_cut_in_its_text_and_whole_in_its_data():
    model = nn.ModuleDict({f"adapter_{letter}": nn.Linear(2, 2).half() for letter in "abcdefghijklmnopqrstuvwxyz"})
    for module in model.values():
        module.bias.data = module.bias.data.float()
    with pytest.raises(PrecisionError, match="and 6 more groups") as raised:
        check_precision(model, mixed_precision="fp16")
    assert len(raised.value.parameters) == 26


def test_the_whole_model_in_half_is_one_line():
    with pytest.raises(PrecisionError, match="  the whole model: float16, 2 parameters, 6 elements"):
        check_precision(nn.Linear(2, 2).half(), mixed_precision="fp16")


def test_half_master_weights_are_a_warning_with_the_reason():
    model = Outer(layers=torch.bfloat16)
    with pytest.warns(PrecisionWarning, match=r"(?s)layers: bfloat16, 4 parameters.*rounded away.*upcast_trainable"):
        report = check_precision(model, mixed_precision="bf16")
    assert [finding.severity for finding in report.findings] == ["warning"]
    assert report.errors == ()


@pytest.mark.parametrize("model", [nn.Module(), nn.Sequential(), nn.Linear(2, 2).half().requires_grad_(False)], ids=str)
def test_a_model_with_nothing_to_train_passes(model):
    report = check_precision(model, mixed_precision="fp16")
    assert report.findings == ()
    assert report.trainable == ()
    assert upcast_trainable(model) == []


def test_a_lazy_module_that_has_not_run_is_a_warning():
    with pytest.warns(PrecisionWarning, match="lazy module"):
        report = check_precision(nn.Sequential(nn.LazyLinear(3)).half(), mixed_precision="fp16")
    assert [finding.elements for finding in report.findings] == [0]


def test_parameters_on_meta_are_judged_like_others():
    with torch.device("meta"):
        model = nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(PrecisionError, match="float16, 2 parameters, 6 elements"):
        check_precision(model, mixed_precision="fp16")


# --- the optimizer ---


def test_an_optimizer_of_this_model_passes():
    model = Outer()
    optimizer = torch.optim.AdamW(model.parameters())  # frozen float16 parameters among them: fine
    assert check_precision(model, mixed_precision="fp16", optimizer=optimizer).findings == ()


def test_an_optimizer_that_holds_replaced_parameters_is_an_error():
    model = Outer()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model.projector[0].weight = nn.Parameter(model.projector[0].weight.detach().clone())
    with pytest.raises(PrecisionError, match=r"param_groups\[0\]\['params'\]\[0\].*no longer the model's") as raised:
        check_precision(model, mixed_precision="no", optimizer=optimizer)
    assert list(raised.value.parameters) == ["optimizer.param_groups[0]['params'][0]"]
    assert "build the optimizer" in raised.value.fix


def test_a_parameter_outside_the_model_and_one_made_later_are_warnings():
    model = Outer()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(()))]})
    model.adapter = nn.Linear(7, 7)
    with pytest.warns(PrecisionWarning, match=r"(?s)outside this model.*adapter: float32, 2 parameters.*never trains"):
        report = check_precision(model, mixed_precision="no", optimizer=optimizer)
    assert [finding.rule for finding in report.findings] == ["optimizer-foreign", "optimizer-misses"]


def test_moments_left_in_half_precision_are_found_and_mended():
    model = nn.Linear(3, 3).half()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3).half()).sum().backward()
    optimizer.step()
    upcast_trainable(model)
    with pytest.raises(PrecisionError, match="moments are still of the dtype") as raised:
        check_precision(model, mixed_precision="fp16", optimizer=optimizer)
    assert set(raised.value.parameters) == {"weight", "bias"}
    with pytest.raises(RuntimeError):  # what it would have come to
        optimizer.step()
    upcast_trainable(model, optimizer=optimizer)
    assert check_precision(model, mixed_precision="fp16", optimizer=optimizer).findings == ()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.float32


def test_two_optimizers_that_share_a_model():
    model = Outer()
    halves = [torch.optim.AdamW(model.projector.parameters()), torch.optim.SGD([*model.layers.parameters()], lr=0.1)]
    with pytest.warns(PrecisionWarning, match="norm: float32, 2 parameters"):
        check_precision(model, optimizer=halves)
    halves[1].add_param_group({"params": model.norm.parameters()})
    assert check_precision(model, optimizer=halves).findings == ()
    with pytest.warns(PrecisionWarning, match="never trains"):
        check_precision(model, optimizer=halves[0])
    model.layers[1].bias = nn.Parameter(torch.zeros(6))
    with pytest.raises(PrecisionError, match=r"optimizer\[1\]\.param_groups\[0\]\['params'\]\[3\]"):
        check_precision(model, optimizer=halves)


def test_the_scaler_of_a_prepared_optimizer_is_read():
    class Prepared:
        scaler = torch.amp.GradScaler("cpu")

        def __init__(self, optimizer):
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    model = nn.Linear(2, 2).half()
    with pytest.raises(PrecisionError, match="GradScaler refuses"):
        check_precision(model, optimizer=Prepared(torch.optim.SGD(model.parameters())))


# --- one dtype in an FSDP wrap ---


def test_mixed_dtypes_in_one_fsdp1_wrap_are_named_by_wrap():
    model = Outer()
    with pytest.raises(
        PrecisionError, match=r"the whole model: float16 \+ float32, 4 parameters, 56 elements"
    ) as raised:
        check_precision(model, mixed_precision="bf16", fsdp_wrap=["ModuleList"])
    assert all(name.startswith("vision_tower.") for name in raised.value.parameters)
    assert "uniform dtype" in str(raised.value)
    assert "ignored_modules" in raised.value.fix


def test_a_wrap_of_its_own_and_a_protected_tower_are_not_mixed():
    class Tower(nn.Sequential):
        pass

    model = Outer(protected=True)
    check_precision(model, mixed_precision="bf16", fsdp_wrap=[])  # protected: in no wrap
    model.second = Tower(nn.Linear(2, 2).half()).requires_grad_(False)
    check_precision(model, mixed_precision="bf16", fsdp_wrap=[Tower])
    with pytest.raises(PrecisionError, match="mixed-dtypes-in-fsdp1-wrap"):
        check_precision(model, mixed_precision="bf16", fsdp_wrap=[])


def _accelerator(**plugin):
    class Plugin:
        fsdp_version, transformer_cls_names_to_wrap, ignored_modules = 1, ["ModuleList"], None

    class State:
        fsdp_plugin = Plugin()

    class Accelerator:
        mixed_precision, scaler, state = "bf16", None, State()

    for name, value in plugin.items():
        setattr(Plugin, name, value)
    return Accelerator()


def test_the_wraps_of_an_accelerator_are_read():
    model = Outer()
    with pytest.raises(PrecisionError, match="mixed-dtypes-in-fsdp1-wrap"):
        check_precision(model, _accelerator())
    check_precision(model, _accelerator(ignored_modules=[model.vision_tower]))
    check_precision(model, _accelerator(ignored_modules="vision_.*"))
    check_precision(model, _accelerator(fsdp_version=2))  # frozen ones may differ there
    check_precision(model, _accelerator(min_num_params=100))  # wraps by size: not known before
    model._no_split_modules = ["Sequential"]  # the tower in a wrap of its own
    check_precision(model, _accelerator(transformer_cls_names_to_wrap=None))
    del model._no_split_modules
    model.projector[0].bfloat16()
    with pytest.raises(PrecisionError, match=r"mixed-dtypes-in-fsdp2-wrap.*uniform original parameter dtype"):
        check_precision(model, _accelerator(fsdp_version=2))
