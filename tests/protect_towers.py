"""Small towers, and outer models that take them in, for the tests of protection."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaModel
from transformers.modeling_utils import PreTrainedModel

from safeload.protecting import protect


def clip_config() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        attention_dropout=0.5,
    )


class SeedConfig(CLIPVisionConfig):
    model_type = "safeload_seed_tower"


class SeedTower(PreTrainedModel):
    """BatchNorm, dropout, tied weights, and a non-persistent buffer that no `_init_weights` can restore."""

    config_class = SeedConfig
    base_model_prefix = "seed"
    main_input_name = "pixel_values"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"second.weight": "first.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.conv = nn.Conv2d(3, 8, 8, 8)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("signs", torch.randn(8), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight.data.normal_()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.conv(pixel_values))).flatten(2).mean(-1)
        return self.second(torch.relu(self.first(hidden))) * self.signs


def make_clip(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CLIPVisionModel(clip_config()).eval()


def make_seed_tower(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    tower = SeedTower(SeedConfig()).eval()
    tower.norm.running_mean.normal_()
    return tower


MAKERS = {"clip": make_clip, "seed": make_seed_tower}


def protected(kind: str = "clip", seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    tower = MAKERS[kind](seed)
    return protect(tower if dtype is None else tower.to(dtype), name=kind, origin=f"made of seed {seed}")


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_whole(tower: nn.Module, want: dict[str, torch.Tensor]) -> None:
    """Bit-equal parameters and buffers, same dtypes, frozen, evaluating, guarded."""
    have = {**dict(tower.named_parameters(remove_duplicate=False)), **dict(tower.named_buffers(remove_duplicate=False))}
    assert sorted(have) == sorted(want)
    for name, expected in want.items():
        assert type(have[name]) in (torch.Tensor, nn.Parameter), name
        assert have[name].dtype == expected.dtype, name
        assert torch.equal(have[name].detach().cpu().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)), (
            name
        )
        assert not have[name].requires_grad, name
    assert not any(part.training for part in tower.modules())
    assert tower._safeload_original


def pixels(seed: int = 5) -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def features(tower: nn.Module, images: torch.Tensor) -> torch.Tensor:
    out = tower(images)
    return out if isinstance(out, torch.Tensor) else out.pooler_output


class OuterConfig(LlamaConfig):
    model_type = "safeload_outer"


def outer_config() -> OuterConfig:
    return OuterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
    )


class Holder(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"deep": tower})


class Outer(LlamaModel):
    """A LLaVA-shaped model. `towers` stands for the safe load in `__init__`: name -> a function giving the tower."""

    config_class = OuterConfig
    towers: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, make in type(self).towers.items():
            self._take(name, make())
        self.projector = nn.Linear(32, 32)
        self.post_init()

    def _take(self, name: str, tower: nn.Module) -> None:
        if name == "listed":
            self.listed = [tower]
        elif name == "many":
            self.many = nn.ModuleList([nn.Identity(), tower])
        elif name == "holder":
            self.holder = Holder(tower)
        else:
            setattr(self, name, tower)


class Pair(nn.Module):
    """The smallest model with a tower: features, then a trainable head of two layers."""

    def __init__(self, tower: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.tower = tower
        self.compute_dtype: torch.dtype | None = None  # what the head computes in, where that is not its own dtype
        self.head = nn.Sequential(nn.Linear(width, 16), nn.Linear(16, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = features(self.tower, images.to(next(self.tower.parameters()).dtype))
        return self.head(seen.to(self.compute_dtype or self.head[0].weight.dtype))
