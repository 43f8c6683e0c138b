"""What layers keep by its place for the backward, and what hooks around them are asked to keep."""

import functools
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_patches.saved_places import SavedPlaces

pytestmark = pytest.mark.version_free


class Layer:
    """tanh(x) @ w, where w lies in memory that others use behind the forward and that is filled again for the
    backward, as spare slots are."""

    def __init__(self, seed):
        self.weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.slots, self.kept = torch.zeros(4, 4), None

    def __call__(self, x):
        self.slots.data.copy_(self.weight)
        with SavedPlaces(self.place_of, self.at):
            rows = torch.tanh(x)
            self.kept = weakref.ref(rows)
            out = rows @ self.slots.detach().requires_grad_()
        self.slots.data.fill_(float("nan"))
        return out

    def place_of(self, tensor):
        inside = tensor.untyped_storage().data_ptr() == self.slots.untyped_storage().data_ptr()
        return (tensor.size(), tensor.stride()) if inside else None

    def at(self, place):
        self.slots.data.copy_(self.weight)
        return torch.as_strided(self.slots.data, *place)


def gradient(run):
    layers, x = [Layer(0), Layer(1)], torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    out = run(layers, x)
    kept = [layer.kept() is not None for layer in layers]
    out.square().sum().backward()
    return x.grad, kept


def plainly(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def test_a_checkpoint_outside_keeps_nothing_of_what_is_inside():
    want, kept = gradient(plainly)
    assert kept == [True, True]
    one = gradient(lambda layers, x: checkpoint(plainly, layers, x, use_reentrant=False))
    again = functools.partial(checkpoint, use_reentrant=False)
    each = gradient(lambda layers, x: again(layers[1], again(layers[0], x)))
    for found, kept in (one, each):
        assert torch.equal(found, want) and kept == [False, False]


def test_hooks_outside_are_asked_for_all_that_lies_elsewhere():
    want, _ = gradient(plainly)
    packed, unpacked = [], []

    def under_hooks(layers, x):
        pack = lambda tensor: packed.append(tensor.shape) or tensor.clone()  # noqa: E731
        unpack = lambda tensor: unpacked.append(tensor.shape) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return plainly(layers, x)

    found, _ = gradient(under_hooks)
    assert torch.equal(found, want)
    # Of each layer what tanh made, for tanh and as the product's rows; the product's weight is a place.
    assert len(packed) == len(unpacked) == 4 and set(packed) == {torch.Size((3, 4))}
