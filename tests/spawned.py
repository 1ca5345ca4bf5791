"""Functions that `run_ranks` runs in the tests."""

import os
import time
from pathlib import Path


def who(word):
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert torch.get_num_threads() == max(1, os.cpu_count() // dist.get_world_size())
    return word, dist.get_rank(), total.item(), os.environ["FLAG"], os.environ["LOCAL_RANK"]


def fail_on_rank_1(kind):
    import torch.distributed as dist

    from safeload.errors import SourceError

    if dist.get_rank() == 1:
        print("on the way to it")
        if kind == "ours":
            raise SourceError("/nowhere: no such folder", path="/nowhere")
        if kind == "foreign":
            raise ValueError("not ours")
        os._exit(7)
    dist.barrier()  # rank 1 never comes


def wait_for_ever(folder):
    import torch.distributed as dist

    Path(folder, f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
    while True:
        time.sleep(1)
