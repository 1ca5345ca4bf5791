"""FSDP1, FSDP2 and DDP around towers, on two ranks: wrapped, trained for three steps, and the tower is whole."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_utils import PreTrainedModel
from transformers.models.clip.modeling_clip import CLIPMLP, CLIPEncoderLayer

from safeload.marking import is_marked
from tests.protect_towers import MAKERS, Pair, assert_whole, pixels, protected, tensors_of
from tests.ranks import on_ranks

WIDTHS = {"clip": 32, "seed": 8}


class Trial:
    """A model with a tower, and what the tower was before anything happened to it."""

    def __init__(self, kind: str = "clip", dtype: torch.dtype | None = None) -> None:
        self.tower = protected(kind, dtype=dtype)
        self.twin = MAKERS[kind]().to(dtype)
        torch.manual_seed(1)
        self.model = Pair(self.tower, WIDTHS[kind])
        self.want = tensors_of(self.tower)
        self.seen: list[bool] = []
        self.objects = {name: (id(p), p.data_ptr()) for name, p in self.tower.named_parameters()}

    def train(self, wrapped: nn.Module, *, clip: bool = False) -> None:
        wrapped.train()
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.5)
        before = [self.local(p) for p in self.trainable(wrapped)]
        images = pixels(dist.get_rank())
        watch = self.tower.register_forward_hook(self.compare)
        for _ in range(3):
            wrapped(images).float().square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        watch.remove()
        assert self.seen == [True] * 3
        after = [self.local(p) for p in self.trainable(wrapped)]
        assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True) if a.numel())

    def compare(self, tower: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        """Whatever the wrapper does to hooks and casts, the tower answers as an unwrapped twin does."""
        mine, twin = (x if isinstance(x, torch.Tensor) else x.pooler_output for x in (output, self.twin(*inputs)))
        self.seen.append(mine.dtype == twin.dtype and torch.equal(mine, twin))

    def trainable(self, wrapped: nn.Module) -> list[nn.Parameter]:
        mine = {id(p) for p in self.tower.parameters()}
        found = [p for p in wrapped.parameters() if id(p) not in mine]
        assert all(p.requires_grad for p in found)
        return found

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()

    def check(self) -> None:
        assert_whole(self.tower, self.want)
        assert {name: (id(p), p.data_ptr()) for name, p in self.tower.named_parameters()} == self.objects


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(7)


def fsdp1_cases():
    layers = ModuleWrapPolicy({CLIPEncoderLayer, CLIPMLP, nn.Linear, nn.Conv2d, nn.BatchNorm2d})
    small = partial(size_based_auto_wrap_policy, min_num_params=50)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    yield "ignored too", {}
    yield "param_init_fn", {"param_init_fn": lambda module: module.apply(_fill), "auto_wrap_policy": layers}
    for orig in (True, False):
        yield f"plain, use_orig_params={orig}", {"use_orig_params": orig}
        yield f"layers, use_orig_params={orig}", {"use_orig_params": orig, "auto_wrap_policy": layers}
        yield f"size, use_orig_params={orig}", {"use_orig_params": orig, "auto_wrap_policy": small}
        yield f"mixed, use_orig_params={orig}", {"use_orig_params": orig, "mixed_precision": half}
        yield f"mixed layers {orig}", {"use_orig_params": orig, "mixed_precision": half, "auto_wrap_policy": layers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["clip", "seed"])
@pytest.mark.filterwarnings("ignore:Both mixed precision")
@on_ranks(2)
def test_fsdp1(kind, dtype):
    device = torch.device("cpu")
    for name, options in fsdp1_cases():
        print(name)
        trial = Trial(kind, dtype)
        trial.model.compute_dtype = torch.bfloat16 if "mixed" in name else None
        named = {"ignored_modules": [trial.tower]} if name == "ignored too" else {}
        wrapped = FSDP(trial.model, device_id=device, **options, **named)
        trial.train(wrapped)
        trial.check()
        keys = list(wrapped.state_dict())
        assert keys, name
        assert not [key for key in keys if key.startswith("tower")], name


def fsdp2_cases():
    yield "root only", {}, False, ()
    yield "every linear layer", {}, True, (nn.Linear, nn.Conv2d, CLIPEncoderLayer, CLIPMLP)
    yield "mixed precision", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, True, (nn.Linear,)
    yield "layers, mixed", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, True, (CLIPEncoderLayer,)
    yield "the tower's own class, mixed", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, True, (PreTrainedModel,)
    yield "offload", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, True, (nn.Linear,)
    yield "no reshard", {"reshard_after_forward": False}, True, (nn.Linear,)
    yield "hsdp", {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))}, True, (nn.Linear,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["clip", "seed"])
@on_ranks(2)
def test_fsdp2(kind, dtype):
    for name, options, nested, kinds in fsdp2_cases():
        print(name)
        trial = Trial(kind, dtype)
        trial.model.compute_dtype = torch.bfloat16 if "mixed" in name else None
        settings = {"mesh": init_device_mesh("cpu", (2,)), **options}
        parts = [part for part in trial.model.modules() if nested and isinstance(part, kinds)]
        for part in reversed(parts):
            fully_shard(part, **settings)
        fully_shard(trial.model, **settings)
        trial.train(trial.model, clip=True)
        trial.check()
        keys = list(trial.model.state_dict())
        assert keys, name
        assert not [key for key in keys if key.startswith("tower")], name
        assert all(isinstance(p, DTensor) for p in trial.model.head.parameters()), name


@on_ranks(2)
def test_fsdp1_with_sync_module_states_on_cpu_raises_the_same_with_a_tower_and_without():
    """It wants an accelerator; what a tower must not do is change that, or be changed by the attempt."""
    said = []
    for model in (nn.Sequential(nn.Linear(4, 4)), Pair(protected())):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            FSDP(model, device_id=torch.device("cpu"), sync_module_states=True)
        said.append(type(caught.value))
    assert said[0] is said[1]
    assert "sync_module_states" in str(caught.value)
    assert_whole(model.tower, tensors_of(protected()))


@on_ranks(2)
def test_ddp():
    for kind in ("clip", "seed"):
        trial = Trial(kind)
        versions = [p._version for p in trial.tower.parameters()]
        wrapped = DistributedDataParallel(trial.model)
        trial.train(wrapped, clip=True)
        trial.check()
        assert [p._version for p in trial.tower.parameters()] == versions
        assert not [key for key in wrapped.state_dict() if "tower" in key]
        assert wrapped.module is trial.model


def test_the_private_registry_of_torch_is_where_it_was():
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
    from torch.distributed.fsdp import _traversal_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    tower = protected()
    assert all(is_marked(part) for part in tower.modules())
    assert isinstance(tower.__dict__[REGISTRY_KEY]["replicate"], RegistryItem)
    assert not _traversal_utils._composable(tower)
    assert not _fsdp_common._is_composable_with_fsdp(tower)
    assert _fsdp_common._is_composable_with_fsdp(nn.Linear(1, 1))
