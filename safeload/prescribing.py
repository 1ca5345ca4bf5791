"""The rules of `safeload doctor`, one table: condition, what will go wrong, the line to change.

Each says what was seen to go wrong in training code, by the versions it was seen with. Knows nothing of files: a rule
looks at a `TrainingSetup` and, where a model was named, at its `ModelFacts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import accelerate
import torch
from packaging.version import Version

from safeload.configuring import Dialect, TrainingSetup
from safeload.peeking import ModelFacts

__all__ = ["PATTERN", "RULES", "ConfigRule"]

PATTERN: Final = "PATTERN"  # stands for a regular expression of the towers' names
_TOWER_LAYERS: Final = re.compile(
    r"CLIP|Siglip|Dino|ViT|Vision|Swin|ConvNext|Whisper|Wav2Vec|Hubert|T5|Audio", re.IGNORECASE
)
_HALVES: Final = frozenset({"float16", "bfloat16"})


Condition = Callable[[TrainingSetup, ModelFacts | None], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """One way to go wrong.

    `setting` is the line to change (of `TrainingSetup.locate`), `values` what it should say by dialect; none where the
    code is to change, not the file. `instead` is what to do otherwise. `by_version` is what `{by_version}` means in
    `consequence` with a version of FSDP; nothing where it is not named. `prevented`: not with safe_from_pretrained.
    """

    id: str
    severity: Literal["error", "warning"]
    applies: Condition
    consequence: str
    setting: str
    instead: str
    values: Mapping[Dialect, str] = field(default_factory=dict)
    by_version: Mapping[int, str] = field(default_factory=dict)
    prevented: bool = False


def _fsdp(setup: TrainingSetup, version: int | None = None) -> bool:
    return setup.backend == "fsdp" and version in (None, setup.fsdp_version)


def _holds(model: ModelFacts | None, dtypes: frozenset[str]) -> bool:
    return model is not None and bool(dtypes.intersection(model.dtypes))


def _ignoring_is_deaf(setup: TrainingSetup, model: ModelFacts | None) -> bool:
    """The versions that are installed here read the setting and do nothing with it."""
    if not _fsdp(setup) or setup.ignored_modules is None:
        return False
    old = Version(accelerate.__version__) < Version("1.10")
    return old or (setup.fsdp_version == 2 and Version(torch.__version__).release < (2, 7))  # noqa: PLR2004


_SAFE: Final = "load the tower with safeload.safe_from_pretrained, which this does not touch (then: doctor --protected)"


def _both(value: str) -> dict[Dialect, str]:
    return {"accelerate": value, "trainer": value}


RULES: Final[tuple[ConfigRule, ...]] = (
    ConfigRule(
        id="ram-efficient-loading-nested-tower",
        severity="error",
        applies=lambda setup, _: _fsdp(setup) and setup.ram_efficient,
        consequence="a from_pretrained inside the model's __init__ is taken for one that FSDP will fill later: with"
        " transformers 4 the tower is garbage on every rank but the first, with transformers 5 the outer load leaves"
        " its position ids random or zero",
        setting="ram_efficient",
        values=_both("false"),
        instead=_SAFE,
        prevented=True,
    ),
    ConfigRule(
        id="ram-efficient-loading-unignores",
        severity="error",
        applies=lambda setup, _: _fsdp(setup, 2) and setup.ram_efficient and setup.ignored_modules is not None,
        consequence="Accelerate collects the ignored parameters and then moves the model to meta, which makes new ones:"
        " the ignored tower is sharded all the same; a persistent buffer of it ends in \"'Tensor' object has no"
        " attribute 'device_mesh'\"",
        setting="ram_efficient",
        values=_both("false"),
        instead=_SAFE,
        prevented=True,
    ),
    ConfigRule(
        id="ram-efficient-loading-without-sync",
        severity="error",
        applies=lambda setup, _: _fsdp(setup, 1) and setup.ram_efficient and not setup.sync_module_states,
        consequence="ranks other than the first get empty weights and nothing that fills them; the Trainer refuses it,"
        " Accelerate turns the setting on against the file",
        setting="sync_module_states",
        values=_both("true"),
        instead="turn RAM-efficient loading off",
    ),
    ConfigRule(
        id="sync-module-states-tower-on-cpu",
        severity="warning",
        applies=lambda setup, _: _fsdp(setup, 1) and setup.sync_module_states,
        consequence='FSDP1 broadcasts the buffers of ignored modules too: a tower that is still on the CPU ends in "No'
        ' backend type associated with device type cpu"',
        setting="sync_module_states",
        instead="put the tower on the accelerator before the wrap; safe_from_pretrained does",
        prevented=True,
    ),
    ConfigRule(
        id="ignored-modules-not-set",
        severity="warning",
        applies=lambda setup, _: _fsdp(setup) and setup.ignored_modules is None,
        consequence="FSDP{setup.fsdp_version} takes a frozen tower into its wraps: it is gathered in every step"
        "{by_version}",
        by_version={
            1: ', and a half-precision tower beside float32 weights is refused ("Must flatten tensors with uniform'
            ' dtype")'
        },
        setting="ignored_modules",
        values=_both(PATTERN),
        instead="safeload.ignored_modules(model) for the plugin (TrainingArguments have no key for it: export"
        " FSDP_IGNORED_MODULES), or load the tower with safeload.safe_from_pretrained, which every wrap passes by",
        prevented=True,
    ),
    ConfigRule(
        id="ignored-modules-without-effect",
        severity="error",
        applies=_ignoring_is_deaf,
        consequence="Accelerate before 1.10 does not read fsdp_ignored_modules{by_version}; here are"
        f" accelerate {accelerate.__version__} and torch {torch.__version__}",
        by_version={2: ", and torch before 2.7 has no ignored_params for FSDP2"},
        setting="ignored_modules",
        instead="upgrade, or load the tower with safeload.safe_from_pretrained, which every wrap passes by",
        prevented=True,
    ),
    ConfigRule(
        id="ignored-tower-not-moved",
        severity="warning",
        applies=lambda setup, _: _fsdp(setup, 1) and setup.ignored_modules is not None,
        consequence="FSDP1 moves what it wraps and leaves ignored modules where they are: a tower built on the CPU"
        " meets inputs on the accelerator",
        setting="ignored_modules",
        instead="tower.to(accelerator.device) before prepare; safe_from_pretrained places it",
        prevented=True,
    ),
    ConfigRule(
        id="frozen-weights-without-orig-params",
        severity="error",
        applies=lambda setup, _: _fsdp(setup, 1) and not setup.use_orig_params,
        consequence='a wrap that holds frozen and trainable weights is refused: "Must flatten tensors with uniform'
        ' `requires_grad` when `use_orig_params=False`"',
        setting="use_orig_params",
        values=_both("true"),
        instead="keep what is frozen in wraps of its own",
    ),
    ConfigRule(
        id="wrap-policy-names-tower-layers",
        severity="warning",
        applies=lambda setup, _: _fsdp(setup) and any(_TOWER_LAYERS.search(name) for name in setup.wrap_classes),
        consequence="layers of {setup.wrap_classes} are wrapped one by one, and those wraps do not know what the root"
        " ignores: the tower's layers are sharded",
        setting="wrap_classes",
        values=_both("(the layer class of the language model alone)"),
        instead="load the tower with safeload.safe_from_pretrained, which every wrap passes by",
        prevented=True,
    ),
    ConfigRule(
        id="fsdp-settings-without-effect",
        severity="warning",
        applies=lambda setup, _: setup.fsdp_settings_unused,
        consequence="there are FSDP settings, and FSDP is not on: none of them does anything",
        setting="fsdp",
        values={"accelerate": "FSDP", "trainer": '"full_shard"'},
        instead="take the settings out",
    ),
    ConfigRule(
        id="zero3-init-nested-tower",
        severity="error",
        applies=lambda setup, _: setup.backend == "deepspeed" and setup.zero_init,
        consequence="zero.Init shards every module while it is constructed: a from_pretrained inside the model's"
        ' __init__ finds parameters of shape [0] and ends in "size mismatch ... torch.Size([0])" or loads nothing',
        setting="zero_init",
        values={"accelerate": "false", "deepspeed": "2"},
        instead="load the tower with safeload.safe_from_pretrained, which steps out of zero.Init (then: doctor"
        " --protected)",
        prevented=True,
    ),
    ConfigRule(
        id="engine-casts-tower",
        severity="warning",
        applies=lambda setup, _: setup.backend == "deepspeed" and setup.engine_precision in ("fp16", "bf16"),
        consequence="DeepSpeed calls {setup.engine_precision} on the whole model: a tower that was stored in another"
        " dtype is rounded or overflows",
        setting="{setup.engine_precision}",
        instead="load the tower with safeload.safe_from_pretrained, which keeps its dtype, and cast_inputs=True",
        prevented=True,
    ),
    ConfigRule(
        id="both-half-precisions",
        severity="error",
        applies=lambda setup, _: setup.both_halves,
        consequence="fp16 and bf16 are both asked for; Trainer, Accelerate and DeepSpeed all refuse it",
        setting="fp16",
        values={"trainer": "false", "deepspeed": "false"},
        instead="keep fp16 and turn bf16 off",
    ),
    ConfigRule(
        id="fp16-half-weights",
        severity="error",
        applies=lambda setup, model: (
            setup.mixed_precision == "fp16" and setup.backend == "other" and _holds(model, frozenset({"float16"}))
        ),
        consequence="{model} is stored in float16, and from_pretrained of transformers 5 keeps what is stored: what"
        ' trains of it fails at the first step with "Attempting to unscale FP16 gradients"',
        setting="mixed_precision",
        values={"accelerate": "bf16", "trainer": "false, and bf16: true"},
        instead="safeload.upcast_trainable(model) before the optimizer is built; frozen weights may stay float16",
    ),
    ConfigRule(
        id="fp16-weights-unknown",
        severity="warning",
        applies=lambda setup, model: setup.mixed_precision == "fp16" and setup.backend == "other" and model is None,
        consequence='weights that are loaded in float16 and trained fail at the first step with "Attempting to unscale'
        ' FP16 gradients"; transformers 5 loads in the dtype that is stored',
        setting="mixed_precision",
        instead="name the model (doctor --model), and call safeload.check_precision(model, accelerator,"
        " optimizer=optimizer)",
    ),
    ConfigRule(
        id="half-master-weights",
        severity="warning",
        applies=lambda setup, model: (
            setup.mixed_precision in ("bf16", "fp8") and setup.backend == "other" and _holds(model, _HALVES)
        ),
        consequence="{model} is stored in half precision, and from_pretrained of transformers 5 keeps what is stored:"
        " updates smaller than about 1/512 of a bfloat16 weight are rounded away",
        setting="mixed_precision",
        instead="safeload.upcast_trainable(model) before the optimizer is built; frozen weights may stay as they are",
    ),
    ConfigRule(
        id="fsdp-casts-what-trains",
        severity="warning",
        applies=lambda setup, model: _fsdp(setup) and setup.mixed_precision != "no" and _holds(model, _HALVES),
        consequence="{model} is stored in half precision; Accelerate casts what trains of it to float32 while it wraps,"
        " and some releases only said that they did (accelerate#3979)",
        setting="mixed_precision",
        instead="safeload.upcast_trainable(model) before prepare, safeload.check_precision(model, accelerator) after",
    ),
    ConfigRule(
        id="mixed-dtypes-in-checkpoint",
        severity="error",
        applies=lambda setup, model: _fsdp(setup, 1) and model is not None and len(model.dtypes) > 1,
        consequence='{model} holds more than one floating dtype, and FSDP1 wants one in each wrap: "Must flatten'
        ' tensors with uniform dtype"',
        setting="ignored_modules",
        instead="from_pretrained(..., dtype=torch.float32) for what trains; keep what is frozen out of the wraps",
    ),
    ConfigRule(
        id="full-half-eval",
        severity="warning",
        applies=lambda setup, _: setup.full_eval is not None,
        consequence="{setup.full_eval}_full_eval casts the whole model for an evaluation outside of train(), and it"
        " stays so: weights that train afterwards are half precision",
        setting="full_eval_{setup.full_eval}",
        values={"trainer": "false"},
        instead="evaluate under autocast, or call safeload.upcast_trainable(model) before training goes on",
    ),
)
