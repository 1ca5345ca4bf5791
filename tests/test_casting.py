"""The dtype at a tower's door: casts where asked for, an error that says what to do where not."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from safeload import safe_from_pretrained
from safeload.casting import install_boundary_casts, install_boundary_errors, remove_boundary
from safeload.errors import PrecisionError
from safeload.protecting import protect, unfreeze
from tests.towers import clip_folder

Pair = collections.namedtuple("Pair", "left right")


class Tower(nn.Module):
    """Gives back what came in, through a layer where it can."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.layer = nn.Linear(4, 4).to(dtype)
        self.seen = None

    def forward(self, pixels=None, *, ids=None, attention_mask=None, extra=None):
        self.seen = (pixels, ids, attention_mask, extra)
        out = self.layer(pixels) if pixels is not None else self.layer.weight[ids]
        return {"features": out, "ids": ids, "extra": extra, "mask": attention_mask}

    def encode(self, pixels):
        return self.layer(pixels)


@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outside", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inputs_come_in_in_the_towers_dtype_and_outputs_leave_in_the_callers(inside, outside):
    tower = install_boundary_casts(Tower(inside))
    out = tower(torch.ones(2, 4, dtype=outside))
    assert tower.seen[0].dtype is inside
    assert out["features"].dtype is outside
    assert tower.encode(torch.ones(2, 4, dtype=outside)).dtype is outside


def test_nothing_is_copied_where_the_dtypes_agree():
    tower = install_boundary_casts(Tower())
    pixels = torch.ones(2, 4, dtype=torch.float16)
    tower(pixels)
    assert tower.seen[0] is pixels


def test_integers_and_booleans_are_untouched_and_nesting_is_kept():
    tower = install_boundary_casts(Tower())
    ids, mask = torch.tensor([1, 2]), torch.tensor([True, False])
    extra = {
        "list": [torch.ones(1), ids],
        "tuple": (torch.ones(1), "text", None),
        "pair": Pair(torch.ones(1), 3),
        "ordered": collections.OrderedDict(a=torch.ones(1)),
        5: torch.ones(1, dtype=torch.bfloat16),
    }
    out = tower(torch.ones(2, 4), ids=ids, attention_mask=mask, extra=extra)
    _, seen_ids, seen_mask, seen = tower.seen
    assert seen_ids is ids
    assert seen_mask is mask
    assert seen["list"][1] is ids
    assert (seen["list"][0].dtype, seen["tuple"][0].dtype, seen[5].dtype) == (torch.float16,) * 3
    assert seen["tuple"][1:] == ("text", None)
    assert (type(seen["pair"]), seen["pair"].left.dtype, seen["pair"].right) == (Pair, torch.float16, 3)
    assert (type(seen["ordered"]), seen["ordered"]["a"].dtype) == (collections.OrderedDict, torch.float16)
    assert extra["list"][0].dtype is torch.float32  # the caller's own containers are left alone
    assert out["extra"]["pair"].left.dtype is torch.float32


def test_without_a_floating_input_the_outputs_stay_unless_a_dtype_was_named():
    ids = torch.tensor([0, 1])
    assert install_boundary_casts(Tower())(ids=ids)["features"].dtype is torch.float16
    assert install_boundary_casts(Tower(), output_dtype=torch.float32)(ids=ids)["features"].dtype is torch.float32


def test_an_additive_mask_stays_finite():
    tower = install_boundary_casts(Tower())
    mask = torch.full((2,), torch.finfo(torch.float32).min)
    tower(torch.ones(2, 4), attention_mask=mask, extra={"cross_mask": mask, "other": mask})
    assert torch.isfinite(tower.seen[2]).all()
    assert torch.isfinite(tower.seen[3]["cross_mask"]).all()
    assert torch.isinf(tower.seen[3]["other"]).all()  # what is not a mask is cast as `.to` casts


def test_gradients_flow_through_the_casts_to_what_comes_before_the_tower():
    tower = install_boundary_casts(Tower()).requires_grad_(False)
    before = nn.Linear(4, 4)
    tower(before(torch.ones(2, 4)))["features"].sum().backward()
    assert before.weight.grad.dtype is torch.float32
    assert before.weight.grad.abs().sum() > 0


def test_off_by_default_and_then_the_error_names_tower_dtypes_and_keyword():
    tower = install_boundary_errors(Tower(), name="vision_tower")
    with pytest.raises(PrecisionError) as raised:
        tower(torch.ones(2, 4))
    text = str(raised.value)
    for part in ("'vision_tower'", "torch.float16", "torch.float32", "cast_inputs=True", "(forward)"):
        assert part in text
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(PrecisionError, match=r"\(encode\)"):
        tower.encode(torch.ones(2, 4, dtype=torch.bfloat16))
    assert tower(torch.ones(2, 4).half())["features"].dtype is torch.float16


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        (nn.Linear(4, 4), torch.ones(2, 4)),
        (nn.Conv2d(3, 2, 2), torch.ones(1, 3, 4, 4)),
        (nn.Conv1d(3, 2, 2), torch.ones(1, 3, 4)),
        (nn.LayerNorm(4), torch.ones(2, 4)),
        (nn.BatchNorm1d(4), torch.ones(2, 4)),
        (nn.MultiheadAttention(4, 1), torch.ones(2, 4)),
        (nn.GRU(4, 4), torch.ones(2, 4)),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16])
def test_a_mismatch_of_every_kind_of_layer_is_explained_and_mended(layer, value, inside):
    class Door(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(layer).to(inside).eval()

        def forward(self, x):
            return self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)

    plain = Door()
    try:
        plain(value)
    except Exception:
        with pytest.raises(PrecisionError, match="cast_inputs=True"):
            install_boundary_errors(plain)(value)
    else:
        install_boundary_errors(plain)(value)  # torch takes the mixture here, and so do we
    install_boundary_casts(plain)(value)


def test_other_failures_and_other_mismatches_pass_as_they_are():
    tower = install_boundary_errors(Tower(torch.float32))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tower(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tower(torch.ones(2, 5).half().float())

    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("bad value")

    with pytest.raises(ValueError, match="bad value"):
        install_boundary_errors(Raises())(torch.ones(2))


def test_under_autocast_a_mixture_is_no_mismatch():
    tower = install_boundary_errors(Tower())
    with torch.autocast("cpu", torch.bfloat16):
        assert tower(torch.ones(2, 4))["features"].dtype is torch.bfloat16


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4).half(), nn.LayerNorm(4).half()

    def forward(self, x):
        return self.norm(self.linear(x))


def test_under_autocast_to_another_dtype_a_half_tower_keeps_to_its_own():
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.half()):
            with pytest.raises(PrecisionError, match=r"torch.float16 and was called with .*autocast to torch.bfloat16"):
                install_boundary_errors(Normed())(given)
        tower = install_boundary_casts(Normed())
        assert tower(x).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")
        compiled = torch.compile(tower, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), tower(x))
    with torch.autocast("cpu", torch.float16):
        assert tower(x).dtype is torch.float32


def test_a_model_that_casts_by_itself_is_left_to_do_so():
    class Casts(Tower):
        def forward(self, pixels):
            return self.layer(pixels.to(self.layer.weight.dtype))

    assert install_boundary_errors(Casts())(torch.ones(2, 4)).dtype is torch.float16


@pytest.mark.parametrize("install", [install_boundary_casts, install_boundary_errors])
def test_torch_compile_takes_the_tower_whole(install):
    tower = install(Tower()).eval()
    dtype = torch.float32 if install is install_boundary_casts else torch.float16

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.head = tower, nn.Linear(4, 2, dtype=dtype)

        def forward(self, x):
            return self.head(self.tower(x, extra={"a": [x]})["features"])

    outer = Outer()
    x = torch.randn(2, 4, dtype=dtype)
    compiled = torch.compile(outer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), outer(x))
    assert compiled(x).dtype is dtype


def test_copies_and_pickles_have_a_boundary_of_their_own():
    tower = install_boundary_casts(Tower(), name="t")
    for twin in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
        assert twin.forward.tower is twin
        with torch.no_grad():
            twin.layer.weight.zero_()
            twin.layer.bias.zero_()
        assert not twin(torch.ones(1, 4))["features"].any()
        assert tower(torch.ones(1, 4))["features"].any()
    buffer = io.BytesIO()
    torch.save(tower, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)(torch.ones(1, 4))["features"].dtype is torch.float32


def _replica(tower):
    """What `torch.nn.parallel.replicate` makes of a module for another device; it needs accelerators itself."""
    replica = tower._replicate_for_data_parallel()
    for name, child in tower._modules.items():
        replica._modules[name] = _replica(child)
    for name, parameter in tower._parameters.items():
        setattr(replica, name, parameter * 0)  # other values, as a sign of whose are used
    return replica


def test_replicas_of_data_parallel_have_a_boundary_of_their_own():
    for wrap in (lambda tower: tower, lambda tower: protect(tower, name="vision", origin="a test")):
        tower = install_boundary_casts(wrap(Tower()))
        twin = _replica(tower)
        assert not any(True for _ in twin.parameters())
        out = twin(torch.ones(2, 4))["features"]
        assert out.dtype is torch.float32
        assert not out.any()
        assert tower(torch.ones(2, 4))["features"].any()
        with pytest.raises(PrecisionError, match=r"torch\.float16"):
            _replica(install_boundary_errors(tower))(torch.ones(2, 4))
    assert callable(nn.Module._replicate_for_data_parallel)  # private: where it moves, replicas call the original


def test_the_signature_is_that_of_the_method():
    tower = Tower()
    expected = inspect.signature(tower.forward)
    assert inspect.signature(install_boundary_casts(tower).forward) == expected
    assert list(expected.parameters) == ["pixels", "ids", "attention_mask", "extra"]


def test_a_boundary_goes_away_and_is_not_put_twice():
    tower = install_boundary_casts(install_boundary_errors(install_boundary_casts(Tower())))
    assert tower(torch.ones(2, 4))["features"].dtype is torch.float32
    assert "forward" not in remove_boundary(tower).__dict__
    assert remove_boundary(tower) is tower
    with pytest.raises(RuntimeError, match="dtype"):
        tower(torch.ones(2, 4))


def test_a_protected_tower_can_have_one_before_or_after():
    for early in (True, False):
        tower = Tower()
        if early:
            install_boundary_casts(tower)
        protect(tower, name="vision", origin="a test")
        if not early:
            install_boundary_casts(tower)
        assert tower(torch.ones(2, 4))["features"].dtype is torch.float32
        twin = copy.deepcopy(tower)
        assert twin.forward.tower is twin
        assert twin(torch.ones(2, 4))["features"].dtype is torch.float32
        again = pickle.loads(pickle.dumps(tower))
        assert again(torch.ones(2, 4))["features"].dtype is torch.float32


@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16])
def test_a_clip_tower_with_its_model_output(inside):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    plain = CLIPVisionModel(config).eval()
    tower = copy.deepcopy(plain).to(inside)
    install_boundary_casts(tower)
    pixels = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        out, expected = tower(pixels, output_hidden_states=True), plain(pixels, output_hidden_states=True)
    assert type(out) is type(expected)
    assert out.keys() == expected.keys()
    assert {state.dtype for state in (*out.hidden_states, out.last_hidden_state, out.pooler_output)} == {torch.float32}
    assert torch.allclose(out.last_hidden_state, expected.last_hidden_state, atol=0.05)
    assert isinstance(tower(pixels, return_dict=False), tuple)


def test_a_module_without_floating_weights_is_called_as_it_is():
    class Count(nn.Module):
        def forward(self, x):
            return x

    x = torch.ones(2)
    assert install_boundary_casts(Count())(x) is x


@pytest.mark.parametrize("cast_inputs", [False, True])
def test_an_unfrozen_tower_has_no_boundary(tmp_path, cast_inputs):
    save_file({name: value.clone() for name, value in Tower().state_dict().items()}, tmp_path / "tower.safetensors")
    tower = safe_from_pretrained(
        Tower, tmp_path / "tower.safetensors", verify="off", device="cpu", cast_inputs=cast_inputs
    )
    unfreeze(tower)
    assert type(tower) is Tower
    assert set(tower.__dict__) - set(Tower().__dict__) <= {"_is_hf_initialized"}
    with pytest.raises(RuntimeError, match="dtype"):
        tower(torch.ones(2, 4).half())
    with torch.autocast("cpu", torch.bfloat16):
        assert tower(torch.ones(2, 4))["features"].dtype is torch.bfloat16


def test_cast_inputs_on_the_load_and_the_error_without(tmp_path):
    save_file({name: value.clone() for name, value in Tower().state_dict().items()}, tmp_path / "tower.safetensors")
    load = functools.partial(safe_from_pretrained, Tower, tmp_path / "tower.safetensors", verify="off", device="cpu")
    pixels = torch.ones(2, 4)
    with pytest.raises(PrecisionError, match=r"'Tower'.*torch.float16.*torch.float32.*cast_inputs=True"):
        load()(pixels)
    tower = load(cast_inputs=True)
    assert tower(pixels)["features"].dtype is torch.float32
    assert tower.layer.weight.dtype is torch.float16
    assert copy.deepcopy(tower)(pixels)["features"].dtype is torch.float32


def test_a_loaded_clip_tower_gives_a_float32_projector_what_it_takes(tmp_path):
    from transformers import CLIPVisionModel

    folder = clip_folder(tmp_path, dtype=torch.float16)
    pixels, projector = torch.randn(1, 3, 32, 32), nn.Linear(64, 8)
    load = functools.partial(safe_from_pretrained, CLIPVisionModel, folder, verify="off", device="cpu")
    assert load()(pixels).last_hidden_state.dtype is torch.float16  # CLIP casts its pixels itself
    projector(load(cast_inputs=True)(pixels).last_hidden_state).sum().backward()
    assert torch.isfinite(projector.weight.grad).all()
