"""Outer models that bring in towers in `__init__`, as multimodal training code does."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from safeload import safe_from_pretrained


class OuterConfig(LlamaConfig):
    model_type = "outer-of-tests"


def outer_config(towers=None, *, safe=True, **options):
    """The configuration of an `Outer`; `towers` is {attribute: (class, path)}."""
    config = OuterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        use_cache=False,
    )
    config.tower_widths = [384, 384]
    Outer.brings_in = (towers or {}, safe, options)  # not in the configuration: classes cannot be written to JSON
    return config


class Outer(LlamaModel):
    config_class = OuterConfig
    brings_in = ({}, True, {})

    def __init__(self, config):
        super().__init__(config)
        towers, safe, options = self.brings_in
        for name, (tower_class, path) in towers.items():
            load = safe_from_pretrained if safe else lambda kind, *args, **kwargs: kind.from_pretrained(*args, **kwargs)
            setattr(self, name, load(tower_class, path, **options))
        self.mm_projector = nn.ModuleList(nn.Linear(width, config.hidden_size) for width in config.tower_widths)
        self.post_init()

    def forward(self, pixel_values, input_ids):
        with torch.no_grad():
            seen = self.vision_tower(pixel_values).last_hidden_state.float()
            read = self.text_tower(input_ids).last_hidden_state.float()
        parts = [project(part) for project, part in zip(self.mm_projector, (seen[:, :8], read), strict=True)]
        return super().forward(inputs_embeds=torch.cat(parts, dim=1)).last_hidden_state.square().mean()
