"""One copy a node: the same tower by every transport, and what sharing alone promises."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.towers import clip_folder, full_clip_folder

TRANSPORTS = [("shared", "sealed"), ("shared", "mapped"), ("broadcast", "sealed"), ("broadcast", "mapped")]


def _load(folder, **kwargs):
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained

    return safe_from_pretrained(CLIPVisionModel, folder, verify="off", **kwargs)


def _reference(folder, dtype=None):
    from transformers import CLIPVisionModel

    return CLIPVisionModel.from_pretrained(folder, **({"torch_dtype": dtype} if dtype else {}))


def _tensors(module):
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _assert_same(tower, reference):
    ours, theirs = _tensors(tower), _tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].shape == value.shape, name
        assert torch.equal(ours[name], value), name


def _open_files():
    """What this process holds of towers, by descriptor."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if "memfd:safeload" in link or link.endswith(".safetensors")]


def _conforms(folder, transport, memory, dtype):
    from safeload import load_report

    tower = _load(folder, transport=transport, memory=memory, dtype=dtype, device="cpu")
    _assert_same(tower, _reference(folder, dtype))
    assert not any(parameter.requires_grad for parameter in tower.parameters())
    assert tower(torch.zeros(1, 3, 32, 32, dtype=dtype or torch.float32)).pooler_output.isfinite().all()
    report = load_report(tower)
    assert (report.transport, report.memory) == (transport, memory)
    assert sum(each.read_bytes > 0 for each in report.ranks) == 1
    for parameter in tower.parameters():  # a storage of its own, not a view of the whole file
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert _open_files() == []
    return report.digest


@pytest.mark.parametrize(("transport", "memory"), TRANSPORTS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_every_transport_gives_the_tower_that_from_pretrained_gives(tmp_path, transport, memory, dtype, shard_size):
    folder = clip_folder(tmp_path / "tower", shard_size=shard_size)
    results = run_on_ranks(2, _conforms, folder, transport, memory, dtype)
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert results[0].value == results[1].value


def _road(folder, dtype):
    from safeload import load_report

    return load_report(_load(folder, dtype=dtype)).built


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_library_that_maps_weights_runs_while_they_are_read(tmp_path, dtype):
    import transformers

    road = run_on_ranks(1, _road, clip_folder(tmp_path / "tower"), dtype, store="none")[0]
    assert road.ok, road.describe()
    # transformers 4 copies every weight into memory of its own: it has to wait for them
    assert road.value == ("early" if transformers.__version__ >= "5" else "late")


def _let_go(folder):
    import gc
    import weakref

    tower = _load(folder, device="cpu")
    tower(torch.zeros(1, 3, 32, 32))
    gone = weakref.ref(tower)
    del tower
    gc.collect()
    assert gone() is None
    with open("/proc/self/maps") as maps:
        assert "memfd:safeload" not in maps.read()


@pytest.mark.parametrize("store", ["file", "none"])
def test_a_tower_that_is_let_go_gives_its_memory_back(tmp_path, store):
    results = run_on_ranks(2 if store == "file" else 1, _let_go, clip_folder(tmp_path / "tower"), store=store)
    assert all(result.ok for result in results), results[0].describe()


def _part_of_a_file(folder):
    from safeload import load_report

    tower = _load(folder, device="cpu")
    _assert_same(tower, _reference(folder))
    return load_report(tower).transport


def test_a_tower_that_is_a_part_of_its_file_is_shared(tmp_path):
    results = run_on_ranks(2, _part_of_a_file, full_clip_folder(tmp_path / "clip"))
    assert [result.value for result in results] == ["shared", "shared"], results[0].describe()


def _write_on_one_rank(folder):
    import torch.distributed as dist

    from safeload import TowerChangedError, safe_from_pretrained  # noqa: F401

    tower = _load(folder, transport="shared", device="cpu")
    before = {name: value.clone() for name, value in _tensors(tower).items()}
    if dist.get_rank() == 1:
        for value in tower.parameters():
            value.data.fill_(7)
    dist.barrier()
    changed = [name for name, value in _tensors(tower).items() if not torch.equal(value, before[name])]
    if dist.get_rank() == 0:
        assert changed == []
        _assert_same(tower, _reference(folder))
        tower(torch.zeros(1, 3, 32, 32))
    else:
        assert len(changed) == len(list(tower.parameters()))
        with pytest.raises(TowerChangedError, match="overwritten"):
            tower(torch.zeros(1, 3, 32, 32))


def test_what_one_rank_writes_reaches_no_other_and_is_noticed(tmp_path):
    folder = clip_folder(tmp_path / "tower")
    results = run_on_ranks(2, _write_on_one_rank, folder)
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()


def _memory(folder):
    import torch.distributed as dist

    from safeload import load_report
    from safeload.metering import pss_bytes

    _load(folder, device="cpu")  # what is loaded lazily is loaded
    dist.barrier()
    before = pss_bytes()
    tower = _load(folder, transport="shared", device="cpu")
    for value in tower.parameters():
        value.sum()
    dist.barrier()
    after = pss_bytes()
    dist.barrier()
    return after - before, load_report(tower).tower_bytes


def test_all_ranks_together_hold_one_copy(tmp_path):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8)
    folder = tmp_path / "tower"
    CLIPVisionModel(config).save_pretrained(folder)
    results = run_on_ranks(3, _memory, folder)
    assert all(result.ok for result in results), results[0].describe()
    grown = sum(result.value[0] for result in results)
    size_bytes = results[0].value[1]
    assert size_bytes > 100e6
    assert grown < 1.15 * size_bytes  # with three copies it would be 3


def _broadcast_memory(folder):
    from safeload import load_report

    _load(folder, transport="broadcast", device="cpu")  # what is loaded lazily is loaded
    tower = _load(folder, transport="broadcast", device="cpu")
    report = load_report(tower)
    return report.tower_bytes, [each.memory_peak_bytes - each.memory_before_bytes for each in report.ranks]


def test_a_receiver_holds_the_tower_and_at_most_two_buckets(tmp_path):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from safeload.broadcasting import BUCKET_BYTES

    config = CLIPVisionConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=8)
    folder = tmp_path / "tower"
    CLIPVisionModel(config).save_pretrained(folder)
    result = run_on_ranks(2, _broadcast_memory, folder)[0]
    assert result.ok, result.describe()
    size_bytes, (source, receiver) = result.value
    assert size_bytes > 5 * BUCKET_BYTES
    assert receiver < size_bytes + 2 * BUCKET_BYTES
    assert source < size_bytes + 2 * BUCKET_BYTES  # its sealed copy, and the buffers that it reads through


def _elsewhere(folder, hosts, dtype=None):
    import torch.distributed as dist

    from safeload import delivering, handing, load_report, sharing

    key = handing.node_key() + " of host " + hosts[dist.get_rank()]
    sharing.node_key = delivering.node_key = lambda: key
    for _ in range(2):
        tower = _load(folder, transport="shared", device="cpu", dtype=dtype)
        _assert_same(tower, _reference(folder, dtype))
    assert _open_files() == []
    return load_report(tower).transport, load_report(tower).transport_reason


def test_ranks_that_share_no_kernel_get_the_broadcast_and_the_report_says_why(tmp_path):
    results = run_on_ranks(2, _elsewhere, clip_folder(tmp_path / "tower"), "ab")
    assert all(result.ok for result in results), results[1].describe()
    why = "no two ranks are on one kernel and in one network name space"
    assert {result.value for result in results} == {("broadcast", why)}


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_node_holds_a_copy_of_its_own(tmp_path, hosts, dtype):
    results = run_on_ranks(4, _elsewhere, clip_folder(tmp_path / "tower"), hosts, dtype)
    assert all(result.ok for result in results), "".join(result.describe() for result in results)
    assert {result.value for result in results} == {("shared", "asked for")}


def _refused(folder):
    import torch.distributed as dist

    from safeload import errors, load_report, sharing

    if dist.get_rank() == 1:

        def refuse(*args, **kwargs):
            raise errors.GroupError("permission denied")

        sharing.take = refuse
    tower = _load(folder, device="cpu")
    _assert_same(tower, _reference(folder))
    return load_report(tower).transport, load_report(tower).transport_reason


def test_a_rank_that_cannot_take_the_memory_over_gets_the_broadcast(tmp_path):
    results = run_on_ranks(2, _refused, clip_folder(tmp_path / "tower"))
    assert all(result.ok for result in results), results[0].describe()
    assert results[0].value[0] == "broadcast"
    assert "rank 1 could not take the memory over: permission denied" in results[0].value[1]


def _corrupt(folder, transport, memory, digest):
    from transformers import CLIPVisionModel

    from safeload import IntegrityError, safe_from_pretrained

    with pytest.raises(IntegrityError) as caught:
        safe_from_pretrained(CLIPVisionModel, folder, transport=transport, memory=memory, device="cpu", manifest=digest)
    assert _open_files() == []
    return caught.value.path, caught.value.rank


@pytest.mark.parametrize(("transport", "memory"), TRANSPORTS)
def test_one_flipped_bit_is_the_same_integrity_error_on_every_rank(tmp_path, transport, memory):
    import hashlib

    folder = clip_folder(tmp_path / "tower")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    manifest = tmp_path / "SHA256SUMS"
    manifest.write_text("".join(lines))
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    results = run_on_ranks(2, _corrupt, folder, transport, memory, manifest)
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert [result.value for result in results] == [(str(weights), 0)] * 2


def _handed_over_unsealed(folder):
    import torch.distributed as dist

    from safeload import IntegrityError, filling, mapping

    if dist.get_rank() == 0:
        filling.freeze = mapping.freeze = lambda memory: None
    with pytest.raises(IntegrityError, match="without being sealed"):
        _load(folder, transport="shared", device="cpu")


def test_memory_that_is_not_sealed_is_refused(tmp_path):
    results = run_on_ranks(2, _handed_over_unsealed, clip_folder(tmp_path / "tower"))
    assert all(result.ok for result in results), results[1].describe()
