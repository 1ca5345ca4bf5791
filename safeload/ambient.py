"""Leave the contexts that a caller's stack has put around our constructor, and come back to them.

A tower is built inside an outer model's `__init__`, and that often runs inside contexts meant for the outer model
alone: a meta device, a default dtype, skipped or emptied initialisers, patched `register_parameter`, the FSDP
environment, DeepSpeed's `zero.Init`. `clean_contexts` steps out of all of them for the time of one build and restores
every one on the way out, also when the build fails.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.init
from torch.overrides import TorchFunctionMode

__all__ = ["clean_contexts", "plain_tensors", "pristine", "unfilled_meta"]

# With both set, transformers and accelerate take every rank but the first for one that need not be filled.
_FSDP_ENVIRONMENT: Final = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
_PATCHED_METHODS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "torch.nn.modules.module": {"Module": ("register_parameter", "register_buffer", "__init__")},
    "transformers.modeling_utils": {"PreTrainedModel": ("init_weights", "tie_weights")},
}
_originals: Final[dict[tuple[str, str], Callable[..., Any]]] = {}  # those that were met, by module and qualified name
_one_at_a_time: Final = threading.RLock()  # what is stepped out of belongs to the process, not to a thread


def pristine(current: Callable[..., Any], *, module: str, qualname: str) -> Callable[..., Any]:
    """Return the function that was defined as `module.qualname`, whatever it has been patched with since.

    Context managers such as accelerate's `init_empty_weights` or transformers' `no_tie_weights` replace a function and
    keep the original where it cannot be asked for, so that one that was never met as it was is looked up among the live
    functions: among the old ones alone, since a tuple that another thread is just building must not be referred to.

    Args:
        current: What the name is bound to now. Returned as it is when it is the original.
        module: The `__module__` of the original.
        qualname: The `__qualname__` of the original.

    Returns:
        The original; `current` where no live function answers to the name.
    """

    def is_original(candidate: Any) -> bool:
        return getattr(candidate, "__module__", None) == module and getattr(candidate, "__qualname__", None) == qualname

    if is_original(current):
        return _originals.setdefault((module, qualname), current)
    if (module, qualname) not in _originals:
        old = (found for number in (2, 1) for found in gc.get_objects(generation=number))
        live = (found for found in old if type(found) is types.FunctionType and is_original(found))
        _originals[module, qualname] = next(live, current)
    return _originals[module, qualname]


def _candidates() -> Iterator[tuple[Any, str, str]]:
    """Yield (owner, name, qualified name) of each function that an ambient context may have replaced."""
    for module_name, owners in _PATCHED_METHODS.items():
        module = sys.modules.get(module_name)
        for owner_name, names in owners.items():
            owner = getattr(module, owner_name, None)
            yield from ((owner, name, f"{owner_name}.{name}") for name in names if owner is not None)
    yield from ((torch.nn.init, name, name) for name in _initialisers())


def _initialisers() -> Iterator[str]:
    for name, current in vars(torch.nn.init).items():
        if isinstance(current, types.FunctionType) and name.endswith("_") and not name.startswith("_"):
            yield name


def _patched_functions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield (owner, name, original) of each function that is replaced just now."""
    for owner, name, qualname in _candidates():
        home = getattr(owner, "__module__", torch.nn.init.__name__)
        original = pristine(vars(owner)[name], module=home, qualname=qualname)
        if original is not vars(owner)[name]:
            yield owner, name, original


@contextlib.contextmanager
def _original_functions() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, original in list(_patched_functions()):
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, original)
        yield


@contextlib.contextmanager
def _plain_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _FSDP_ENVIRONMENT}
    os.environ.update({name: "false" for name, value in before.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _outside_zero_init() -> Iterator[None]:
    """Leave DeepSpeed's `zero.Init`, and hide its configuration from transformers, which would enter it again."""
    with contextlib.ExitStack() as stack:
        partitioning: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
        if partitioning is not None and getattr(partitioning, "zero_init_context", None):
            partitioning.shutdown_init_context()
            stack.callback(partitioning.restore_init_context)
        bridge: Any = sys.modules.get("transformers.integrations.deepspeed")
        if bridge is not None and bridge.is_deepspeed_zero3_enabled():
            config = bridge._hf_deepspeed_config_weak_ref()
            bridge.unset_hf_deepspeed_config()
            stack.callback(bridge.set_hf_deepspeed_config, config)
        yield


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Leave the random number generators as they were.

    Only the source runs `from_pretrained`, the others only a constructor: without this, what the script draws next
    (the projector's initial weights, say) would differ between the ranks.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=devices, device_type=accelerator.type if accelerator else "cuda"):
        yield


@contextlib.contextmanager
def clean_contexts(*, device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Build inside this: no context that surrounds the caller reaches the constructor.

    Stepped out of: `torch.device(...)` contexts and the default device, `torch.set_default_dtype`, inference mode,
    autocast, transformers' initialisation contexts, accelerate's `init_empty_weights`, DeepSpeed's `zero.Init`, and the
    environment `ACCELERATE_USE_FSDP` with `FSDP_CPU_RAM_EFFICIENT_LOADING`. The random state is left as it was. One
    thread at a time: most of these belong to the whole process.

    Args:
        device: The device that tensors are made on inside.
        dtype: The default dtype inside.

    Ranks: local.
    """
    with (
        _one_at_a_time,
        _same_random_state(),
        _plain_environment(),
        _outside_zero_init(),
        _original_functions(),
        torch.autocast("cpu", enabled=False),
        _default_dtype(dtype),
        plain_tensors(device),
    ):
        yield


@contextlib.contextmanager
def plain_tensors(device: torch.device) -> Iterator[None]:
    """Make ordinary tensors on `device` inside, whatever device context or inference mode surrounds the caller.

    Args:
        device: The device that tensors are made on.

    Ranks: local.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        if torch.get_default_device() != device:  # a device context is a call of Python around every operation
            stack.enter_context(torch.device(device))
        yield


# Functions of torch.nn.init that take a tensor of every shape, and those that refuse one of less than two dimensions.
_FILLS: Final = frozenset({"uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_"})
_FANS: Final = frozenset({"kaiming_uniform_", "kaiming_normal_"})
_KNOWN: Final[Mapping[str, frozenset[str]]] = {  # values that the latter never refuse
    "mode": frozenset({"fan_in", "fan_out"}),
    "nonlinearity": frozenset({"leaky_relu", "relu", "linear"}),
}


class _UnfilledMeta(TorchFunctionMode):
    """Leaves a tensor on meta as it is where a function of `torch.nn.init` would fill it, and would not refuse to."""

    def __init__(self) -> None:
        super().__init__()
        self._fills, self._fans = (frozenset(vars(torch.nn.init)[name] for name in names) for names in (_FILLS, _FANS))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in self._fills or (func in self._fans and _is_never_refused(args, given)):
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)


def _is_never_refused(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether a call of one of `_FANS` takes a matrix, at least, and says no more than those are sure to know."""
    tensor = args[0] if args else given.get("tensor")
    is_matrix = isinstance(tensor, torch.Tensor) and tensor.dim() > 1
    return len(args) <= 1 and is_matrix and all(given.get(name) in {None, *known} for name, known in _KNOWN.items())


def unfilled_meta() -> contextlib.AbstractContextManager[object]:
    """Construct a module on meta inside this, within `clean_contexts`: what has no values is not given random ones.

    Filling it has no effect, and torch does it in Python, tensor by tensor. Tensors elsewhere are filled as ever, and a
    tensor that an initialiser refuses for its shape is refused here too.

    Ranks: local.
    """
    return _UnfilledMeta()
