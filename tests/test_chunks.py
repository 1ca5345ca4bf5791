"""Digests of chunks: what they speed up, what a damaged or forged list does."""

from __future__ import annotations

import hashlib
import json

import pytest

from safeload import chunking
from tests.ranks import run_on_ranks
from tests.towers import clip_folder

DETAIL = "compared by the digests of chunks"


def _manifest(folder):
    path = folder.parent / "SHA256SUMS"
    path.write_text(
        "".join(f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in sorted(folder.iterdir()))
    )
    return path


@pytest.fixture
def tower(tmp_path):
    folder = clip_folder(tmp_path / "tower", shard_size="200KB")
    return folder, _manifest(folder), {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def _load(folder, manifest, kwargs):
    from transformers import CLIPVisionModel

    from safeload import SafeLoadError, load_report, safe_from_pretrained

    kwargs = {"memory": "mapped", "device": "cpu", "chunk_digests": True, **kwargs}
    try:
        loaded = safe_from_pretrained(CLIPVisionModel, folder, manifest=manifest, **kwargs)
    except SafeLoadError as error:
        return type(error).__name__
    reference = CLIPVisionModel.from_pretrained(folder).state_dict()
    assert all((value == reference[name]).all() for name, value in loaded.state_dict().items())
    return load_report(loaded).provenance_detail


def _run(tower, ranks=2, **kwargs):
    folder, manifest, env = tower
    results = run_on_ranks(ranks, _load, folder, manifest, kwargs, env=env)
    assert all(result.ok for result in results), results[0].describe()
    assert len({result.value for result in results}) == 1
    return results[0].value


def _lists(tower):
    return sorted((tower[1].parent / "cache" / "safeload" / "chunks").glob("*.json"))


@pytest.mark.parametrize("kwargs", [{}, {"transport": "broadcast"}, {"verdict": "first_use"}])
def test_the_second_load_compares_chunks(tower, kwargs):
    assert DETAIL not in _run(tower)
    shards = sorted(tower[0].glob("*.safetensors"))
    expected = {f"{hashlib.sha256(shard.read_bytes()).hexdigest()}.json" for shard in shards}
    assert {path.name for path in _lists(tower)} == expected
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in _lists(tower))
    assert DETAIL in _run(tower, **kwargs)


def _flip(path, where=-5):
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("which", [0, -1])
def test_a_corrupted_file_is_found_by_its_chunks(tower, which):
    _run(tower)
    _flip(sorted(tower[0].glob("*.safetensors"))[which])
    assert _run(tower) == "IntegrityError"


def test_a_corrupted_list_costs_a_pass_and_nothing_else(tower):
    _run(tower)
    good = {path: path.read_bytes() for path in _lists(tower)}
    victim = _lists(tower)[0]
    fields = json.loads(victim.read_text())
    fields["digests"][0] = "0" * 64
    victim.write_text(json.dumps(fields))
    assert DETAIL not in _run(tower)
    assert victim.read_bytes() == good[victim]  # and it is written anew
    assert DETAIL in _run(tower)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', "not json", '{"format": 2, "digests": []}'])
def test_a_list_that_cannot_be_read_is_as_none(tower, text):
    _run(tower)
    _lists(tower)[0].write_text(text)
    assert DETAIL not in _run(tower)


@pytest.mark.parametrize("what", ["list", "folder", "link"])
def test_a_list_that_others_could_have_written_is_not_used(tower, what):
    _run(tower)
    victim = _lists(tower)[0]
    if what == "list":
        victim.chmod(0o666)
    elif what == "folder":
        victim.parent.chmod(0o777)
    else:
        victim.rename(victim.parent / "moved")
        victim.symlink_to("moved")
    assert DETAIL not in _run(tower)


def test_pinned_manifests_do_without_lists_unless_asked(tower):
    _run(tower, chunk_digests=None)
    assert _lists(tower) == []
    _run(tower)
    assert DETAIL not in _run(tower, chunk_digests=None)


def test_a_file_that_fails_leaves_no_list(tower):
    shard = sorted(tower[0].glob("*.safetensors"))[0]
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    _flip(shard)
    assert _run(tower) == "IntegrityError"
    assert digest not in {path.stem for path in _lists(tower)}


@pytest.mark.parametrize("size_bytes", [0, 1, chunking.CHUNK_BYTES, chunking.CHUNK_BYTES + 1])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_byte_is_in_some_chunk(tmp_path, size_bytes, parts):
    data = bytes(range(251)) * (size_bytes // 251 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size_bytes])
    hasher = chunking.ChunkHasher()
    for start in range(0, size_bytes, 3_000_000):
        hasher.add(memoryview(data)[start : min(start + 3_000_000, size_bytes)])
    chunks = hasher.result()

    def agree():
        with path.open("rb") as file:
            return all(
                chunking.agrees(file.fileno(), chunks, part=part, parts=parts, threads=2) for part in range(parts)
            )

    assert agree()
    for where in {0, size_bytes // 2, size_bytes - 1} if size_bytes else ():
        _flip(path, where)
        assert not agree()
        _flip(path, where)
    path.write_bytes(data[: size_bytes + 1])
    assert not agree()
