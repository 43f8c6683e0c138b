"""What a cluster that is not at hand would do: a queueing model of dispatch and combine, an event engine over the real
kernels, the published rows both are checked against, and what follows from them (steps, advice, peers).

    from hybrid_ep.hardware import clusters
    from hybrid_ep.perf import model, shape
    model.predict("dispatch", shape.Shape(64, 8, 4096, 7168, 8, 256), clusters.get("h100_8x400g"), num_sms=8)

`events` needs the compiled core; everything else is Python and numpy."""
