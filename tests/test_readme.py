"""The README says what is true: its examples run, its commands are there, every public function is shown."""

import argparse
import ast
import os
import re
import shlex
import warnings
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
    assert public_functions() - called == set()


def test_every_error_class_is_explained():
    errors = {name for name in safeload.__all__ if name.endswith("Error")}
    told = README.read_text().partition("## Errors")[2].partition("\n## ")[0]
    assert {name for name in errors - {"SafeLoadError", "GroupError"} if f"| `{name}`" not in told} == set()
    assert "`SafeLoadError`" in told


def sections():
    """{heading: its python blocks}; the blocks of a section run one after the other, each section by itself."""
    lines = README.read_text().splitlines()
    found = {}
    for line, text in blocks("python"):
        heading = next(each for each in reversed(lines[:line]) if each.startswith("## "))
        found.setdefault(heading[3:], []).append((line, text))
    return found


def surroundings(folder):
    """What the examples take for granted: the imports of a training script, a configuration, a model, a path."""
    import json

    import torch
    import transformers
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    config.mm_vision_tower = folder

    class ThirdPartyModel(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.vision_tower = transformers.CLIPVisionModel.from_pretrained(config.mm_vision_tower)

    os.chdir(Path(folder).parent)
    torch.manual_seed(0)
    ids = torch.randint(100, (1, 8))
    # first, since it resets what Accelerator has set up
    args = transformers.TrainingArguments(output_dir=folder + "-out", use_cpu=True, report_to=[])
    return {
        "CLIPVisionModel": transformers.CLIPVisionModel,
        "LlamaForCausalLM": transformers.LlamaForCausalLM,
        "ThirdPartyModel": ThirdPartyModel,
        "Trainer": transformers.Trainer,
        "__name__": "readme",
        "accelerator": Accelerator(cpu=True),
        "args": args,
        "config": config,
        "data": [{"input_ids": ids[0], "labels": ids[0]}],
        "fully_shard": fully_shard,
        "ids": ids,
        "json": json,
        "loader": torch.utils.data.DataLoader([ids[0]]),
        "model": transformers.LlamaForCausalLM(config).half(),
        "nn": nn,
        "path": folder,
        "plain_model": transformers.LlamaForCausalLM(config),
        "re": re,
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


@on_ranks(2, timeout_s=90)
def test_the_examples_run_in_their_order_on_two_ranks(locked_tower):
    warnings.filterwarnings("ignore", "(?s).*TRUST ON FIRST USE", safeload.UnverifiedWarning)
    for blocks_of_section in sections().values():
        names = surroundings(locked_tower)
        for line, text in blocks_of_section:
            padded = "\n" * (line - 1) + text  # tracebacks then point into the README
            exec(compile(padded, str(README), "exec"), names)


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
