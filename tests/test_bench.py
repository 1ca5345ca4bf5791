"""`safeload bench`: it measures what it says, and says what it measured."""

from __future__ import annotations

import json

import pytest

from safeload.benching import BenchReport, Measured, bench, make_tower
from safeload.errors import SafeLoadError


def _measured(way, ranks, seconds, pss_bytes=100):
    return Measured(
        way=way,
        ranks=ranks,
        seconds=seconds,
        returned_s=tuple(value / 2 for value in seconds),
        cpu_s=seconds,
        pss_bytes=pss_bytes,
        peak_bytes=2 * pss_bytes,
    )


@pytest.fixture
def report():
    measured = (
        _measured("sha256", 2, (1.0, 2.0, 3.0)),
        _measured("safeload", 2, (2.0, 2.0, 9.0)),
        _measured("sha256", 4, (1.0, 1.0, 1.0)),
        _measured("safeload", 4, (3.0, 3.0, 3.0)),
    )
    limits = {"sha256": 0.5}
    return BenchReport(
        tower="small",
        tower_bytes=100,
        measured=measured,
        limits_s=limits,
        machine={"cores": 2},
        versions={"torch": "2"},
    )


def test_a_ratio_is_the_median_over_the_rounds(report):
    assert report.ratio("safeload", "sha256", 2) == 2.0  # of 2, 1 and 3
    assert report.ratio("safeload", "sha256", 2, returned=True) == 1.0
    with pytest.raises(KeyError):
        report.ratio("safeload", "dcp", 2)


def test_table_and_picture_show_every_way(report, tmp_path):
    from safeload.plotting import bench_picture, bench_table

    text = bench_table(report)
    assert all(part in text for part in ("sha256", "safeload", "2.000-9.000", "1.00 x", "2.00 x", "0.50 s"))
    bench_picture(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_ways_and_sizes_are_refused(tmp_path):
    with pytest.raises(SafeLoadError, match="no such way: magic"):
        bench(tmp_path, ways=["magic"], work=tmp_path)
    with pytest.raises(SafeLoadError, match="expected one of"):
        make_tower(tmp_path, "7B")


def test_the_command_measures_a_tower_that_it_makes(tmp_path, capsys):
    from safeload.cli import main

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
    status = main(["bench", "--json", *(str(part) for option in options.items() for part in option)])
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {each["way"] for each in report["measured"]} == set(ways.split(","))
    assert all(each["seconds"][0] > 0 for each in report["measured"])
    assert report["tower_bytes"] > 30e6
    assert plot.stat().st_size > 1000
