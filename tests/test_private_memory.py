"""Where memory cannot be sealed: the same loads on 2 ranks, from a private file."""

import os
from pathlib import Path

import pytest

from tests.badfiles import ROWS, make
from tests.files import clip_single, clip_tensors, lock, write
from tests.ranks import on_ranks
from tests.test_adversary import use_memory, values_of

CHOSEN = ["1 truncated by one byte", "2 bit flipped in a shard", "7d model.safetensors is a FIFO", "8 missing shard"]


@on_ranks(2, timeout_s=60)
def test_load_and_clean_up(tmp_path):
    import torch.distributed as dist
    from transformers import CLIPVisionModel

    from safeload import safe_from_pretrained

    folder, private = Path(tmp_path) / "tower", Path(tmp_path) / f"private{dist.get_rank()}"
    private.mkdir()
    if dist.get_rank() == 0:
        write(folder, clip_single())
        (folder / "SHA256SUMS").write_text(lock(clip_single()))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        use_memory("private file", patch)
        patch.setattr("safeload.holding._RAM", private)
        patch.setattr("tempfile.tempdir", str(private))
        tower = safe_from_pretrained(CLIPVisionModel, folder)
        for row in ROWS:
            if row.name in CHOSEN:
                bad = Path(tmp_path) / row.name.replace(" ", "-")
                if dist.get_rank() == 0:
                    make(row, bad)
                dist.barrier()
                with pytest.raises(row.error, match="rank 0"):
                    safe_from_pretrained(CLIPVisionModel, bad, verify="auto" if row.locked else "off")
    assert os.listdir(private) == []
    assert values_of(tower) == {name: raw for name, (_, raw) in clip_tensors().items()}
