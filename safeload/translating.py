"""Read a configuration file of any dialect into one `TrainingSetup`.

Receives a path. Fills in the defaults that the dialect's own reader would (`accelerate launch`, `TrainingArguments`,
DeepSpeed), and follows the DeepSpeed and FSDP files that a file names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from safeload.configuring import ConfigFile, TrainingSetup, read_file

__all__ = ["read_setup"]


def read_setup(path: str | Path) -> TrainingSetup:
    """Read a configuration file, and the DeepSpeed file it names.

    Args:
        path: An Accelerate YAML or JSON, TrainingArguments as JSON or YAML, a DeepSpeed JSON.

    Returns:
        What it configures.

    Raises:
        SourceError: Not found, not readable, or none of these.
    """
    file = read_file(Path(path))
    if file.dialect == "accelerate":
        return _from_accelerate(file)
    return _from_trainer(file) if file.dialect == "trainer" else _from_engine(TrainingSetup(files=(file,)), file)


def _from_accelerate(file: ConfigFile) -> TrainingSetup:
    values = file.values
    kind = str(values.get("distributed_type") or "NO").upper()
    said = str(values.get("mixed_precision") or "no").lower()
    mixed: Any = said if said in ("fp16", "bf16", "fp8") else "no"
    setup = TrainingSetup(files=(file,), mixed_precision=mixed)
    sharding = _section(values, "fsdp_config")
    if kind == "FSDP":
        # what `accelerate launch` fills in where the file is silent
        return replace(
            setup,
            backend="fsdp",
            fsdp_version=_number(sharding.get("fsdp_version"), 1),
            ram_efficient=_flag(sharding.get("fsdp_cpu_ram_efficient_loading"), True),
            sync_module_states=_flag(sharding.get("fsdp_sync_module_states"), True),
            use_orig_params=_flag(sharding.get("fsdp_use_orig_params"), True),
            ignored_modules=_text(sharding.get("fsdp_ignored_modules")),
            wrap_classes=_names(sharding.get("fsdp_transformer_layer_cls_to_wrap")),
        )
    if kind != "DEEPSPEED":
        return replace(setup, fsdp_settings_unused=bool(sharding))
    engine = _section(values, "deepspeed_config")
    stage = _number(engine.get("zero_stage"), 2)
    precision: Any = mixed if mixed != "fp8" else "bf16"
    setup = replace(setup, backend="deepspeed", zero_stage=stage, engine_precision=precision)
    linked = engine.get("deepspeed_config_file")
    if isinstance(linked, str) and linked not in ("", "none"):
        setup = _from_engine(setup, read_file(Path(file.path).parent / linked, "deepspeed"))
    return replace(setup, zero_init=setup.zero_stage == 3 and _flag(engine.get("zero3_init_flag"), True))  # noqa: PLR2004


def _from_trainer(file: ConfigFile) -> TrainingSetup:
    values = file.values
    fp16, bf16 = _flag(values.get("fp16"), False), _flag(values.get("bf16"), False)
    full_eval: Any = next((half for half in ("fp16", "bf16") if _flag(values.get(f"{half}_full_eval"), False)), None)
    setup = TrainingSetup(
        files=(file,),
        mixed_precision="fp16" if fp16 else "bf16" if bf16 else "no",
        both_halves=fp16 and bf16,
        full_eval=full_eval,
    )
    engine = values.get("deepspeed")
    if isinstance(engine, dict):
        return _from_engine(setup, replace(file, dialect="deepspeed", values=engine))
    if isinstance(engine, str) and engine:
        return _from_engine(setup, read_file(Path(file.path).parent / engine, "deepspeed"))
    sharding = _fsdp_config(file)
    if values.get("fsdp") in (None, "", [], False):
        return replace(setup, fsdp_settings_unused=any(sharding.values()))
    newest = 2 if int(transformers.__version__.split(".")[0]) >= 5 else 1  # noqa: PLR2004 - the default since 5
    return replace(
        setup,
        backend="fsdp",
        fsdp_version=_number(sharding.get("version"), newest),
        ram_efficient=_flag(sharding.get("cpu_ram_efficient_loading"), False),
        sync_module_states=_flag(sharding.get("sync_module_states"), True),
        use_orig_params=_flag(sharding.get("use_orig_params"), True),
        wrap_classes=_names(sharding.get("transformer_layer_cls_to_wrap")),
    )


def _fsdp_config(file: ConfigFile) -> dict[str, Any]:
    said = file.values.get("fsdp_config")
    if isinstance(said, str) and said:
        said = read_file(Path(file.path).parent / said, "trainer").values
    return {key.removeprefix("fsdp_"): value for key, value in said.items()} if isinstance(said, dict) else {}


def _from_engine(setup: TrainingSetup, file: ConfigFile) -> TrainingSetup:
    """Add what a DeepSpeed file says. "auto" stands for what the Trainer or Accelerate says."""
    on = {half: _section(file.values, half).get("enabled", False) for half in ("fp16", "bf16")}
    said = [half for half, value in on.items() if _flag(value, False)]
    engine: Any = said[0] if said else setup.mixed_precision if "auto" in on.values() else "no"
    stage = _number(_section(file.values, "zero_optimization").get("stage"), 0)
    return replace(
        setup,
        files=setup.files if setup.files == (file,) else (*setup.files, file),
        backend="deepspeed",
        mixed_precision=engine if setup.mixed_precision == "no" else setup.mixed_precision,
        both_halves=setup.both_halves or len(said) > 1 or _clash(setup, said),
        zero_stage=stage,
        zero_init=stage == 3,  # noqa: PLR2004 - with the Trainer, HfDeepSpeedConfig turns zero.Init on
        engine_precision=engine,
    )


def _clash(setup: TrainingSetup, said: list[str]) -> bool:
    return bool(said) and setup.mixed_precision in ("fp16", "bf16") and setup.mixed_precision not in said


def _section(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _flag(value: Any, default: bool) -> bool:
    if value is None or value == "auto":
        return default
    return str(value).lower() in ("true", "1", "yes", "on", "y", "t")


def _number(value: Any, default: int) -> int:
    return int(value) if re.fullmatch(r"\d{1,3}", str(value)) else default


def _text(value: Any) -> str | None:
    return str(value) if value not in (None, "", "none", "None") else None


def _names(value: Any) -> tuple[str, ...]:
    found = value if isinstance(value, list) else str(value or "").split(",")
    return tuple(str(name).strip() for name in found if str(name).strip())
