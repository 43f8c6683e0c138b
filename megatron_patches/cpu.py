"""What Megatron-Core needs of CUDA to run on a CPU with gloo: seven small pieces, for recipes and tests.

`install()` before the first Megatron import of the process, and never where a GPU is: it refuses there,
because a model that silently trains on the CPU of a GPU machine is worse than an error. No file of Megatron
is edited; each piece says what breaks without it. Which pieces a run needs (megatron-core 0.19): allgather
1 2, alltoall 1-4, flex 1 2 5, Megatron's optimizers also 5 6, megatron-core 0.16 also 7.
"""

import functools
import importlib

import torch

_installed = False


def install():
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


def _random_state(generator):
    """1. Megatron forks the CUDA generator for dropout and initialisation. A second CPU generator stands
    in, so that forking leaves torch's own alone. Without it calls queue up for a CUDA that never comes."""
    cuda = torch.cuda
    replacements = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "manual_seed": lambda seed: void(generator.manual_seed(int(seed))),
        "manual_seed_all": lambda seed: void(generator.manual_seed(int(seed))),
    }
    for name, function in replacements.items():
        setattr(cuda, name, function)
        setattr(cuda.random, name, function)


def void(_value):
    """Drop a value where CUDA's function returns None."""


def _current_device():
    """2. Scratch buffers and DDP's gradient buffers are allocated on torch.cuda.current_device()."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = void


class _Event:
    """A CUDA event of a machine where everything is already done."""

    def __init__(self, *_args, **_keywords):
        pass

    def record(self, _stream=None):
        pass

    def wait(self, _stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, _other):
        return 0.0


class _Stream:
    """A CUDA stream of a machine with one: every order is the program's order."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_args, **_keywords):
        pass

    def wait_stream(self, _other):
        pass

    def wait_event(self, _event):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass

    def query(self):
        return True


class _StreamContext:
    """`with torch.cuda.stream(...)`, doing nothing."""

    def __init__(self, _stream=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        return False


def _streams():
    """3. The alltoall dispatcher, shared-expert overlap and the 1F1B schedule create streams and events."""
    stream = _Stream()
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = _Stream, _Event, _StreamContext
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.record_stream = lambda tensor, _stream: None


def _as_cpu(device):
    is_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return torch.device("cpu") if is_cuda else device


def _device_arguments():
    """5. The flex dispatcher and the optimizers say device="cuda", others `.cuda()`."""

    def on_cpu(function):
        @functools.wraps(function)
        def call(*args, **keywords):
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
    move = torch.Tensor.to

    def to(tensor, *args, **keywords):
        if "device" in keywords:
            keywords["device"] = _as_cpu(keywords["device"])
        return move(tensor, *map(_as_cpu, args), **keywords)

    torch.Tensor.to = to
    torch.Tensor.cuda = lambda tensor, *args, **keywords: tensor
    torch.nn.Module.cuda = lambda module, *args, **keywords: module


def _type_names():
    """6. Gradient clipping and the distributed optimizer want `tensor.type()` to be torch.cuda.FloatTensor."""
    type_of = torch.Tensor.type

    def named(tensor, dtype=None, *args, **keywords):
        if dtype is not None:
            return type_of(tensor, dtype, *args, **keywords)
        return type_of(tensor).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named


def _inside_megatron(generator):
    """4. alltoall hands c10d split sizes that are lists only when they were CUDA tensors: convert CPU ones
    too. 7. The router of 0.16 names a Transformer Engine function it has not imported. And the rest of 1."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    tokens = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: generator.set_state(state)
    convert = tokens.maybe_move_tensor_to_cpu

    @functools.wraps(convert)
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return convert(tensor, as_numpy, record_stream)

    tokens.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
