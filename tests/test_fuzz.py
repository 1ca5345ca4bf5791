"""Mutated headers, indexes, locks, kept digests and folders: nothing loads with other bytes, hangs or dies.

The runs are the same every time. `SAFELOAD_FUZZ_EXAMPLES=20000 pytest tests/test_fuzz.py` looks further, at random.
"""

import contextlib
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safeload.caching import read_cache, read_local_dir
from safeload.digests import Digest
from safeload.errors import CheckpointError, SafeLoadError
from safeload.headers import HeaderWatch, parse_header, parse_header_size
from safeload.indexes import is_plain_name, parse_index
from safeload.locking import format_lock, parse_lock
from tests.files import clip_sharded, index, lock, safetensors, sharded, single, tensor, write
from tests.test_badfiles import run_source

EXAMPLES = int(os.environ.get("SAFELOAD_FUZZ_EXAMPLES", "0"))
fuzz = settings(
    max_examples=EXAMPLES or 150,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# Ends a hang: nothing here waits for anything.
pytestmark = pytest.mark.timeout(3600 if EXAMPLES else 60)


@st.composite
def mutated(draw, good):
    """Bytes with a few edits: flips, cuts, repeats, and words of the format put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "repeat", "insert", "number"]))
        if kind == "flip" and place < len(data):
            data[place] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 40))]
        elif kind == "repeat":
            data[place:place] = data[place : place + draw(st.integers(1, 60))]
        elif kind == "insert":
            data[place:place] = draw(st.sampled_from(WORDS))
        elif kind == "number":
            digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
            if digits:
                data[draw(st.sampled_from(digits))] = ord(str(draw(st.integers(0, 9))))
    return bytes(data)


WORDS = b'" { } [ ] , : .. / null -1 1e9 NaN "dtype":"I32", "shape":[0], "data_offsets":[0,24],'.split()
WORDS += [b" ", b"\r\n", b"\\", b"\0", b"\xff", b"\\ud800", b'"__metadata__":{},']
HEADER = json.dumps(
    {"__metadata__": {"format": "pt"}}
    | tensor("a")
    | tensor("b", begin=24)
    | tensor("c", dtype="BF16", shape=[2, 2], begin=48, size=8)
    | tensor("d", dtype="I64", shape=[], begin=56, size=8)
    | tensor("e", shape=[0, 3], begin=64, size=0)
).encode()
GOOD = safetensors(HEADER, bytes(range(64)))


def agree_with_safetensors(data, step=7):
    """What is accepted here means the same to the library that loads it."""
    import safetensors as library

    try:
        length = parse_header_size(data[:512], path="x", size_bytes=len(data))
        header = parse_header(data[8 : 8 + length], path="x", size_bytes=len(data))
    except CheckpointError:
        header = None
    watch = HeaderWatch(path="x", size_bytes=len(data))
    try:
        for start in range(0, len(data), step):
            watch.add(memoryview(data)[start : start + step])
        watched = watch.result()
    except CheckpointError as error:
        watched = error
    assert (watched == header) if header else isinstance(watched, CheckpointError)
    if header is None:
        return
    theirs = {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in library.deserialize(data)
    }
    ours = {t.name: (t.dtype, t.shape, data[8 + length + t.begin : 8 + length + t.end]) for t in header.tensors}
    assert ours == theirs


@fuzz
@given(mutated(HEADER))
def test_headers(raw):
    agree_with_safetensors(struct.pack("<Q", len(raw)) + raw + GOOD[-64:])


@fuzz
@given(mutated(GOOD))
def test_whole_files(data):
    agree_with_safetensors(data)


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "BOOL", "F4", "F6_E2M3", "F8_E8M0", "C64", "x", 3, None]),
        "shape": st.lists(st.integers(-1, 9) | st.sampled_from([2**31, 2**62, 2**64]), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 70) | st.just(2**63), min_size=1, max_size=3),
    }
)


@fuzz
@given(
    st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | st.none(), max_size=4), st.integers(0, 80)
)
def test_headers_of_random_entries(header, data_bytes):
    agree_with_safetensors(safetensors(json.dumps(header).encode(), bytes(data_bytes)))


@fuzz
@given(mutated(sharded()["model.safetensors.index.json"]))
def test_indexes(raw):
    try:
        found = parse_index(raw, path="x")
    except CheckpointError:
        return
    value = json.loads(raw)
    assert dict(found.weight_map) == value["weight_map"]
    assert set(found.shards) == set(value["weight_map"].values())
    assert all(is_plain_name(shard) for shard in found.shards)


names = st.text(st.sampled_from("ab/.\\:\0\n é\ud800"), max_size=8)


@fuzz
@given(st.dictionaries(st.text(max_size=3), names | st.integers() | st.none(), min_size=1, max_size=3))
def test_names_in_an_index_stay_in_the_folder(weight_map):
    weight_map = {key: f"{name}.safetensors" if isinstance(name, str) else name for key, name in weight_map.items()}
    with contextlib.suppress(CheckpointError):
        for shard in parse_index(index(weight_map), path="x").shards:
            assert os.path.normpath(f"/folder/{shard}") == f"/folder/{shard}"


@fuzz
@given(mutated(lock(clip_sharded()).encode()))
def test_locks(raw):
    try:
        found = parse_lock(raw, path="x")
    except CheckpointError:
        return
    assert all(is_plain_name(name) for name in found.entries)
    assert parse_lock(format_lock(found).encode(), path="x").entries == found.entries
    lines = [line for line in raw.decode().split("\n") if line and not line.startswith("#")]
    assert len(lines) == len(found.entries)


@fuzz
@given(
    mutated(b'{"format_version": 1, "files": {"a": {"size": 1, "blob_id": "%s", "lfs_sha256": null}}}' % (b"a" * 40))
)
def test_listings_kept_in_a_cache(raw):
    with tempfile.TemporaryDirectory() as place:
        storage = Path(place) / "models--a--b"
        write(storage, {f"trees/{'0' * 40}.json": raw})
        (storage / "snapshots" / ("0" * 40)).mkdir(parents=True)
        found = read_cache(storage / "snapshots" / ("0" * 40))
        assert found is None or all(isinstance(digest, Digest) for digest in found.digests.values())


@fuzz
@given(mutated(b"%s\n%s\n1700000000.0\n" % (b"0" * 40, b"a" * 64)))
def test_metadata_of_a_local_dir(raw):
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), {".cache/huggingface/download/model.safetensors.metadata": raw})
        found = read_local_dir(Path(place))
        assert found is None or all(isinstance(digest, Digest) for digest in found.digests.values())


NAMES = [*clip_sharded(), "model.safetensors", "pytorch_model.bin", "sub", "SHA256SUMS", "adapter_config.json", "x.py"]
steps = st.tuples(
    st.sampled_from(["swap", "rename", "copy", "link", "unlink", "cut", "grow", "flip", "mkdir", "fifo", "other"]),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
)


def move_around(kind, path, second):
    if kind == "swap" and path.is_file() and second.is_file():  # reading a FIFO would wait
        first_data, second_data = path.read_bytes(), second.read_bytes()
        path.write_bytes(second_data)
        second.write_bytes(first_data)
    elif kind == "rename":
        path.rename(second)
    elif kind == "copy":
        shutil.copyfile(path, second)
    elif kind != "swap":
        path.unlink(missing_ok=True)
        {"link": lambda: path.symlink_to(second.name), "mkdir": path.mkdir, "fifo": lambda: os.mkfifo(path)}[kind]()


def change_bytes(kind, path):
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[len(data) // 2] ^= 4
    elif kind == "other":
        data = clip_sharded(seed=1).get(path.name, b"?")
    path.write_bytes(data[: len(data) // 2] if kind == "cut" else data + b"!" * 9 if kind == "grow" else data)


def do(folder, step):
    """One step of an untidy or hostile hand; steps that cannot be done are left out."""
    kind, one, other = step
    path = folder / one
    with contextlib.suppress(OSError, IndexError):
        if kind == "unlink":
            path.unlink()
        elif kind in ("cut", "grow", "flip", "other"):
            if path.is_file():
                change_bytes(kind, path)
        else:
            move_around(kind, path, folder / other)


@fuzz
@given(st.lists(steps, min_size=1, max_size=6), st.booleans(), st.sampled_from(["single", "sharded"]))
def test_folders(todo, locked, layout):
    good = single() if layout == "single" else clip_sharded()
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "tower", good)
        pins = None
        if locked:
            pins = Path(place) / "lock"
            pins.write_text(lock(good))
        for step in todo:
            do(folder, step)
        try:
            read = run_source(folder, manifest=pins)
        except SafeLoadError:
            return
        if locked:
            assert read == good
        for name, data in read.items():
            assert data == (folder / name).read_bytes()
