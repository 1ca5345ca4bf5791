"""What torchrun starts on each host: load a tower, and write down what this rank got."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.test_hosts import load_here


def main() -> None:
    folder, source_rank, results = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    seen = load_here(folder, source_rank) | {"rank": dist.get_rank(), "local_rank": int(os.environ["LOCAL_RANK"])}
    (results / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
