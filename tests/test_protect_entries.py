"""The ways into a tower beside calling it: its other methods, its parts, parts of parts. Each is looked at first."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

from safeload.errors import IntegrityError, TowerChangedError
from safeload.protecting import frozen_towers, protect, tower_state, unfreeze
from tests.protect_towers import assert_whole, features, make_clip, make_seed_tower, pixels, tensors_of


class Own(nn.Module):
    """Own code: methods that use weights without calling any module, and one that answers in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(4, 4))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5)))
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) @ self.mixing

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.mixing

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]

    def in_pieces(self, x: torch.Tensor) -> Any:
        for row in x:
            yield self.body(row)


def make_whole_clip() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def make_vae() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an extra")
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2).eval()


def make_own() -> nn.Module:
    torch.manual_seed(0)
    return Own().eval()


def _vision(clip: nn.Module) -> nn.Module:
    return getattr(clip, "vision_model", clip)  # transformers 4 has one module more around it


HIDDEN = torch.ones(1, 17, 32)
IMAGES = pixels()
X = torch.ones(3, 4)

# how the tower is made, a parameter of it that is used, the way in
WAYS = {
    "call": (make_clip, "embeddings.class_embedding", lambda t: t(IMAGES)),
    "forward": (make_clip, "embeddings.class_embedding", lambda t: t.forward(IMAGES)),
    "child": (make_clip, "encoder.layers.0.mlp.fc1.weight", lambda t: _vision(t).encoder(HIDDEN)),
    "part of a part": (make_clip, "encoder.layers.1.mlp.fc1.bias", lambda t: _vision(t).encoder.layers[1].mlp(HIDDEN)),
    "leaf": (make_clip, "post_layernorm.weight", lambda t: _vision(t).post_layernorm(HIDDEN)),
    "clip images": (make_whole_clip, "visual_projection.weight", lambda t: t.get_image_features(IMAGES)),
    "clip text": (make_whole_clip, "text_projection.weight", lambda t: t.get_text_features(torch.ones(1, 3).long())),
    "clip half": (make_whole_clip, "vision_model.embeddings.class_embedding", lambda t: t.vision_model(IMAGES)),
    "vae encode": (make_vae, "encoder.conv_in.weight", lambda t: t.encode(IMAGES)),
    "vae decode": (make_vae, "decoder.conv_in.weight", lambda t: t.decode(torch.ones(1, 2, 8, 8))),
    "vae child": (make_vae, "encoder.conv_in.weight", lambda t: t.encoder(IMAGES)),
    "own method": (make_own, "mixing", lambda t: t.project(X)),
    "attention": (make_own, "attention.out_proj.weight", lambda t: t.attend(X)),
    "attention itself": (make_own, "attention.out_proj.weight", lambda t: t.attention(X, X, X)),
    "in pieces": (make_own, "body.0.weight", lambda t: list(t.in_pieces(X))),
    "buffer": (make_seed_tower, "norm.running_mean", lambda t: t.norm(torch.ones(1, 8, 2, 2))),
}
WRITES = {
    "counted": lambda tensor: tensor.mul_(1.5).add_(1),
    "through data": lambda tensor: tensor.data.mul_(1.5).add_(1),
    "by numpy": lambda tensor: tensor.detach().numpy().__iadd__(1),
}


def _name(tower: nn.Module, ending: str) -> str:
    [name] = [kept.name for kept in tower_state(tower).kept if f".{kept.name}".endswith(f".{ending}")]
    return name


def _tensor(tower: nn.Module, name: str) -> torch.Tensor:
    return next(kept.tensor for kept in tower_state(tower).kept if kept.name == name)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_an_in_place_write_is_noticed_before_the_first_use(way):
    make, ending, use = WAYS[way]
    for label, write in WRITES.items():
        tower = protect(make(), origin="here")
        name = _name(tower, ending)
        with torch.no_grad():
            write(_tensor(tower, name))
        for _ in range(2):
            with pytest.raises(TowerChangedError, match="unfreeze") as caught:
                use(tower)
            assert caught.value.changes == {name: "overwritten in place"}, label


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_counted_write_is_noticed_between_two_uses_and_the_rest_is_mended(way):
    make, ending, use = WAYS[way]
    tower = protect(make(), origin="here")
    want = tensors_of(tower)
    use(tower)
    name = _name(tower, ending)
    tensor = _tensor(tower, name)
    tensor.data = tensor.data.double() * 3  # a cast with other values: the verified ones are put back
    use(tower)
    assert_whole(tower, want)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(TowerChangedError, match=f"{name}: overwritten in place"):
        use(tower)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_nothing_leaves_a_tower_before_the_verdict(way):
    make, _, use = WAYS[way]
    asked = []

    def verdict() -> None:
        asked.append(1)
        raise IntegrityError("not these bytes", path="here")

    tower = protect(make(), origin="here", verdict=verdict)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="not these bytes"):
            use(tower)
    assert asked == [1]
    good = protect(make(), origin="here", verdict=lambda: asked.append(2))
    use(good)
    use(good)
    assert asked == [1, 2]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_answer_is_that_of_an_ordinary_module_also_of_copies_and_after_unfreeze(way):
    make, _, use = WAYS[way]
    with torch.no_grad():
        want = use(make())
    tower = protect(make(), origin="here")
    unfrozen = unfreeze(protect(make(), origin="here")).eval()
    assert type(unfrozen) is type(make())
    assert not [hook for part in unfrozen.modules() for hook in part._forward_pre_hooks.values()]
    for each in (tower, copy.deepcopy(tower), pickle.loads(pickle.dumps(tower)), unfrozen):
        with torch.no_grad():
            assert torch.allclose(_first(use(each)), _first(want), atol=1e-5)


def _first(answer: Any) -> torch.Tensor:
    if isinstance(answer, torch.Tensor):
        return answer
    if hasattr(answer, "latent_dist"):
        return answer.latent_dist.mean
    return _first(answer[0])


def test_evaluation_mode_is_put_back_before_a_part_is_used():
    tower = protect(make_own(), origin="here")
    want = tower.body(X)
    tower.body.train()
    assert torch.equal(tower.body(X), want)
    assert not tower.body[1][1].training


@pytest.mark.parametrize("way", ["attention", "child", "clip images", "leaf", "own method", "vae encode"])
def test_every_way_in_compiles_to_one_graph_and_is_looked_at_when_traced(way):
    make, ending, use = WAYS[way]
    torch._dynamo.reset()
    tower = protect(make(), origin="here")
    want = _first(use(tower))
    run = torch.compile(use, backend="eager", fullgraph=True)
    assert torch.allclose(_first(run(tower)), want, atol=1e-5)
    changed = protect(make(), origin="here")
    with torch.no_grad():
        _tensor(changed, _name(changed, ending)).data.add_(1)
    with pytest.raises(Exception, match="overwritten in place"):
        run(changed)


def test_parts_are_looked_at_while_another_thread_is_inside():
    """A call of the tower in one thread does not spare a part that another thread calls."""
    tower = protect(make_own(), origin="here")
    inside, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go.wait(10)

    tower.body[0].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: tower(X))
    thread.start()
    assert inside.wait(10)
    with torch.no_grad():
        tower.body[1][0].weight.add_(1)
    with pytest.raises(TowerChangedError):
        tower.body[1](X)
    go.set()
    thread.join()
    assert not tower_state(tower).inside | tower_state(tower).within


def test_a_call_that_fails_leaves_no_thread_inside():
    tower = protect(make_own(), origin="here")
    for part in (tower, tower.body):
        with pytest.raises(RuntimeError, match="shapes"):
            part(torch.ones(2, 3))
        assert not tower_state(tower).inside | tower_state(tower).within
    assert not tower.body._forward_hooks


def test_a_call_that_is_interrupted_spares_no_later_one():
    tower = protect(make_own(), origin="here")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for part in (tower, tower.body):
        handle = tower.body[0].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            part(X)
        handle.remove()
    with torch.no_grad():
        tower.mixing.add_(1)
    with pytest.raises(TowerChangedError):
        tower(X)


def test_a_part_that_is_kept_without_its_tower_is_still_looked_at():
    tower = protect(make_whole_clip(), origin="here")
    part = tower.vision_model
    want = tower.vision_model(IMAGES).pooler_output
    del tower
    gc.collect()
    assert torch.equal(part(IMAGES).pooler_output, want)
    part.half()
    assert torch.equal(part(IMAGES).pooler_output, want)
    with torch.no_grad():
        part.post_layernorm.weight.add_(1)
    with pytest.raises(TowerChangedError, match=r"post_layernorm\.weight: overwritten in place"):
        part(IMAGES)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_writes_through_data_after_the_first_use_are_noticed_in_the_hosts_memory(way):
    make, ending, use = WAYS[way]
    tower = protect(make(), origin="here")
    use(tower)
    name = _name(tower, ending)
    for parameter in (*tower.parameters(), *tower.buffers()):
        if parameter.is_floating_point():
            parameter.data.mul_(0.9).add_(0.3)
    with pytest.raises(TowerChangedError, match="unfreeze") as caught:
        use(tower)
    assert caught.value.changes[name] == "overwritten in place"


def test_modules_that_were_swapped_behind_the_guard_are_named():
    tower = protect(make_own(), origin="here")
    kept = tower.body[0]
    tower(X)
    tower.body._modules["0"] = nn.Linear(4, 4)
    with pytest.raises(TowerChangedError, match=r"body\.0: this module was replaced by a Linear"):
        tower(X)
    tower.body._modules["0"] = kept
    tower(X)
    tower.body._modules["0"] = torch.nn.Sequential(kept)  # a wrapper without tensors of its own
    tower(X)
    del tower.body._modules["0"]
    with pytest.raises(TowerChangedError, match=r"body\.0: this module was removed"):
        tower.body(X)


def test_a_method_that_is_patched_on_the_class_later_is_the_one_that_runs(monkeypatch):
    tower = protect(make_own(), origin="here")
    monkeypatch.setattr(Own, "project", lambda self, x: x * 2)
    assert torch.equal(tower.project(X), X * 2)


def test_state_and_names_know_nothing_of_it():
    tower = protect(make_clip(), origin="here")
    plain = make_clip()
    assert list(tower.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in tower.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(frozen_towers(nn.ModuleList([tower]))) == ["0"]
    assert torch.equal(features(tower, pixels()), features(plain, pixels()))
