"""What scripts do to single objects, each row on two ranks of one group: the tower is bit-equal before and after.

All rows run in one start of the ranks; each is a test of its own here, by name. A row is harmless, or is refused with
a message that names `unfreeze`, at once or at the next use; never silently wrong. After every row both ranks use the
tower, compare its answer and every parameter and buffer with what they were, and check it against each other.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from safeload.checking import check_towers
from safeload.errors import ProtectionError, TowerChangedError
from safeload.fingerprinting import fingerprint
from tests.protect_towers import (
    MAKERS,
    Outer,
    Pair,
    assert_whole,
    features,
    outer_config,
    pixels,
    protected,
    tensors_of,
)
from tests.ranks import RanksFailed, run_on_ranks

WIDTHS = {"clip": 32, "seed": 8}


@dataclass
class Trial:
    """A model with a tower, and a folder of its own."""

    model: Pair
    tower: nn.Module
    folder: Path
    kind: str

    @property
    def linear(self) -> nn.Linear:
        return next(part for part in self.tower.modules() if isinstance(part, nn.Linear))

    def train(self, model: nn.Module | None = None, **options: Any) -> None:
        model = model or self.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, **options)
        for _ in range(2):
            model(pixels(dist.get_rank())).float().square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(module.weight)
        module.weight.data.fill_(3)


def _load(trial: Trial, *, strict: bool, assign: bool, tower: str) -> None:
    state = {name: value.clone() for name, value in trial.model.state_dict().items()}
    for name, value in trial.tower.state_dict().items() if tower != "absent" else ():
        state[f"tower.{name}"] = value.clone() + (1 if tower == "other" else 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trial.model.load_state_dict(state, strict=strict, assign=assign)
    said = [str(each.message) for each in caught if "other values" in str(each.message)]
    assert len(said) == (tower == "other"), said
    assert all("unfreeze" in text and "verified values were kept" in text for text in said)


def _save_and_back(trial: Trial) -> None:
    trial.tower.save_pretrained(trial.folder)
    if dist.get_rank() and not any(trial.folder.glob("*.safetensors")):
        return  # transformers 5 lets the first rank alone write
    want, written = trial.tower.state_dict(), load_file(trial.folder / "model.safetensors")
    assert written
    assert all(torch.equal(value, want[name]) for name, value in written.items())
    if trial.kind == "clip":
        again = trial.tower._safeload_original.from_pretrained(trial.folder)
        assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())


def _through_torch_save(trial: Trial) -> list[nn.Module]:
    stream = io.BytesIO()
    torch.save(trial.model, stream)
    stream.seek(0)
    return [torch.load(stream, weights_only=False).tower]


def _weights_only(trial: Trial) -> None:
    stream = io.BytesIO()
    torch.save({"model": trial.model.state_dict(), "tower": trial.tower.state_dict()}, stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=True)
    trial.model.load_state_dict(read["model"])
    trial.tower.load_state_dict(read["tower"])


def _between_processes(trial: Trial) -> list[nn.Module]:
    return [pickle.loads(ForkingPickler.dumps(trial.model)).tower]  # as torch.multiprocessing sends an argument


def _llama(trial: Trial) -> nn.Module:
    Outer.towers = {"tower": lambda: trial.tower}
    try:
        return Outer(outer_config())
    finally:
        Outer.towers = {}


def _peft(trial: Trial, **options: Any) -> None:
    import peft

    names = {"clip": ["q_proj", "v_proj"], "seed": ["first", "q_proj"]}[trial.kind]
    model = peft.get_peft_model(_llama(trial), peft.LoraConfig(r=2, target_modules=names, **options))
    model(input_ids=torch.arange(6).view(1, 6)).last_hidden_state.sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    model.save_pretrained(trial.folder)
    model.merge_and_unload()


def _kbit(trial: Trial) -> None:
    import peft

    trial.model.is_loaded_in_8bit = True
    trial.model.get_input_embeddings = lambda: trial.model.head
    peft.prepare_model_for_kbit_training(trial.model, use_gradient_checkpointing=False)


def _checkpointing(trial: Trial, **options: Any) -> None:
    model = _llama(trial)
    model.gradient_checkpointing_enable(**options)
    model.enable_input_require_grads()
    model.train()
    seen = features(trial.tower, pixels()).mean()
    (model(input_ids=torch.arange(6).view(1, 6)).last_hidden_state.sum() + seen).backward()


def _average(trial: Trial) -> list[nn.Module]:
    averaged = AveragedModel(trial.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        trial.train()
        averaged.update_parameters(trial.model)
    averaged(pixels())
    return [averaged.module.tower]


def _by_hand(trial: Trial, *, data: bool) -> None:
    """The average that scripts write themselves, over a copy; its rounding changes bits, so the copy is refused."""
    twin = copy.deepcopy(trial.model)
    twin(pixels())
    with torch.no_grad():
        for mean, value in zip(twin.parameters(), trial.model.parameters(), strict=True):
            (mean.data if data else mean).mul_(0.9).add_(value, alpha=0.1)
    twin(pixels())


def _decay(trial: Trial) -> None:
    """Weight decay of one's own, through `.data`, over all parameters."""
    for parameter in trial.model.parameters():
        parameter.data.mul_(0.99)


def _shallow(trial: Trial) -> list[nn.Module]:
    twin = copy.copy(trial.model)
    tower = copy.copy(trial.tower)
    twin.half()
    tower.half()
    tower.train()
    features(tower, pixels())
    return [twin.tower, tower]


def _functional(trial: Trial) -> None:
    other = {name: value.detach() * 2 for name, value in trial.model.named_parameters()}
    torch.func.functional_call(trial.model, other, (pixels(),))


@contextlib.contextmanager
def _swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _swap(trial: Trial) -> None:
    with _swapping():
        trial.model.half()
        trial.model.to(torch.float64)
        trial.model.load_state_dict(trial.model.state_dict())
    parameter = trial.linear.weight
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros_like(parameter)))


def _dispatch(trial: Trial) -> None:
    from accelerate import dispatch_model

    dispatch_model(trial.model, {"": "cpu"}, force_hooks=True)(pixels())


def _inference(trial: Trial) -> None:
    with torch.inference_mode():
        trial.model(pixels())


def _each(trial: Trial, do: Any) -> None:
    for child in trial.tower.children():
        do(child)


def _set_training(part: nn.Module) -> None:
    for each in part.modules():
        each.training = True


def _default_dtype(trial: Trial) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        trial.model.to(torch.bfloat16)
        trial.model(pixels())
        features(copy.deepcopy(trial.tower), pixels().float())
    finally:
        torch.set_default_dtype(before)


HARMLESS = {
    "to dtype": lambda t: t.model.to(torch.float16),
    "half": lambda t: t.model.half(),
    "bfloat16": lambda t: t.model.bfloat16(),
    "float": lambda t: t.model.float(),
    "double": lambda t: t.model.double(),
    "type": lambda t: t.model.type(torch.float16),
    "to meta": lambda t: t.model.to("meta"),
    "to empty": lambda t: t.model.to_empty(device="cpu"),
    "to device, not blocking": lambda t: t.model.to("cpu", non_blocking=True),
    "to memory format": lambda t: t.model.to(memory_format=torch.channels_last),
    "the tower itself": lambda t: t.tower.half().to("meta").to_empty(device="cpu").train(),
    "casts of the tower's children": lambda t: _each(t, lambda part: part.half().to("meta")),
    "to empty of the tower's children": lambda t: _each(t, lambda part: part.to_empty(device="cpu")),
    "default dtype": _default_dtype,
    "apply": lambda t: t.model.apply(_init),
    "apply to the tower": lambda t: t.tower.apply(_init),
    "init_weights": lambda t: t.tower.init_weights(),
    "post_init": lambda t: t.tower.post_init(),
    "tie_weights": lambda t: t.tower.tie_weights(),
    "train": lambda t: (t.model.train(), t.train()),
    "train, each module": lambda t: [part.train() for part in t.model.modules()],
    "training set by hand": lambda t: _each(t, _set_training),
    "requires_grad_ of the model": lambda t: (t.model.requires_grad_(True), t.train()),
    "requires_grad of each parameter": lambda t: [p.requires_grad_(True) for p in t.model.parameters()],
    **{
        f"load_state_dict, strict={strict}, assign={assign}, tower {tower}": (
            lambda t, options=(strict, assign, tower): _load(t, strict=options[0], assign=options[1], tower=options[2])
        )
        for strict in (True, False)
        for assign in (True, False)
        for tower in ("absent", "same", "other")
    },
    "load_state_dict of the tower's children, assign": lambda t: _each(
        t, lambda part: part.load_state_dict({k: v + 1 for k, v in part.state_dict().items()}, assign=True)
    ),
    "deepcopy": lambda t: [copy.deepcopy(t.model).tower, copy.deepcopy(t.tower)],
    "copy": _shallow,
    "pickle": lambda t: [pickle.loads(pickle.dumps(t.model)).tower],
    "torch.save": _through_torch_save,
    "torch.save, weights_only": _weights_only,
    "multiprocessing": _between_processes,
    "share_memory": lambda t: t.model.share_memory(),
    "save_pretrained and back": _save_and_back,
    "PEFT beside the tower": lambda t: _peft(t, exclude_modules=r".*tower.*"),
    "casts for k-bit training": _kbit,
    "gradient checkpointing": _checkpointing,
    "gradient checkpointing, reentrant": lambda t: _checkpointing(
        t, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "optimizer of all parameters": lambda t: t.train(),
    "optimizer of all parameters, foreach": lambda t: t.train(foreach=True),
    "parameters replaced through data": lambda t: [
        setattr(p, "data", torch.zeros_like(p)) for p in t.model.parameters()
    ],
    "vector_to_parameters": lambda t: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(t.model.parameters()) * 2, t.model.parameters()
    ),
    "an averaged model": _average,
    "functional_call": _functional,
    "swap_tensors": _swap,
    "dispatch_model": _dispatch,
    "inference_mode": _inference,
    "a tensor removed": lambda t: delattr(t.linear, "weight"),
    "storage resized through data": lambda t: t.linear.weight.data.resize_(0),
}
REFUSED = {
    "requires_grad_ of the tower": lambda t: t.tower.requires_grad_(True),
    "PEFT inside the tower": _peft,
    "parametrize": lambda t: parametrize.register_parametrization(t.linear, "weight", nn.Identity()),
    "weight_norm": lambda t: nn.utils.parametrizations.weight_norm(t.linear),
    "spectral_norm": lambda t: nn.utils.spectral_norm(t.linear),
    "prune": lambda t: __import__("torch.nn.utils.prune").nn.utils.prune.random_unstructured(t.linear, "weight", 0.5),
    "a new parameter": lambda t: t.tower.register_parameter("prompt", nn.Parameter(torch.zeros(1))),
    "a new buffer": lambda t: t.tower.register_buffer("prompt", torch.zeros(1)),
    "a new module": lambda t: t.tower.add_module("prompt", nn.Linear(1, 1)),
    "other values loaded into the tower": lambda t: t.tower.load_state_dict(
        {name: value + 1 for name, value in t.tower.state_dict().items()}
    ),
}
# What cannot be kept off is refused at the next use. These lose the tower's values, so they come without the rest.
NOTICED = {
    "an average by hand": lambda t: _by_hand(t, data=False),
    "an average by hand, through data": lambda t: _by_hand(t, data=True),
    "weight decay through data": lambda t: (_decay(t), t.model(pixels())),
    "initialisers of the tower's children": lambda t: (_each(t, lambda part: part.apply(_init)), t.model(pixels())),
    "quantised in place": lambda t: (
        torch.ao.quantization.quantize_dynamic(t.model, {nn.Linear}, inplace=True),
        features(t.tower, pixels()),
    ),
    "a gradient of one's own": lambda t: (
        [setattr(p, "grad", torch.ones_like(p)) for p in t.model.parameters()],
        torch.optim.AdamW(t.model.parameters(), lr=0.1).step(),
        t.model(pixels()),
    ),
}
ROWS = {
    **{name: ("harmless", row) for name, row in HARMLESS.items()},
    **{name: ("refused", row) for name, row in REFUSED.items()},
    **{name: ("noticed", row) for name, row in NOTICED.items()},
}


def _run_row(kind: str, expected: str, row: Any, folder: Path) -> Pair:
    tower = protected(kind)
    want = tensors_of(tower)
    trial = Trial(Pair(tower, WIDTHS[kind]), tower, folder, kind)
    seen = features(tower, pixels())
    if expected == "harmless":
        copies = row(trial)
        for twin in copies if isinstance(copies, list) else ():
            if hasattr(twin, "_safeload_original") and twin is not tower:
                assert torch.equal(features(twin, pixels()), seen), "a copy answers differently"
                assert_whole(twin, want)
    else:
        kinds = ProtectionError if expected == "refused" else TowerChangedError
        with pytest.raises(kinds, match="unfreeze"):
            row(trial)
    if expected != "noticed":
        assert torch.equal(features(tower, pixels()), seen), "the tower answers differently"
        assert_whole(tower, want)
    return trial.model


def _rows(kind: str, folder: str) -> dict[str, str]:
    failed = {}
    for number, (name, (expected, row)) in enumerate(ROWS.items()):
        mine, model, digest = "", None, ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                place = Path(folder, kind, str(dist.get_rank()), str(number))
                place.mkdir(parents=True)
                model = _run_row(kind, expected, row, place)
                digest = (
                    "" if expected == "noticed" else str([fingerprint(t) for t in tensors_of(model.tower).values()])
                )
            except BaseException:
                mine = traceback.format_exc()
        told: list[tuple[str, str]] = [("", ""), ("", "")]
        dist.all_gather_object(told, (mine, digest))
        if told[0] != told[1] or mine:
            failed[name] = "\n".join(f"rank {rank}: {text or found}" for rank, (text, found) in enumerate(told))
        elif number % 10 == 0 and expected != "noticed":
            assert check_towers(model).ranks == 2
    return failed


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    found = {}
    for kind in MAKERS:
        with tempfile.TemporaryDirectory() as folder:
            results = run_on_ranks(2, _rows, kind, folder, timeout_s=110)
        if not all(result.ok for result in results):
            raise RanksFailed(results)
        found[kind] = results[0].value
    return found


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("row", sorted(ROWS))
def test_on_two_ranks(outcomes, row, kind):
    assert row not in outcomes[kind], outcomes[kind][row]
