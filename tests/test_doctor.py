"""`safeload doctor`: each rule fires where it should and falls silent when its line is changed as it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from safeload.cli import main
from safeload.configuring import read_file
from safeload.diagnosing import diagnose
from safeload.errors import SourceError
from safeload.peeking import ModelFacts, read_model
from safeload.prescribing import RULES
from safeload.translating import read_setup

HALF = ModelFacts(name="model", dtypes={"float16": 10}, towers=("vision_tower",))
BRAIN = ModelFacts(name="model", dtypes={"bfloat16": 10})
FULL = ModelFacts(name="model", dtypes={"float32": 10})
MIXED = ModelFacts(name="model", dtypes={"float32": 10, "float16": 10})


def _accelerate(**settings):
    fsdp = {f"fsdp_{key}": value for key, value in settings.pop("fsdp", {}).items()}
    engine = settings.pop("engine", None)
    base = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP" if fsdp else "MULTI_GPU", **settings}
    base |= {"fsdp_config": fsdp} if fsdp else {}
    return base | ({"deepspeed_config": engine, "distributed_type": "DEEPSPEED"} if engine is not None else {})


def _trainer(**settings):
    return {"output_dir": "out", "per_device_train_batch_size": 1, **settings}


QUIET = {"cpu_ram_efficient_loading": False, "sync_module_states": False, "ignored_modules": "tower"}

# rule, a configuration in which it fires, the model, what makes it silent (merged over the configuration)
CASES = [
    (
        "ram-efficient-loading-nested-tower",
        _accelerate(fsdp={"version": 1}),
        None,
        {"cpu_ram_efficient_loading": False},
    ),
    (
        "ram-efficient-loading-nested-tower",
        _accelerate(fsdp={"version": 2}),
        None,
        {"cpu_ram_efficient_loading": False},
    ),
    (
        "ram-efficient-loading-nested-tower",
        _trainer(fsdp="full_shard", fsdp_config={"cpu_ram_efficient_loading": "true"}),
        None,
        {"cpu_ram_efficient_loading": "false"},
    ),
    (
        "ram-efficient-loading-unignores",
        _accelerate(fsdp={**QUIET, "version": 2, "cpu_ram_efficient_loading": True}),
        None,
        {"cpu_ram_efficient_loading": False},
    ),
    (
        "ram-efficient-loading-without-sync",
        _accelerate(fsdp={**QUIET, "cpu_ram_efficient_loading": True}),
        None,
        {"sync_module_states": True},
    ),
    ("sync-module-states-tower-on-cpu", _accelerate(fsdp={"version": 1}), None, {"sync_module_states": False}),
    ("ignored-modules-not-set", _accelerate(fsdp={"version": 2}), None, {"ignored_modules": "tower"}),
    ("ignored-tower-not-moved", _accelerate(fsdp=QUIET), None, {"version": 2}),
    (
        "frozen-weights-without-orig-params",
        _accelerate(fsdp={"use_orig_params": False}),
        None,
        {"use_orig_params": True},
    ),
    (
        "wrap-policy-names-tower-layers",
        _accelerate(fsdp={**QUIET, "transformer_layer_cls_to_wrap": "CLIPEncoderLayer,LlamaDecoderLayer"}),
        None,
        {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    ),
    (
        "wrap-policy-names-tower-layers",
        _trainer(
            fsdp="full_shard auto_wrap",
            fsdp_config={"transformer_layer_cls_to_wrap": ["SiglipEncoderLayer", "GemmaDecoderLayer"]},
        ),
        None,
        {"transformer_layer_cls_to_wrap": ["GemmaDecoderLayer"]},
    ),
    (
        "fsdp-settings-without-effect",
        {**_accelerate(fsdp=QUIET), "distributed_type": "MULTI_GPU"},
        None,
        {"distributed_type": "FSDP"},
    ),
    ("fsdp-settings-without-effect", _trainer(fsdp_config={"version": 2}), None, {"fsdp": "full_shard"}),
    ("zero3-init-nested-tower", _accelerate(engine={"zero_stage": 3}), None, {"zero3_init_flag": False}),
    ("zero3-init-nested-tower", {"zero_optimization": {"stage": 3}}, None, {"stage": 2}),
    ("zero3-init-nested-tower", _trainer(deepspeed={"zero_optimization": {"stage": 3}}), None, {"stage": 2}),
    ("engine-casts-tower", {"bf16": {"enabled": True}}, None, {"enabled": False}),
    (
        "engine-casts-tower",
        _accelerate(engine={"zero_stage": 2}, mixed_precision="fp16"),
        None,
        {"mixed_precision": "no"},
    ),
    ("both-half-precisions", _trainer(fp16=True, bf16=True), None, {"fp16": False}),
    ("both-half-precisions", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, None, {"enabled": False}),
    ("fp16-half-weights", _accelerate(mixed_precision="fp16"), HALF, {"mixed_precision": "bf16"}),
    ("fp16-half-weights", _trainer(fp16=True), HALF, {"fp16": False}),
    ("fp16-weights-unknown", _accelerate(mixed_precision="fp16"), None, {"mixed_precision": "bf16"}),
    ("half-master-weights", _accelerate(mixed_precision="bf16"), BRAIN, {"mixed_precision": "no"}),
    ("half-master-weights", _trainer(bf16=True), HALF, {"bf16": False}),
    ("fsdp-casts-what-trains", _accelerate(mixed_precision="bf16", fsdp=QUIET), BRAIN, {"mixed_precision": "no"}),
    ("mixed-dtypes-in-checkpoint", _accelerate(fsdp=QUIET), MIXED, {"version": 2}),
    ("full-half-eval", _trainer(bf16_full_eval=True), None, {"bf16_full_eval": False}),
    ("full-half-eval", _trainer(fp16_full_eval=True), None, {"fp16_full_eval": False}),
]


def _write(folder, values, name=None):
    """As each tool writes it: YAML for Accelerate, indented JSON for the rest."""
    if "compute_environment" in values:
        path = folder / (name or "accelerate.yaml")
        path.write_text(yaml.safe_dump(values, sort_keys=False))
    else:
        path = folder / (name or "config.json")
        path.write_text(json.dumps(values, indent=2))
    return path


def _merged(values, changes):
    """The configuration with settings changed where they stand; those that are nowhere are added to the section."""
    left = dict(changes)

    def walk(inner):
        out = {}
        for key, value in inner.items():
            bare = key.removeprefix("fsdp_")
            known = next((each for each in (key, bare) if each in left), None)
            out[key] = walk(value) if isinstance(value, dict) else left[known] if known else value
        return out

    merged = walk(values)
    said = json.dumps(merged)
    for key, value in left.items():
        if f'"{key}"' in said or f'"fsdp_{key}"' in said:
            continue
        if key in ("fsdp",):
            merged[key] = value
        elif "deepspeed_config" in merged:
            merged["deepspeed_config"][key] = value
        else:
            merged["fsdp_config"][f"fsdp_{key}" if "compute_environment" in merged else key] = value
    return merged


def _rules(path, model=None, **options):
    return [finding.rule for finding in diagnose(read_setup(path), model, **options).findings]


@pytest.mark.parametrize(("rule", "values", "model", "mended"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_rule_fires_and_falls_silent_when_the_line_is_changed(rule, values, model, mended, tmp_path):
    assert rule in _rules(_write(tmp_path, values), model)
    assert rule not in _rules(_write(tmp_path, _merged(values, mended)), model)


def test_every_rule_has_a_case_and_speaks_in_full():
    tested = {case[0] for case in CASES} | {"ignored-modules-without-effect"}
    assert tested == {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert len(rule.consequence) > 40
        assert rule.values or rule.instead


def test_ignored_modules_that_installed_versions_do_not_read(tmp_path, monkeypatch):
    path = _write(tmp_path, _accelerate(fsdp=QUIET))
    monkeypatch.setattr("safeload.prescribing.accelerate.__version__", "1.1.1")
    assert "ignored-modules-without-effect" in _rules(path)
    monkeypatch.setattr("safeload.prescribing.accelerate.__version__", "1.15.0")
    assert "ignored-modules-without-effect" not in _rules(path)
    path = _write(tmp_path, _accelerate(fsdp={**QUIET, "version": 2}))
    assert "ignored-modules-without-effect" not in _rules(path)
    monkeypatch.setattr("safeload.prescribing.torch.__version__", "2.6.0+cu124")
    assert "ignored-modules-without-effect" in _rules(path)


GOOD = [
    _accelerate(mixed_precision="bf16"),
    _accelerate(mixed_precision="no", fsdp={**QUIET, "version": 2}),
    _trainer(bf16=True),
    _trainer(),
    {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"},
]


@pytest.mark.parametrize("values", GOOD, ids=range(len(GOOD)))
def test_good_configurations_are_good(values, tmp_path, monkeypatch):
    monkeypatch.setattr("safeload.prescribing.accelerate.__version__", "1.15.0")
    assert _rules(_write(tmp_path, values), FULL) == []


def test_with_protected_towers_what_they_prevent_is_left_out(tmp_path):
    path = _write(tmp_path, _accelerate(mixed_precision="fp16", fsdp={"version": 2}))
    assert "ram-efficient-loading-nested-tower" in _rules(path)
    assert _rules(path, protected=True) == []
    path = _write(tmp_path, _accelerate(mixed_precision="fp16"))
    assert _rules(path, HALF, protected=True) == ["fp16-half-weights"]


# --- the line to change ---

TEXT = """\
compute_environment: LOCAL_MACHINE
# fsdp_cpu_ram_efficient_loading: in a comment
distributed_type: FSDP
mixed_precision: fp16
fsdp_config:
  fsdp_version: 1
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
"""


def test_the_line_is_the_one_that_says_it_and_the_change_is_valid(tmp_path):
    path = tmp_path / "fsdp.yaml"
    path.write_text(TEXT)
    by_rule = {finding.rule: finding for finding in diagnose(read_setup(path)).findings}
    assert by_rule["frozen-weights-without-orig-params"].line == 7
    assert by_rule["frozen-weights-without-orig-params"].change == "fsdp_use_orig_params: true"
    assert by_rule["ram-efficient-loading-nested-tower"].line == 8
    missing = by_rule["ignored-modules-not-set"]
    assert missing.line is None
    assert missing.change.endswith("(a new line, within fsdp_config)")
    lines = TEXT.splitlines()
    for finding in by_rule.values():
        if finding.line is not None and finding.change:
            lines[finding.line - 1] = "  " + finding.change
    lines.append("  " + missing.change.partition("   (")[0])
    path.write_text("\n".join(lines))
    assert not {"frozen-weights-without-orig-params", "ram-efficient-loading-nested-tower"} & set(_rules(path))
    assert "ignored-modules-not-set" not in _rules(path)
    pattern = yaml.safe_load(path.read_text())["fsdp_config"]["fsdp_ignored_modules"]
    for name in ("vision_tower", "model.vision_tower", "base_model.model.model.vision_tower", "_orig_mod.vision_tower"):
        assert re.fullmatch(pattern, name)
    assert not re.fullmatch(pattern, "model.vision_tower.layers")


def test_lines_of_json_and_of_nested_keys_with_the_same_name(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  "fp16": {\n\t"enabled": false\n  },\n  "bf16": {\n    "enabled": true\n  }\n}\n')
    (finding,) = diagnose(read_setup(path)).findings
    assert (finding.rule, finding.line) == ("engine-casts-tower", 6)


def test_the_towers_of_the_model_are_in_the_pattern(tmp_path):
    path = _write(tmp_path, _accelerate(fsdp={"version": 2}))
    model = ModelFacts(name="m", dtypes={"float32": 1}, towers=("vision_tower", "audio_tower"))
    by_rule = {finding.rule: finding for finding in diagnose(read_setup(path), model).findings}
    assert "'(.*\\.)?(vision_tower|audio_tower)'" in by_rule["ignored-modules-not-set"].change


# --- files that name other files ---


def test_the_deepspeed_file_is_followed_from_accelerate_and_from_the_trainer(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))
    path = _write(tmp_path, _accelerate(engine={"deepspeed_config_file": "ds.json"}, mixed_precision="bf16"))
    setup = read_setup(path)
    assert (setup.zero_stage, setup.zero_init, setup.engine_precision) == (3, True, "bf16")
    path = _write(tmp_path, _trainer(deepspeed="ds.json", fp16=True), "training.json")
    setup = read_setup(path)
    assert (setup.zero_stage, setup.engine_precision, setup.mixed_precision) == (3, "fp16", "fp16")
    findings = {finding.rule: finding for finding in diagnose(setup).findings}
    assert findings["zero3-init-nested-tower"].path.endswith("ds.json")
    assert findings["zero3-init-nested-tower"].change == "stage: 2"


def test_a_deepspeed_file_that_says_the_other_precision_is_a_clash(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}}))
    path = _write(tmp_path, _accelerate(engine={"deepspeed_config_file": "ds.json"}, mixed_precision="bf16"))
    assert "both-half-precisions" in _rules(path)


def test_an_fsdp_file_of_the_trainer_is_followed(tmp_path):
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_cpu_ram_efficient_loading": "True", "version": 2}))
    setup = read_setup(_write(tmp_path, _trainer(fsdp="full_shard", fsdp_config="fsdp.json")))
    assert (setup.backend, setup.fsdp_version, setup.ram_efficient) == ("fsdp", 2, True)


def test_what_training_arguments_themselves_write_is_read(tmp_path):
    from transformers import TrainingArguments

    written = TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=True, report_to=[]
    ).to_json_string()
    (tmp_path / "training_args.json").write_text(written)
    setup = read_setup(tmp_path / "training_args.json")
    assert (setup.dialect, setup.mixed_precision, setup.backend, setup.fsdp_settings_unused) == (
        "trainer",
        "bf16",
        "other",
        False,
    )


def test_what_accelerate_itself_writes_is_read(tmp_path):
    from accelerate.utils import write_basic_config

    path = tmp_path / "default.yaml"
    assert write_basic_config(mixed_precision="no", save_location=str(path))
    assert read_setup(path).dialect == "accelerate"
    assert _rules(path) == []


def test_values_as_people_write_them(tmp_path):
    for said, expected in (("true", True), ("True", True), (True, True), ("no", False), ("auto", True), (None, True)):
        path = _write(tmp_path, _accelerate(fsdp={"use_orig_params": said}))
        assert read_setup(path).use_orig_params is expected
    assert read_setup(_write(tmp_path, _accelerate(mixed_precision=None))).mixed_precision == "no"
    assert read_setup(_write(tmp_path, _accelerate(fsdp={"version": "two"}))).fsdp_version == 1
    assert read_setup(_write(tmp_path, _trainer(fsdp=[], fsdp_config=None))).backend == "other"


# --- files that are none ---


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"3",
        b"{",
        b"\xff\xfe\x00",
        b"a: [",
        b"learning: 1",
        b"{}",
        b"a: &a [*a]",
        b"[" * 5000,
        b"x" * 2_000_000,
    ],
    ids=range(11),
)
def test_what_is_not_a_training_configuration_is_misuse(content, tmp_path, capsys):
    path = tmp_path / "some.file"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"some\.file"):
        read_file(path)
    assert main(["doctor", str(path)]) == 2
    assert "some.file" in capsys.readouterr().err


def test_a_path_that_is_no_file_is_misuse(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "could not be read" in capsys.readouterr().err


def test_a_file_that_is_missing_is_said_to_be_no_more_than_that(tmp_path, capsys):
    missing = tmp_path / "missing.yaml"
    assert main(["doctor", str(missing)]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f": {missing}: no such file")


def test_help_and_errors_say_that_training_arguments_may_be_yaml(tmp_path, capsys):
    path = tmp_path / "args.yaml"
    path.write_text("output_dir: out\nfp16: true\n")
    assert read_setup(path).dialect == "trainer"
    path.write_text("learning: 1\n")
    assert main(["doctor", str(path)]) == 2
    assert "TrainingArguments as JSON or YAML" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "TrainingArguments as JSON or YAML" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("version", [1, 2])
def test_of_fsdp_only_the_version_that_is_used_is_spoken_of(version, tmp_path, monkeypatch):
    seen = {}
    for accelerate in ("1.1.1", "1.15.0"):
        monkeypatch.setattr("safeload.prescribing.accelerate.__version__", accelerate)
        for fsdp in ({}, QUIET, {"use_orig_params": False, "cpu_ram_efficient_loading": True}):
            for values in (
                _accelerate(mixed_precision="fp16", fsdp={**fsdp, "version": version}),
                _trainer(fp16=True, fsdp="full_shard auto_wrap", fsdp_config={**fsdp, "version": version}),
            ):
                diagnosis = diagnose(read_setup(_write(tmp_path, values)))
                assert f"FSDP{3 - version}" not in str(diagnosis)
                seen |= {finding.rule: finding.consequence for finding in diagnosis.findings}
    assert ("Must flatten" in seen["ignored-modules-not-set"]) is (version == 1)
    assert ("torch before 2.7" in seen["ignored-modules-without-effect"]) is (version == 2)


@pytest.mark.parametrize("model", ["/nope", "./nope", "no/such/folder", "~/nope"])
def test_a_model_by_a_path_that_is_not_there_is_not_looked_for_on_the_hub(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("safeload.peeking.get_safetensors_metadata", lambda *args: pytest.fail("asked the Hub"))
    config = _write(tmp_path, _accelerate(mixed_precision="fp16"))
    assert main(["doctor", str(config), "--model", model]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f": {model}: no such folder or file")


def test_a_yaml_that_would_run_code_does_not(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text(f"compute_environment: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    with pytest.raises(SourceError):
        read_setup(path)
    assert not (tmp_path / "made").exists()


# --- the model ---


def _checkpoint(folder, dtypes, config=None):
    folder.mkdir(exist_ok=True)
    save_file({f"w{i}": torch.zeros(2, 3, dtype=dtype) for i, dtype in enumerate(dtypes)}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_is_read_from_headers_and_config(tmp_path):
    folder = _checkpoint(tmp_path / "m", [torch.float16, torch.float32, torch.int64], {"vision_config": {"a": 1}})
    assert read_model(str(folder)) == ModelFacts(
        name=str(folder), dtypes={"float16": 6, "float32": 6}, towers=("vision_tower",)
    )
    assert read_model(str(folder / "model.safetensors")).dtypes == {"float16": 6, "float32": 6}


def test_a_model_without_weights_is_read_from_its_config(tmp_path):
    for key in ("dtype", "torch_dtype"):
        folder = tmp_path / key
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({key: "bfloat16"}))
        assert set(read_model(str(folder)).dtypes) == {"bfloat16"}


def test_a_model_that_is_not_there_or_broken_is_misuse(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = _write(tmp_path, _accelerate(mixed_precision="fp16"))
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"12345678" * 4)

    def offline(*args, **kwargs):
        raise ConnectionError("no network in tests")

    monkeypatch.setattr("safeload.peeking.get_safetensors_metadata", offline)
    for model in ("nobody/nothing", str(tmp_path / "empty"), str(broken)):
        assert main(["doctor", str(config), "--model", model]) == 2
        assert model in capsys.readouterr().err


# --- the command ---


def test_exit_status_text_and_json(tmp_path, capsys):
    good = _write(tmp_path, _accelerate(mixed_precision="bf16"))
    half = str(_checkpoint(tmp_path / "half", [torch.float16]))
    assert main(["doctor", str(good)]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    assert main(["doctor", str(good), "--model", half]) == 0  # a warning
    assert "half-master-weights" in capsys.readouterr().out
    assert main(["doctor", str(good), "--model", half, "--strict"]) == 1
    capsys.readouterr()
    bad = _write(tmp_path, _accelerate(mixed_precision="fp16"), "bad.yaml")
    assert main(["doctor", str(bad), "--model", half]) == 1
    text = capsys.readouterr().out
    assert f"error: {bad}:3: [fp16-half-weights]" in text
    assert "Attempting to unscale FP16 gradients" in text
    assert "change to: mixed_precision: bf16" in text
    assert main(["doctor", str(bad), "--model", half, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["healthy"] is False
    assert read["findings"][0]["rule"] == "fp16-half-weights"
    assert (read["findings"][0]["line"], read["findings"][0]["path"]) == (3, str(bad))


def test_the_program_itself(tmp_path):
    bad = _write(tmp_path, _accelerate(fsdp={"version": 1}))
    for argv, status in (([str(bad)], 1), ([str(tmp_path / "no.yaml")], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "safeload", "doctor", *argv], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
