"""Ranks without a launcher: what they return, how they fail, and that none of them outlives the program."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from safeload.errors import PeerError, SourceError
from safeload.spawning import run_ranks

MINUTE = timedelta(minutes=1)
TORCH = ["torch", "torch.distributed"]


def children():
    return {each.pid for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE}


def rank_folders():
    return set(Path(tempfile.gettempdir()).glob("safeload-ranks-*"))


def test_each_rank_returns_its_value_from_one_process_group(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = rank_folders()
    values = run_ranks("tests.spawned.who", "word", ranks=3, timeout=MINUTE, env={"FLAG": "set"}, preload=TORCH)
    assert values == tuple(("word", rank, 3, "set", str(rank)) for rank in range(3))
    assert rank_folders() == before
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_error_of_ours_keeps_its_class_and_data():
    start = time.monotonic()
    with pytest.raises(SourceError, match="no such folder") as caught:
        run_ranks("tests.spawned.fail_on_rank_1", "ours", ranks=2, timeout=MINUTE, preload=TORCH)
    assert caught.value.path == "/nowhere"
    assert time.monotonic() - start < 40  # rank 0 sits in a barrier and is stopped


@pytest.mark.parametrize(("kind", "told"), [("foreign", "ValueError: not ours"), ("exit", "exit status 7")])
def test_another_failure_names_the_rank_and_what_it_printed(kind, told):
    with pytest.raises(PeerError) as caught:
        run_ranks("tests.spawned.fail_on_rank_1", kind, ranks=2, timeout=MINUTE, preload=TORCH)
    assert told in caught.value.failures[1]
    assert kind == "exit" or "on the way to it" in caught.value.failures[1]


def test_late_ranks_are_stopped(tmp_path):
    before = children()
    with pytest.raises(PeerError, match="did not end in time"):
        run_ranks("tests.spawned.wait_for_ever", str(tmp_path), ranks=2, timeout=timedelta(seconds=6), preload=TORCH)
    pids = {int(file.read_text()) for file in tmp_path.iterdir()}
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    # the server that they were forked from, and its tracker, stay for the next run and end with this process
    assert len(children() - before) <= 2


HOWS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def test_no_process_outlives_the_program(tmp_path):
    """Three programs at once, each to be ended in its own way: most of their time goes into imports."""
    programs = {}
    try:
        for how in HOWS:
            folder = tmp_path / how.name
            folder.mkdir()
            programs[how] = _start_program(folder)
        families = {how: _wait_for_ranks(programs[how], tmp_path / how.name) for how in HOWS}
        for how in HOWS:
            _end_program(programs[how], how, families[how])
    finally:
        for program in programs.values():
            for each in psutil.process_iter(["pid"]):
                if each.pid != os.getpid() and _session(each.pid) == program.pid:
                    each.kill()
            program.wait()


def _start_program(folder):
    code = (
        "import signal\n"
        "from datetime import timedelta\n"
        "from safeload.spawning import run_ranks\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        f"    run_ranks('tests.spawned.wait_for_ever', {str(folder)!r}, ranks=2, timeout=timedelta(minutes=5))\n"
    )
    script = folder / "program.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, script], start_new_session=True, env=environment)


def _wait_for_ranks(program, folder):
    until = time.monotonic() + 60
    while len(list(folder.glob("rank-*"))) < 2 and time.monotonic() < until:
        assert program.poll() is None
        time.sleep(0.1)
    family = psutil.Process(program.pid).children(recursive=True)
    assert len(family) >= 2
    return family


def _end_program(program, how, family):
    if how == signal.SIGINT:
        os.killpg(program.pid, how)  # as a terminal does it: every process of the group gets it
    else:
        program.send_signal(how)
    program.wait(timeout=15)
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    assert program.returncode != 0


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
