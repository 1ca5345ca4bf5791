"""Repositories on 2 ranks: the source alone asks the Hub, and what comes of it is the same on both."""

import warnings

import pytest

from tests.fakehub import FakeHub
from tests.files import clip_single, clip_tensors
from tests.ranks import run_on_ranks
from tests.test_adversary import values_of
from tests.test_hubs import point_client_at

REPO = "org/tower"
NOBODY = "http://127.0.0.1:9"  # the discard port: a connection is refused at once
FLIPPED = {"model.safetensors": lambda data: data[:-1] + bytes([data[-1] ^ 1])}
OUTCOMES = {
    "good": ({}, "hub"),
    "tampered": ({"tamper": FLIPPED}, "IntegrityError"),
    "not served": ({"hidden": {"model.safetensors"}}, "SourceError"),
    "cut off": ({"cut": {"model.safetensors"}}, "SourceError"),
    "401": ({"status": (401, "RepoNotFound")}, "SourceError"),
    "404": ({"status": (404, "RepoNotFound")}, "SourceError"),
    "503": ({"status": (503, "")}, "SourceError"),
}


def load(endpoint, place, **where):
    """Load on this rank; returns the provenance, or the error and what it says."""
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import SafeLoadError, load_report, safe_from_pretrained

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*hf_xet")
        point_client_at(patch, place / f"rank{dist.get_rank()}", endpoint if dist.get_rank() == 0 else NOBODY)
        try:
            tower = safe_from_pretrained(CLIPVisionModel, REPO, **where)
        except SafeLoadError as error:
            return type(error).__name__, str(error)
    assert values_of(tower) == {name: raw for name, (_, raw) in clip_tensors().items()}
    return load_report(tower).provenance, load_report(tower).commit


def run(endpoint, place, **where):
    results = run_on_ranks(2, load_with, endpoint, place, where, timeout_s=60)
    assert all(result.ok for result in results), results
    assert results[0].value == results[1].value
    return results[0].value


def load_with(endpoint, place, where):
    return load(endpoint, place, **where)


@pytest.mark.parametrize("case", OUTCOMES)
def test_outcome_is_the_same_on_both_ranks(case, tmp_path):
    faults, expected = OUTCOMES[case]
    with FakeHub() as hub:
        commit = hub.commit(REPO, clip_single())
        for name, value in faults.items():
            setattr(hub, name, value)
        found, text = run(hub.endpoint, tmp_path)
        assert found == expected, text
        assert text == commit if expected == "hub" else REPO in text


def test_dead_hub(tmp_path):
    found, text = run(NOBODY, tmp_path)
    assert found == "SourceError"
    assert "rank 0" in text


def test_warm_cache_offline_and_pinned(tmp_path):
    with FakeHub() as hub:
        commit = hub.commit(REPO, clip_single())
        assert run(hub.endpoint, tmp_path) == ("hub", commit)
        hub.log.clear()
        assert run(hub.endpoint, tmp_path, revision=commit) == ("cache", commit)
        assert run(hub.endpoint, tmp_path, local_files_only=True) == ("cache", commit)
        assert hub.log == []
