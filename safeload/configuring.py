"""What a training is configured to do: the records, the file, and the line of each setting.

Receives a path: an Accelerate YAML, TrainingArguments as JSON or YAML, a DeepSpeed JSON. Gives a `ConfigFile`; what it
means is read by `translating`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from safeload.errors import SourceError

__all__ = ["ConfigFile", "Dialect", "Place", "TrainingSetup", "read_file"]

Dialect = Literal["accelerate", "trainer", "deepspeed"]
_MOST_BYTES: Final = 1024**2  # no training configuration is near that; a weight file given by mistake is
_ENGINE_KEYS: Final = {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"}
_LAUNCHER_KEYS: Final = {"compute_environment", "distributed_type", "num_machines", "machine_rank", "main_process_port"}
_TRAINER_KEYS: Final = {
    "output_dir",
    "per_device_train_batch_size",
    "num_train_epochs",
    "learning_rate",
    "gradient_accumulation_steps",
    "fp16",
    "bf16",
    "fsdp",
    "deepspeed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One file as written: its text, for line numbers, and what it says."""

    path: str
    dialect: Dialect
    text: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a setting is or belongs: file, key, and the line if it is written. `within` is the key it is nested in."""

    path: str
    dialect: Dialect
    key: str
    within: str
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What a training is configured to do. Defaults are filled in as the dialect's own reader does.

    `ignored_modules` is None where there is none; `zero_init` is whether ZeRO-3 partitions while constructing.
    """

    files: tuple[ConfigFile, ...]
    mixed_precision: Literal["fp16", "bf16", "fp8", "no"] = "no"
    both_halves: bool = False
    full_eval: Literal["fp16", "bf16"] | None = None
    backend: Literal["fsdp", "deepspeed", "other"] = "other"
    fsdp_version: int = 1
    ram_efficient: bool = False
    sync_module_states: bool = True
    use_orig_params: bool = True
    ignored_modules: str | None = None
    wrap_classes: tuple[str, ...] = ()
    fsdp_settings_unused: bool = False
    zero_stage: int = 0
    zero_init: bool = False
    engine_precision: Literal["fp16", "bf16", "auto", "no"] = "no"

    @property
    def dialect(self) -> Dialect:
        """Of the file that was named."""
        return self.files[0].dialect

    @property
    def title(self) -> str:
        """The file and what it configures, in a few words."""
        how = {
            "fsdp": f"FSDP{self.fsdp_version}",
            "deepspeed": f"DeepSpeed ZeRO-{self.zero_stage}",
            "other": "neither FSDP nor DeepSpeed",
        }[self.backend]
        names = {"accelerate": "Accelerate", "trainer": "TrainingArguments", "deepspeed": "DeepSpeed"}
        return f"{self.files[0].path} ({names[self.dialect]}; {how}; mixed precision {self.mixed_precision})"

    def locate(self, setting: str) -> Place:
        """Return where a setting is written, or where it belongs.

        Args:
            setting: A name of `_KEYS`.
        """
        places = [_place(file, keys) for file in reversed(self.files) if (keys := _KEYS[file.dialect].get(setting, ()))]
        written = [place for place in places if place.line is not None]
        nowhere = Place(path=self.files[0].path, dialect=self.dialect, key="", within="", line=None)
        return (written or places or [nowhere])[0]


_KEYS: Final[dict[Dialect, dict[str, tuple[str, ...]]]] = {
    "accelerate": {
        "mixed_precision": ("mixed_precision",),
        "ram_efficient": ("fsdp_config", "fsdp_cpu_ram_efficient_loading"),
        "sync_module_states": ("fsdp_config", "fsdp_sync_module_states"),
        "use_orig_params": ("fsdp_config", "fsdp_use_orig_params"),
        "ignored_modules": ("fsdp_config", "fsdp_ignored_modules"),
        "wrap_classes": ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap"),
        "fsdp": ("distributed_type",),
        "zero_init": ("deepspeed_config", "zero3_init_flag"),
    },
    "trainer": {
        "mixed_precision": ("fp16",),
        "fp16": ("fp16",),
        "bf16": ("bf16",),
        "full_eval_fp16": ("fp16_full_eval",),
        "full_eval_bf16": ("bf16_full_eval",),
        "ram_efficient": ("fsdp_config", "cpu_ram_efficient_loading"),
        "sync_module_states": ("fsdp_config", "sync_module_states"),
        "use_orig_params": ("fsdp_config", "use_orig_params"),
        "wrap_classes": ("fsdp_config", "transformer_layer_cls_to_wrap"),
        "fsdp": ("fsdp",),
    },
    "deepspeed": {
        "fp16": ("fp16", "enabled"),
        "bf16": ("bf16", "enabled"),
        "zero_init": ("zero_optimization", "stage"),
    },
}


def read_file(path: Path, dialect: Dialect | None = None) -> ConfigFile:
    """Read a configuration file and recognise its dialect.

    Args:
        path: A YAML or JSON file.
        dialect: Where it is known already, as of a file that another names.

    Returns:
        The file.

    Raises:
        SourceError: Not found, not readable, or of no dialect that is known.
    """
    looked_for = "an Accelerate YAML, TrainingArguments as JSON or YAML, or a DeepSpeed JSON"
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise SourceError(f"{path} is larger than 1 MiB: not {looked_for}.", path=str(path), looked_for=looked_for)
        text = raw.decode("utf-8-sig")
        # JSON with tabs is not YAML, and YAML is not JSON
        values = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except FileNotFoundError as error:
        raise SourceError(f"{path}: no such file", path=str(path), looked_for=looked_for) from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SourceError(f"{path} could not be read as {looked_for}: {error}", path=str(path)) from error
    found = dialect or (_dialect(values) if isinstance(values, dict) else None)
    if found is None:
        raise SourceError(
            f"{path} is not {looked_for}: it has none of their keys, such as {', '.join(sorted(_LAUNCHER_KEYS)[:2])},"
            f" {', '.join(sorted(_TRAINER_KEYS)[-2:])}, zero_optimization.",
            path=str(path),
            looked_for=looked_for,
        )
    return ConfigFile(path=str(path), dialect=found, text=text, values=values)


def _dialect(values: Mapping[str, Any]) -> Dialect | None:
    keys = set(values)
    if keys & _ENGINE_KEYS or any(isinstance(values.get(half), dict) for half in ("fp16", "bf16")):
        return "deepspeed"
    if keys & _LAUNCHER_KEYS:
        return "accelerate"
    if keys & _TRAINER_KEYS:
        return "trainer"
    return "accelerate" if keys & {"mixed_precision", "fsdp_config", "deepspeed_config"} else None


def _has(values: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _place(file: ConfigFile, keys: tuple[str, ...]) -> Place:
    line = _line(file.text, keys) if _has(file.values, keys) else None
    return Place(path=file.path, dialect=file.dialect, key=keys[-1], within=".".join(keys[:-1]), line=line)


def _line(text: str, keys: tuple[str, ...]) -> int | None:
    """The line of the last key, looked for behind the line of those it is nested in."""
    position = 0
    for key in keys:
        found = re.compile(rf"""(?:^|[\s,{{])["']?{re.escape(key)}["']?\s*:""", re.MULTILINE).search(text, position)
        if found is None:
            return None
        position = found.end()
    return text.count("\n", 0, position) + 1
