"""What a load's memory is said to be: read from the system at the beginning, and again where it has to be."""

from __future__ import annotations

import mmap
import sys
import time

import pytest

from safeload import metering
from safeload.metering import MemoryMeter

MIB = 1024**2
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PSS is told by Linux alone")


@pytest.fixture
def readings(monkeypatch):
    taken = []
    read = metering.pss_bytes
    monkeypatch.setattr(metering, "pss_bytes", lambda: taken.append(read()) or taken[-1])
    return taken


def wait_for_first(readings):
    until = time.monotonic() + 10
    while not readings and time.monotonic() < until:
        time.sleep(0.001)


def test_own_memory_that_grew_and_went_is_in_the_peak_without_another_reading(readings):
    with MemoryMeter() as meter:
        wait_for_first(readings)
        own = mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        own.write(b"x" * len(own))
        time.sleep(0.3)
        own.close()
    assert len(readings) == 2, "one at the beginning, one at the end"
    assert (meter.before_bytes, meter.after_bytes) == tuple(readings)
    assert meter.peak_bytes > meter.before_bytes + 200 * MIB
    assert meter.after_bytes < meter.peak_bytes - 200 * MIB


def test_files_that_were_mapped_meanwhile_are_read_at_the_end(readings, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 256 * MIB)
    with MemoryMeter() as meter:
        wait_for_first(readings)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        meter.stop()
    mapped.close()
    assert len(readings) == 2
    assert meter.after_bytes == readings[1] > meter.before_bytes + 200 * MIB
    assert meter.peak_bytes == meter.after_bytes
