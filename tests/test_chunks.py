"""Digests of chunks: what they speed up, what a damaged or forged list does."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack

import pytest

from safeload import chunking, matching
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


def _with(**fields):
    return json.dumps(
        {"format": 1, "algorithm": "sha256", "chunk_bytes": 8 << 20, "size_bytes": 9, "digests": ["0"], **fields}
    )


UNREADABLE = {
    "nothing": "",
    "no fields": "{}",
    "no object": "[]",
    "too few fields": '{"format": 1}',
    "no JSON": "not json",
    "another format": '{"format": 2, "digests": []}',
    "no end": _with(chunk_bytes=float("inf")),
    "no size": _with(size_bytes=float("inf")),
    "no number": _with(size_bytes=float("nan")),
    "too deep": "[" * 200_000,
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_a_list_that_cannot_be_read_is_as_none(tower, text):
    _run(tower)
    _lists(tower)[0].write_text(text)
    assert DETAIL not in _run(tower)


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_does_without_lists(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(chunking.Path, "home", _no_home)
    hasher = chunking.ChunkHasher()
    hasher.add(memoryview(b"x"))
    chunking.leave("0" * 64, hasher.result())
    assert chunking.find("0" * 64, size_bytes=1) is None


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
@pytest.mark.parametrize("takers", [1, 3])
def test_every_byte_is_in_some_chunk(tmp_path, size_bytes, takers):
    data = bytes(range(251)) * (size_bytes // 251 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size_bytes])
    hasher = chunking.ChunkHasher()
    for start in range(0, size_bytes, 3_000_000):
        hasher.add(memoryview(data)[start : min(start + 3_000_000, size_bytes)])
    known = (hasher.result(),)

    def agree():
        with path.open("rb") as file, ExitStack() as kept:
            tickets = matching.issue_tickets(matching.chunk_count(known), kept)
            shares = [matching.Matching([file.fileno()], known, tickets, threads=2) for _ in range(takers)]
            counts = [share.result(check=never) for share in shares]
            for share in shares:
                share.close()
        return None not in counts and sum(counts) == matching.chunk_count(known)

    assert agree()
    for where in {0, size_bytes // 2, size_bytes - 1} if size_bytes else ():
        _flip(path, where)
        assert not agree()
        _flip(path, where)
    path.write_bytes(data[: size_bytes + 1])
    assert agree() is (size_bytes == 0)  # a file without chunks has nothing to compare; its size was compared before


def never(doing):
    """Nothing ends the wait."""


def known_files(tmp_path, sizes):
    fds, known = [], []
    for number, size_bytes in enumerate(sizes):
        path = tmp_path / f"part-{number}"
        path.write_bytes(os.urandom(size_bytes))
        hasher = chunking.ChunkHasher()
        hasher.add(memoryview(path.read_bytes()))
        fds.append(os.open(path, os.O_RDONLY))
        known.append(hasher.result())
    return fds, known


def test_the_chunks_of_several_files_are_split_among_all_takers(tmp_path, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1 << 20)
    fds, known = known_files(tmp_path, [3 << 20, 1, (5 << 20) + 7])
    assert matching.chunk_count(known) == 3 + 1 + 6
    assert matching.all_agree(fds, known, threads=3, check=never)
    _flip(tmp_path / "part-1", 0)
    assert not matching.all_agree(fds, known, threads=3, check=never)
    for fd in fds:
        os.close(fd)


def test_more_chunks_than_tickets(tmp_path, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(matching, "_MOST_TICKETS", 4)
    fds, known = known_files(tmp_path, [(9 << 20) + 5])
    with ExitStack() as kept:
        tickets = matching.issue_tickets(10, kept)
        assert len(os.read(tickets, 1000)) == 4 * 4  # 3 + 3 + 3 + 1
    assert matching.all_agree(fds, known, threads=2, check=never)
    _flip(tmp_path / "part-0", (9 << 20) + 4)
    assert not matching.all_agree(fds, known, threads=2, check=never)
    os.close(fds[0])


def test_a_ticket_that_is_lost_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1 << 20)
    fds, known = known_files(tmp_path, [4 << 20])
    with ExitStack() as kept:
        tickets = matching.issue_tickets(4, kept)
        os.read(tickets, 4)  # whoever had it is gone
        share = matching.Matching(fds, known, tickets, threads=1)
        assert share.result(check=never) == 3
        share.close()
    os.close(fds[0])


def test_what_cannot_be_read_does_not_agree(tmp_path):
    fds, known = known_files(tmp_path, [4 << 20])
    unreadable = os.open(tmp_path / "part-0", os.O_WRONLY)
    assert not matching.all_agree([unreadable], known, threads=1, check=never)
    os.close(unreadable)
    os.close(fds[0])
