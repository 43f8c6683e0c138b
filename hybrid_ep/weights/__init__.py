"""Experts' weights travel in place of tokens: every rank pulls what it lacks of a layer while the layer before runs.

    ExpertStore       registered memory: each rank's own experts of all layers, where the others read them; gradients
    WeightPrefetcher  two buffers that a copying thread fills, a layer ahead of the one that computes

`docs/weights.md` says when it pays, and who waits for whom."""

from hybrid_ep.weights.copying import Statistics
from hybrid_ep.weights.layout import WeightLayout
from hybrid_ep.weights.prefetch import Fetched, WeightPrefetcher
from hybrid_ep.weights.store import ExpertStore

__all__ = ["ExpertStore", "Fetched", "Statistics", "WeightLayout", "WeightPrefetcher"]
