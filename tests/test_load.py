"""The main job on real weights: from the line in a model's `__init__` to three optimizer steps, rank by rank."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import BertModel, CLIPVisionModel, Dinov2Config, Dinov2Model
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from safeload import (
    CheckpointError,
    SourceError,
    UnsafeFormatError,
    frozen_towers,
    load_report,
    safe_from_pretrained,
)
from safeload.families import dtype_keyword
from safeload.observing import observe_opens
from tests.outer_models import Outer, outer_config
from tests.ranks import on_ranks
from tests.towers import clip_folder, real_text_tower, real_vision_tower, rewrite, tensors_of

FILLS_EVERY_RANK = int(transformers.__version__.split(".")[0]) >= 5
FSDP_ENVIRONMENT = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
# The vision tower was saved without its mask token, which 4.46 knows no way to leave out.
HAS_USE_MASK_TOKEN = hasattr(Dinov2Config(), "use_mask_token")
MASK_TOKEN = "embeddings.mask_token"
DTYPES = {"as stored": None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CLASSES = {"vision_tower": Dinov2Model, "text_tower": BertModel}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Copies of the real towers, each with its lock."""
    found = {"vision_tower": real_vision_tower(), "text_tower": real_text_tower()}
    top = tmp_path_factory.mktemp("towers")
    return {name: str(locked_copy(folder, top / name)) for name, folder in found.items()}


def locked_copy(folder, copy):
    copy.mkdir()
    lines = []
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / name, copy / name)
        if name == "model.safetensors" and folder == real_vision_tower() and not HAS_USE_MASK_TOKEN:
            rewrite(copy / name, lambda tensors: tensors | {MASK_TOKEN: torch.zeros(1, 384, dtype=torch.float16)})
        lines.append(f"{hashlib.sha256((copy / name).read_bytes()).hexdigest()}  {name}\n")
    (copy / "SHA256SUMS").write_text("".join(lines))
    return copy


@pytest.fixture(scope="module")
def alone(folders):
    """sha256 of every tensor, {dtype: {tower: {name: digest}}}, as one process alone loads them."""
    return {
        name: {tower: digests_of(plainly(CLASSES[tower], path, dtype)) for tower, path in folders.items()}
        for name, dtype in DTYPES.items()
    }


def plainly(tower_class, path, dtype=None):
    return tower_class.from_pretrained(path, **{dtype_keyword("transformers"): dtype or "auto"})


def digest(tensor):
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + raw).hexdigest()


def digests_of(tower):
    return {name: digest(tensor) for name, tensor in tensors_of(tower).items()}


def photograph(size=112, batch=2):
    """Something of the statistics of a photograph: large soft shapes, finer ones on top, little noise."""
    generator = torch.Generator().manual_seed(11)
    image = torch.zeros(batch, 3, size, size)
    for cells, strength in ((3, 1.0), (9, 0.5), (27, 0.25), (size, 0.05)):
        layer = torch.rand(batch, 3, cells, cells, generator=generator) - 0.5
        image += strength * torch.nn.functional.interpolate(layer, size=(size, size), mode="bicubic")
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((image + 0.5).clamp(0, 1) - mean[:, None, None]) / std[:, None, None]


def words(batch=2, tokens=6):
    return torch.randint(1000, 20000, (batch, tokens), generator=torch.Generator().manual_seed(3))


def everywhere(value):
    """Every rank's value, in rank order."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def weights_of(folders):
    return [Path(folder, "model.safetensors") for folder in folders.values()]


def towers_in(folders):
    return {name: (CLASSES[name], path) for name, path in folders.items()}


# --- bit-equal, and read by one rank ---


def check_values(folders, alone, tmp_path, *, transport):
    rank = dist.get_rank()
    for name, dtype in DTYPES.items():
        with observe_opens(weights_of(folders)) as opened:
            model = Outer(outer_config(towers_in(folders), dtype=dtype, transport=transport))
        assert opened.names == (("model.safetensors",) if rank == 0 else ())
        assert sorted(frozen_towers(model)) == sorted(folders)
        for tower, path in folders.items():
            loaded = getattr(model, tower)
            assert isinstance(loaded, CLASSES[tower])
            assert not loaded.training
            assert digests_of(loaded) == alone[name][tower], f"{tower} {name}"
            check_report(loaded, path, transport)
        check_features(model, folders, dtype)
    check_without_a_folder(folders, alone, tmp_path)


def check_report(tower, path, transport):
    report = load_report(tower)
    assert report.transport == ("shared" if transport == "auto" else transport)
    assert report.provenance == "pinned"
    assert json.loads(report.to_json())["digest"] == report.digest
    size_bytes = Path(path, "model.safetensors").stat().st_size
    for each in report.ranks:
        if each.rank == 0:
            assert each.read_bytes >= size_bytes
            assert "model.safetensors" in each.files_opened
        else:
            assert each.read_bytes == 0
            assert each.files_opened == ()
            assert each.received_bytes == report.tower_bytes
    assert len(set(everywhere(report.digest))) == 1


def check_features(model, folders, dtype):
    """The same batch gives the same features on every rank, those of a tower that this process loads by itself."""
    pixels = photograph().to(model.vision_tower.dtype)
    for tower, inputs in (("vision_tower", pixels), ("text_tower", words())):
        loaded = getattr(model, tower)
        reference = plainly(CLASSES[tower], folders[tower], dtype).eval()
        with torch.no_grad():
            got, want = (each(inputs).last_hidden_state for each in (loaded, reference))
        assert got.isfinite().all()
        assert got.float().std() > 0.1
        assert torch.equal(got, want)
        assert len(set(everywhere(digest(got)))) == 1


def check_without_a_folder(folders, alone, tmp_path):
    """A rank that is not the source cannot have read a file: where it stands, there is none."""
    own = tmp_path / f"rank-{dist.get_rank()}"
    own.mkdir()
    if dist.get_rank() == 0:
        for name, path in folders.items():
            shutil.copytree(path, own / name)
    os.chdir(own)
    for name in folders:
        tower = safe_from_pretrained(CLASSES[name], f"./{name}")
        assert digests_of(tower) == alone["as stored"][name]
        assert Path(name).exists() == (dist.get_rank() == 0)


@on_ranks(2, timeout_s=120)
def test_two_ranks_hold_what_one_process_alone_loads(folders, alone, tmp_path):
    check_values(folders, alone, tmp_path, transport="broadcast")


@on_ranks(4, timeout_s=150)
def test_four_ranks_hold_what_one_process_alone_loads(folders, alone, tmp_path):
    check_values(folders, alone, tmp_path, transport="auto")


# --- trained, and untouched ---


def wrap_fsdp1(model):
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def wrap_fsdp2(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def wrap_fsdp2_offload(model):
    return wrap_fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def check_training(folders, alone, *, transport):
    for wrap in (wrap_fsdp1, wrap_fsdp2, wrap_fsdp2_offload):
        torch.manual_seed(0)
        model = Outer(outer_config(towers_in(folders), transport=transport))
        towers = {name: getattr(model, name) for name in folders}
        held = {name: list(tensors_of(tower).items()) for name, tower in towers.items()}
        places = {name: [tensor.data_ptr() for _, tensor in tensors] for name, tensors in held.items()}
        full = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        wrapped = wrap(model)
        trainable = {name: each for name, each in wrapped.named_parameters() if each.requires_grad}
        before = {name: local(each).detach().clone() for name, each in trainable.items()}
        train(wrapped, trainable.values())
        for name, tower in towers.items():
            now = tensors_of(tower)
            assert list(now) == [key for key, _ in held[name]]
            assert all(now[key] is tensor for key, tensor in held[name]), f"{wrap.__name__}: {name}: other objects"
            assert [tensor.data_ptr() for tensor in now.values()] == places[name], f"{wrap.__name__}: {name} has moved"
            assert digests_of(tower) == alone["as stored"][name], f"{wrap.__name__}: {name} has other values"
            assert all(each.grad is None and not each.requires_grad for each in tower.parameters())
        shards = sum(local(each).numel() for each in trainable.values())
        assert shards < full, f"{wrap.__name__} has sharded nothing"
        assert sum(everywhere(shards)) >= full
        changed = [name for name, each in trainable.items() if not torch.equal(local(each), before[name])]
        assert len(changed) >= sum(each.numel() > 0 for each in before.values()) - 1  # embed_tokens is not used


def train(model, trainable):
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    model.train()
    losses = []
    for _ in range(3):
        loss = model(photograph(batch=1).half(), words(batch=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@on_ranks(2, timeout_s=120)
def test_training_on_two_ranks_leaves_the_towers_alone(folders, alone):
    check_training(folders, alone, transport="broadcast")


@on_ranks(4, timeout_s=150)
def test_training_on_four_ranks_leaves_the_towers_alone(folders, alone):
    check_training(folders, alone, transport="auto")


# --- the report that all began with ---


def made(towers, outer, *, safe):
    """The model made in both ways, or the error."""
    config = outer_config(towers, safe=safe)
    for make in (lambda: Outer(config), lambda: Outer.from_pretrained(outer, config=config)):
        try:
            yield make()
        except RuntimeError as error:
            yield error


def synchronise_trainable(model):
    """What FSDP does later for the outer model's own weights, which old versions fill on the first rank alone."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)


@on_ranks(2, timeout_s=120, env=FSDP_ENVIRONMENT)
def test_the_environment_of_fsdp_training(folders, alone, tmp_path):
    rank, want = dist.get_rank(), alone["fp32"]["text_tower"]  # the text tower is stored in fp32
    if rank == 0:
        Outer(outer_config()).save_pretrained(tmp_path / "outer")
    dist.barrier()
    towers = towers_in(folders)
    direct, outer = made({"text_tower": towers["text_tower"]}, tmp_path / "outer", safe=False)
    if FILLS_EVERY_RANK:
        assert digests_of(direct.text_tower) == want
        assert "meta device context" in str(outer)
    else:
        for model in (direct, outer):
            found = digests_of(model.text_tower)
            wrong = [name for name in want if found[name] != want[name]]
            assert not wrong if rank == 0 else len(wrong) > 50
    for model in made(towers, tmp_path / "outer", safe=True):
        for name in folders:
            assert digests_of(getattr(model, name)) == alone["as stored"][name], name
            assert not getattr(model, name).training
        synchronise_trainable(model)
        with torch.no_grad():
            loss = model(photograph().half(), words())
        assert loss.isfinite()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


# --- failures ---


@pytest.mark.skipif(HAS_USE_MASK_TOKEN, reason="this version can leave the mask token out, as the checkpoint does")
@on_ranks(2)
def test_a_tensor_that_plain_from_pretrained_would_draw_at_random_is_refused():
    folder = real_vision_tower()
    assert MASK_TOKEN in digests_of(plainly(Dinov2Model, folder))
    with pytest.raises(CheckpointError) as caught:
        safe_from_pretrained(Dinov2Model, folder, verify="off")
    assert caught.value.missing == [MASK_TOKEN]


def take_shard(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    return shard.name


def take_key(folder):
    file = folder / "model.safetensors"
    name = next(key for key in load_file(file) if key.endswith("layers.1.mlp.fc1.weight"))
    rewrite(file, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    return "layers.1.mlp.fc1.weight"


def change_shape(folder):
    rewrite(
        folder / "model.safetensors",
        lambda tensors: {key: value[1:] if "fc1.bias" in key else value for key, value in tensors.items()},
    )
    return "fc1.bias"


def leave_only_pickle(folder):
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    return "pytorch_model.bin"


def take_folder(folder):
    shutil.rmtree(folder)
    return str(folder)


def flip_header(folder):
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[:8] = (2**63).to_bytes(8, "little")
    file.write_bytes(raw)
    return "model.safetensors"


FAILURES = {
    "missing folder": (take_folder, "5GB", SourceError),
    "missing shard": (take_shard, "100KB", SourceError),
    "missing key": (take_key, "5GB", CheckpointError),
    "wrong shape": (change_shape, "5GB", CheckpointError),
    "only .bin": (leave_only_pickle, "5GB", UnsafeFormatError),
    "impossible header": (flip_header, "5GB", CheckpointError),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """{case: (folder, word that the message has to hold)}; and one folder that is whole."""
    top = tmp_path_factory.mktemp("broken")
    made = {
        case: (folder := clip_folder(top / case.replace(" ", "-"), shard_size=size), spoil(folder))
        for case, (spoil, size, _) in FAILURES.items()
    }
    return {case: (str(folder), word) for case, (folder, word) in made.items()}, str(clip_folder(top / "whole"))


@on_ranks(3, timeout_s=120)
def test_a_failure_is_the_same_named_error_on_every_rank(broken):
    cases, whole = broken
    for case, (folder, word) in cases.items():
        kind = FAILURES[case][2]
        start = time.monotonic()
        with pytest.raises(kind) as caught:
            safe_from_pretrained(CLIPVisionModel, folder, verify="off")
        seconds = time.monotonic() - start
        error = caught.value
        assert type(error) is kind, case
        assert word in str(error), case
        assert seconds < 10, case
        said = everywhere((type(error).__name__, error.message, error.rank, error.stage, error.to_fields()))
        assert said[0] == said[1] == said[2], case
        assert error.rank == 0, case
        assert error.stage, case
        total = torch.ones(1)
        dist.all_reduce(total)  # the same process group still works
        assert total.item() == 3
    tower = safe_from_pretrained(CLIPVisionModel, whole, verify="off")
    assert len(set(everywhere(str(sorted(digests_of(tower).items()))))) == 1


@on_ranks(2, timeout_s=60)
def test_saved_weights_of_another_dtype_are_cast_once_on_the_source(tmp_path):
    """A cast makes the same values on every rank, since only the source makes it."""
    if dist.get_rank() == 0:
        folder = clip_folder(tmp_path / "tower", dtype=torch.float64)
        assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.float64}
    dist.barrier()
    tower = safe_from_pretrained(CLIPVisionModel, str(tmp_path / "tower"), dtype="bfloat16", verify="off")
    assert {each.dtype for each in tower.parameters()} == {torch.bfloat16}
    assert len(set(everywhere(str(sorted(digests_of(tower).items()))))) == 1
