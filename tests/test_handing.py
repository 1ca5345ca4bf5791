"""Descriptors from process to process."""

from __future__ import annotations

import ctypes
import os
import time
from datetime import timedelta

import pytest

from safeload.errors import GroupError
from safeload.handing import Offer, node_key, take

SOON = timedelta(seconds=5)
NEW_PID_NAMESPACE = 0x20000000


def _memory(text: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def _in_child(body, *, unshare: int = 0) -> int:
    """Run in a forked process, in name spaces of its own where asked for; return its exit status."""
    middle = os.fork()
    if middle == 0:
        status = 9
        try:
            if unshare and ctypes.CDLL(None, use_errno=True).unshare(unshare):
                os._exit(77)
            inner = os.fork()
            if inner == 0:
                try:
                    body()
                    os._exit(0)
                finally:
                    os._exit(8)
            status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1])


@pytest.mark.parametrize("unshare", [0, NEW_PID_NAMESPACE])
def test_what_arrives_is_the_same_memory_also_in_another_pid_namespace(unshare):
    fd = _memory(b"tower")

    with Offer([fd]) as offer:
        address = offer.address

        def child():
            (taken,) = take(address, 1, timeout=SOON)
            assert os.pread(taken, 99, 0) == b"tower"
            assert os.fstat(taken).st_ino == os.fstat(fd).st_ino
            assert os.getpid() == 1 or not unshare

        status = _in_child(child, unshare=unshare)
    os.close(fd)
    if status == 77:
        pytest.skip("this user may not make a PID name space")
    assert status == 0


def test_more_descriptors_than_one_message_takes():
    fds = [_memory(str(number).encode()) for number in range(450)]
    with Offer(fds) as offer:
        taken = take(offer.address, len(fds), timeout=SOON)
    assert [os.pread(fd, 9, 0) for fd in taken] == [str(number).encode() for number in range(450)]
    for fd in (*fds, *taken):
        os.close(fd)


def test_nothing_is_left_of_an_offer():
    fd = _memory(b"")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Offer([fd]) as offer:
            os.close(take(offer.address, 1, timeout=SOON)[0])
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(GroupError, match="could not be taken over"):
        take(offer.address, 1, timeout=SOON)
    os.close(fd)


def test_fewer_descriptors_than_announced_is_an_error_and_closes_them():
    fd = _memory(b"")
    with Offer([fd]) as offer:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(GroupError, match="1 of 2"):
            take(offer.address, 2, timeout=SOON)
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_another_user_gets_nothing():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    fd = _memory(b"tower")

    with Offer([fd]) as offer:
        address = offer.address

        def child():
            os.setuid(65534)
            with pytest.raises(GroupError):
                take(address, 1, timeout=SOON)

        assert _in_child(child) == 0
    os.close(fd)


def test_the_key_is_the_same_in_every_process_of_this_node():
    key = node_key()

    def child():
        assert node_key() == key

    assert _in_child(child) == 0
    assert _in_child(child, unshare=NEW_PID_NAMESPACE) in (0, 77)


def test_an_offer_ends_at_once():
    fd = _memory(b"tower")
    began = time.monotonic()
    for _ in range(20):
        with Offer([fd]):
            time.sleep(0.01)  # its thread is in `accept`
    os.close(fd)
    assert time.monotonic() - began < 20 * 0.08
