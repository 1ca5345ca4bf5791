"""`redirect_from_pretrained` and `safeload run`: code that calls `from_pretrained`, unedited, gets the safe load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, CLIPVisionModel

from safeload.commands import UsageError
from safeload.errors import SafeLoadError, SourceError
from safeload.protecting import frozen_towers
from safeload.redirecting import find_class, redirect_from_pretrained
from tests.protect_towers import assert_whole, make_clip, tensors_of
from tests.ranks import on_ranks

ORIGINAL = CLIPVisionModel.__dict__.get("from_pretrained")


class ThirdParty(nn.Module):
    """Code that nobody here may edit."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.tower = CLIPVisionModel.from_pretrained(path, low_cpu_mem_usage=True)
        self.head = nn.Linear(32, 2)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    tower = make_clip(3)
    tower.save_pretrained(folder)
    return tensors_of(tower)


@on_ranks(2)
def test_third_party_code_gets_the_safe_load_on_every_rank(tmp_path):
    import torch.distributed as dist

    folder = tmp_path / "tower"
    want = tensors_of(make_clip(3))
    if dist.get_rank() == 0:
        saved(folder)
    dist.barrier()
    with redirect_from_pretrained(CLIPVisionModel, verify="off"):
        model = ThirdParty(str(folder))
    assert_whole(model.tower, want)
    assert CLIPVisionModel.__dict__.get("from_pretrained") is ORIGINAL
    assert not frozen_towers(ThirdParty(str(folder)))


def test_as_a_decorator_and_with_an_auto_class_and_keywords(tmp_path):
    want = saved(tmp_path)

    @redirect_from_pretrained(AutoModel, CLIPVisionModel, verify="off")
    def build():
        named = CLIPVisionModel.from_pretrained(pretrained_model_name_or_path=tmp_path, torch_dtype=torch.bfloat16)
        return named, CLIPVisionModel.from_pretrained(tmp_path)

    half, whole = build()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert_whole(whole, want)


class Sub(CLIPVisionModel):
    pass


def test_subclasses_are_left_alone(tmp_path):
    saved(tmp_path)
    with redirect_from_pretrained(CLIPVisionModel, verify="off"):
        assert not frozen_towers(Sub.from_pretrained(tmp_path))


def test_errors_go_through_and_the_class_is_as_before(tmp_path):
    with pytest.raises(SourceError), redirect_from_pretrained(CLIPVisionModel):
        CLIPVisionModel.from_pretrained(tmp_path / "missing")
    assert CLIPVisionModel.__dict__.get("from_pretrained") is ORIGINAL


def test_what_cannot_be_honoured_is_refused(tmp_path):
    with redirect_from_pretrained(CLIPVisionModel, verify="off"):
        with pytest.raises(SafeLoadError, match="positional arguments"):
            CLIPVisionModel.from_pretrained(tmp_path, 1)
        with pytest.raises(SafeLoadError, match="device_map"):
            CLIPVisionModel.from_pretrained(tmp_path, device_map="auto")


@pytest.mark.parametrize("classes", [(), (nn.Linear,), ("CLIPVisionModel",)])
def test_nothing_to_redirect_is_an_error(classes):
    with pytest.raises(SafeLoadError, match="from_pretrained"), redirect_from_pretrained(*classes):
        pass


def test_classes_are_found_by_name():
    assert find_class("CLIPVisionModel") is CLIPVisionModel
    assert find_class("torch.nn:Linear") is nn.Linear
    assert find_class("tests.test_protect_redirect.Sub") is Sub
    with pytest.raises(SafeLoadError, match="no class 'Missing' in transformers or diffusers"):
        find_class("Missing")


SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from transformers import CLIPVisionModel
if "RANK" in os.environ:
    dist.init_process_group("gloo")
class ThirdParty(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.tower = CLIPVisionModel.from_pretrained(path)
model = ThirdParty(sys.argv[1])
model.half().train()
facts = {
    "name": __name__, "arguments": sys.argv[2:], "training": model.tower.training,
    "dtype": str(next(model.parameters()).dtype), "sum": sum(float(p.sum()) for p in model.tower.parameters()),
}
open(f"{sys.argv[1]}/seen.{os.environ.get('RANK', '0')}", "w").write(json.dumps(facts))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_of(launcher: str) -> list[str]:
    program = ["-m", "safeload", "run", "--classes", "CLIPVisionModel"]
    if launcher == "python":
        return [sys.executable, *program]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    options = "--multi_gpu --num_processes=2 --num_machines=1 --machine_rank=0 --mixed_precision=no"
    port = f"--main_process_port={free_port()}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--dynamo_backend=no", port]
    return [*launch, *program]


LAUNCHERS = ("accelerate", "python", "torchrun")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The script under each launcher, all of them at once: most of their time goes into imports."""
    ours = ("RANK", "WORLD", "LOCAL", "MASTER")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as started:
        found = {}
        for launcher in LAUNCHERS:
            folder = tmp_path_factory.mktemp(launcher)
            want = saved(folder)
            script = folder / "train.py"
            script.write_text(SCRIPT)
            command = [*command_of(launcher), str(script), str(folder), "--lr", "1", "--json"]
            log = started.enter_context((folder / "output").open("w"))
            # In a session of its own, so that a launcher that is late takes its workers along.
            process = subprocess.Popen(command, env=env, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)
            started.callback(end_session, process)
            found[launcher] = (process, folder, want)
        yield found


def end_session(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_is_run_unedited(runs, launcher):
    process, folder, want = runs[launcher]
    assert process.wait(timeout=90) == 0, (folder / "output").read_text()
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("seen.*"))]
    assert len(seen) == (1 if launcher == "python" else 2)
    for facts in seen:
        assert facts["name"] == "__main__"
        assert facts["arguments"] == ["--lr", "1", "--json"]
        assert facts["dtype"] == "torch.float32"
        assert facts["training"] is False
        total = sum(float(want[name].sum()) for name, _ in make_clip(3).named_parameters())
        assert facts["sum"] == pytest.approx(total, rel=1e-6)


def test_misuse_is_named(tmp_path):
    from safeload.cli import build_parser

    for arguments, said in (
        (["--classes", "Missing", "x.py"], "no class"),
        (["--classes", "CLIPVisionModel", "x.py"], "no script"),
    ):
        args = build_parser().parse_args(["run", *arguments])
        with pytest.raises(UsageError, match=said):
            args.command.run(args)
