"""What the README says of a benchmark is what it has found, and targets are held to what was measured."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import linear, quoting, reach
from safeload.benching import BenchReport, Measured

README = Path(__file__).parents[1] / "README.md"


def _measured(way, ranks, seconds, **others):
    values = {
        "returned_s": tuple(value / 4 for value in seconds),
        "cpu_s": seconds,
        "source_cpu_s": tuple(1.5 * value for value in seconds),
        "pss_bytes": 10**9,
        "peak_bytes": 2 * 10**9,
        "loaded_bytes": 10**9,
    }
    return Measured(way=way, ranks=ranks, seconds=seconds, **{**values, **others})


def _report(measured, tower_bytes=10**9, **others):
    return BenchReport(
        tower="made",
        tower_bytes=tower_bytes,
        measured=tuple(measured),
        limits_s={"sha256": 0.7},
        machine={"cores": 2, "machine": "x86_64"},
        versions={"python": "3.11.2", "torch": "2.13.0", "safeload": "0.1.0"},
        **others,
    )


def _all_ways(seconds=1.0, **others):
    names = reach.ways(reach.TARGETS, reach.BESIDE)
    return [_measured(way, ranks, (seconds,) * 3, **others) for way in names for ranks in (2, 4)]


@pytest.fixture
def quoted(tmp_path):
    """A README that quotes a result, not yet written."""
    report = _report(_all_ways(), left_out={"runai": "runai-model-streamer is not installed"})
    reach.keep(report, reach.reached([report], reach.TARGETS, (2, 4)), tmp_path, "made", "python -m benchmarks.reach")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- quoted: made.json -->\nold\n<!-- end of quote -->\nafter\n")
    return readme


def _quote(readme, *options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quoting", *options, str(readme)])
        return quoting.main()


def test_the_readme_quotes_what_was_found():
    text = README.read_text(encoding="utf-8")
    assert quoting.requote(text, README.parent) == text


def test_the_readme_quotes_a_result():
    assert quoting.QUOTE.search(README.read_text(encoding="utf-8").partition("## What a load costs")[2])


def test_a_quote_that_is_not_what_was_found_is_told_and_written(quoted, capsys):
    assert _quote(quoted) == 1
    assert "--write" in capsys.readouterr().out
    assert _quote(quoted, "--write") == 0
    assert _quote(quoted) == 0
    text = quoted.read_text()
    assert text.startswith("before\n<!-- quoted: made.json -->\n`python -m benchmarks.reach`; made, 1.00 GB; 2 cores")
    assert text.endswith("<!-- end of quote -->\nafter\n")
    assert "| **safeload** | 1.00 | 1.00 | 1.00 | 1.00 |" in text
    assert "torch 2.13.0" in text
    assert "not measured: runai-model-streamer is not installed" in text
    quoted.write_text(text.replace("| **safeload** | 1.00", "| **safeload** | 0.90"))
    assert _quote(quoted) == 1


def test_each_row_has_as_many_cells_as_the_heading(quoted):
    _quote(quoted, "--write")
    ways, _, targets = quoted.read_text().partition("| what : beside what")
    for table in (ways, f"| what : beside what{targets}"):
        assert {line.count("|") for line in table.splitlines() if line.startswith("|")} == {6}


def test_targets_are_quoted_with_what_they_were_held_to(quoted):
    _quote(quoted, "--write")
    lines = quoted.read_text().splitlines()
    assert "| safeload : sha256 | 1.00 | 1.35 | 1.00 | 1.50 |" in lines
    assert "| safeload-known : sha256 | 1.00, missed | 0.50 | 1.00, missed | 0.50 |" in lines
    assert "| safeload-known : from_pretrained |  |  | 1.00, missed | 0.85 |" in lines


def test_every_way_that_reach_measures_can_be_quoted():
    assert set(reach.ways(reach.TARGETS, reach.BESIDE)) - set(quoting.NAMES) == set()


# --- the targets ---


def _verdicts(report, ranks=(2, 4), targets=reach.TARGETS):
    return {(row.what, row.ranks): row.verdict for row in reach.reached([report], targets, ranks)}


def test_targets_are_met_or_missed_by_what_was_measured():
    verdicts = _verdicts(_report(_all_ways()))
    assert verdicts["safeload : sha256", 2] == "met"
    assert verdicts["safeload-known : sha256", 4] == "MISSED"
    assert verdicts["safeload-first-use, until it returns : from_pretrained", 2] == "met"  # it returns at a quarter
    assert verdicts["safeload-broadcast : tensorizer-verified", 4] == "MISSED"
    assert verdicts["safeload, memory at the end : its tower", 2] == "met"
    assert verdicts["safeload, memory on the way : its tower", 4] == "met"
    assert set(_verdicts(_report(_all_ways()), ranks=(2,))) == {key for key in verdicts if key[1] == 2}


def test_memory_of_a_cast_tower_is_held_to_the_bytes_it_has():
    measured = [replace(each, loaded_bytes=10**9 // 2) if each.way == "safeload-bf16" else each for each in _all_ways()]
    assert _verdicts(_report(measured))["safeload-bf16, memory at the end : its tower", 2] == "MISSED"


def test_a_target_beside_a_way_that_is_not_installed_says_so():
    measured = [each for each in _all_ways() if not each.way.startswith("tensorizer")]
    report = _report(measured, left_out={"tensorizer-verified": "tensorizer is not installed"})
    verdicts = _verdicts(report)
    assert verdicts["safeload-broadcast : tensorizer-verified", 2] == "not measured: tensorizer is not installed"
    assert verdicts["safeload : sha256", 2] == "met"


def test_each_target_is_held_to_its_own_race():
    targets = [
        reach.Target(way="safeload-broadcast", to="broadcast-async", most={2: 1.1}),
        reach.Target(way="safeload-broadcast", of="peak", most={2: 2.5}),
        reach.Target(way="safeload-broadcast", to="tensorizer-verified", most={2: 0.8}),
        reach.Target(way="safeload-broadcast", of="returns", to="tensorizer-verified", most={2: 0.4}),
    ]
    pairs = reach.races(targets)
    assert pairs == (("broadcast-async", "safeload-broadcast"), ("tensorizer-verified", "safeload-broadcast"))
    own_s = (8.0, 1.0)  # of the same way, in either race
    raced = [
        _report([_measured(other, 2, (4.0,) * 3), _measured(own, 2, (seconds,) * 3)])
        for (other, own), seconds in zip(pairs, own_s, strict=True)
    ]
    want = [2.0, 2.0, 0.25, 0.0625]  # it returns at a quarter
    assert [row.ratio for row in reach.reached(raced, targets, (2,))] == want
    assert [row.verdict for row in reach.reached(raced, targets, (2,))] == ["MISSED", "met", "met", "met"]
    turned = reach.reached(raced[::-1], targets, (2,))
    assert [row.ratio for row in turned] == want


# --- the line ---


def _lines(seconds):
    reports = [
        _report([_measured("safeload", 2, (value,) * 3)], tower_bytes=size * 10**9)
        for size, value in enumerate(seconds, 1)
    ]
    return linear.fit("safeload", reports, 2), reports


def test_a_tower_that_was_measured_twice_has_the_rounds_of_both():
    first, second = (_report([_measured("safeload", 2, (value, value))]) for value in (1.0, 3.0))
    joined = linear.join(first, second).find("safeload", 2)
    assert joined.seconds == (1.0, 1.0, 3.0, 3.0)
    assert joined.source_cpu_s == (1.5, 1.5, 4.5, 4.5)


def test_a_line_says_how_far_the_worst_is_off(tmp_path):
    straight, reports = _lines((1.1, 2.1, 3.1, 4.1))
    assert straight.deviation == pytest.approx(0, abs=1e-9)
    assert (straight.s_per_gb, straight.start_s) == (pytest.approx(1.0), pytest.approx(0.1))
    assert straight.busy == pytest.approx((1.5,) * 4)
    bent, _ = _lines((1.0, 2.0, 3.0, 8.0))
    assert bent.deviation > linear.MOST_DEVIATION
    assert ": hashed on several cores" in linear.say_busy(straight)
    assert ": NOT hashed" in linear.say_busy(replace(straight, busy=(0.9,) * 4))
    linear.keep([straight], reports, tmp_path, "made", "python -m benchmarks.linear")
    kept = json.loads((tmp_path / "made.json").read_text())
    assert kept["lines"] == json.loads(json.dumps([asdict(straight)]))
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")
    assert "| **safeload** | 2 | 1.10 | 2.10 | 3.10 | 4.10 | 1.00 | 0% |" in quoting.render(kept)
