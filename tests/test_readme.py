"""The README says what is true: its examples run, its commands are there, every public function is shown."""

import argparse
import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import safeload
from safeload import cli
from tests.ranks import on_ranks
from tests.towers import clip_folder

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    """The text of each fenced block of this language, with the number of its first line."""
    text = README.read_text()
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(text[: found.start()].count("\n") + 2, found.group(1)) for found in pattern.finditer(text)]


def public_functions():
    named = {name: getattr(safeload, name) for name in safeload.__all__}
    return {name for name, value in named.items() if not isinstance(value, type)}


def test_every_public_function_is_shown_in_an_example():
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        for _, text in blocks("python")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }
    behind_commands = set(re.findall(r"`(\w+)\(", README.read_text())) & {"write_lock", "verify_checkpoint"}
    assert public_functions() - called - behind_commands == set()


def test_every_error_class_is_explained():
    errors = {name for name in safeload.__all__ if name.endswith("Error")}
    told = README.read_text().partition("## Errors")[2].partition("\n## ")[0]
    assert {name for name in errors if f"| `{name}`" not in told} == set()


def sections():
    """{heading: its python blocks}; the blocks of a section run one after the other, each section by itself."""
    lines = README.read_text().splitlines()
    found = {}
    for line, text in blocks("python"):
        heading = next(each for each in reversed(lines[:line]) if each.startswith("## "))
        found.setdefault(heading[3:], []).append((line, text))
    return found


def surroundings_of_use():
    """What the examples of "Use" take for granted: code that is not the reader's. They bring their own imports."""
    import transformers
    from torch import nn

    class ThirdPartyModel(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.vision_tower = transformers.CLIPVisionModel.from_pretrained(config.mm_vision_tower)

    return {"ThirdPartyModel": ThirdPartyModel, "__name__": "readme"}


def surroundings(folder):
    """What the examples of the other sections take for granted: imports of a training script, a model, data."""
    import torch
    import transformers
    from accelerate import Accelerator

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    torch.manual_seed(0)
    ids = torch.randint(100, (1, 8))
    # first, since it resets what Accelerator has set up
    args = transformers.TrainingArguments(output_dir=folder + "-out", use_cpu=True, report_to=[])
    return {
        "CLIPVisionModel": transformers.CLIPVisionModel,
        "Trainer": transformers.Trainer,
        "__name__": "readme",
        "accelerator": Accelerator(cpu=True),
        "args": args,
        "data": [{"input_ids": ids[0], "labels": ids[0]}],
        "ids": ids,
        "loader": torch.utils.data.DataLoader([ids[0]]),
        "model": transformers.LlamaForCausalLM(config).half(),
        "plain_model": transformers.LlamaForCausalLM(config),
        "safe_from_pretrained": safeload.safe_from_pretrained,
        "torch": torch,
    }


@pytest.fixture
def locked_tower(tmp_path):
    import hashlib

    folder = clip_folder(tmp_path / "tower")
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return str(folder)


@pytest.fixture
def lock_sha256(locked_tower, capsys, monkeypatch):
    """What the README's command prints when it makes the README's lock; it shows three points in its place."""
    monkeypatch.chdir(Path(locked_tower).parent)
    line = next(line for _, text in blocks("console") for line in text.splitlines() if "$ safeload lock" in line)
    assert cli.main(shlex.split(line.partition("$ safeload ")[2])) == 0
    path, shown = capsys.readouterr().out.splitlines()
    text = README.read_text()
    assert f"{line}\n{path}\nmanifest_sha256=...\n" in text
    return shown.removeprefix("manifest_sha256=")


@on_ranks(2, timeout_s=90)
def test_the_examples_run_in_their_order_on_two_ranks(locked_tower, lock_sha256):
    import torch

    os.chdir(Path(locked_tower).parent)
    torch.distributed.init_process_group = lambda: None  # these ranks have their group
    for heading, blocks_of_section in sections().items():
        names = surroundings_of_use() if heading == "Use" else surroundings(locked_tower)
        for line, text in blocks_of_section:
            padded = "\n" * (line - 1) + text  # tracebacks then point into the README
            padded = padded.replace('manifest_sha256="..."', f'manifest_sha256="{lock_sha256}"')
            exec(compile(padded, str(README), "exec"), names)


def test_sha256sum_reads_the_lock_as_shown(locked_tower, lock_sha256):
    shown = [line for _, text in blocks("console") for line in text.splitlines() if "sha256sum" in line]
    assert len(shown) == 1
    parent = Path(locked_tower).parent
    command = ["bash", "-c", shown[0].removeprefix("$ ")]
    done = subprocess.run(command, cwd=parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors: OK" in done.stdout


def test_the_doctor_says_what_is_shown_of_the_file_that_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, config),) = blocks("yaml")
    Path("fsdp.yaml").write_text(config)
    (shown,) = [text.splitlines() for _, text in blocks("console") if "$ safeload doctor" in text]
    assert cli.main(shlex.split(shown[0].partition("$ safeload ")[2])) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.removesuffix("...").rstrip() for line in shown[1:]] == [
        line[: len(expected.removesuffix("...").rstrip())] if expected.endswith("...") else line
        for expected, line in zip(shown[1:], said, strict=False)
    ]


def test_the_commands_are_there_with_their_options():
    actions = cli.build_parser()._actions
    commands = next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))
    shown = [
        shlex.split(line.partition("$ safeload ")[2])
        for _, text in blocks("console")
        for line in text.splitlines()
        if line.startswith("$ safeload ")
    ]
    for words in shown:
        cli.build_parser().parse_args(words)
    mentioned = set(re.findall(r"`safeload (\w+)", README.read_text())) | {words[0] for words in shown}
    assert mentioned <= set(commands)


@pytest.mark.parametrize("last", ["demo", "pytest"])
def test_there_is_one_command_that_sets_up_and_runs(last):
    found = [line for _, text in blocks("bash") for line in text.splitlines() if line.split()[-1] == last]
    assert len(found) == 1
    steps = found[0].split(" && ")
    assert steps[0] == "python3 -m venv .venv"
    assert all(step.startswith((".venv/bin/", "python3 -m venv")) for step in steps)


def test_no_more_is_promised_than_there_is():
    text = README.read_text()
    options = {word for word in re.findall(r"`(--[a-z-]+)", text)}
    actions = cli.build_parser()._actions
    commands = next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))
    known = {option for parser in commands.values() for action in parser._actions for option in action.option_strings}
    assert options <= known
