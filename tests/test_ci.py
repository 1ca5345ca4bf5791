"""The script that checks a clean clone fails when any of its steps fails, and ends with pytest's closing lines."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands for python3 and for all that an environment's bin/ has: writes down its call and fails where it is told to.
STAND_IN = """#!/usr/bin/env bash
call="$(basename "$0") $*"
echo "$call" >> "$CALLS"
if [[ -n "$BREAKS" && "$call" == *"$BREAKS"* ]]; then
  [[ "$call" == *"-m pytest"* ]] && echo "=== 1 failed, 2 passed in 0.1s ==="
  exit 3
fi
case "$call" in
  *"-m venv "*)
    mkdir -p "${@: -1}/bin"
    for name in python pip ruff mypy safeload; do cp "$0" "${@: -1}/bin/$name"; done ;;
  *"import torch'"*|*"-c import torch") exit 1 ;;
  *"-m pytest"*) echo "=== 3 passed in 0.1s ===" ;;
esac
"""

STEPS = [
    ("", ""),
    ("-m venv .venv-ci-report1", "environment of report 1"),
    ("safeload demo", "the README's demo"),
    ("--no-deps gt-all", "text tower"),
    ("-m pytest", "the README's tests"),
    ("-m pytest", "tests on transformers 4.46.3, accelerate 1.1.1"),
    ("ruff check", "lint"),
    ("ruff format", "format"),
    ("mypy", "types"),
]

ORDER = [
    "-m venv .venv-ci",
    "pip install -q torch==2.13.0",
    "pip install -e .",
    "safeload demo",
    "pip install -e .[test]",
    "python -m pytest",
    "transformers==4.46.3 accelerate==1.1.1",
    "ruff check .",
    "ruff format --check .",
    "mypy",
]


@pytest.fixture
def run(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    shutil.copy(ROOT / "README.md", clone)
    shutil.copytree(ROOT / "tests", clone / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"

    def start(breaks):
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "CI")}
        environment = {**kept, "PATH": f"{stand_in.parent}:{os.environ['PATH']}", "CALLS": str(calls), "BREAKS": breaks}
        command = [str(clone / ".ci" / "run")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, calls.read_text().splitlines()

    return start


@pytest.mark.parametrize(("breaks", "step"), STEPS)
def test_a_step_that_fails_fails_it_all(run, breaks, step):
    status, out, _ = run(breaks)
    assert status == (1 if breaks else 0), out
    assert ("FAILED" in out) == bool(breaks)
    if breaks:
        assert f"--- {step}: FAILED" in out
        assert f"FAILED: {step}" in out.splitlines()


def test_all_steps_run_in_their_order_and_the_tests_close_it(run):
    _, out, calls = run("")
    told = [next((place for place, call in enumerate(calls) if words in call), None) for words in ORDER]
    assert None not in told
    assert told == sorted(told)
    newest, report1 = [call for call in calls if "-m pytest" in call]
    assert newest == "python -m pytest", "the whole suite, nothing left out"
    again = set(report1.removeprefix("python -m pytest ").split())
    meets_others = ("load", "building", "ambient", "hubs", "casting", "remote_code", "precision", "unscale")
    assert again >= {f"tests/test_{name}.py" for name in meets_others}
    assert again >= {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_protect*.py")}
    assert all((ROOT / name).exists() for name in again)
    assert [line.split(maxsplit=1) for line in out.splitlines()[-2:]] == [
        ["newest", "=== 3 passed in 0.1s ==="],
        ["report1", "=== 3 passed in 0.1s ==="],
    ]
