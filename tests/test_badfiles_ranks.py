"""Every row of the table of bad checkpoints on 2 ranks: one error, the same on both, or the values of the good one."""

import re
import time
import warnings
from pathlib import Path

import pytest

from tests.badfiles import ROWS, make
from tests.files import clip_single, clip_tensors, write
from tests.ranks import on_ranks

LIMIT_S = 5
PARTS = 4


def load(folder):
    """Load on this rank; returns the error, or the tower."""
    from transformers import CLIPVisionModel

    from safeload.errors import SafeLoadError
    from safeload.loading import safe_from_pretrained

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no expected digest")
        try:
            return safe_from_pretrained(CLIPVisionModel, folder)
        except SafeLoadError as error:
            return error


def problems_of(row, outcome, seconds):
    """Say what is wrong with the outcome of one row on one rank, or nothing."""
    problems = [f"took {seconds:.1f} s"] if seconds > LIMIT_S else []
    if row.error is None:
        return problems + ([f"raised {outcome!r}"] if isinstance(outcome, Exception) else differences(outcome))
    if not isinstance(outcome, row.error):
        return [*problems, f"expected {row.error}, got {outcome!r:.300}"]
    if not re.search(row.match, outcome.message, re.DOTALL):
        problems.append(f"{row.match!r} is not in {outcome.message!r}")
    return problems if outcome.rank == 0 else [*problems, f"blames rank {outcome.rank}"]


def differences(tower):
    good = clip_tensors()
    found = {f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in tower.state_dict().items()}
    return [name for name, (_, raw) in good.items() if found[name].numpy().tobytes() != raw]


@pytest.mark.parametrize("part", range(PARTS))
@on_ranks(2, timeout_s=120)
def test_bad_checkpoint(part, tmp_path):
    import torch.distributed as dist

    failures = []
    good = Path(tmp_path) / "good"
    if dist.get_rank() == 0:
        write(good, clip_single())
    dist.barrier()
    assert differences(load(good)) == []  # the first load imports the class, which is no row's time
    for place, row in enumerate(ROWS[part::PARTS]):
        folder = Path(tmp_path) / str(place)
        if dist.get_rank() == 0:
            make(row, folder)
        dist.barrier()
        start = time.monotonic()
        outcome = load(folder)
        seconds = time.monotonic() - start
        outcomes = [None, None]
        text = (type(outcome).__name__, str(outcome) if isinstance(outcome, Exception) else "")
        dist.all_gather_object(outcomes, text)
        wrong = problems_of(row, outcome, seconds) + (["differs between ranks"] if outcomes[0] != outcomes[1] else [])
        failures += [f"{row.name}: {problem}" for problem in wrong]
    assert not failures, "\n".join(failures)
