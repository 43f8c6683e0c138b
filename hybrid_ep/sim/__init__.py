"""Simulated worlds: the real kernels of all ranks in one process, explored by seed or run on a virtual clock.

Beside them what a cluster that is not at hand would do: clusters with sourced numbers, a queueing model of dispatch and
combine, the published rows it is checked against, and what follows from it (steps, advice, peers).

    from hybrid_ep.sim import clusters, model, shape
    model.predict("dispatch", shape.Shape(64, 8, 4096, 7168, 8, 256), clusters.get("h100_8x400g"), num_sms=8)

`world` needs the compiled core; everything else is Python and numpy.
"""
