"""The verdict at the tower's first use: on every rank, before any output leaves the tower."""

from __future__ import annotations

import copy
import hashlib
import pickle

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.towers import clip_folder

USES = {
    "forward": lambda tower: tower(torch.zeros(1, 3, 32, 32)),
    "part": lambda tower: next(tower.children())(torch.zeros(1, 3, 32, 32)),
    "state_dict": lambda tower: tower.state_dict(),
    "unfreeze": lambda tower: __import__("safeload").unfreeze(tower),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "outer": lambda tower: torch.nn.ModuleDict({"tower": tower}).state_dict(),
}


def _manifest(folder):
    path = folder.parent / "SHA256SUMS"
    path.write_text(
        "".join(f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in sorted(folder.iterdir()))
    )
    return path


def _flip_a_bit(folder):
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    return weights


def _load(folder, manifest, **kwargs):
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained

    return safe_from_pretrained(CLIPVisionModel, folder, manifest=manifest, verdict="first_use", device="cpu", **kwargs)


def _use_bad(folder, manifest, use, kwargs):
    from safeload import IntegrityError

    tower = _load(folder, manifest, **kwargs)
    for _ in range(2):  # and again: it does not become good by being asked twice
        with pytest.raises(IntegrityError) as caught:
            USES[use](tower)
    return caught.value.path, caught.value.expected, caught.value.actual


@pytest.mark.parametrize("use", USES)
def test_a_bad_tower_is_refused_at_its_first_use(tmp_path, use):
    folder = clip_folder(tmp_path / "tower")
    manifest = _manifest(folder)
    weights = _flip_a_bit(folder)
    results = run_on_ranks(2, _use_bad, folder, manifest, use, {})
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert results[0].value == results[1].value
    assert results[0].value[0] == str(weights)


@pytest.mark.parametrize("kwargs", [{"memory": "mapped"}, {"transport": "broadcast"}, {"dtype": "bfloat16"}])
def test_on_every_road(tmp_path, kwargs):
    folder = clip_folder(tmp_path / "tower")
    manifest = _manifest(folder)
    _flip_a_bit(folder)
    results = run_on_ranks(2, _use_bad, folder, manifest, "state_dict", kwargs)
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()


def _use_good(folder, manifest):
    from transformers import CLIPVisionModel

    from safeload import filling, load_report

    slow = filling.copy_hashed

    def copy_slowly(*args, **kwargs):
        import time

        time.sleep(1)
        return slow(*args, **kwargs)

    filling.copy_hashed = copy_slowly
    tower = _load(folder, manifest)
    before = load_report(tower)
    pixels = torch.rand(1, 3, 32, 32)
    assert torch.equal(tower(pixels).pooler_output, CLIPVisionModel.from_pretrained(folder)(pixels).pooler_output)
    after = load_report(tower)
    return before.verdict, before.digest, after.verdict, after.provenance, len(after.digest)


def test_a_good_tower_is_used_and_the_report_is_completed(tmp_path):
    folder = clip_folder(tmp_path / "tower")
    results = run_on_ranks(2, _use_good, folder, _manifest(folder))
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert {result.value for result in results} == {("pending", "", "first_use", "pinned", 64)}


def _alone(folder, manifest):
    from safeload import IntegrityError

    tower = _load(folder, manifest)
    with pytest.raises(IntegrityError):
        tower(torch.zeros(1, 3, 32, 32))


def test_one_process_for_itself(tmp_path):
    folder = clip_folder(tmp_path / "tower")
    manifest = _manifest(folder)
    _flip_a_bit(folder)
    result = run_on_ranks(1, _alone, folder, manifest, store="none")[0]
    assert result.ok, result.describe()


def _source_dies(folder, manifest):
    import os
    import time

    import torch.distributed as dist

    from safeload import PeerError, filling

    if dist.get_rank() == 1:

        def never(*args, **kwargs):
            time.sleep(60)

        filling.copy_hashed = never
    tower = _load(folder, manifest, source_rank=1)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(PeerError, match="source rank 1 has ended"):
        tower(torch.zeros(1, 3, 32, 32))
    return time.monotonic() - began


def test_a_source_that_dies_before_the_verdict_is_noticed(tmp_path):
    folder = clip_folder(tmp_path / "tower")
    results = run_on_ranks(2, _source_dies, folder, _manifest(folder))
    assert results[0].value is not None, results[0].describe()
    assert results[0].value < 10
    assert results[1].exit_status == 3
