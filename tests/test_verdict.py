"""The verdict at the tower's first use: on every rank, before any output leaves the tower."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import time

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
    "state_dict of a part": lambda tower: next(tower.children()).state_dict(),
    "state_dict of a leaf": lambda tower: _leaf(tower).state_dict(),
    "pickle of a part": lambda tower: pickle.dumps(next(tower.children())),
    "copy of a part": lambda tower: copy.deepcopy(next(tower.children())),
    "restore": lambda tower: __import__("safeload").restore_towers(tower),
}


def _leaf(tower):
    return next(part for part in tower.modules() if not list(part.children()) and list(part.parameters()))


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
    import torch.distributed as dist

    from safeload import PeerError, filling

    if dist.get_rank() == 1:

        def never(*args, **kwargs):
            time.sleep(60)

        filling.copy_hashed = never
    tower = _load(folder, manifest, source_rank=1, memory="mapped")
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


def _read_at_once(folder, manifest, kwargs):
    """Read parameters as any code may, when the call has just returned; nobody is asked then."""
    from transformers import CLIPVisionModel

    from safeload import filling

    slow = filling.copy_hashed

    def copy_slowly(*args, **rest):
        time.sleep(0.5)
        return slow(*args, **rest)

    filling.copy_hashed = copy_slowly
    tower = _load(folder, manifest, **kwargs)
    seen = {name: parameter.detach().clone() for name, parameter in tower.named_parameters()}
    expected = CLIPVisionModel.from_pretrained(folder, dtype=kwargs.get("dtype", "float32"))
    return [name for name, value in expected.named_parameters() if not torch.equal(seen[name], value)]


@pytest.mark.parametrize("kwargs", [{}, {"memory": "mapped"}, {"dtype": "bfloat16"}, {"transport": "broadcast"}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tensors_are_in_place_when_the_call_returns(tmp_path, kwargs, ranks):
    folder = clip_folder(tmp_path / "tower")
    results = run_on_ranks(ranks, _read_at_once, folder, _manifest(folder), kwargs)
    assert all(result.ok for result in results), results[0].describe()
    assert [result.value for result in results] == [[]] * ranks


def _fork_at_once(folder, manifest, good):
    from safeload import IntegrityError

    tower = _load(folder, manifest, memory="mapped", chunk_digests=False)
    child = os.fork()
    try:
        tower(torch.zeros(1, 3, 32, 32))
        mine = True
    except IntegrityError:
        mine = False
    if not child:
        os._exit(0 if mine == good else 1)
    _, status = os.waitpid(child, 0)
    return mine, os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_has_the_verdict_and_leaves_it_to_its_parent(tmp_path, ranks, good):
    folder = clip_folder(tmp_path / "tower")
    manifest = _manifest(folder)
    if not good:
        _flip_a_bit(folder)
    results = run_on_ranks(ranks, _fork_at_once, folder, manifest, good)
    assert all(result.ok for result in results), results[0].describe()
    assert [result.value for result in results] == [(good, 0)] * ranks
