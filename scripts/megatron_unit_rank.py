"""One rank of `megatron_unit_tests.py`: Megatron-LM's tests under pytest, hybrid_ep in their dispatchers' place.

Nothing of Megatron-LM is changed on disk. In this process: the CPU pieces of `megatron_patches.cpu` and the few more
that these tests need, their download of data replaced by nothing, and the dispatcher classes that MoELayer looks up."""

import copy
import os
import re
import sys
import time
import types

ROUTES = ("ours", "deep_ep", "theirs")
SAME_EVERYWHERE = re.compile(r"world.?size.*not divisible|requires? .*world size")  # all ranks fail alike, and go on


class Reporter:
    """Tells the parent what each test did; stops this rank after a failure, for the others may wait for it."""

    def __init__(self, send, num_ranks):
        self.send, self.num_ranks, self.started, self.session = send, num_ranks, 0.0, None

    def pytest_collection_modifyitems(self, items):
        for item in items:
            if hasattr(item, "callspec"):
                smaller(item.callspec.params, self.num_ranks)

    def pytest_collection_finish(self, session):
        import torch

        torch.cuda.is_available = torch.cuda.seen_by_megatron  # what tests were skipped by is decided now
        self.session = session
        self.send(("collected", [item.nodeid for item in session.items]))

    def pytest_runtest_logstart(self, nodeid, location):
        self.started = time.monotonic()
        self.send(("start", nodeid))

    def pytest_runtest_logreport(self, report):
        text = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)[-2000:]
            if not SAME_EVERYWHERE.search(text):
                self.session.shouldstop = "a test failed on this rank"
        elif report.skipped:
            text = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        if report.when == "call" or report.outcome != "passed":
            self.send((report.outcome, report.nodeid, text))
        if report.when == "teardown":
            self.send(("end", report.nodeid, time.monotonic() - self.started))

    def pytest_collectreport(self, report):
        if report.failed:
            self.send(("not collected", report.nodeid, str(report.longrepr)[-2000:]))


def smaller(params, num_ranks):
    """Halve the parallel sizes that a test is called with until they fit the world: their CI has 8 ranks."""
    tensor = "moe_tp_size" if params.get("moe_tp_size") else "tp_size"
    while params.get(tensor, 1) * params.get("ep_size", 1) > num_ranks:
        largest = max((tensor, "ep_size"), key=lambda name: params.get(name, 1))
        params[largest] //= 2
    params.update({"tp_size": min(params["tp_size"], num_ranks)} if "tp_size" in params else {})


def prepare(checkout, world_size, route):
    """Before any fork: everything that is imported once. Returns nothing; ends in the process as the tests want it."""
    sys.path.insert(0, str(checkout))
    import torch

    torch.set_num_threads(1)
    from megatron_patches import cpu

    cpu.install()
    _more_of_cuda(torch, world_size)
    download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = lambda assets_dir: None
    sys.modules[download.__name__] = download
    import megatron.core.models.gpt.gpt_model
    import megatron.training.initialize  # noqa: F401

    if not megatron.core.__file__.startswith(str(checkout)):
        raise SystemExit(f"megatron.core comes from {megatron.core.__file__}, not from {checkout}")
    _routed(route)


def _more_of_cuda(torch, world_size):
    """Names that tests ask for and Megatron's library code does not; collectives of nccl become gloo's."""
    cuda = torch.cuda
    cuda.seen_by_megatron = cuda.is_available
    cuda.is_available = lambda: True  # while tests are collected: their skip marks ask
    cuda.device_count = lambda: world_size
    cuda.empty_cache = cuda.memory.empty_cache = cuda.reset_peak_memory_stats = lambda *_: None
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_: 0
    cuda.get_device_capability = lambda *_: (8, 0)
    _groups_of_gloo(torch.distributed)


def _groups_of_gloo(dist):
    """nccl becomes gloo, and groups of the same ranks one group: Megatron makes dozens in every test and destroys none,
    and each of gloo's has threads that poll."""
    initialize, new_group, destroy, made = dist.init_process_group, dist.new_group, dist.destroy_process_group, {}

    def init_process_group(backend=None, *args, **keywords):
        made.clear()
        return initialize("gloo", *args, **keywords)

    def shared_group(ranks=None, *_args, **_keywords):
        key = tuple(ranks if ranks is not None else range(dist.get_world_size()))
        if key not in made:
            made[key] = new_group(list(key), backend="gloo")
        return made[key]

    def destroy_all(group=None):
        if group is None:  # a single group may serve somebody else
            made.clear()
            destroy()

    dist.init_process_group, dist.new_group, dist.destroy_process_group = init_process_group, shared_group, destroy_all


def _routed(route):
    """Put our dispatcher where MoELayer looks for any of its three; or only serve as deep_ep; or leave all."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a, moe_layer

    import megatron_patches

    if route == "theirs":
        return
    megatron_patches.apply("token_dispatcher" if route == "ours" else "deep_ep")
    destroy = parallel_state.destroy_model_parallel

    def destroy_model_parallel():
        megatron_patches.release_buffers()  # as docs/megatron.md asks of whoever builds other groups
        destroy()

    parallel_state.destroy_model_parallel = destroy_model_parallel
    if route == "deep_ep":
        return
    fused_a2a.HAVE_DEEP_EP = fused_a2a.HAVE_HYBRIDEP = True  # both kinds of test run, and get ours
    ours = moe_layer.MoEFlexTokenDispatcher

    class Routed(ours):
        """Ours, whichever backend the test asked for."""

        def __init__(self, num_local_experts, local_expert_indices, config, pg_collection=None):
            config = copy.copy(config)
            config.moe_flex_dispatcher_backend = "hybridep"
            super().__init__(num_local_experts, local_expert_indices, config, pg_collection)

    for name in ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher"):
        setattr(moe_layer, name, Routed)


def run(checkout, rank, world_size, port, nodes, collect_only, send):
    """pytest over `nodes` on this rank, in a process of its own."""
    os.chdir(checkout)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    import pytest

    options = ["--collect-only"] if collect_only else []
    pytest.main(
        [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "--capture=fd",
            "-q",
            "--no-header",
            "--tb=short",
            "-o",
            "addopts=",
            "--rootdir",
            str(checkout),
            *options,
            *nodes,
        ],
        plugins=[Reporter(send, world_size)],
    )
