"""`safeload bench`: it measures what it says, says what it measured, and holds the ways of others to their values."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import mmap
import os
import sys
import threading
import time
import types
import unittest.mock

import pytest
import torch
import torch.distributed as dist

from safeload import benching, chilling, metering, racing, weighing
from safeload.benching import WAYS, BenchReport, Measured, bench, installed
from safeload.chilling import drop, read_anew, resident_share
from safeload.errors import SafeLoadError
from safeload.making import make_sharded_tower, make_tower
from safeload.peers import PEERS, hash_files
from safeload.skeletons import Peer, empty_module, fill_module, load_class, meta_module
from tests.ranks import on_ranks
from tests.towers import assert_equal_towers, clip_folder

_MIB = 1024**2


def _measured(way, ranks, seconds, **others):
    values = {
        "returned_s": tuple(value / 2 for value in seconds),
        "cpu_s": seconds,
        "source_cpu_s": seconds,
        "pss_bytes": 100,
        "peak_bytes": 200,
        "loaded_bytes": 100,
    }
    return Measured(way=way, ranks=ranks, seconds=seconds, **{**values, **others})


@pytest.fixture
def report():
    measured = (
        _measured("sha256", 2, (1.0, 2.0, 3.0)),
        _measured("safeload", 2, (2.0, 2.0, 9.0)),
        _measured("sha256", 4, (1.0, 1.0, 1.0)),
        _measured("safeload-broadcast-mapped", 4, (3.0, 3.0, 3.0)),
    )
    return BenchReport(
        tower="small",
        tower_bytes=100,
        measured=measured,
        limits_s={"sha256": 0.5},
        machine={"cores": 2},
        versions={"torch": "2"},
        page_cache="cold",
        resident=0.25,
        left_out={"tensorizer": "tensorizer is not installed"},
    )


def test_a_ratio_is_the_median_over_the_rounds(report):
    assert report.ratio("safeload", "sha256", 2) == 2.0  # of 2, 1 and 3
    assert report.ratio("safeload", "sha256", 2, returned=True) == 1.0
    with pytest.raises(KeyError):
        report.ratio("safeload", "dcp", 2)


def test_table_and_picture_show_every_way_and_what_to_know(report, tmp_path):
    from safeload.plotting import bench_picture, bench_table

    text = bench_table(report)
    assert all(part in text for part in ("sha256", "safeload", "2.000-9.000", "1.00 x", "2.00 x", "0.50 s"))
    assert "safeload-broadcast-mapped" in text
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(text.split())
    assert "Only ratios within one run mean anything" in flat
    assert "NOT COLD: up to 25% of their pages stayed" in flat
    assert "Left out: tensorizer, tensorizer is not installed." in flat
    bench_picture(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_ways_sizes_and_folders_are_refused(tmp_path):
    with pytest.raises(SafeLoadError, match="no such way: magic"):
        bench(tmp_path, ways=["magic"], work=tmp_path)
    with pytest.raises(SafeLoadError, match="no safetensors files"):
        bench(tmp_path, ways=["sha256"], work=tmp_path)
    with pytest.raises(SafeLoadError, match="expected one of"):
        make_tower(tmp_path, "7B")
    with pytest.raises(SafeLoadError, match="expected 1 to 4"):
        make_sharded_tower(tmp_path, "1B", 5)


def test_a_sharded_tower_grows_by_its_shards(tmp_path):
    sizes = []
    for shards in (1, 2, 4):
        files = sorted(make_sharded_tower(tmp_path, "0.01B", shards).glob("*.safetensors"))
        assert len(files) == shards
        sizes.append(sum(file.stat().st_size for file in files))
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.1)
    assert sizes[2] == pytest.approx(4 * sizes[0], rel=0.1)


# --- the ways of others ---


def test_a_way_whose_library_is_not_there_is_left_out_or_refused(monkeypatch, tmp_path):
    clip_folder(tmp_path)
    gone = Peer(load=PEERS["runai"].load, needs=("no_such_library", "no-such-package"))
    monkeypatch.setitem(PEERS, "runai", gone)
    assert installed(["sha256", "runai", "safeload"]) == (
        ("sha256", "safeload"),
        {"runai": "no-such-package is not installed"},
    )
    with pytest.raises(SafeLoadError, match="runai: not installed here: pip install no-such-package"):
        bench(tmp_path, ways=["runai"], work=tmp_path)


def test_the_command_leaves_out_what_nobody_asked_for_by_name(monkeypatch, tmp_path):
    from safeload.cli import main

    asked = []

    def stand_in(folder, *, ways, optional, **others):
        asked.append((tuple(ways), optional))
        raise SafeLoadError("far enough")

    monkeypatch.setattr(benching, "bench", stand_in)
    monkeypatch.setitem(PEERS, "runai", Peer(load=PEERS["runai"].load, needs=("json", "json")))  # installed anywhere
    for options in ((), ("--against", "all"), ("--against", "runai,safeload")):
        assert main(["bench", "--tower", str(tmp_path), *options]) == 1
    assert "tensorizer-verified" in asked[0][0]
    assert asked[0][1]
    assert asked[1:] == [(WAYS, True), (("runai", "safeload"), False)]


def test_hashes_are_those_of_the_files(tmp_path):
    contents = (b"", b"x" * (3 << 20), b"abc")
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert hash_files([str(path) for path in paths]) == tuple(
        hashlib.sha256(content).hexdigest() for content in contents
    )


def test_an_empty_module_has_the_constructors_buffers(tmp_path):
    folder = str(clip_folder(tmp_path))
    want = load_class(folder).from_pretrained(folder)
    got = empty_module(load_class(folder), folder)
    assert {name: value.shape for name, value in got.named_parameters()} == {
        name: value.shape for name, value in want.named_parameters()
    }
    assert not any(value.is_meta for value in got.parameters())
    for name, value in want.named_buffers():
        assert torch.equal(dict(got.named_buffers())[name], value), name


def test_files_with_other_names_are_no_match(tmp_path):
    folder = str(clip_folder(tmp_path))
    module = meta_module(load_class(folder), folder)
    with pytest.raises(SafeLoadError, match="renames no keys"):
        fill_module(module, {"other": torch.zeros(1)})


@pytest.mark.parametrize("way", [way for way in PEERS if PEERS[way].needs is None])
def test_a_usual_way_loads_what_from_pretrained_loads(way, tmp_path):
    _all_load_the_same(str(clip_folder(tmp_path / "tower")), str(tmp_path / "work"), way)


@pytest.mark.parametrize("way", [way for way in PEERS if PEERS[way].needs is not None])
def test_a_librarys_way_loads_what_from_pretrained_loads(way, tmp_path):
    missing = PEERS[way].missing
    if missing is not None:
        pytest.skip(f"{missing} is not installed; pip install 'safeload[peers]' for what bench can compare with")
    _all_load_the_same(str(clip_folder(tmp_path / "tower", shard_size="150KB")), str(tmp_path / "work"), way)


@on_ranks(2)
def _all_load_the_same(folder, work, way):
    what = racing.Race(folder=folder, ways=(way,), rounds=1, work=work)
    model_class = load_class(folder)
    racing._prepare(model_class, what)
    got = racing._load_by(way, model_class, what)()
    assert (len(what.files()) > len(racing.weight_files(folder))) == (PEERS[way].file is not None)
    want = model_class.from_pretrained(folder)
    assert_equal_towers(got, want.bfloat16() if way.endswith("bf16") else want)


def test_a_way_that_loads_other_values_is_no_yardstick(tmp_path):
    folder = str(clip_folder(tmp_path))
    model_class = load_class(folder)
    module = model_class.from_pretrained(folder)
    racing._compare("mine", module, model_class, folder)
    racing._compare("mine", module.bfloat16(), model_class, folder)
    with torch.no_grad():
        next(module.parameters()).view(-1)[0] += 1
    with pytest.raises(SafeLoadError, match=r"mine: .*is not what from_pretrained gives"):
        racing._compare("mine", module, model_class, folder)


# --- asked before anything is measured ---


def _refused(options):
    from safeload.cli import main

    with unittest.mock.patch("safeload.making.make_tower", side_effect=AssertionError("made before it was asked")):
        return main(["bench", *options])


@pytest.mark.parametrize("plot", ["/no/such/folder/x.png", "picture.xyz"])
def test_a_picture_that_cannot_be_drawn_is_told_first(plot, capsys):
    assert _refused(["--plot", plot]) != 0
    assert plot in capsys.readouterr().err


def test_no_matplotlib_and_no_such_way_are_told_first(monkeypatch, capsys):
    assert _refused(["--against", "telepathy"]) != 0
    assert "telepathy" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _refused(["--plot", "x.png"]) != 0
    assert "matplotlib" in capsys.readouterr().err


def test_a_repository_is_measured_where_the_client_keeps_it(monkeypatch, tmp_path):
    from safeload.commands import bench as command

    folder = clip_folder(tmp_path / "tower")
    found = types.SimpleNamespace(folder=folder)
    monkeypatch.setattr("safeload.resolving.resolve", lambda name: {"openai/clip": found}[name])
    args = types.SimpleNamespace(tower="openai/clip", size="0.3B")
    assert command._folder_of(args, tmp_path) == folder
    assert command._folder_of(types.SimpleNamespace(tower=str(folder)), tmp_path) == folder


# --- cold files ---


def test_dropped_files_are_out_of_memory_and_the_check_can_tell(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 << 20))
    if resident_share([str(path)]) is None:
        pytest.skip("this system has no mincore")
    assert resident_share([str(path)]) == 1.0
    drop([str(path)])
    cold = resident_share([str(path)])
    if cold == 1.0:
        pytest.skip("the file system of the temporary folder keeps its files in memory alone")
    assert cold == 0.0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])
        drop([str(path)])
        assert resident_share([str(path)]) == 1.0  # pages in use stay
    assert resident_share([]) == 0.0


@pytest.fixture
def shares_after_drop(monkeypatch):
    """How much of each file is in memory when `read_anew` has dropped it and has not read it yet."""
    found = []

    def drop_and_look(paths):
        drop(paths)
        found.extend(map(_share, paths))

    monkeypatch.setattr(chilling, "drop", drop_and_look)
    return found


def _share(path):
    return resident_share([path])


def test_files_that_are_read_anew_are_in_memory_and_whole(tmp_path, shares_after_drop):
    contents = [os.urandom(size_bytes) for size_bytes in (9 << 20, 5, 0)]
    paths = [str(tmp_path / str(number)) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        with open(path, "wb") as file:
            file.write(content)
    if _share(paths[0]) is None:
        pytest.skip("this system has no mincore")
    read_anew(iter(paths))
    if shares_after_drop[0] == 1.0:
        pytest.skip("the file system of the temporary folder keeps its files in memory alone")
    assert shares_after_drop == [0.0, 0.0, 0.0]
    assert [_share(path) for path in paths] == [1.0, 1.0, 0.0]  # the last one has no page
    for path, content in zip(paths, contents, strict=True):
        with open(path, "rb") as file:
            assert file.read() == content


def test_a_file_that_is_mapped_stays_as_it_is(tmp_path, shares_after_drop):
    paths = [str(tmp_path / name) for name in ("mapped", "other")]
    content = os.urandom(8 << 20)
    for path in paths:
        with open(path, "wb") as file:
            file.write(content)
    if _share(paths[0]) is None:
        pytest.skip("this system has no mincore")
    with open(paths[0], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])
        read_anew(paths)
        assert mapped[:] == content
    if shares_after_drop[1] == 1.0:
        pytest.skip("the file system of the temporary folder keeps its files in memory alone")
    assert shares_after_drop == [1.0, 0.0]
    assert [_share(path) for path in paths] == [1.0, 1.0]


def test_files_that_cannot_be_dropped_or_read_are_told(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_anew([str(tmp_path / "none")])
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with pytest.raises(NotImplementedError, match="posix_fadvise"):
        read_anew([])


# --- what a race does on every rank ---


@on_ranks(2)
def test_the_first_rank_warms_the_files_and_the_others_wait(tmp_path):
    source, read = dist.get_rank() == 0, []

    def slowly(paths):
        time.sleep(0.3)
        read.extend(paths)
        (tmp_path / "read").touch()

    def not_here(paths):
        raise NotImplementedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "read_anew", slowly)
        racing._warm(["a", "b"])
        assert (tmp_path / "read").exists()
        assert read == (["a", "b"] if source else [])
        patch.setattr(racing, "read_anew", not_here)
        racing._warm(["a"])


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is told by Linux alone")
def test_a_load_is_weighed_while_all_ranks_hold_it_and_at_its_most(tmp_path):
    (tmp_path / "weights").write_bytes(os.urandom(64 * _MIB))
    _weigh(str(tmp_path / "weights"))


@on_ranks(2)
def _weigh(path):
    source = dist.get_rank() == 0

    def load():
        time.sleep(0 if source else 1)  # the first rank waits until the other one maps the file too
        if source:
            working = torch.ones(160 * _MIB, dtype=torch.uint8)
            time.sleep(0.5)
            del working
        module = torch.nn.Module()
        module.register_buffer("table", torch.from_file(path, shared=False, size=64 * _MIB, dtype=torch.uint8))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metering, "_SHARE", 0)  # look often, however long a reading takes on a busy machine
        found = weighing.weigh_once(load)
    assert found["loaded_bytes"] == 64 * _MIB
    assert 24 * _MIB < found["pss_bytes"] < 48 * _MIB  # half of what both have looked at
    assert (found["peak_bytes"] > 150 * _MIB) == source
    assert weighing.weigh_once(lambda: None)["loaded_bytes"] == 0


@on_ranks(2)
def test_a_load_is_timed_until_all_ranks_have_it():
    pause_s = 0.1 if dist.get_rank() == 0 else 0.6
    found = weighing.time_once(lambda: time.sleep(pause_s))
    assert pause_s <= found["returned_s"] < pause_s + 0.4
    assert found["seconds"] >= 0.6
    assert found["cpu_s"] < 0.4


# --- all of it ---


def _run(options, tmp_path, capsys):
    from safeload.cli import main

    assert main(["bench", "--json", *(str(part) for option in options.items() for part in option)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_measures_a_tower_that_it_makes(tmp_path, capsys):
    plot = tmp_path / "plot.png"
    ways = "sha256,from_pretrained,safeload,safeload-known"
    options = {
        "--size": "0.01B",
        "--ranks": "2",
        "--rounds": "1",
        "--against": ways,
        "--work": tmp_path,
        "--plot": plot,
    }
    report = _run(options, tmp_path, capsys)
    assert {each["way"] for each in report["measured"]} == set(ways.split(","))
    assert all(each["seconds"][0] > 0 for each in report["measured"])
    assert all(0 < each["source_cpu_s"][0] <= each["cpu_s"][0] for each in report["measured"])
    assert report["tower_bytes"] > 30e6
    assert any("gloo" in name for name in report["limits_s"])
    assert (report["page_cache"], report["resident"]) == ("warm", None)
    assert plot.stat().st_size > 1000


def test_a_cold_run_says_how_cold_it_was(tmp_path):
    folder = clip_folder(tmp_path / "tower")
    found = bench(folder, ways=["safeload-mapped"], ranks=[1], rounds=1, work=tmp_path / "work", cold=True)
    assert found.page_cache == "cold"
    assert found.resident is None or 0 <= found.resident <= 1
    assert any("page cache" in note for note in found.notes())


def _own_mib():
    """Memory that is this process's own, in MiB; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return next((int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon:")), 0.0)
    return 0.0


@on_ranks(1)
def test_what_one_way_has_freed_is_not_there_for_the_next():
    weighing.let_malloc_map()
    torch.ones(16 << 20, dtype=torch.uint8)  # from what is freed glibc learns what to keep
    weighing.give_back_memory()
    before = _own_mib()
    thread = threading.Thread(target=lambda: [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(20)])
    thread.start()
    thread.join()
    weighing.give_back_memory()
    assert _own_mib() - before < 8
