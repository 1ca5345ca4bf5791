"""Ranks of one group that call different functions of safeload are told what each of them called."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.towers import clip_folder


def _call(folder, checker):
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import MismatchedCallError, check_towers, safe_from_pretrained

    def load():
        return safe_from_pretrained(CLIPVisionModel, folder, verify="off", device="cpu")

    tower = load()
    with pytest.raises(MismatchedCallError) as caught:
        check_towers(tower) if dist.get_rank() == checker else load()
    assert torch.equal(*(next(each.parameters()) for each in (tower, load())))  # the group works on
    return str(caught.value)


@pytest.mark.parametrize("checker", [0, 1])
def test_a_check_on_one_rank_and_a_load_on_the_other(tmp_path, checker):
    results = run_on_ranks(2, _call, clip_folder(tmp_path / "tower"), checker)
    assert all(result.ok for result in results), results[0].describe() + results[1].describe()
    assert len({result.value for result in results}) == 1
    assert "call=check_towers" in results[0].value
    assert "call=safe_from_pretrained" in results[0].value
