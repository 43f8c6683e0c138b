"""What Megatron-Core needs of CUDA to run on a CPU with gloo: eight small pieces, for recipes and tests.

`install()` before the first Megatron import of the process, and never where a GPU is: it refuses there,
because a model that silently trains on the CPU of a GPU machine is worse than an error. No file of Megatron
is edited; each piece says what breaks without it. Which pieces a run needs (megatron-core 0.19): allgather
1 2, alltoall 1-4, flex 1 2 5, Megatron's optimizers also 5 6, megatron-core 0.16 also 7, its main branch 8 for MTP.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

_installed = False
_T = TypeVar("_T")


def install() -> None:
    """Install all pieces; idempotent. Raises RuntimeError when torch sees a CUDA device."""
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError(
            "megatron_patches.cpu.install() is for machines without a GPU, and torch sees "
            f"{torch.cuda.device_count()}: remove the call, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    if _installed:
        return
    _installed = True
    generator = torch.Generator()
    _random_state(generator)
    _current_device()
    _streams()
    _device_arguments()
    _type_names()
    _inside_megatron(generator)


def _random_state(generator: torch.Generator) -> None:
    """1. Megatron forks the CUDA generator for dropout and initialisation. A second CPU generator stands
    in, so that forking leaves torch's own alone. Without it calls queue up for a CUDA that never comes."""
    cuda = torch.cuda
    replacements = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "manual_seed": lambda seed: void(generator.manual_seed(int(seed))),
        "manual_seed_all": lambda seed: void(generator.manual_seed(int(seed))),
    }
    _replace(cuda, **replacements)
    _replace(cuda.random, **replacements)


def void(_value: object) -> None:
    """Drop a value where CUDA's function returns None."""


def _replace(owner: object, **attributes: object) -> None:
    """Put other values in the place of a module's or class's own, of whatever type those are."""
    for name, value in attributes.items():
        setattr(owner, name, value)


def _current_device() -> None:
    """2. Scratch buffers and DDP's gradient buffers are allocated on torch.cuda.current_device()."""
    _replace(torch.cuda, current_device=lambda: torch.device("cpu"), set_device=void)


class _Event:
    """A CUDA event of a machine where everything is already done."""

    def __init__(self, *_args: object, **_keywords: object) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        pass

    def wait(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: _Event) -> float:
        return 0.0


class _Stream:
    """A CUDA stream of a machine with one: every order is the program's order."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_args: object, **_keywords: object) -> None:
        pass

    def wait_stream(self, _other: _Stream) -> None:
        pass

    def wait_event(self, _event: _Event) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _StreamContext:
    """`with torch.cuda.stream(...)`, doing nothing."""

    def __init__(self, _stream: _Stream | None = None) -> None:
        pass

    def __enter__(self) -> _StreamContext:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


def _streams() -> None:
    """3. The alltoall dispatcher, shared-expert overlap and the 1F1B schedule create streams and events; the router
    tracer asks whether a graph is being captured."""
    stream = _Stream()

    def the_stream(device: object = None) -> _Stream:
        return stream

    def nothing(*_: object, **__: object) -> None:
        pass

    _replace(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        stream=_StreamContext,
        current_stream=the_stream,
        default_stream=the_stream,
        synchronize=nothing,
        is_current_stream_capturing=lambda: False,
    )
    _replace(torch.Tensor, record_stream=nothing)


def _as_cpu(device: _T) -> _T | torch.device:
    is_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return torch.device("cpu") if is_cuda else device


def _device_arguments() -> None:
    """5. The flex dispatcher and the optimizers say device="cuda", others `.cuda()`."""

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if "device" in keywords:
                keywords["device"] = _as_cpu(keywords["device"])
            return function(*args, **keywords)

        return call

    for name in (
        "tensor",
        "as_tensor",
        "arange",
        "empty",
        "empty_like",
        "full",
        "full_like",
        "ones",
        "ones_like",
        "rand",
        "randn",
        "zeros",
        "zeros_like",
    ):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    move: Callable[..., torch.Tensor] = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        if "device" in keywords:
            keywords["device"] = _as_cpu(keywords["device"])
        return move(tensor, *map(_as_cpu, args), **keywords)

    def where_it_is(it: _T, *_: object, **__: object) -> _T:
        return it

    _replace(torch.Tensor, to=to, cuda=where_it_is)
    _replace(torch.nn.Module, cuda=where_it_is)


def _type_names() -> None:
    """6. Gradient clipping and the distributed optimizer want `tensor.type()` to be torch.cuda.FloatTensor."""
    type_of: Callable[..., Any] = torch.Tensor.type

    def named(
        tensor: torch.Tensor, dtype: torch.dtype | str | None = None, *args: Any, **keywords: Any
    ) -> torch.Tensor | str:
        if dtype is not None:
            return type_of(tensor, dtype, *args, **keywords)
        return type_of(tensor).replace("torch.", "torch.cuda.", 1)

    _replace(torch.Tensor, type=named)


def _inside_megatron(generator: torch.Generator) -> None:
    """4. alltoall hands c10d split sizes that are lists only when they were CUDA tensors: convert CPU ones
    too. 7. The router of 0.16 names a Transformer Engine function it has not imported. 8: see `_name_classes`. And the
    rest of 1."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    tokens = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    _replace(random, _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: generator.set_state(state))
    convert: Callable[..., torch.Tensor | np.ndarray] = tokens.maybe_move_tensor_to_cpu

    @functools.wraps(convert)
    def maybe_move_tensor_to_cpu(
        tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False
    ) -> torch.Tensor | np.ndarray:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return convert(tensor, as_numpy, record_stream)

    _replace(tokens, maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)
    if not hasattr(utils, "te_general_gemm"):
        _replace(utils, te_general_gemm=None)
    _name_classes(importlib.import_module("megatron.core.tensor_parallel.inference_layers"))


def _name_classes(layers: ModuleType) -> None:
    """8. The main branch (0.20) asks of MTP's linear whether it is one of two layers for inference. Without Transformer
    Engine their names hold stand-ins, of which isinstance() raises: classes that nothing is take their place."""
    if hasattr(layers, "is_inference_column_parallel_linear"):
        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(getattr(layers, name, None), type):
                _replace(layers, **{name: type(name, (), {})})
