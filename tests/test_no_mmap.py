"""memory="sealed" is the switch for no mmap: no rank ever maps a file of the checkpoint, which is read from end to end.

Two witnesses: every map that Python itself makes is told by an audit event, and a thread looks at /proc/self/maps all
the time, which shows those of libraries. The same witnesses do see memory="mapped".
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from transformers import CLIPVisionModel

from safeload import safe_from_pretrained
from tests.ranks import run_on_ranks
from tests.towers import clip_folder

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="no /proc/self/maps to look at")


class Witness:
    """Notes every map of a file below a folder, while it is entered."""

    def __init__(self, folder):
        self.folder, self.seen, self.looks = os.path.realpath(folder), set(), 0
        self._active, self._stop = True, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _audit(self, event, args):
        if self._active and event == "mmap.__new__" and args[0] >= 0:
            self._note(os.readlink(f"/proc/self/fd/{args[0]}"))

    def _note(self, path):
        if path.startswith(self.folder):
            self.seen.add(path)

    def _look(self):
        while not self._stop.wait(0.0005):
            for line in MAPS.read_text().splitlines():
                self._note(line[73:])
            self.looks += 1

    def __enter__(self):
        sys.addaudithook(self._audit)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()
        self._active = False


def _load(folder, options):
    with Witness(folder) as witness:
        tower = safe_from_pretrained(CLIPVisionModel, folder, device="cpu", verify="off", **options)
        next(tower.parameters()).sum()
    assert witness.looks > 3
    return sorted(os.path.basename(path) for path in witness.seen)


def _seen(folder, ranks=2, **options):
    store = "file" if ranks > 1 else "none"
    results = run_on_ranks(ranks, _load, str(folder), options, store=store)
    assert all(result.ok for result in results), results[0].describe()
    return [result.value for result in results]


@pytest.mark.parametrize("transport", ["shared", "broadcast"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_sealed_load_maps_no_file_of_the_checkpoint(tmp_path, transport, dtype):
    folder = clip_folder(tmp_path / "tower", shard_size="150KB")
    assert _seen(folder, transport=transport, dtype=dtype) == [[], []]


def test_nor_does_one_process(tmp_path):
    assert _seen(clip_folder(tmp_path / "tower"), ranks=1) == [[]]


def test_the_witnesses_see_a_mapped_load(tmp_path):
    folder = clip_folder(tmp_path / "tower", shard_size="150KB")
    on_source, _ = _seen(folder, memory="mapped", chunk_digests=False)
    assert on_source == sorted(path.name for path in folder.glob("*.safetensors"))
