"""A small model in the shape of LLaVA: a vision tower that `__init__` brings in, a projector, a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from safeload.loading import safe_from_pretrained

__all__ = ["Model", "ModelConfig", "model_config", "text_inputs", "tower_class_of", "tower_inputs", "write_small_tower"]

_IMAGE_TOKENS: Final = 16  # of the tower's output, so that a tower of large images does not make long sequences
_TEXT_TOKENS: Final = 8
_VOCABULARY: Final = 128
# The half that a LLaVA-style model takes from a checkpoint of both; AutoModel would take both.
_VISION_HALVES: Final = {
    "clip": "CLIPVisionModel",
    "clip_vision_model": "CLIPVisionModel",
    "siglip": "SiglipVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
}

_ANY_SIZE: Final = ("dinov2", "dinov2_with_registers", "dinov3_vit")  # take small images as well as large ones
_PATCHES: Final = 8  # along each side of such an image


class ModelConfig(LlamaConfig):  # type: ignore[misc]
    """The language model's configuration, and where the tower is."""

    model_type = "safeload-demo"


def model_config(tower: str | None = None, *, tower_class: str = "", width: int = 0, safe: bool = False) -> ModelConfig:
    """Return the configuration of the demo's model.

    Args:
        tower: What to load the tower from; None makes a model without one.
        tower_class: Name of its class in transformers.
        width: Size of its features.
        safe: Whether to load it with safeload.
    """
    config = ModelConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
        use_cache=False,
    )
    config.mm_vision_tower = tower
    config.mm_tower_class = tower_class
    config.mm_hidden_size = width
    config.mm_safe = safe
    return config


class Model(LlamaForCausalLM):  # type: ignore[misc]
    """The model; `config.mm_safe` says which of the two lines brings in the tower."""

    config_class = ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.mm_vision_tower is not None:
            tower_class = getattr(transformers, config.mm_tower_class)
            if config.mm_safe:
                self.vision_tower = safe_from_pretrained(tower_class, config.mm_vision_tower)
            else:
                self.vision_tower = tower_class.from_pretrained(config.mm_vision_tower)
        self.mm_projector = nn.Linear(config.mm_hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, inputs: dict[str, torch.Tensor], input_ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of the text that follows the images.

        Args:
            inputs: Of the tower.
            input_ids: `[batch, tokens]`.
        """
        with torch.no_grad():
            features = self.vision_tower(**inputs).last_hidden_state[:, :_IMAGE_TOKENS]
        images = self.mm_projector(features.to(self.mm_projector.weight.dtype))
        embeds = torch.cat([images, self.get_input_embeddings()(input_ids)], dim=1)
        labels = torch.cat([torch.full(images.shape[:2], -100), input_ids], dim=1)
        loss: torch.Tensor = super().forward(inputs_embeds=embeds, labels=labels, use_cache=False).loss
        return loss


def write_small_tower(folder: Path) -> Path:
    """Write a CLIP vision tower of random weights, some 25 MB, and return its folder."""
    config = CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        image_size=64,
        patch_size=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPVisionModel(config)
        for parameter in model.parameters():  # its own initialisation has zeros, which garbage can equal
            nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(folder)
    return folder


def tower_class_of(folder: str) -> tuple[str, int]:
    """Return the name of the transformers class that a LLaVA-style model uses, and the width of its features."""
    config = AutoConfig.from_pretrained(folder)
    vision = getattr(config, "vision_config", config)
    return _VISION_HALVES.get(config.model_type, AutoModel.__name__), int(vision.hidden_size)


def tower_inputs(tower: Any, *, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Make random inputs for a tower of images, or of text.

    Args:
        tower: The tower.
        batch: How many.
        generator: Where they come from.
    """
    config, dtype = tower.config, next(tower.parameters()).dtype
    size = getattr(config, "image_size", None)
    if config.model_type in _ANY_SIZE:
        size = config.patch_size * _PATCHES
    if size is None:
        ids = torch.randint(min(config.vocab_size, 1000), (batch, _IMAGE_TOKENS), generator=generator)
        return {"input_ids": ids}
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.randn(batch, channels, height, width, generator=generator).to(dtype)}


def text_inputs(*, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Make random text for the language model, `[batch, tokens]`."""
    return torch.randint(_VOCABULARY, (batch, _TEXT_TOKENS), generator=generator)
