"""What does the training stack do to a frozen tower, loaded by plain `from_pretrained` and by safeload?

    python -m benchmarks.what_happens_to_a_tower

Two ranks on the CPU do each of a list of things to a small model with a tower and then compare every parameter and
buffer of the tower, bit by bit, with the checkpoint. The plain tower is frozen and set to evaluation mode by hand, as
training scripts do. Prints the table as Markdown; the last line is JSON with the versions.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaModel, ResNetConfig, ResNetModel
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.utils import logging

from safeload import safe_from_pretrained

RANKS = 2
WAYS = ("plain from_pretrained", "safeload")


class Config(LlamaConfig):
    """The outer model's; `tower` is a folder, `way` how it is loaded."""

    model_type = "what_happens"


class Outer(LlamaModel):
    """A LLaVA-shaped model that brings its tower in, in `__init__`."""

    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if getattr(config, "tower", None):
            self.tower = _load(config.way, CLIPVisionModel, config.tower)
        self.projector = nn.Linear(32, 32)
        self.post_init()


class Model(nn.Module):
    """The smallest model with a tower."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(32, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give four numbers an image."""
        seen = self.tower(images.to(next(self.tower.parameters()).dtype)).pooler_output.flatten(1)
        return self.head(seen.to(self.head.weight.dtype))


def _load(way: str, kind: Any, folder: str) -> nn.Module:
    if way == "safeload":
        return safe_from_pretrained(kind, folder, verify="off")
    return kind.from_pretrained(folder).requires_grad_(False).eval()


def _outer_config(**extra: Any) -> Config:
    return Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **extra
    )


def _train(model: nn.Module, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(2):
        model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def _fsdp_environment():
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    os.environ.update(dict.fromkeys(names, "true"))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


# Each takes the way, the folder and a fresh model, and returns the tower to look at.


def _construct(way: str, folder: str, model: Model) -> nn.Module:
    with _fsdp_environment():
        return Outer(_outer_config(tower=f"{folder}/clip", way=way)).tower


def _outer_from_pretrained(way: str, folder: str, model: Model) -> nn.Module:
    return Outer.from_pretrained(f"{folder}/outer", config=_outer_config(tower=f"{folder}/clip", way=way)).tower


def _outer_with_keys(way: str, folder: str, model: Model) -> nn.Module:
    chosen = _outer_config(tower=f"{folder}/clip", way=way)
    return Outer.from_pretrained(f"{folder}/outer_with_keys", config=chosen).tower


def _outer_fsdp(way: str, folder: str, model: Model) -> nn.Module:
    with _fsdp_environment():
        return _outer_from_pretrained(way, folder, model)


def _fsdp1(way: str, folder: str, model: Model) -> nn.Module:
    tower = model.tower
    _train(FSDP(model, device_id=torch.device("cpu"), use_orig_params=True))
    return tower


def _fsdp1_layers(way: str, folder: str, model: Model) -> nn.Module:
    tower, policy = model.tower, ModuleWrapPolicy({CLIPEncoderLayer})
    _train(FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy))
    return tower


def _fsdp2(way: str, folder: str, model: Model) -> nn.Module:
    _train(fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,))))
    return model.tower


def _fsdp2_layers(way: str, folder: str, model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in [part for part in model.modules() if isinstance(part, CLIPEncoderLayer)]:
        fully_shard(part, mesh=mesh)
    _train(fully_shard(model, mesh=mesh))
    return model.tower


def _accelerate_fsdp2(way: str, folder: str, model: Model) -> nn.Module:
    """On CPU, Accelerate does not enter its FSDP branch by itself; `ignored_modules` is given, as people do."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    accelerator.state.device = torch.device("cpu")
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=True,
        ignored_modules=[model.tower],
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    return prepared.tower


def _ddp(way: str, folder: str, model: Model) -> nn.Module:
    _train(DistributedDataParallel(model))
    return model.tower


def _train_mode(way: str, folder: str, model: Model) -> nn.Module:
    resnet = Model(_load(way, ResNetModel, f"{folder}/resnet"))
    resnet.train()
    resnet(torch.randn(2, 3, 32, 32))
    return resnet.tower


def _on_model(do: Callable[[Model], Any]) -> Callable[[str, str, Model], nn.Module]:
    def run(way: str, folder: str, model: Model) -> nn.Module:
        twin = do(model)
        return twin.tower if isinstance(twin, Model) and twin is not model else model.tower

    return run


def _init(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        nn.init.normal_(part.weight)


def _other_values(model: Model) -> None:
    state = {
        f"tower.{name}": value + 1 for name, value in model.tower.state_dict().items() if value.is_floating_point()
    }
    model.load_state_dict({**model.state_dict(), **state}, strict=False)


def _made_trainable(model: Model) -> None:
    model.requires_grad_(True)
    _train(model)


def _adapters(model: Model) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "head"]), model)
    _train(model)


def _kbit(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)
    model.tower(torch.randn(1, 3, 32, 32).to(next(model.tower.parameters()).dtype))


def _averaged(model: Model) -> Model:
    average = AveragedModel(model)
    _train(model)
    average.update_parameters(model)
    return average.module


def _compiled(model: Model) -> None:
    _train(torch.compile(model, backend="aot_eager"))


OPERATIONS: dict[str, Callable[[str, str, Model], nn.Module]] = {
    "`Outer(config)`, FSDP environment": _construct,
    "`Outer.from_pretrained`": _outer_from_pretrained,
    "the same, FSDP environment": _outer_fsdp,
    "the same, other tower values in the checkpoint": _outer_with_keys,
    "FSDP1, two steps": _fsdp1,
    "FSDP1, wrap policy names the tower's layers": _fsdp1_layers,
    "FSDP2, two steps": _fsdp2,
    "FSDP2, tower's layers sharded too": _fsdp2_layers,
    "Accelerate FSDP2, RAM-efficient, `ignored_modules`": _accelerate_fsdp2,
    "DDP, two steps": _ddp,
    "`model.train()`, BatchNorm tower, one forward": _train_mode,
    "`model.half()`": _on_model(lambda model: model.half()),
    '`model.to("meta")`': _on_model(lambda model: model.to("meta")),
    "`model.to_empty()`": _on_model(lambda model: model.to_empty(device="cpu")),
    "`model.apply(init)`": _on_model(lambda model: model.apply(_init)),
    "`model.requires_grad_(True)`, two steps": _on_model(_made_trainable),
    "`load_state_dict` with other values": _on_model(_other_values),
    "LoRA on a name that the tower has too": _on_model(_adapters),
    "casts as for k-bit training, one forward": _on_model(_kbit),
    "`copy.deepcopy`": _on_model(copy.deepcopy),
    "`pickle`": _on_model(lambda model: pickle.loads(pickle.dumps(model))),
    "averaged copy (EMA)": _on_model(_averaged),
    "`torch.compile`, two steps": _on_model(_compiled),
}


def _describe(tower: nn.Module, want: dict[str, torch.Tensor]) -> str:
    """Say in a few words what became of a tower's tensors, dtypes, gradients and mode."""
    have = {**dict(tower.named_parameters()), **dict(tower.named_buffers())}
    found: dict[str, int] = {}
    for name, expected in want.items():
        tensor = have.get(name)
        if tensor is None:
            what = "gone"
        elif type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor":
            what = "sharded"
        elif tensor.is_meta:
            what = "on meta"
        elif tensor.dtype != expected.dtype:
            what = f"cast to {str(tensor.dtype).removeprefix('torch.')}"
        elif tensor.shape != expected.shape:
            what = "emptied"
        else:
            what = "" if torch.equal(tensor.detach(), expected) else "with other values"
        if what:
            found[what] = found.get(what, 0) + 1
    said = [f"{count} of {len(want)} tensors {what}" for what, count in found.items()]
    said += ["new trainable parameters"] if set(dict(tower.named_parameters())) - set(want) else []
    said += ["trainable"] if any(p.requires_grad for name, p in have.items() if name in want) else []
    said += ["in training mode"] if tower.training else []
    return ", ".join(said) or "whole"


def _attempt(way: str, folder: str, operation: Callable[[str, str, Model], nn.Module]) -> str:
    kind, name = (ResNetModel, "resnet") if operation is _train_mode else (CLIPVisionModel, "clip")
    plain = kind.from_pretrained(f"{folder}/{name}")
    want = {key: value.detach().clone() for key, value in (*plain.named_parameters(), *plain.named_buffers())}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _describe(operation(way, folder, Model(_load(way, CLIPVisionModel, f"{folder}/clip"))), want)
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:90]}{'...' if len(text) > 90 else ''}"


def _rank_main(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    seen: dict[str, dict[str, str]] = {}
    for name, operation in OPERATIONS.items():
        seen[name] = {way: _attempt(way, folder, operation) for way in WAYS}
        dist.barrier()
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def _prepare(folder: str) -> None:
    torch.manual_seed(0)
    clip = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    CLIPVisionModel(clip).save_pretrained(f"{folder}/clip")
    resnet = ResNetConfig(embedding_size=8, hidden_sizes=[32], depths=[1], layer_type="basic")
    ResNetModel(resnet).save_pretrained(f"{folder}/resnet")
    Outer(_outer_config()).save_pretrained(f"{folder}/outer")
    outer = Outer(_outer_config())
    outer.tower = CLIPVisionModel(clip)
    outer.save_pretrained(f"{folder}/outer_with_keys")


def _merged(by_rank: list[str]) -> str:
    if len(set(by_rank)) == 1:
        return by_rank[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(by_rank))


def _versions() -> dict[str, str]:
    import accelerate
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Run everything on two ranks and print the table."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _prepare(folder)
        torch.multiprocessing.spawn(_rank_main, args=(folder,), nprocs=RANKS)
        by_rank = [json.loads(Path(f"{folder}/rank{rank}.json").read_text()) for rank in range(RANKS)]
    rows = {name: {way: _merged([seen[name][way] for seen in by_rank]) for way in WAYS} for name in OPERATIONS}
    print(f"| what is done | {' | '.join(WAYS)} |\n| --- | --- | --- |")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row[way].replace('|', '/') for way in WAYS)} |")
    print(json.dumps({**_versions(), "ranks": RANKS, "seconds": round(time.perf_counter() - start, 1), "rows": rows}))


if __name__ == "__main__":
    main()
