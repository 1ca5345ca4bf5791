"""upcast_trainable: in place, only what trains, all or nothing; plain, tied, sharded, wrapped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from safeload import rewrapping
from safeload.errors import PrecisionError
from safeload.precision import PrecisionWarning, check_precision
from safeload.upcasting import upcast_trainable
from tests.ranks import on_ranks


def _net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def _halves(frozen=()):
    model = _net().half()
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def test_only_what_trains_is_cast_in_place_and_the_names_come_back():
    model = _halves(frozen=[0])
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    assert upcast_trainable(model) == ["2.weight", "2.bias"]
    for name, parameter in model.named_parameters():
        same, pointer, values = before[name]
        assert parameter is same
        assert torch.equal(parameter, values.to(parameter.dtype))
        assert (parameter.data_ptr() == pointer) is name.startswith("0.")
        # read from the model itself, not from what the cast returned
        assert dict(model.named_parameters())[name].dtype is (torch.float16 if name.startswith("0.") else torch.float32)
    assert upcast_trainable(model) == []


def test_nothing_is_ever_cast_down_and_float64_is_a_choice():
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    assert upcast_trainable(model) == ["2.weight", "2.bias"]
    assert [layer.weight.dtype for layer in model] == [torch.float64, torch.float32, torch.float32]
    assert upcast_trainable(model, torch.float64) == ["1.weight", "1.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, "float32", None])
def test_a_dtype_that_is_not_for_master_weights_is_refused(dtype):
    model = _halves()
    with pytest.raises(PrecisionError, match="not a dtype for master weights"):
        upcast_trainable(model, dtype)
    assert model[0].weight.dtype is torch.float16


def test_gradients_and_hooks_and_attributes_stay_with_their_parameter():
    model = _halves()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    model[0].weight.marker = "mine"
    model(torch.ones(2, 7).half()).sum().backward()
    gradient = model[0].weight.grad.clone()
    upcast_trainable(model)
    assert model[0].weight.marker == "mine"
    assert model[0].weight.grad.dtype is torch.float32
    assert torch.equal(model[0].weight.grad, gradient.float())
    model(torch.ones(2, 7)).sum().backward()
    assert seen == [torch.float16, torch.float32]


def test_an_optimizer_built_before_trains_the_cast_weights():
    model = _halves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    upcast_trainable(model)
    assert check_precision(model, mixed_precision="fp16", optimizer=optimizer).findings == ()
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_ties_stay_ties_by_object_and_by_memory():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False), "view": nn.Linear(4, 4)})
    model.half()
    model["head"].weight = model["embed"].weight
    model["view"].weight = nn.Parameter(model["embed"].weight.data)  # another Parameter over the same memory
    assert upcast_trainable(model) == ["embed.weight", "view.weight", "view.bias"]
    assert model["head"].weight is model["embed"].weight
    assert model["view"].weight.data_ptr() == model["embed"].weight.data_ptr()


def test_meta_lazy_empty_and_scalar_parameters():
    with torch.device("meta"):
        model = nn.Linear(2, 2, dtype=torch.float16)
    assert upcast_trainable(model) == ["weight", "bias"]
    assert (model.weight.dtype, model.weight.device.type) == (torch.float32, "meta")
    assert upcast_trainable(nn.LazyLinear(2).half()) == []
    odd = nn.Module()
    odd.none, odd.one = nn.Parameter(torch.zeros(0).half()), nn.Parameter(torch.zeros(()).half())
    odd.none2 = nn.Parameter(torch.zeros(0).half())
    assert upcast_trainable(odd) == ["none", "one", "none2"]
    assert {p.dtype for p in odd.parameters()} == {torch.float32}
    assert odd.none.data is not odd.none2.data


def test_float8_that_requires_grad_is_refused_before_anything_changes():
    model = _halves()
    model.quantised = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    with pytest.raises(PrecisionError, match=r"nothing was changed: float8 and integer weights.*quantised") as raised:
        upcast_trainable(model)
    assert list(raised.value.parameters) == ["quantised"]
    assert model[0].weight.dtype is torch.float16
    model.quantised.requires_grad_(False)
    assert len(upcast_trainable(model)) == 4


def test_a_tensor_subclass_of_a_quantiser_is_refused():
    class Packed(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float16)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return cls(args[0].inner)
            raise NotImplementedError(str(function))

    model = nn.Module()
    model.weight = nn.Parameter(Packed(torch.zeros(2, dtype=torch.int8)))
    with pytest.raises(PrecisionError, match="tensor subclass whose insides safeload does not know"):
        upcast_trainable(model)


def test_a_compiled_model_is_cast_and_runs_on():
    model = _halves(frozen=[0])
    compiled = torch.compile(model, backend="eager")
    with torch.autocast("cpu", torch.float16):
        first = compiled(torch.ones(2, 7))
    assert upcast_trainable(compiled) == ["_orig_mod.2.weight", "_orig_mod.2.bias"]
    assert check_precision(compiled, mixed_precision="fp16").findings == ()
    with torch.autocast("cpu", torch.float16):
        assert torch.allclose(compiled(torch.ones(2, 7)), first)
    with torch.autocast("cpu", torch.float16):
        compiled(torch.ones(2, 7)).float().sum().backward()
    assert model[2].weight.grad.dtype is torch.float32


def test_a_copy_of_a_cast_model_is_cast():
    model = _halves()
    upcast_trainable(model)
    assert copy.deepcopy(model)[0].weight.dtype is torch.float32


# --- wrapped, in two ranks ---


def _train(model, optimizer, steps=3, seed=None):
    losses = []
    for _ in range(steps):
        torch.manual_seed(seed or 0)
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 7)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    return losses


def _averaged(parameter):
    """Whether both ranks hold the same gradient, made from different batches."""
    everyone = [torch.empty_like(parameter.grad) for _ in range(2)]
    torch.distributed.all_gather(everyone, parameter.grad.contiguous())
    return torch.equal(*everyone)


def _backward(ddp):
    torch.manual_seed(torch.distributed.get_rank())
    with torch.autocast("cpu", torch.float16):
        ddp(torch.randn(4, 7)).float().square().mean().backward()


@on_ranks(2)
def test_ddp_gets_new_buckets_given_the_wrapper_or_only_the_inner_module():
    for static_graph in (False, True):
        for inner in (False, True):
            model = _halves(frozen=[0])
            ddp = nn.parallel.DistributedDataParallel(model, static_graph=static_graph)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            _backward(ddp)
            optimizer.zero_grad()
            upcast_trainable(model if inner else ddp)
            for _ in range(3):
                _backward(ddp)
                assert model[2].weight.grad.dtype is torch.float32
                assert _averaged(model[2].weight), (static_graph, inner)
                optimizer.step()
                optimizer.zero_grad()
            assert ddp._get_ddp_logging_data()["dtypes"] == "float"
            _train(ddp, optimizer)


@on_ranks(2)
def test_without_new_buckets_ddp_no_longer_averages_which_is_why_they_are_made():
    model = _halves(frozen=[0])
    ddp = nn.parallel.DistributedDataParallel(model)
    _backward(ddp)
    for parameter in model[2].parameters():
        parameter.grad = None
        parameter.data = parameter.data.float()
    _backward(ddp)
    assert not _averaged(model[2].weight)


@on_ranks(2)
def test_ddp_with_a_communication_hook_says_why_not():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = _halves()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(PrecisionError, match="communication hook"):
        upcast_trainable(ddp)
    assert model[0].weight.dtype is torch.float16


def _fsdp1(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy, **options)


def _grown(losses, reference):
    return all(abs(a - b) < 1e-3 for a, b in zip(losses, reference, strict=True))


def _reference_losses():
    """One process, float32 weights from the same halves, the same batches."""
    model = _halves().float()
    return _train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_fsdp1_shards_are_cast_before_and_after_the_first_forward():
    reference = _reference_losses()
    for use_orig_params in (True, False):
        for late in (False, True):
            model = _fsdp1(_halves(), use_orig_params=use_orig_params)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            same = list(model.parameters())
            if late:
                with torch.autocast("cpu", torch.float16), torch.no_grad():
                    model(torch.randn(4, 7))
                with torch.autocast("cpu", torch.float16):
                    model(torch.randn(4, 7)).float().sum().backward()
                with pytest.raises(PrecisionError, match="holds gradients"):
                    upcast_trainable(model)
                optimizer.zero_grad()
            assert len(upcast_trainable(model)) == len(same)
            assert all(a is b for a, b in zip(model.parameters(), same, strict=True))
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert check_precision(model, mixed_precision="fp16", optimizer=optimizer).findings == ()
            losses = _train(model, optimizer)
            assert _grown(losses, reference), (use_orig_params, late, losses, reference)


@on_ranks(2)
def test_wraps_of_fsdp1_that_are_there_are_of_one_dtype_each_whatever_was_planned():
    model = nn.Sequential(nn.Linear(7, 5).half().requires_grad_(False), nn.Linear(5, 3))
    with pytest.raises(PrecisionError, match="mixed-dtypes-in-fsdp1-wrap"):
        check_precision(model, fsdp_wrap=[])
    assert check_precision(_fsdp1(model, use_orig_params=True), fsdp_wrap=[]).findings == ()


@on_ranks(2)
def test_fsdp1_with_frozen_weights_in_the_same_flat_tensor_says_why_not():
    inner = _halves()
    inner[0].bias.requires_grad_(False)
    model = _fsdp1(inner, use_orig_params=True)
    with pytest.raises(PrecisionError, match="frozen and trainable parameters in one flat tensor"):
        upcast_trainable(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@on_ranks(2)
def test_fsdp2_shards_are_cast_before_and_after_the_first_forward_and_frozen_ones_are_not():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reference = _reference_losses()
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float16)):
        for frozen in ([], [0]):
            for late in (False, True):
                model = _halves(frozen=frozen)
                for layer in (model[2], model):  # the root's wrap holds the first layer
                    fully_shard(layer, mp_policy=policy)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                same = list(model.parameters())
                if late:
                    model(torch.randn(4, 7).half()).float().sum().backward()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        model(torch.randn(4, 7).half())  # leaves the root gathered
                assert upcast_trainable(model) == [n for n, p in model.named_parameters() if p.requires_grad]
                assert all(a is b for a, b in zip(model.parameters(), same, strict=True))
                expected = [torch.float32 if p.requires_grad else torch.float16 for p in same]
                assert [p.dtype for p in model.parameters()] == expected
                assert [p.to_local().dtype for p in model.parameters()] == expected
                assert check_precision(model, mixed_precision="fp16", optimizer=optimizer).findings == ()
                losses = _train(model, optimizer)
                assert frozen or _grown(losses, reference), (policy, late, losses, reference)
                assert [p.dtype for p in model.parameters()] == expected
                assert model.state_dict()["2.weight"].dtype is torch.float32


@on_ranks(2)
def test_mixed_dtypes_in_an_fsdp2_wrap_are_found_before_torch_does():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7).half(), nn.Linear(7, 7).half())
    for module in (model[0], model[1], model):
        fully_shard(module)
    with pytest.warns(PrecisionWarning, match="half-master-weights"):
        assert check_precision(model, "no").errors == ()  # each wrap is of one dtype
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7).half())
    fully_shard(model)
    with pytest.raises(PrecisionError, match="mixed-dtypes-in-fsdp2-wrap"):
        check_precision(model, "no")
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(torch.randn(2, 7))
    upcast_trainable(model)
    check_precision(model, "no")
    model(torch.randn(2, 7))


@on_ranks(2)
def test_after_a_forward_without_backward_the_shards_are_judged_not_the_gathered_copies():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = fully_shard(_net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.randn(4, 7))
    assert check_precision(model, mixed_precision="fp16").findings == ()


def test_torch_still_has_the_private_names_this_hangs_on():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.nn.parallel import DistributedDataParallel

    for owner, names in (
        (
            DistributedDataParallel,
            ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper"),
        ),
        (DistributedDataParallel, ("_set_static_graph",)),
        (FlatParamHandle, ("_use_sharded_views", "init_flat_param_attributes")),
        (FSDPModule, ("_get_fsdp_state", "reshard")),
        (FSDPParamGroup, ("_init_mp_dtypes",)),
        (FSDPParam, ("reset_sharded_param",)),
    ):
        assert [name for name in names if not hasattr(owner, name)] == []


def test_where_torch_has_moved_its_names_it_says_why_not_and_changes_nothing():
    class Moved:
        pass

    with pytest.raises(
        PrecisionError, match=r"has no Moved\._comm_hooks.*nothing was changed|nothing was changed.*has no Moved"
    ):
        rewrapping._require(Moved(), ("_comm_hooks",))
