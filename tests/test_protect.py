"""What one process can do to a protected tower."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from safeload.checking import check_towers
from safeload.errors import ProtectionError, TowerChangedError
from safeload.glancing import _before_part
from safeload.listening import PART
from safeload.protecting import frozen_towers, protect, tower_state, unfreeze
from tests.protect_towers import MAKERS, Pair, assert_whole, features, make_clip, pixels, protected, tensors_of

KINDS = sorted(MAKERS)
WIDTHS = {"clip": 32, "seed": 8}


def pair(kind: str) -> tuple[Pair, dict[str, torch.Tensor]]:
    tower = protected(kind)
    return Pair(tower, WIDTHS[kind]), tensors_of(tower)


def test_protect_returns_the_same_object_of_a_class_with_the_same_name():
    tower = make_clip()
    before = type(tower)
    assert protect(tower, name="clip", origin="here") is tower
    assert isinstance(tower, before)
    assert type(tower) is not before
    assert (type(tower).__name__, type(tower).__qualname__, type(tower).__module__) == (
        before.__name__,
        before.__qualname__,
        before.__module__,
    )
    assert type(protected()) is type(tower)


def test_parts_that_train_in_a_tower_that_does_not_are_put_into_eval_mode():
    tower = make_clip().eval()
    *_, last = tower.modules()
    last.training = True
    protect(tower, name="clip", origin="here")
    assert not any(part.training for part in tower.modules())


def glances(tower: nn.Module) -> list[int]:
    """How many hooks of ours each module has."""
    return [sum(hook is _before_part for hook in part._forward_pre_hooks.values()) for part in tower.modules()]


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
        if module.bias is not None:
            module.bias.data.zero_()


HARMLESS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to_dtype": lambda m: m.to(torch.float16),
    "to_meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to_memory_format": lambda m: m.to(memory_format=torch.channels_last),
    "train": lambda m: m.train(),
    "train_each": lambda m: [part.train() for part in m.modules()],
    "apply_init": lambda m: m.apply(_init),
    "share_memory": lambda m: m.share_memory(),
    "zero_grad": lambda m: m.zero_grad(),
    "kbit_casts": lambda m: [setattr(p, "data", p.data.to(torch.float64)) for p in m.parameters()],
    "replace_parameters": lambda m: [
        setattr(part, name, nn.Parameter(torch.zeros_like(p)))
        for part in m.modules()
        for name, p in part.named_parameters(recurse=False)
    ],
    "replace_behind_the_guard": lambda m: [
        part._buffers.update({name: torch.zeros_like(b) for name, b in part.named_buffers(recurse=False)})
        for part in m.modules()
    ],
    "requires_grad_on_the_outer_model": lambda m: m.requires_grad_(True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", sorted(HARMLESS))
@pytest.mark.filterwarnings("ignore:tower .* is protected")
def test_the_tower_stays_what_was_verified_after(what: str, kind: str):
    model, want = pair(kind)
    seen = features(model.tower, pixels())
    HARMLESS[what](model)
    assert torch.equal(features(model.tower, pixels()), seen)
    assert_whole(model.tower, want)


def test_dropout_and_batch_statistics_stay_off():
    model, want = pair("seed")
    model.train()
    for _ in range(3):
        model(pixels()).sum().backward()
    assert_whole(model.tower, want)
    assert all(p.grad is None for p in model.tower.parameters())


def test_requires_grad_on_the_tower_is_refused_and_names_unfreeze():
    with pytest.raises(ProtectionError, match="unfreeze"):
        protected().requires_grad_(True)


def test_requires_grad_on_the_outer_model_warns_before_use():
    model, _ = pair("clip")
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"made trainable.*unfreeze"):
        model(pixels())


def test_a_new_module_inside_the_tower_is_refused_and_names_unfreeze():
    tower = protected()
    layer = next(part for part in tower.modules() if isinstance(part, nn.Linear))
    parent = next(part for part in tower.modules() if layer in part._modules.values())
    key = next(key for key, child in parent._modules.items() if child is layer)
    with pytest.raises(ProtectionError, match=rf"{key}.*exclude_modules.*unfreeze"):
        setattr(parent, key, nn.Linear(2, 2))
    assert getattr(parent, key) is layer


def test_a_new_parameter_inside_the_tower_is_refused():
    with pytest.raises(ProtectionError, match="unfreeze"):
        protected().register_parameter("prompt", nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("write", ["versioned", "through_data"])
def test_in_place_changes_are_noticed_before_the_first_use_and_named(write: str):
    model, _ = pair("clip")
    name, parameter = list(model.tower.named_parameters())[3]
    with torch.no_grad():
        (parameter if write == "versioned" else parameter.data).mul_(1.5)
    with pytest.raises(TowerChangedError, match=f"{name}: overwritten") as caught:
        model(pixels())
    assert caught.value.changes == {name: "overwritten in place"}


def test_equal_values_written_in_place_are_no_change():
    model, want = pair("clip")
    with torch.no_grad():
        for parameter in model.tower.parameters():
            parameter.copy_(parameter.clone())
    model(pixels())
    assert_whole(model.tower, want)


class Renewing(nn.Module):
    """As dynamic rotary embeddings: the module gives its buffer a new value in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cache", torch.full((2,), float(images.shape[0])), persistent=False)
        return images.mean() * self.scale * self.cache


def test_a_buffer_that_the_tower_itself_renews_is_its_own_affair():
    tower = protect(nn.Sequential(Renewing()), origin="here")
    for size in (2, 3, 3):
        tower(torch.ones(size, 1))
        assert tower[0].cache.tolist() == [size, size]
        tower.train()
        check_towers(tower)
    twin = copy.deepcopy(tower)
    check_towers(twin)
    tower[0].cache = torch.zeros(2)
    assert tower[0].cache.tolist() == [3, 3]


def test_every_part_knows_what_is_in_it_also_where_parts_are_shared():
    shared = nn.Linear(3, 3)
    tower = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.ReLU(), shared, nn.Linear(3, 2)), shared)
    protect(tower, origin="here")
    for part in tower.modules():
        mark = part.__dict__[PART]
        assert [each.module() for each in mark.parts] == list(part.modules())
        want = [id(tensor) for each in part.modules() for tensor in each.parameters(recurse=False)]
        assert [id(kept.tensor) for kept in mark.kept] == want


def test_the_outer_state_dict_has_nothing_of_the_tower_and_the_towers_own_is_complete():
    model, want = pair("seed")
    assert sorted(model.state_dict()) == ["head.0.bias", "head.0.weight", "head.1.bias", "head.1.weight"]
    assert sorted(model.tower.state_dict()) == sorted(set(want) - {"signs"})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_loading_a_state_dict_without_the_tower_leaves_it(strict: bool, assign: bool):
    model, want = pair("seed")
    objects = {name: id(p) for name, p in model.tower.named_parameters()}
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, strict=strict, assign=assign)
    assert model.head[0].weight.eq(1).all()
    assert objects == {name: id(p) for name, p in model.tower.named_parameters()}
    assert_whole(model.tower, want)


@pytest.mark.parametrize("assign", [False, True])
def test_other_values_in_a_state_dict_are_reported_by_name_and_the_verified_ones_win(assign: bool):
    model, want = pair("clip")
    name = sorted(model.tower.state_dict())[2]
    state = {**model.state_dict(), **{f"tower.{k}": v.clone() for k, v in model.tower.state_dict().items()}}
    state[f"tower.{name}"] += 1
    with pytest.warns(
        UserWarning, match=rf"other values for 1 tensors.*tower\.{name}.*verified values were kept.*unfreeze"
    ):
        model.load_state_dict(state, assign=assign)
    assert_whole(model.tower, want)
    assert tower_state(model.tower).conflicts == [f"tower.{name}"]


def test_a_misspelt_key_of_the_tower_is_called_that():
    model, want = pair("clip")
    name = sorted(model.tower.state_dict())[2]
    state = {**model.state_dict(), f"tower.{name}x": torch.zeros(1)}
    with pytest.warns(
        UserWarning, match=rf"names 1 tensors that tower 'clip' .* does not have: tower\.{name}x\..*kept"
    ):
        model.load_state_dict(state)
    state[f"tower.{name}"] = model.tower.state_dict()[name] + 1
    with pytest.warns(UserWarning, match=rf"other values for 1 tensors .*: tower\.{name}; it names 1 tensors that"):
        model.load_state_dict(state, strict=False)
    assert_whole(model.tower, want)


def test_a_buffer_that_older_checkpoints_hold_is_silent_where_it_is_the_same():
    model, want = pair("seed")
    state = {**model.state_dict(), "tower.signs": model.tower.signs.clone()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)
    assert_whole(model.tower, want)


def test_other_values_loaded_into_the_tower_itself_are_refused():
    tower = protected()
    state = {name: value + 1 for name, value in tower.state_dict().items()}
    with pytest.raises(ProtectionError, match="unfreeze"):
        tower.load_state_dict(state)


def test_the_same_values_in_a_state_dict_are_silent():
    model, want = pair("seed")
    state = {**model.state_dict(), **{f"tower.{k}": v.clone() for k, v in model.tower.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)
        model(pixels())
    assert_whole(model.tower, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
def test_copies_are_protected_and_bit_equal(how: str, kind: str):
    model, want = pair(kind)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
    assert_whole(twin.tower, want)
    assert list(frozen_towers(twin)) == ["tower"]
    twin.half()
    assert_whole(twin.tower, want)
    assert not {p.data_ptr() for p in twin.tower.parameters()} & {p.data_ptr() for p in model.tower.parameters()}
    assert torch.equal(features(twin.tower, pixels()), features(model.tower, pixels()))
    assert glances(twin.tower) == glances(model.tower)


def test_a_tower_pickled_after_a_change_is_refused():
    tower = protected()
    with torch.no_grad():
        next(tower.parameters()).data.view(-1)[1] += 1
    with pytest.raises(TowerChangedError, match="overwritten in place"):
        pickle.loads(pickle.dumps(tower))


def test_a_copied_part_of_a_tower_is_an_ordinary_module():
    layer = next(part for part in protected().modules() if isinstance(part, nn.Linear))
    twin = copy.deepcopy(layer)
    twin.weight = nn.Parameter(torch.zeros_like(twin.weight))
    assert twin.weight.eq(0).all()


def test_nothing_keeps_a_dropped_tower_alive():
    gc.disable()
    try:
        tower = protected()
        features(tower, pixels())
        gone = weakref.ref(tower)
        del tower
        assert gone() is None
    finally:
        gc.enable()


def test_save_pretrained_and_back(tmp_path):
    model, want = pair("clip")
    kind = type(make_clip())
    model.tower.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert all(torch.equal(value, want[name]) for name, value in tensors_of(again).items())
    assert again.config.architectures == [kind.__name__]


def test_unfreeze_gives_an_ordinary_module_back():
    model, want = pair("clip")
    kind = tower_state(model.tower) and type(model.tower)._safeload_original
    assert unfreeze(model.tower) is model.tower
    assert type(model.tower) is kind
    assert not frozen_towers(model)
    assert all(torch.equal(value, want[name]) for name, value in tensors_of(model.tower).items())
    assert all(p.requires_grad for p in model.parameters())
    assert all(part.training for part in model.modules())
    assert len(model.state_dict()) == 4 + len(model.tower.state_dict())
    model(pixels()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.half()
    assert next(model.tower.parameters()).dtype == torch.float16


def test_unfreeze_gives_memory_of_its_own_and_a_dtype_that_may_be_trained():
    tower = protected(dtype=torch.float16)
    places = {p.data_ptr() for p in tower.parameters()}
    unfreeze(tower)
    assert {p.dtype for p in tower.parameters()} == {torch.float32}
    assert not places & {p.data_ptr() for p in tower.parameters()}
    assert {p.dtype for p in unfreeze(protected(dtype=torch.bfloat16)).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in unfreeze(protected(), dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_unfreeze_and_protect_again():
    tower = protected()
    before = glances(tower)
    assert set(glances(unfreeze(tower))) == {0}
    protect(tower, name="again", origin="second load")
    assert list(frozen_towers(nn.ModuleList([tower]))) == ["0"]
    assert glances(tower) == before


@pytest.mark.parametrize("call", [tower_state, unfreeze])
def test_an_ordinary_module_is_refused(call):
    with pytest.raises(ProtectionError, match="not a protected tower"):
        call(nn.Linear(2, 2))


def test_protecting_twice_is_refused():
    with pytest.raises(ProtectionError, match="protected already"):
        protect(protected(), name="again", origin="here")


def test_a_tensor_without_data_is_refused():
    with pytest.raises(ProtectionError, match="no data"):
        protect(make_clip().to("meta"), name="meta", origin="nowhere")


def test_towers_are_found_by_qualified_name():
    model = nn.ModuleDict({"a": Pair(protected()), "b": protected("seed")})
    assert sorted(frozen_towers(model)) == ["a.tower", "b"]
    assert list(frozen_towers(model["b"])) == [""]
