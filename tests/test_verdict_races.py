"""A verdict that takes its time: longer than the call's own life, than the group's timeout, and asked for at once."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.towers import clip_folder


def _load(folder, **kwargs):
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained

    return safe_from_pretrained(CLIPVisionModel, folder, verify="off", device="cpu", **kwargs)


def _delay_reading(seconds):
    from safeload import filling

    read = filling.copy_hashed

    def read_late(*args, **kwargs):
        time.sleep(seconds)
        return read(*args, **kwargs)

    filling.copy_hashed = read_late


def _use(folder):
    from safeload import check_towers

    tower = _load(folder, verdict="first_use")
    check = check_towers(tower)  # waits for the verdict, too, where the library could build before it
    assert tower(torch.zeros(1, 3, 32, 32)).pooler_output.isfinite().all()
    return check.ranks


def _use_late(folder):
    from safeload import signalling

    signalling._ANSWER_S = 1.0  # what a live control line may take to answer; this one has ended
    _delay_reading(3)
    return _use(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_reading_may_go_on_long_after_the_call(tmp_path, size):
    folder = clip_folder(tmp_path / "tower")
    results = run_on_ranks(size, _use_late, folder, store="none" if size == 1 else "file")
    assert all(result.ok for result in results), results[0].describe() + results[-1].describe()
    assert all(result.value == size for result in results)


def _use_in_threads(folder):
    _delay_reading(2)
    tower = _load(folder, verdict="first_use")
    errors = []

    def use():
        try:
            tower(torch.zeros(1, 3, 32, 32))
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_several_threads_may_use_it_first(tmp_path):
    results = run_on_ranks(3, _use_in_threads, clip_folder(tmp_path / "tower"))
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert [result.value for result in results] == [[], [], []]


def _drop_unused(folder):
    import gc

    open_before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        tower = _load(folder, verdict="first_use")
        del tower
        gc.collect()
    until = time.monotonic() + 5
    while len(set(os.listdir("/proc/self/fd")) - open_before) > 3 and time.monotonic() < until:
        time.sleep(0.05)
    return len(set(os.listdir("/proc/self/fd")) - open_before)


def test_a_tower_that_is_never_used_leaves_no_descriptors(tmp_path):
    results = run_on_ranks(2, _drop_unused, clip_folder(tmp_path / "tower"))
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert max(result.value for result in results) <= 3  # each promise's line to the store may live on


def _load_behind_a_stall(folder):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        _delay_reading(4)
    return _load(folder, transport="broadcast") is not None


def test_a_source_that_stalls_in_the_stream_for_longer_than_the_groups_timeout(tmp_path):
    folder = clip_folder(tmp_path / "tower")
    results = run_on_ranks(2, _load_behind_a_stall, folder, group_timeout_s=2)
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
