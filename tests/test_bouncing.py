"""Bytes on their way to an accelerator: by two pinned buffers, never written to before the copy out of them has ended.

There is no accelerator here. A stand-in takes its place: memory that says it is on one, and copies that happen only
when they are waited for, the last moment at which a real one may read the buffer.
"""

from __future__ import annotations

import pytest
import torch

from safeload.bouncing import Bounce, Lane
from safeload.broadcasting import broadcast, buckets
from safeload.group import join_group
from safeload.planning import LoadPlan, Segment
from tests.ranks import on_ranks

CPU, ACCELERATOR = torch.device("cpu"), torch.device("cuda", 0)
BUCKET = 3 << 20
SIZES = (2 * BUCKET + 5, 100, BUCKET, 1 << 20, 7, 4 * BUCKET, 300)  # large ones in slices, small ones packed


class LateLane(Lane):
    """An accelerator that reads as late as it may; it keeps account of host memory."""

    def __init__(self, *, pins=True):
        self.pins, self.pinned_bytes, self.host_bytes, self.copies, self.waited = pins, 0, 0, 0, 0
        self.there = set()

    def place(self, tensor):
        self.there.add(tensor.untyped_storage().data_ptr())
        return tensor

    def device_of(self, tensor):
        return ACCELERATOR if tensor.untyped_storage().data_ptr() in self.there else CPU

    def empty(self, size_bytes, device):
        made = torch.empty(size_bytes, dtype=torch.uint8)
        if device.type == "cpu":
            self.host_bytes += size_bytes
            return made
        return self.place(made)

    def pin(self, size_bytes):
        if not self.pins:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        self.pinned_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, to, of):
        assert self.device_of(to) == ACCELERATOR
        self.copies += 1

        def wait():
            self.waited += 1
            to.copy_(of)

        return wait


def _plan():
    return LoadPlan(tensors=(), segments=tuple(Segment(size_bytes=size) for size in SIZES))


def _bytes(seed):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (size,), dtype=torch.uint8, generator=draw) for size in SIZES)


def _send(group, lane, *, wire_device, source, target):
    broadcast(
        group,
        _plan(),
        source=source,
        target=target,
        wire_device=wire_device,
        bucket_bytes=BUCKET,
        lane=lane,
    )


@on_ranks(2)
def test_a_wire_on_the_cpu_and_a_tower_on_an_accelerator():
    lane, want = LateLane(), _bytes(0)
    with join_group() as group:
        target = tuple(lane.place(torch.zeros_like(each)) for each in want)
        _send(group, lane, wire_device=CPU, source=want if group.is_source else None, target=target)
    assert all(map(torch.equal, target, want))
    assert lane.copies == lane.waited == sum(map(len, buckets(_plan(), bucket_bytes=BUCKET)))
    assert lane.pinned_bytes == 2 * BUCKET
    assert lane.host_bytes == 0  # not a byte more than the two buffers


@on_ranks(2)
def test_a_wire_on_an_accelerator_and_a_source_on_the_cpu():
    lane, want = LateLane(), _bytes(1)
    copies = []
    lane.start = lambda to, of: copies.append(1) or (lambda: None) if to.copy_(of) is not None else None  # at once
    with join_group() as group:
        target = tuple(lane.place(torch.zeros_like(each)) for each in want)
        _send(group, lane, wire_device=ACCELERATOR, source=want if group.is_source else None, target=target)
        is_source = group.is_source
    assert all(map(torch.equal, target, want))
    assert bool(copies) == is_source
    assert lane.pinned_bytes == (2 * BUCKET if is_source else 0)  # the others receive where the tower lives
    assert lane.host_bytes == 0


@on_ranks(2)
def test_where_memory_cannot_be_pinned_it_goes_as_before():
    lane, want = LateLane(pins=False), _bytes(2)
    for wire_device in (CPU, ACCELERATOR):
        target = tuple(lane.place(torch.zeros_like(each)) for each in want)
        with join_group() as group:
            _send(group, lane, wire_device=wire_device, source=want if group.is_source else None, target=target)
        assert all(map(torch.equal, target, want))
    assert lane.copies == lane.pinned_bytes == 0


@on_ranks(2)
def test_nothing_is_pinned_for_a_tower_on_the_cpu():
    lane, want = LateLane(), _bytes(3)
    with join_group() as group:
        target = None if group.is_source else tuple(torch.zeros_like(each) for each in want)
        _send(group, lane, wire_device=CPU, source=want if group.is_source else None, target=target)
    assert target is None or all(map(torch.equal, target, want))
    assert lane.copies == lane.pinned_bytes == 0
    assert lane.host_bytes < 2 << 20  # packed small segments alone


def _large(want):
    """Only what goes straight to its place: from a packed bucket it is copied on, in the order of a real stream."""
    return [number for number, each in enumerate(want) if each.numel() > 1 << 20]


def test_one_process_and_an_accelerator():
    lane, want = LateLane(), _bytes(4)
    target = tuple(lane.place(torch.zeros_like(each)) for each in want)
    with join_group() as group:
        _send(group, lane, wire_device=ACCELERATOR, source=want, target=target)
    assert all(torch.equal(target[number], want[number]) for number in _large(want))
    assert lane.pinned_bytes == 2 * BUCKET
    assert lane.copies == lane.waited == len(tuple(buckets(_plan(), bucket_bytes=BUCKET)))


def test_a_buffer_is_lent_again_only_after_the_copies_from_it():
    lane = LateLane()
    bounce = Bounce(lane, 8)
    first, second = bounce.lend(8), bounce.lend(4)
    assert first is not None
    assert second is not None
    assert (first.numel(), second.numel()) == (8, 4)
    assert bounce.lend(8) is None  # never a third
    there = lane.place(torch.zeros(8, dtype=torch.uint8))
    first.fill_(7)
    bounce.send(there, first, lent=first)
    bounce.take_back(first)
    assert lane.waited == 0
    again = bounce.lend(8)
    assert again is not None
    assert again.data_ptr() == first.data_ptr()
    assert lane.waited == 1
    assert there.tolist() == [7] * 8


def test_the_check_can_tell_a_buffer_that_was_used_too_early(monkeypatch):
    monkeypatch.setattr(Bounce, "_wait_for", lambda self, address: None)
    monkeypatch.setattr(Bounce, "drain", lambda self: [wait() for each in self._waits.values() for wait in each])
    lane, want = LateLane(), _bytes(5)
    target = tuple(lane.place(torch.zeros_like(each)) for each in want)
    with join_group() as group:
        _send(group, lane, wire_device=ACCELERATOR, source=want, target=target)
    assert not all(torch.equal(target[number], want[number]) for number in _large(want))


def test_a_copy_that_fails_is_told(monkeypatch):
    lane, want = LateLane(), _bytes(6)

    def start(to, of):
        def wait():
            raise RuntimeError("the accelerator is gone")

        return wait

    lane.start = start
    target = tuple(lane.place(torch.zeros_like(each)) for each in want)
    with join_group() as group, pytest.raises(Exception, match="the accelerator is gone"):
        _send(group, lane, wire_device=ACCELERATOR, source=want, target=target)


def test_the_real_lane_says_where_memory_is_and_pins_or_says_no():
    lane = Lane()
    assert lane.device_of(torch.empty(1)) == CPU
    assert lane.empty(3, CPU).shape == (3,)
    bounce = Bounce(lane, 16)
    lent = bounce.lend(16)
    assert (lent is not None and lent.is_pinned()) == torch.accelerator.is_available()


def test_a_device_without_events_is_waited_for_as_a_whole(monkeypatch):
    waited = []

    def raises(device):
        raise NotImplementedError("no streams")

    monkeypatch.setattr(torch.accelerator, "current_stream", raises)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    to = torch.zeros(4, dtype=torch.uint8)
    wait = Lane().start(to, torch.ones(4, dtype=torch.uint8))
    assert waited == []
    wait()
    assert waited == [CPU]
    assert to.tolist() == [1] * 4
