"""Pages for fresh memory: of the kind that costs less, as far as the memory goes, and no byte changed."""

from __future__ import annotations

import mmap
import sys
import time
from itertools import pairwise

import pytest
import torch

from safeload import populating
from safeload.advising import knows
from safeload.placing import allocate
from safeload.planning import LoadPlan, Segment
from safeload.populating import Populating

HUGE_PAGE = 2 * 1024**2
STEP = populating._STEP_PAGES * HUGE_PAGE
SIZES = (10 * STEP, 64, 1000, 3 * STEP)  # 52 MiB
HUGE, SMALL, POPULATE = populating.MADV_HUGEPAGE, populating.MADV_NOHUGEPAGE, populating.MADV_POPULATE_WRITE


def _allocate(sizes=SIZES):
    plan = LoadPlan(tensors=(), segments=tuple(Segment(size_bytes=size) for size in sizes))
    return allocate(plan, torch.device("cpu"))


def _populate(segments):
    populating = Populating(segments)
    with populating:
        populating._thread.join(timeout=30)
        assert not populating._thread.is_alive()


@pytest.fixture
def advised(monkeypatch):
    """Record what is advised, and let a step in huge pages take as long as `cost_s` says."""
    seen, cost_s, clock = [], [], [0.0]

    def advise(begin, end, advice):
        if advice == POPULATE:
            share = (end - begin) / STEP
            clock[0] += share * (0.001 if seen[-1][2] == SMALL or not cost_s else cost_s.pop(0))
        seen.append((begin, end, advice))
        return True

    monkeypatch.setattr(populating, "advise", advise)
    monkeypatch.setattr(populating.sys, "platform", "linux")
    monkeypatch.setattr(populating.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(populating, "huge_page_bytes", lambda: HUGE_PAGE)
    return seen, cost_s


def _kinds(seen):
    """Whether huge pages were asked for, by whole step."""
    return [advice == HUGE for begin, end, advice in seen if advice != POPULATE and end - begin == STEP]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/smaps and MADV_POPULATE_WRITE")
def test_all_pages_are_there_and_no_byte_is_changed():
    segments = _allocate()
    segments[1].fill_(7)
    segments[3][-1] = 9
    if not knows(POPULATE):
        pytest.skip("this kernel is older than 5.14: it makes pages only as they are written to")
    faults = _faults()
    _populate(segments)
    assert _faults() > faults
    faults = _faults()
    for segment in segments:
        segment[:: mmap.PAGESIZE] += 1
    assert _faults() - faults < 100, "pages that were not there were made as they were written to"
    assert segments[1].unique().tolist() == [7, 8]
    assert segments[3][-1] == 9
    assert set(segments[0].unique().tolist()) == {0, 1}


def _faults():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_every_byte_lies_in_one_step_and_steps_end_at_pages(advised):
    segments = _allocate()
    _populate(segments)
    steps = [(begin, end) for begin, end, advice in advised[0] if advice == POPULATE]
    assert steps[0][0] <= segments[0].data_ptr()
    assert steps[-1][1] >= segments[-1].data_ptr() + SIZES[-1]
    assert all(before[1] == after[0] for before, after in pairwise(steps))
    assert all(begin % mmap.PAGESIZE == end % mmap.PAGESIZE == 0 for begin, end in steps)
    assert all(begin % STEP == 0 for begin, _ in steps[1:])


def test_huge_pages_are_taken_while_they_cost_less(advised):
    seen, cost_s = advised
    cost_s += [0.0002] * 100
    _populate(_allocate())
    kinds = _kinds(seen)
    assert kinds[:2] == [False, False], "nobody has looked what small pages cost"
    assert len(kinds) > 10
    assert all(kinds[2:])


def test_huge_pages_that_the_host_has_to_find_again_are_given_up(advised):
    seen, cost_s = advised
    cost_s += [0.0002] * 3 + [0.009] * 100
    _populate(_allocate())
    assert _kinds(seen)[2:8] == [True] * 5 + [False]
    assert not any(_kinds(seen)[7:])


def test_one_dear_page_is_chance(advised):
    seen, cost_s = advised
    cost_s += [0.0002, 0.009] * 50
    _populate(_allocate())
    assert all(_kinds(seen)[2:])


def test_a_kernel_that_cannot_is_left_to_make_huge_pages_itself(monkeypatch):
    seen = []
    monkeypatch.setattr(populating.sys, "platform", "linux")
    monkeypatch.setattr(populating, "advise", lambda *args: seen.append(args) or args[2] != POPULATE)
    segments = _allocate()
    _populate(segments)
    assert [advice for _, _, advice in seen] == [SMALL, POPULATE, HUGE]
    assert seen[-1][0] <= segments[0].data_ptr()
    assert seen[-1][1] >= segments[-1].data_ptr() + SIZES[-1]


def test_on_a_system_without_huge_pages_none_are_tried_and_all_pages_are_made(advised, monkeypatch):
    seen, cost_s = advised
    cost_s += [0.0002] * 100
    monkeypatch.setattr(populating, "huge_page_bytes", lambda: 0)
    segments = _allocate()
    _populate(segments)
    steps = [(begin, end) for begin, end, advice in seen if advice == POPULATE]
    assert [advice for _, _, advice in seen[:-1]] == [SMALL, POPULATE] * len(steps)
    assert steps[0][0] <= segments[0].data_ptr()
    assert steps[-1][1] >= segments[-1].data_ptr() + SIZES[-1]


def test_memory_that_is_not_one_piece_is_left_alone(advised):
    _populate((torch.empty(STEP, dtype=torch.uint8), torch.empty(2 * STEP, dtype=torch.uint8)[STEP:]))
    _populate(())
    _populate(reversed(_allocate()))
    assert advised[0] == []
    _populate(_allocate())
    assert advised[0] != []


def test_it_stops_when_the_load_ends(monkeypatch):
    steps = []

    def advise(begin, end, advice):
        steps.append(advice)
        time.sleep(0.05)
        return True

    monkeypatch.setattr(populating.sys, "platform", "linux")
    monkeypatch.setattr(populating, "advise", advise)
    with Populating(_allocate()) as populate:
        while not steps:
            time.sleep(0.001)
    assert not populate._thread.is_alive()
    assert len(steps) < 10
