"""The table of the rules, cell by cell: dtype of the weight, frozen or not, mixed precision."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

from safeload.errors import PrecisionError
from safeload.precision import PrecisionWarning, check_precision
from safeload.ruling import TrainingMode, judge, read_mode

OK, WARN, ERROR = None, "half-master-weights", "fp16-under-scaler"
ODD = "untrainable-dtype"

# what a trainable weight of each dtype breaks, by mixed precision; a frozen weight breaks nothing anywhere
TABLE = {
    #                      fp16    bf16   no
    torch.float64:       (OK,     OK,    OK),
    torch.float32:       (OK,     OK,    OK),
    torch.float16:       (ERROR,  WARN,  WARN),
    torch.bfloat16:      (WARN,   WARN,  WARN),
    torch.float8_e4m3fn: (ODD,    ODD,   ODD),
    torch.float8_e5m2:   (ODD,    ODD,   ODD),
    torch.int8:          (ODD,    ODD,   ODD),
    torch.uint8:         (ODD,    ODD,   ODD),
    torch.complex64:     (OK,     OK,    OK),
}  # fmt: skip
CELLS = [
    (dtype, trainable, mixed, TABLE[dtype][column] if trainable else OK)
    for dtype, trainable, (column, mixed) in itertools.product(TABLE, (True, False), enumerate(("fp16", "bf16", "no")))
]


class Quantised(nn.Parameter):
    """An integer weight that says it requires grad: torch makes none itself, a quantiser's subclass may."""

    requires_grad = property(lambda self: True)


class Holder(nn.Module):
    """One weight of any dtype."""

    def __init__(self, dtype, trainable):
        super().__init__()
        data = torch.zeros(4, dtype=torch.float32).to(dtype)
        integer = not (dtype.is_floating_point or dtype.is_complex)
        self.weight = Quantised(data, False) if integer and trainable else nn.Parameter(data, trainable)


@pytest.mark.parametrize(("dtype", "trainable", "mixed", "rule"), CELLS, ids=str)
def test_every_cell_of_the_table(dtype, trainable, mixed, rule):
    model = Holder(dtype, trainable)
    assert model.weight.requires_grad is trainable
    assert model.weight.dtype is dtype
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rule in (ERROR, ODD):
            with pytest.raises(PrecisionError) as raised:
                check_precision(model, mixed_precision=mixed)
            name = str(dtype).removeprefix("torch.")
            assert raised.value.parameters == {"weight": f"{rule}: {name}"}
            assert name in str(raised.value)
            assert raised.value.fix in str(raised.value)
            return
        report = check_precision(model, mixed_precision=mixed)
    assert [finding.rule for finding in report.findings] == ([rule] if rule else [])
    assert [warning.category for warning in caught] == ([PrecisionWarning] if rule else [])
    assert not report.errors


@pytest.mark.parametrize(
    ("dtype", "mixed"), [(t, m) for t in (torch.float16, torch.bfloat16) for m in ("fp16", "bf16")]
)
def test_what_the_table_says_is_what_torch_does(dtype, mixed):
    """The cells of half-precision weights, run: the scaler refuses float16 alone, and half weights lose small steps."""
    torch.manual_seed(0)
    head = nn.Linear(8, 1).to(dtype)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=mixed == "fp16")
    with torch.autocast("cpu", torch.float16 if mixed == "fp16" else torch.bfloat16):
        loss = head(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    if judge(dtype, trainable=True, mode=read_mode(mixed, scaler)).severity == "error":
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)


def test_a_scaler_that_is_off_or_sharded_lets_float16_pass_with_a_warning():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for scaler in (torch.amp.GradScaler("cpu", enabled=False), False, ShardedGradScaler("cpu")):
        mode = read_mode("fp16", scaler)
        assert judge(torch.float16, trainable=True, mode=mode).id == WARN
    assert read_mode("fp16", ShardedGradScaler("cpu")).scaler == "sharded"


def test_a_scaler_without_mixed_precision_refuses_float16_too():
    mode = read_mode("no", torch.amp.GradScaler("cpu"))
    assert judge(torch.float16, trainable=True, mode=mode).id == ERROR
    assert read_mode("bf16", True).scaler == "plain"


def test_an_engine_that_keeps_its_own_master_weights_may_train_half_ones():
    mode = TrainingMode(mixed_precision="fp16", scaler="none", engine_masters=True)
    assert judge(torch.float16, trainable=True, mode=mode) is None
    assert judge(torch.bfloat16, trainable=True, mode=mode) is None
    assert judge(torch.int8, trainable=True, mode=mode).id == ODD

    class DeepSpeedEngine(nn.Module):
        """Stands in by its name, which is all that is looked at."""

    assert read_mode("fp16", None, model=DeepSpeedEngine()) == mode

    class Accelerator:
        mixed_precision = "fp16"
        scaler = None
        distributed_type = "DistributedType.DEEPSPEED"

    assert read_mode(Accelerator(), None) == mode


@pytest.mark.parametrize(
    ("said", "read"),
    [("fp16", "fp16"), ("16-mixed", "fp16"), (torch.float16, "fp16"), ("bf16", "bf16"), (torch.bfloat16, "bf16"),
     ("bf16-mixed", "bf16"), ("no", "no"), (None, "no"), (torch.float32, "no"), ("FP16", "fp16"), ("bf16-true", "no"),
     ("fp8", "fp8")],
)  # fmt: skip
def test_how_mixed_precision_may_be_said(said, read):
    assert read_mode(said, None).mixed_precision == read


@pytest.mark.parametrize("said", ["fp17", torch.int8, 3, object(), "", True])
def test_a_bad_mixed_precision_is_a_typed_error_that_says_what_is_good(said):
    with pytest.raises(PrecisionError, match="is not a mixed precision") as raised:
        check_precision(nn.Linear(2, 2), mixed_precision=said)
    assert raised.value.parameters == {}


def test_training_arguments_and_accelerators_are_read():
    from accelerate import Accelerator

    class Arguments:  # transformers 4: no mixed_precision of its own
        fp16, bf16 = False, True

    assert read_mode(Arguments(), None).mixed_precision == "bf16"
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert read_mode(accelerator, None) == TrainingMode(mixed_precision="bf16", scaler="none")
