"""Every bad checkpoint there is, as a table: what was done to a good one, and the error it must give on every rank.

`ROWS` holds one `Row` for each. A row's `damage` changes a good folder in place. `error` is None where the checkpoint
must load, with the values of the good one. `locked` rows keep the `SHA256SUMS` of the good files beside the bad ones.
`stage` is "source" where the source's own stages see it, "build" where only the class's loader can.
"""

import json
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safeload.errors import CheckpointError, IntegrityError, SourceError, UnsafeFormatError
from tests.files import clip_sharded, clip_single, clip_tensors, flip, index, lock, pack, safetensors, tensor, write

__all__ = ["ROWS", "Row", "make"]

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FIRST = next(iter(clip_tensors()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    damage: Callable[[Path], object]
    error: type[Exception] | None
    match: str = ""
    layout: str = "single"
    locked: bool = False
    stage: str = "source"


ROWS: list[Row] = []


def row(name, error, match="", *, layout="single", locked=False, stage="source"):
    """Add the decorated damage to the table."""

    def add(damage):
        ROWS.append(Row(name=name, damage=damage, error=error, match=match, layout=layout, locked=locked, stage=stage))
        return damage

    return add


def make(row, folder):
    """Write the good checkpoint of the row's layout, lock it where the row says so, and damage it."""
    files = clip_single() if row.layout == "single" else clip_sharded()
    write(folder, files)
    if row.locked:
        (folder / "SHA256SUMS").write_text(lock(files))
    row.damage(folder)
    return folder


def edit(name, change):
    """A damage that changes the bytes of one file."""

    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def edit_header(change, name=MODEL):
    """A damage that changes the header's JSON text, and nothing of the data."""

    def edited(data):
        (length,) = struct.unpack("<Q", data[:8])
        text = change(data[8 : 8 + length].decode())
        raw = text if isinstance(text, bytes) else text.encode()
        return struct.pack("<Q", len(raw)) + raw + data[8 + length :]

    return edit(name, edited)


def edit_entries(change, name=MODEL):
    """A damage that changes the header as a dict."""

    def edited(text):
        header = json.loads(text)
        return json.dumps(change(header) or header)

    return edit_header(edited, name)


def edit_index(change):
    def edited(data):
        value = json.loads(data)
        return json.dumps(change(value) or value).encode()

    return edit(INDEX, edited)


def replace_with(name, make):
    """A damage that puts something else in the place of a file."""

    def damage(folder):
        (folder / name).unlink()
        make(folder / name)

    return damage


def outside(folder, name, data):
    path = folder.parent / f"{folder.name}-outside" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def bind_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


# 1: cut short
for cut, what in ((-1, "by one byte"), (-1000, "by a thousand"), (4, "to 4 bytes"), (0, "to nothing"), (8, "to 8")):
    row(f"1 truncated {what}", CheckpointError, "truncated|empty")(edit(MODEL, lambda data, cut=cut: data[:cut]))
row("1 truncated shard", CheckpointError, f"{ONE}.*truncated", layout="sharded")(edit(ONE, lambda data: data[:-1]))
row("1 truncated and locked", (CheckpointError, IntegrityError), MODEL, locked=True)(edit(MODEL, lambda d: d[:-1]))

# 2, 3: other bytes in a good file
row("2 bit flipped in the data", IntegrityError, MODEL, locked=True)(edit(MODEL, flip))
row("2 bit flipped in a shard", IntegrityError, TWO, layout="sharded", locked=True)(edit(TWO, flip))
row("2 bit flipped in the config", IntegrityError, "config.json", locked=True)(
    edit("config.json", lambda data: data.replace(b"8", b"9", 1))
)
row("2 bit flipped in the index", IntegrityError, "index", layout="sharded", locked=True)(edit(INDEX, flip))
rename = edit_header(lambda text: text.replace("class_embedding", "clasr_embedding"))
row("2b bit flipped in a name", CheckpointError, "class_embedding", stage="build")(rename)
row("2b bit flipped in a name, locked", IntegrityError, MODEL, locked=True)(rename)
row("2b bit flipped in a quote, locked", IntegrityError, MODEL, locked=True)(edit(MODEL, lambda d: flip(d, 9)))


@row("3 contents of two shards swapped", CheckpointError, "in another shard", layout="sharded")
def swap(folder):
    one, two = (folder / ONE).read_bytes(), (folder / TWO).read_bytes()
    write(folder, {ONE: two, TWO: one})


row("3b shard of another revision", IntegrityError, ONE, layout="sharded", locked=True)(
    lambda folder: write(folder, {ONE: clip_sharded(seed=1)[ONE]})
)

# 4: length of the header
for value, what in ((2**63, "2^63"), (2**64 - 1, "2^64-1"), (10**9, "beyond the file"), (0, "0"), (1, "1")):
    row(f"4 header length {what}", CheckpointError, "header")(
        edit(MODEL, lambda data, value=value: struct.pack("<Q", value) + data[8:])
    )

# 5: keys given twice
ENTRY = json.dumps(tensor(FIRST, shape=[1], size=4))[1:-1]
row("5 key twice, identical", CheckpointError, "twice")(
    edit_header(lambda text: text[:-1] + ", " + json.dumps({FIRST: json.loads(text)[FIRST]})[1:])
)
row("5 key twice, garbage first", CheckpointError, "twice")(edit_header(lambda text: "{" + ENTRY + ", " + text[1:]))
row("5 key twice inside an entry", CheckpointError, "twice")(
    edit_header(lambda text: text.replace('"dtype": "F32"', '"dtype": "I32", "dtype": "F32"', 1))
)
row("5b name twice, two places", CheckpointError, "twice")(edit_header(lambda text: text[:-1] + ", " + ENTRY + "}"))
row("5b metadata twice", CheckpointError, "twice")(edit_header(lambda text: '{"__metadata__": {}, ' + text[1:]))

# 6: names that leave the folder, or that another file is taken by
NAMES = "../x.safetensors a/../../x.safetensors {outside} ./x.safetensors a\\x.safetensors a//x.safetensors"
for name in (*NAMES.split(), "C:x.safetensors", "x\0.safetensors", "", ".", "..", "x.safetensors/", "x.txt"):

    @row(f"6 weight_map names {name!r}", CheckpointError, "weight_map", layout="sharded")
    def leave(folder, name=name):
        there = outside(folder, "x.safetensors", pack(clip_tensors(seed=9)))
        shard = name.replace("{outside}", str(there))
        edit_index(lambda value: value["weight_map"].update({FIRST: shard}))(folder)


def point_config_at(name):
    return edit("config.json", lambda data: json.dumps({**json.loads(data), "transformers_weights": name}).encode())


row("6c config names ../x", CheckpointError, "transformers_weights")(point_config_at("../x.safetensors"))


@row("6d config names another file", CheckpointError, "transformers_weights")
def name_other(folder):
    write(folder, {"alt.safetensors": pack(clip_tensors(seed=9))})
    point_config_at("alt.safetensors")(folder)


row("6d config names the same file", None)(point_config_at(MODEL))

# 7: what is not a file
for name, layout in ((MODEL, "single"), (ONE, "sharded"), ("config.json", "single"), (INDEX, "sharded")):
    where = f"{name} is"
    row(f"7b {where} a link to itself", SourceError, re.escape(name), layout=layout)(
        replace_with(name, lambda path: path.symlink_to(path.name))
    )
    row(f"7b {where} a link to nowhere", SourceError, re.escape(name), layout=layout)(
        replace_with(name, lambda path: path.symlink_to("nowhere"))
    )
    row(f"7d {where} a FIFO", SourceError, "FIFO", layout=layout)(replace_with(name, os.mkfifo))
    row(f"7d {where} a socket", SourceError, re.escape(name), layout=layout)(replace_with(name, bind_socket))
    row(f"7d {where} a device", SourceError, "a device", layout=layout)(
        replace_with(name, lambda path: path.symlink_to("/dev/zero"))
    )
    row(f"7e {where} a folder", SourceError, "a folder", layout=layout)(replace_with(name, Path.mkdir))


def link_outside(folder, data=None):
    there = outside(folder, ONE, (folder / ONE).read_bytes() if data is None else data)
    (folder / ONE).unlink()
    (folder / ONE).symlink_to(there)


row("7 shard is a link to the same bytes outside", None, layout="sharded", locked=True)(link_outside)
row("7 shard is a link to other bytes outside", IntegrityError, "is a link to", layout="sharded", locked=True)(
    lambda folder: link_outside(folder, clip_sharded(seed=1)[ONE])
)

# 8: index and shards disagree
row("8 missing shard", SourceError, ONE, layout="sharded")(lambda folder: (folder / ONE).unlink())
row("8 missing weights", SourceError, "model.safetensors")(lambda folder: (folder / MODEL).unlink())
row("8b tensor that is not in the index", CheckpointError, FIRST, layout="sharded")(
    edit_index(lambda value: value["weight_map"].pop(FIRST) and None)
)
row("8c index without a shard", CheckpointError, "missing", layout="sharded", stage="build")(
    edit_index(lambda value: {**value, "weight_map": {k: v for k, v in value["weight_map"].items() if v == ONE}})
)
row("8d tensor that is nowhere", CheckpointError, "ghost", layout="sharded")(
    edit_index(lambda value: value["weight_map"].update(ghost=ONE))
)
row("8e tensor in the wrong shard", CheckpointError, FIRST, layout="sharded")(
    edit_index(lambda value: value["weight_map"].update({FIRST: TWO}))
)

# 9: indexes that are none
DEEP = b'{"metadata": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_000 + b', "weight_map": {}}'
for what, text in {
    "weight_map is a number": b'{"metadata": {}, "weight_map": 3}',
    "weight_map is a list": b'{"metadata": {}, "weight_map": ["a"]}',
    "weight_map is empty": index({}),
    "shard is a number": index({FIRST: 3}),
    "shard is a list": index({FIRST: [ONE]}),
    "no metadata": json.dumps({"weight_map": {FIRST: ONE}}).encode(),
    "no weight_map": b'{"metadata": {}}',
    "metadata is text": json.dumps({"metadata": "x", "weight_map": {FIRST: ONE}}).encode(),
    "nested deep": DEEP,
    "nested a hundred deep": b'{"metadata": ' + b"[" * 100 + b"]" * 100 + b', "weight_map": {"a": "b"}}',
    "key twice": b'{"metadata": {}, "weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "not JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "not UTF-8": b'{"metadata": {"\xff": 1}}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "half a surrogate pair": b'{"metadata": {}, "weight_map": {"\\ud800": "x.safetensors"}}',
    "number of many digits": b'{"metadata": {"n": ' + b"9" * 10_000 + b'}, "weight_map": {"a": "x.safetensors"}}',
    "HTML page": b"<!DOCTYPE html><html></html>",
    "30 MB": b'{"metadata": {}, "weight_map": {"a": "x.safetensors"}}' + b" " * 30_000_000,
}.items():
    row(f"9 index: {what}", CheckpointError, "index", layout="sharded")(edit(INDEX, lambda data, text=text: text))
for what, text in {
    "nested deep": DEEP,
    "not JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "HTML page": b"<html></html>",
}.items():
    row(f"9 config: {what}", CheckpointError, "config.json")(edit("config.json", lambda data, text=text: text))

# 10, 11, 12: entries that do not describe the data
row("10 extra tensor without bytes", CheckpointError, "extra", stage="build")(
    edit_entries(lambda header: header.update(tensor("extra", shape=[0], begin=0, size=0)))
)
row("10b tensor as shape [0]", CheckpointError, FIRST)(edit_entries(lambda header: header[FIRST].update(shape=[0])))
PATCH = "vision_model.embeddings.position_embedding.weight"
row("10b transposed shape", CheckpointError, "position_embedding", stage="build")(
    edit_entries(lambda header: header[PATCH]["shape"].reverse())
)


def shift(by):
    def change(header):
        for name, entry in header.items():
            if name not in ("__metadata__", FIRST):
                entry["data_offsets"] = [place + by for place in entry["data_offsets"]]

    return edit_entries(change)


def longer(folder):
    shift(4)(folder)
    edit(MODEL, lambda data: data + b"\0\0\0\0")(folder)


row("11 hole", CheckpointError, "hole")(longer)
row("11 overlap", CheckpointError, "overlap|trailing")(shift(-4))
row("11 trailing byte", CheckpointError, "trailing")(edit(MODEL, lambda data: data + b"\0"))
row("11 trailing megabytes", CheckpointError, "trailing")(edit(MODEL, lambda data: data + bytes(3_000_000)))
ODD = {
    "shape overflows": {"shape": [2**62, 4]},
    "shape beyond 64 bits": {"shape": [2**64]},
    "shape negative": {"shape": [-8]},
    "shape is a float": {"shape": [8.0]},
    "shape is a truth value": {"shape": [True]},
    "shape is text": {"shape": "8"},
    "shape of many dimensions": {"shape": [1] * 10_000},
    "offsets reversed": {"data_offsets": [32, 0]},
    "offsets negative": {"data_offsets": [-32, 0]},
    "offsets of three": {"data_offsets": [0, 32, 64]},
    "offsets beyond the file": {"data_offsets": [0, 2**40]},
    "offsets are text": {"data_offsets": ["0", "32"]},
    "dtype unknown": {"dtype": "F31"},
    "dtype is a number": {"dtype": 32},
    "dtype of other size": {"dtype": "F16"},
    "one key more": {"more": 1},
}
for what, change in ODD.items():
    row(f"12 {what}", CheckpointError, MODEL)(edit_entries(lambda header, change=change: header[FIRST].update(change)))
row("12 entry is a number", CheckpointError, MODEL)(edit_entries(lambda header: header.update({FIRST: 3})))
row("12 entry is null", CheckpointError, MODEL)(edit_entries(lambda header: header.update({FIRST: None})))
row("12 entry without dtype", CheckpointError, MODEL)(edit_entries(lambda header: header[FIRST].pop("dtype") and None))
row("12 metadata is a list", CheckpointError, "__metadata__")(edit_entries(lambda h: h.update(__metadata__=["x"])))
row("12 metadata of numbers", CheckpointError, "__metadata__")(edit_entries(lambda h: h.update(__metadata__={"a": 1})))
row("12 metadata with half a surrogate pair", CheckpointError, "__metadata__")(
    edit_entries(lambda header: header.update(__metadata__={"a": "\ud800"}))
)
row("12 header is a list", CheckpointError, MODEL)(edit_header(lambda text: "[" + text + "]"))
row("12 header is not UTF-8", CheckpointError, MODEL)(edit_header(lambda text: b'{"\xff": 1}'))
row("12 header begins with a space", CheckpointError, "begin")(edit_header(lambda text: " " + text))
row("12 header nested deep", CheckpointError, MODEL)(edit_header(lambda text: DEEP))
row("12 name that is half a surrogate pair", CheckpointError, MODEL)(
    edit_header(lambda text: text.replace('"vision_model.', '"\\ud800', 1))
)
relabel = edit_entries(
    lambda header: [entry.update(dtype="I32") for name, entry in header.items() if name != "__metadata__"] and None
)
row("12b floats relabelled as integers", CheckpointError, "I32", stage="build")(relabel)
row("12b floats relabelled as integers, locked", IntegrityError, MODEL, locked=True)(relabel)

# 13: far too much of something
row("13 60 MB of padding", CheckpointError, "header")(edit_header(lambda text: text + " " * 60_000_000))
row("13 padding within reason", None)(edit_header(lambda text: text + " " * 1000))


@row("13b 400 000 tensors without bytes", CheckpointError, "header|tensors")
def crowd(folder):
    write(folder, {MODEL: safetensors({f"t{n}": tensor("", shape=[0], size=0)[""] for n in range(400_000)}, b"")})


@row("13b 200 000 tensors within 25 MB", CheckpointError, "more than 100000 tensors")
def crowd_less(folder):
    write(folder, {MODEL: safetensors({f"t{n}": tensor("", shape=[0], size=0)[""] for n in range(200_000)}, b"")})


for locked in (False, True):
    row(f"13c 4 TiB of nothing{', locked' * locked}", (CheckpointError, SourceError), "trailing|memory", locked=locked)(
        lambda folder: os.truncate(folder / MODEL, 2**42)
    )


@row("13c 4 TiB that the header promises", SourceError, "memory")
def promise(folder):
    write(folder, {MODEL: safetensors(tensor(FIRST, dtype="U8", shape=[2**42], size=2**42), b"")})
    os.truncate(folder / MODEL, (folder / MODEL).stat().st_size + 2**42)


# 14: what else lies in the folder
@row("14 pickle beside", None)
def pickle_beside(folder):
    write(folder, {"pytorch_model.bin": b"\x80\x02cos\nsystem\n", "training_args.bin": b"x", "evil.py": b"1/0"})


row("14b only pickle", UnsafeFormatError, "save_file")(lambda f: (f / MODEL).rename(f / "pytorch_model.bin"))
row("14b only pickle shards", UnsafeFormatError, "save_file")(
    lambda f: write(f, {"pytorch_model.bin.index.json": b"{}"}) and (f / MODEL).unlink()
)
row("14d single file beside index and shards", SourceError, "ambiguous", layout="sharded")(
    lambda folder: write(folder, {MODEL: clip_single(seed=1)[MODEL]})
)
row("14 variant beside", None)(lambda folder: write(folder, {"model.fp16.safetensors": b"not asked for"}))

# 15: names
row("15 wrong case", SourceError, "Model.safetensors")(
    lambda folder: (folder / MODEL).rename(folder / "Model.safetensors")
)


@row("15 shard in another Unicode form", SourceError, r"e\\u0301", layout="sharded")
def decompose(folder):
    (folder / ONE).rename(folder / "mod\u0065\u0301l.safetensors")
    edit(INDEX, lambda data: data.replace(ONE.encode(), "mod\u00e9l.safetensors".encode()))(folder)


@row("15 shard with a name beyond ASCII", None, layout="sharded")
def accent(folder):
    (folder / ONE).rename(folder / "mod\u00e9l 1.safetensors")
    edit(INDEX, lambda data: data.replace(ONE.encode(), "mod\u00e9l 1.safetensors".encode()))(folder)


@row("15 shards in a folder below", None, layout="sharded")
def below(folder):
    write(folder, {f"part/{ONE}": (folder / ONE).read_bytes()})
    (folder / ONE).unlink()
    edit(INDEX, lambda data: data.replace(ONE.encode(), f"part/{ONE}".encode()))(folder)


row("15 name too long", SourceError, "name too long", layout="sharded")(
    edit(INDEX, lambda data: data.replace(ONE.encode(), b"a" * 5000 + b".safetensors"))
)

# 16: something else under the name
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
for locked in (False, True):
    both = (CheckpointError, IntegrityError)
    row(f"16 LFS pointer{', locked' * locked}", both, "git lfs pull", locked=locked)(edit(MODEL, lambda data: POINTER))
row("16 LFS pointer as config", CheckpointError, "git lfs pull")(edit("config.json", lambda data: POINTER))
row("16 LFS pointer as shard", CheckpointError, "git lfs pull", layout="sharded")(edit(ONE, lambda data: POINTER))
row("16 HTML page", CheckpointError, "HTML")(
    edit(MODEL, lambda data: b"<!DOCTYPE html>\n<html><body>Log in</body></html>")
)
row("16 pickle renamed", CheckpointError, "pickle")(edit(MODEL, lambda data: b"\x80\x02}q\0." + bytes(100)))
row("16 zip pickle renamed", CheckpointError, "pickle")(edit(MODEL, lambda data: b"PK\x03\x04" + bytes(1000)))
row("16 text", CheckpointError, MODEL)(edit(MODEL, lambda data: b"hello, world, this is text\n" * 10))

# 22, 23: the lock itself
row("22 lock lacks a needed file", IntegrityError, "config.json", locked=True)(
    edit("SHA256SUMS", lambda data: b"".join(line for line in data.splitlines(True) if b"config" not in line))
)
row("22 lock lacks a shard", IntegrityError, ONE, layout="sharded", locked=True)(
    edit("SHA256SUMS", lambda data: b"".join(line for line in data.splitlines(True) if ONE.encode() not in line))
)
row("22 lock names a file that is absent", SourceError, "gone", locked=True)(
    edit("SHA256SUMS", lambda data: data + b"0" * 64 + b"  gone.json\n")
)
row("22 more files in the folder", None, locked=True)(lambda folder: write(folder, {"README.md": b"x", "x.json": b"{"}))
GOOD = "a" * 64
for what, line in {
    "leaves the folder": f"{GOOD}  ../x\n",
    "absolute": f"{GOOD}  /etc/passwd\n",
    "backslash": f"{GOOD}  a\\b\n",
    "escaped": f"\\{GOOD}  a\\nb\n",
    "NUL": f"{GOOD}  a\0b\n",
    "dot": f"{GOOD}  ./config.json\n",
    "40 digits": f"{'a' * 40}  config.json\n",
    "not digits": f"{'g' * 64}  config.json\n",
    "no name": f"{GOOD}\n",
    "empty line": "\n",
    "text": "hello\n",
}.items():
    row(f"23 lock: {what}", CheckpointError, "SHA256SUMS", locked=True)(
        edit("SHA256SUMS", lambda data, line=line: data + line.encode())
    )
row("23 lock: named twice", CheckpointError, "twice", locked=True)(edit("SHA256SUMS", lambda data: data + data))
row("23 lock: byte order mark", CheckpointError, "SHA256SUMS", locked=True)(
    edit("SHA256SUMS", lambda data: b"\xef\xbb\xbf" + data)
)
row("23 lock: not UTF-8", CheckpointError, "SHA256SUMS", locked=True)(edit("SHA256SUMS", lambda data: data + b"\xff\n"))
row("23 lock: empty", CheckpointError, "SHA256SUMS", locked=True)(edit("SHA256SUMS", lambda data: b""))
row("23 lock: only comments", CheckpointError, "SHA256SUMS", locked=True)(
    edit("SHA256SUMS", lambda data: b"# repo: a/b\n")
)
row("23 lock: upper case", None, locked=True)(
    edit("SHA256SUMS", lambda data: re.sub(rb"^[0-9a-f]{64}", lambda m: m[0].upper(), data, flags=re.MULTILINE))
)
row("23 lock: CRLF", None, locked=True)(edit("SHA256SUMS", lambda data: data.replace(b"\n", b"\r\n")))
row("23 lock: a FIFO", SourceError, "FIFO", locked=True)(replace_with("SHA256SUMS", os.mkfifo))
row("23 lock: binary marks", None, locked=True)(edit("SHA256SUMS", lambda data: data.replace(b"  ", b" *")))
