"""Is what the README says of a benchmark what the benchmark has found?

    python -m benchmarks.quoting [--write] [README.md]

A README quotes a kept result between two comments: `<!-- quoted: benchmarks/results/NAME.json -->` and
`<!-- end of quote -->`. Exits with 1 where what is between them is not what the JSON says; with `--write` it is written
there. To quote another result, put its name into the comment and write. Results of `benchmarks.reach` and
`benchmarks.linear` can be quoted.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTH = 120
QUOTE = re.compile(r"(?P<begin><!-- quoted: (?P<path>\S+) -->\n)(?P<text>.*?)(?P<end><!-- end of quote -->)", re.DOTALL)
NAMES = {  # a way's name in words; a way that is not here is not quoted
    "sha256": "one sha256 pass over the files, by one rank",
    "from_pretrained": "`from_pretrained` on every rank, unverified",
    "hash-everywhere": "the same, each rank hashing first",
    "hash-on-first": "the same, rank 0 hashing first",
    "broadcast": "rank 0 loads, a broadcast a tensor",
    "broadcast-async": "the same, all broadcasts at once",
    "dcp": "DCP, `broadcast_from_rank0`",
    "sync_module_states": "FSDP, `sync_module_states`",
    "tensorizer": "tensorizer on every rank",
    "tensorizer-verified": "tensorizer on every rank, verifying",
    "fastsafetensors": "fastsafetensors on every rank",
    "runai": "Run:ai streamer on every rank",
    "safeload": "**safeload**",
    "safeload-mapped": '**safeload**, `memory="mapped"`',
    "safeload-known": "the same, from the second load of the files on",
    "safeload-first-use": 'the same, `verdict="first_use"`, with the verdict',
    "safeload-broadcast": '**safeload**, `transport="broadcast"`',
    "safeload-broadcast-mapped": 'the same, `memory="mapped"`',
    "from_pretrained-bf16": "`from_pretrained(dtype=torch.bfloat16)` on every rank",
    "safeload-bf16": '**safeload**, `dtype="bfloat16"`',
}


def render(kept: Mapping[str, Any]) -> str:
    """Return a kept result as Markdown.

    Args:
        kept: The JSON of `benchmarks.reach` or `benchmarks.linear`.
    """
    lines = [*(_lines_of_linear(kept) if "lines" in kept else _lines_of_reach(kept))]
    return "\n".join(lines) + "\n"


def _lines_of_reach(kept: Mapping[str, Any]) -> Iterator[str]:
    rows = {(row["way"], row["ranks"]): row for row in kept["measured"]}
    ranks = sorted({count for _, count in rows})
    yield from _where(
        kept,
        kept["command"],
        f"Seconds from a barrier until every rank has read its whole tower, {kept['page_cache']} page cache; medians. "
        "Memory: of all ranks together, in towers.",
    )
    yield "| way |" + "".join(f" {n} ranks, s |" for n in ranks) + "".join(f" memory, {n} ranks |" for n in ranks)
    yield "| --- |" + " --- |" * (2 * len(ranks))
    for way in (way for way in NAMES if (way, ranks[0]) in rows):
        of = [rows[way, count] for count in ranks]
        seconds = " | ".join(f"{statistics.median(row['seconds']):.2f}" for row in of)
        memory = " | ".join("" if way == "sha256" else f"{row['pss_bytes'] / kept['tower_bytes']:.2f}" for row in of)
        yield f"| {NAMES[way]} | {seconds} | {memory} |"
    for way, reason in kept["left_out"].items():
        yield f"| {NAMES.get(way, way)} | not measured: {reason} |{' |' * (2 * len(ranks) - 1)}"
    yield ""
    yield from _lines_of_targets(kept["reach"], ranks)


def _lines_of_targets(reach: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> Iterator[str]:
    """Say what each target was held to, in a race of two: a ratio, and the most that it was to be."""
    rows = {(row["what"], row["ranks"]): row for row in reach}
    yield "| what : beside what, by the ways' names in `safeload bench` |" + "".join(
        f" {n} ranks | at most |" for n in ranks
    )
    yield "| --- |" + " --- |" * (2 * len(ranks))
    for what in dict.fromkeys(row["what"] for row in reach):
        cells = []
        for count in ranks:
            row = rows.get((what, count))
            ratio = "" if row is None else "not measured" if row["ratio"] is None else f"{row['ratio']:.2f}"
            missed = row is not None and row["ratio"] is not None and row["verdict"] != "met"
            cells += [f"{ratio}, missed" if missed else ratio, "" if row is None else f"{row['most']:.2f}"]
        yield f"| {what} | {' | '.join(cells)} |"


def _lines_of_linear(kept: Mapping[str, Any]) -> Iterator[str]:
    last = kept["reports"][-1]
    yield from _where(last, kept["command"], "Towers of one shard to four, all of the same layers.")
    sizes = kept["lines"][0]["gigabytes"]
    yield f"| way | ranks | {' | '.join(f'{size:.2f} GB, s' for size in sizes)} | s a GB | off the line by |"
    yield f"| --- | --- |{' --- |' * (len(sizes) + 2)}"
    for line in kept["lines"]:
        seconds = " | ".join(f"{value:.2f}" for value in line["seconds"])
        way = NAMES.get(line["way"], line["way"])
        yield f"| {way} | {line['ranks']} | {seconds} | {line['s_per_gb']:.2f} | {line['deviation']:.0%} |"


def _where(report: Mapping[str, Any], command: str, what: str) -> Iterator[str]:
    """Say in a paragraph what was run, on what, and what its limits are."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "safeload")
    limits = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["limits_s"].items())
    text = (
        f"`{command}`; {report['tower']}, {report['tower_bytes'] / 1e9:.2f} GB; {machine['cores']} cores, "
        f"{machine['machine']}; {versions}. {what} This machine's limits for as many bytes, in seconds: {limits}."
    )
    yield from textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)
    yield ""


def requote(text: str, root: Path) -> str:
    """Return a README's text with every quote written anew.

    Args:
        text: Of the README.
        root: What the paths in it are relative to.
    """

    def write(found: re.Match[str]) -> str:
        kept = json.loads((root / found["path"]).read_text(encoding="utf-8"))
        return f"{found['begin']}{render(kept)}{found['end']}"

    return QUOTE.sub(write, text)


def main() -> int:
    """Compare or write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("readme", type=Path, nargs="?", default=ROOT / "README.md")
    args = parser.parse_args()
    text = args.readme.read_text(encoding="utf-8")
    written = requote(text, args.readme.parent)
    if args.write:
        args.readme.write_text(written, encoding="utf-8")
    elif written != text:
        print(f"{args.readme}: what it quotes is not what was found; python -m benchmarks.quoting --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
