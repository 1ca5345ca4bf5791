"""The sealed bytes are what was hashed, and an unmodified from_pretrained loads them."""

import hashlib
import json
import os
import shutil
import stat

import pytest

from safeload.errors import CheckpointError, SourceError, UnsafeFormatError
from safeload.resolving import resolve
from safeload.sealing import open_folder, seal
from safeload.verifying import Manifest

NOTHING = Manifest(provenance="none", source="nothing", entries={})


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    folder = tmp_path_factory.mktemp("clip")
    CLIPVisionModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def single(clip_folder, tmp_path):
    return shutil.copytree(clip_folder, tmp_path / "single")


@pytest.fixture
def sharded(clip_folder, tmp_path):
    from transformers import CLIPVisionModel

    CLIPVisionModel.from_pretrained(clip_folder).save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def same(one, other):
    import torch

    one, other = one.state_dict(), other.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("memory", ["sealed", "mapped"])
def test_unmodified_from_pretrained_loads_the_sealed_bytes(layout, memory, request):
    from transformers import CLIPVisionModel

    folder = request.getfixturevalue(layout)
    (folder / "pytorch_model.bin").write_bytes(b"never looked at")
    expected = CLIPVisionModel.from_pretrained(folder)
    with seal(resolve(folder), NOTHING, memory=memory) as sealed:
        shutil.rmtree(folder)
        with open_folder(sealed) as private:
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
            assert sorted(path.name for path in private.iterdir()) == sorted(sealed.names)
            model = CLIPVisionModel.from_pretrained(private)
        assert not private.exists()
    assert same(model, expected)


def test_digests_are_those_of_the_files(single):
    with seal(resolve(single), NOTHING) as sealed:
        sums = {name: hashlib.sha256((single / name).read_bytes()).hexdigest() for name in sealed.names}
        assert {file.name: file.sha256 for file in sealed.files} == sums
        lines = "".join(sorted(f"{value}  {name}\n" for name, value in sums.items()))
        assert sealed.digest == hashlib.sha256(lines.encode()).hexdigest()
        assert sealed.bytes_read == sum((single / name).stat().st_size for name in sealed.names)
        assert sealed.read("config.json") == (single / "config.json").read_bytes()


def test_sealed_memory_refuses_change(single):
    with seal(resolve(single), NOTHING) as sealed:
        for file in sealed.files:
            for change in (lambda fd: os.pwrite(fd, b"x", 0), lambda fd: os.ftruncate(fd, 1)):
                with pytest.raises(PermissionError):
                    change(file.fd)


def test_progress_ends_at_the_total(sharded):
    calls = []
    with seal(resolve(sharded), NOTHING, on_bytes=lambda *call: calls.append(call)) as sealed:
        total = sum(file.size_bytes for file in sealed.weight_files)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_descriptors_are_closed(single):
    before = set(os.listdir("/proc/self/fd"))
    seal(resolve(single), NOTHING).close()
    (single / "model.safetensors").unlink()
    os.mkfifo(single / "model.safetensors")
    with pytest.raises(SourceError, match="FIFO"):
        seal(resolve(single), NOTHING)
    assert set(os.listdir("/proc/self/fd")) == before


def test_all_missing_shards_are_listed(sharded):
    shards = sorted(sharded.glob("*.safetensors"))[:2]
    for shard in shards:
        shard.unlink()
    with pytest.raises(SourceError, match=r"00001-of.*00002-of"):
        seal(resolve(sharded), NOTHING)


def test_shard_outside_the_folder_is_refused(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "../evil/x.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="evil"):
        seal(resolve(sharded), NOTHING)


def test_only_pickle_is_refused_with_the_way_to_convert(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(UnsafeFormatError, match="save_file"):
        resolve(single)


def test_missing_folder_says_where(tmp_path):
    with pytest.raises(SourceError, match="nowhere"):
        resolve(tmp_path / "nowhere")


@pytest.mark.parametrize("at_most", [1, 3, 9, 600])
def test_reads_that_return_less_than_asked(single, at_most, monkeypatch):
    from safeload import reading
    from safeload.examining import examine

    monkeypatch.setattr(reading, "_CHUNK_BYTES", at_most)  # as a network file system may do
    with seal(resolve(single), NOTHING) as sealed:
        assert sealed.read("model.safetensors") == (single / "model.safetensors").read_bytes()
        assert len(examine(sealed).tensors) > 10
