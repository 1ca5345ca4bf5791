"""The program: its commands and options are a tested list, its exit status means what it says."""

import argparse
import json
import subprocess
import sys

import pytest

from safeload import cli
from safeload.commands import COMMANDS, UsageError
from safeload.errors import IntegrityError

WHERE = ["--cache-dir", "--help", "--json", "--local-files-only", "--revision", "--subfolder", "--token", "--variant"]
OPTIONS = {
    "demo": ["--help", "--json", "--ranks", "--tower"],
    "verify": [
        *WHERE,
        "--allow-pickle",
        "--certificate-chain",
        "--manifest",
        "--manifest-sha256",
        "--public-key",
        "--signature",
    ],
    "lock": [*WHERE, "--allow-pickle", "--force", "--output"],
    "inspect": [*WHERE, "--model-class", "--tensors"],
    "doctor": ["--help", "--json", "--model", "--protected", "--strict"],
    "run": ["--classes", "--help", "--json", "--module"],
    "bench": [
        "--against",
        "--cold",
        "--help",
        "--json",
        "--plot",
        "--ranks",
        "--rounds",
        "--size",
        "--tower",
        "--work",
    ],
}


def commands():
    actions = cli.build_parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def test_the_commands_and_their_options_are_these():
    found = {
        name: sorted(max(action.option_strings, key=len) for action in parser._actions if action.option_strings)
        for name, parser in commands().items()
    }
    assert found == {name: sorted(options) for name, options in OPTIONS.items()}
    assert tuple(found) == COMMANDS


def test_every_command_has_help_and_json():
    for name, parser in commands().items():
        assert parser.description, name
        assert all(action.help for action in parser._actions), name
        assert "--json" in parser.format_help(), name


@pytest.mark.parametrize(
    "argv",
    [[], ["nothing"], ["demo", "--ranks", "1"], ["demo", "--ranks", "two"], ["demo", "--nothing"], ["demo", "more"]],
    ids=" ".join,
)
def test_misuse_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: safeload" in capsys.readouterr().err


class Stand:
    """A command that does what a test says."""

    def __init__(self, does):
        self.does = does

    def add_parser(self, subparsers):
        return subparsers.add_parser("stand", description="A stand-in.")

    def run(self, args):
        return self.does(args)


@pytest.fixture
def program(monkeypatch):
    def make(does):
        monkeypatch.setattr(cli, "COMMANDS", ("stand",))
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: Stand(does))
        return cli.main

    return make


def refuse(args):
    raise IntegrityError("/tower/model.safetensors: other bytes", path="/tower/model.safetensors", algorithm="sha256")


def test_what_a_command_returns_is_the_status(program):
    assert program(lambda args: 0)(["stand"]) == 0
    assert program(lambda args: 1)(["stand"]) == 1


def test_an_error_of_ours_is_status_1_with_its_text(program, capsys):
    assert program(refuse)(["stand"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "IntegrityError: /tower/model.safetensors: other bytes\n"


def test_with_json_an_error_of_ours_is_an_object(program, capsys):
    assert program(refuse)(["stand", "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)["error"]
    assert fields["class"] == "IntegrityError"
    assert fields["data"]["path"] == "/tower/model.safetensors"


def test_options_that_make_no_sense_together_are_status_2(program, capsys):
    def misuse(args):
        raise UsageError("--one goes without --other")

    assert program(misuse)(["stand"]) == 2
    assert "--one goes without --other" in capsys.readouterr().err


def test_an_interrupt_is_status_130(program):
    def interrupt(args):
        raise KeyboardInterrupt

    assert program(interrupt)(["stand"]) == 130


def test_a_bug_is_not_hidden(program):
    def fail(args):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        program(fail)(["stand"])


def test_help_and_version_need_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from safeload.cli import main\n"
        "for argv in (['--help'], ['demo', '--help'], ['--version']):\n"
        "    try:\n"
        "        main(argv)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'huggingface_hub', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
