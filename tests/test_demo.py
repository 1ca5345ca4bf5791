"""The demo: what it shows is what happens, on this stack, and it fails when a promise does not hold."""

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import transformers
from rich.console import Console

from safeload.cli import main
from safeload.demo import run_demo
from safeload.demo_records import WAYS
from safeload.demo_tables import print_result
from tests.ranks import on_ranks
from tests.towers import real_text_tower, real_vision_tower

pytestmark = pytest.mark.timeout(180)

FILLS_EVERY_RANK = int(transformers.__version__.split(".")[0]) >= 5


def start_demo(*options, **kwargs):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "safeload", "demo", *options]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment, **kwargs)


@pytest.fixture
def demo(capfd):
    """The program in this process, whose fork server is warm."""

    def run(*options):
        status = main(["demo", *options])
        return status, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def result():
    return run_demo()


def test_there_is_a_row_for_each_way_and_rank(result):
    want = [(way, rank) for way in WAYS for rank in range(2)]
    for rows in (result.plain, result.safe, result.trained):
        assert [(row.way, row.rank) for row in rows] == want


def test_plain_from_pretrained_goes_wrong_as_this_stack_has_it(result):
    direct_0, direct_1, outer_0, outer_1 = result.plain
    assert direct_0.right
    if FILLS_EVERY_RANK:  # every rank reads the file; an outer from_pretrained refuses the nested one
        assert direct_1.right
        assert direct_1.opened == direct_0.opened == ("model.safetensors",)
        for row in (outer_0, outer_1):
            assert "meta device context" in row.error
    else:  # only the first rank is filled, and nobody says so
        assert outer_0.right
        for row in (direct_1, outer_1):
            assert row.error is None
            assert len(row.wrong_parameters) > 100
            assert row.example


def test_safeload_holds_on_the_same_stack(result):
    assert result.failed == ()
    assert result.passed
    for row in result.safe:
        assert row.right
        assert row.opened == (("model.safetensors",) if row.rank == 0 else ())
    for row in result.trained:
        assert row.untouched
        assert row.sharded == row.changed == row.trainable > 20
        assert row.losses[-1] < row.losses[0]
    assert result.report["provenance"] == "none"


def test_memory_is_told_rank_by_rank(result):
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process's share of memory")
    for row in result.safe:
        assert row.peak_bytes >= row.before_bytes > 0
        assert row.peak_bytes >= row.after_bytes > 0
    whole_job = sum(row.after_bytes - row.before_bytes for row in result.safe if row.way == result.safe[0].way)
    assert whole_job >= result.setting.tower_bytes // 2, "one copy, in the shares of all ranks together"


def test_the_tables_fit_80_columns_and_say_what_was_seen(result):
    text = io.StringIO()
    print_result(result, Console(file=text, width=80, force_terminal=False))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    shown = text.getvalue()
    count = len(result.setting.reference)
    assert f"Model.from_pretrained  1          0 of {count}" in shown
    assert "0, source" in shown
    assert shown.count("untouched\n") + shown.count("untouched  \n") == len(result.trained)
    assert "…" not in shown  # nothing was cut off
    assert ("meta device" in shown.replace("\n", " ")) == FILLS_EVERY_RANK


def broken(result, **changes):
    return replace(result, **changes)


def test_each_promise_that_does_not_hold_fails_the_demo(result):
    first, *others = result.safe
    one, *more = result.trained
    other_rank = result.safe[1]
    cases = {
        "every tensor": {"safe": (replace(first, wrong_buffers=("x",)), *others)},
        "only the source": {"safe": (first, replace(other_rank, opened=("model.safetensors",)), *result.safe[2:])},
        "same features": {"trained": (replace(one, features="other"), *more)},
        "untouched": {"trained": (replace(one, same_values=False), *more)},
        "is sharded": {"trained": (replace(one, sharded=one.trainable - 1), *more)},
        "has changed": {"trained": (replace(one, changed=0), *more)},
    }
    for words, change in cases.items():
        changed = broken(result, **change)
        assert len(changed.failed) == 1, words
        assert words in changed.failed[0]
        text = io.StringIO()
        print_result(changed, Console(file=text, width=200))
        assert "did not hold" in text.getvalue()
    nobody_read = broken(result, safe=tuple(replace(row, opened=()) for row in result.safe))
    assert "only the source" in nobody_read.failed[0]  # a watch that saw nothing proves nothing


@on_ranks(2)
def test_a_tower_that_training_touches_is_noticed():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from safeload.demo_model import Model, model_config
    from safeload.demo_ranks import _train
    from tests.towers import VISION

    model = Model(model_config(width=VISION["hidden_size"]))
    model.vision_tower = CLIPVisionModel(CLIPVisionConfig(**VISION))  # frozen by nobody
    row = _train(model, WAYS[0])
    assert not row.untouched
    assert not row.same_objects


def test_a_real_tower_on_three_ranks_as_json(demo):
    status, out, err = demo("--json", "--ranks", "3", "--tower", str(real_text_tower()))
    assert status == 0, out + err
    told = json.loads(out)
    assert told["passed"] is True
    assert told["failed"] == []
    assert told["ranks"] == 3
    assert [len(row["opened"]) for row in told["safe"]] == [1, 0, 0, 1, 0, 0]
    assert len(told["setting"]["reference"]) > 100


def test_a_real_vision_tower_in_tables(demo):
    status, out, err = demo("--tower", str(real_vision_tower()))
    if hasattr(transformers.Dinov2Config(), "use_mask_token"):
        assert status == 0, out + err
        assert "Dinov2Model" in out
        assert "With safeload: none" in out
    else:  # 4.46 has no way to leave out the mask token, which was not saved
        assert status == 1
        assert err.startswith("CheckpointError: ")
        assert "embeddings.mask_token" in err


def test_a_tower_that_is_not_there_is_a_named_failure(demo, tmp_path):
    status, out, err = demo("--json", "--tower", str(tmp_path / "nothing"))
    assert status == 1, err
    assert json.loads(out)["error"]["class"] == "SourceError"
    status, out, err = demo("--tower", str(tmp_path / "nothing"))
    assert (status, out) == (1, "")
    assert err.startswith("SourceError: ")
    assert "nothing" in err


def test_control_c_ends_it_all(tmp_path, monkeypatch):
    """And so does what a scheduler sends. Two programs at once: most of their time goes into imports."""
    with contextlib.ExitStack() as started:
        running = []
        for how in (signal.SIGINT, signal.SIGTERM):
            folder = tmp_path / how.name
            folder.mkdir()
            monkeypatch.setenv("TMPDIR", str(folder))
            # a shell's background job ignores Ctrl-C, and what it starts does
            restore = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            process = start_demo(start_new_session=True, preexec_fn=restore)
            started.callback(end_session, process)
            running.append((process, how, folder))
        for process, how, folder in running:
            family = wait_for_family(process)  # tracker, fork server, a rank
            os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
            out, err = process.communicate(timeout=15)
            assert process.returncode == 128 + how
            assert out == ""
            assert "Traceback" not in err
            assert not psutil.wait_procs(family, timeout=15)[1]
            assert [each.name for each in folder.iterdir() if each.name.startswith("safeload-")] == []


def wait_for_family(process):
    until = time.monotonic() + 60
    while len(psutil.Process(process.pid).children(recursive=True)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    return family


def end_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
