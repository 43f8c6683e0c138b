"""The order of layers, learned: every step is known but for the first, an evaluation as soon as it repeats itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from travelling import SHAPES, check_layer, own_weights

from hybrid_ep.testing import VirtualWorld
from hybrid_ep.weights import ExpertStore, WeightLayout, WeightPrefetcher
from hybrid_ep.weights.order import REMEMBERED, Order

CHUNKS = ((0, 1), (2, 3))  # of two virtual stages, on the first of two ranks


def interleaved(num_micro, rank=0):
    """(layer, in the backward) of a step of 1F1B with the two chunks, two micro-batches of a chunk at a time, as in
    Megatron's schedule."""
    turns = [chunk for _ in range(num_micro // 2) for chunk in (0, 0, 1, 1)]
    forwards = [[(layer, False) for layer in CHUNKS[chunk]] for chunk in turns]
    backwards = [[(layer, True) for layer in reversed(CHUNKS[1 - chunk])] for chunk in turns]
    warm = min(len(forwards), 2 * (1 - rank) + 2)
    step = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        step += [forward, backward]
    return [use for part in step + backwards[len(forwards) - warm :] for use in part]


def known(order, layers):
    """How many of the layers were said before they were used."""
    right = 0
    for layer in layers:
        right += list(order.following(1)) == [layer]
        order.used(layer)
    return right


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(2, 4))
def test_a_step_like_the_one_before_is_known_whole(layers, steps):
    order = Order()
    known(order, layers)
    for _ in range(steps):
        order.new_step()
        assert list(order.following(len(layers))) == layers
        assert known(order, layers) == len(layers)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.booleans())
def test_any_order_is_taken(first, second, at_once):
    order = Order()
    for layers in (first, second, first):
        known(order, layers)
        if not at_once:
            order.new_step()
            order.new_step()  # weights that nothing used
    if first and second and not at_once:
        assert list(order.following(len(first))) == first


def test_an_evaluation_and_a_longer_step_are_known_from_their_second_round():
    order, train, evaluation = Order(), [layer for layer, _ in interleaved(4)], [0, 1, 0, 1, 2, 3, 2, 3]
    known(order, train)
    assert known(order, evaluation * 10) >= 9 * len(evaluation) - 8
    order.new_step()
    assert known(order, train) == len(train), "what came behind it last time does no harm"
    order.new_step()
    assert known(order, train) == len(train)
    assert known(order, train * 3) >= 3 * len(train) - 16, "more micro-batches than in the step before"


def test_a_step_without_an_end_is_not_kept_whole():
    order = Order()
    assert known(order, [0, 1, 2, 3, 4] * REMEMBERED) > 5 * REMEMBERED - 20
    assert len(order._past) <= 2 * REMEMBERED
    order.new_step()
    assert known(order, [0, 1, 2, 3, 4] * 4) >= 16


@pytest.mark.parametrize("num_micro", [4, 8])
def test_virtual_stages_miss_no_layer_once_a_step_was_seen(num_micro):
    layout = WeightLayout(4, 2, 4, SHAPES, torch.float32, 2)
    steps = 3

    def run(rank, group):
        prefetcher = WeightPrefetcher(ExpertStore(group, layout, timeout_s=30))
        missed = []
        for version in range(steps):
            prefetcher.publish(own_weights(layout, rank, version))
            before = prefetcher.statistics.missed
            for layer, backward in interleaved(num_micro):
                check_layer(prefetcher, layer, version)
                prefetcher.release(layer, backward=backward)
            missed.append(prefetcher.statistics.missed - before)
        prefetcher.close()
        return missed

    for first, *others in VirtualWorld(1, 2).run(run):
        assert first > 0, "to and fro is no pipeline's order: the test would show nothing"
        assert others == [0] * (steps - 1)
