"""apply, revert, status: the two seams, every change recorded so that it can be undone exactly.

Seam "s3" (the default) replaces the class `moe_layer.MoEFlexTokenDispatcher`; Megatron's configuration
keeps saying flex / hybridep, because the 1F1B schedule and the padding rules look at that name. Seam "s1"
serves as the package `deep_ep`, and Megatron's own HybridEP manager calls hybrid_ep through it.
"""

import dataclasses
import functools
import importlib
import sys

from megatron_patches import seams, settings

_ABSENT = object()
_undo = []  # newest last: (sentence, function)
_seam = None


@dataclasses.dataclass(frozen=True)
class Status:
    """What `status()` reports.

    * `seam`: "s3", "s1" or None. `megatron_core`: version, or None when it is not importable.
    * `seams`: check -> "ok" or what changed. `patched`: sentences, one a change in force.
    * `settings`: values in force. `buffers`: one line a live buffer.
    """

    seam: str | None
    megatron_core: str | None
    seams: dict
    patched: tuple
    settings: settings.Settings
    buffers: tuple

    @property
    def applied(self):
        """True while a patch is in force."""
        return self.seam is not None

    def __str__(self):
        rows = [
            f"megatron-core  {self.megatron_core or 'not importable'}",
            f"seam           {self.seam or 'none'}",
        ]
        rows += [f"check          {name}: {text}" for name, text in self.seams.items()]
        rows += [f"patched        {text}" for text in self.patched] or ["patched        nothing"]
        given = {k: v for k, v in dataclasses.asdict(self.settings).items() if v is not None}
        rows += [f"settings       {given}"] + [f"buffer         {text}" for text in self.buffers]
        return "\n".join(rows)


def apply(
    seam="s3",
    *,
    ranks_per_node=None,
    num_sms=None,
    timeout_s=None,
    dispatch_dtype=None,
    buffer_class=None,
    command_line=False,
    **options,
):
    """Make Megatron-Core dispatch its tokens through hybrid_ep. Affects the MoE layers built from now on.

    * `seam`: "s3" our token dispatcher, or "s1" hybrid_ep served as `deep_ep` to Megatron's own manager.
    * `ranks_per_node`, `num_sms`, `timeout_s`, `dispatch_dtype`, `buffer_class`: see `settings.Settings`. With "s1"
      Megatron builds the buffer: only `buffer_class` applies, give the rest in the environment and in
      Megatron's flags.
    * `options`: the other fields of `settings.Settings` (expert balancer, load statistics, tuning, grouped GEMM, router
      guards); only with "s3".
    * `command_line`: add the `--hybrid-ep` flags to Megatron's parser and stay off until they are given.

    Returns the `Status`. Idempotent: again with the same seam only renews the settings.
    Raises ValueError for a bad argument, SeamError for an unknown Megatron-Core (nothing is changed then).
    """
    global _seam
    if seam not in ("s3", "s1"):
        raise ValueError(f"seam is {seam!r}: give 's3' (token dispatcher) or 's1' (as deep_ep)")
    if _seam not in (None, seam):
        raise ValueError(f"seam is {seam!r}, but {_seam!r} is in force: call megatron_patches.revert() first")
    wanted = settings.Settings(
        not command_line, ranks_per_node, num_sms, timeout_s, dispatch_dtype, buffer_class, **options
    )
    if seam == "s1" and (options or command_line or ranks_per_node or num_sms or timeout_s or dispatch_dtype):
        raise ValueError(
            "seam 's1' takes only buffer_class: Megatron builds the buffer itself, so set "
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN, HYBRID_EP_TIMEOUT_S and Megatron's num_sms flag"
        )
    if _seam is None:
        seams.require(seam)
        try:
            (_install_dispatcher if seam == "s3" else _install_as_deep_ep)(wanted)
            if command_line:
                from megatron_patches import flags

                _set(flags.arguments_module(), "add_megatron_arguments", flags.wrapper())
            install_compute(wanted)
        except BaseException:
            revert()
            raise
        _seam = seam
    if seam == "s3" and (command_line or wanted.balance != "off"):
        _install_balance()
    if seam == "s3" and (command_line or wanted.rehomes):
        _install_rehoming()
    install_compute(wanted)  # what an earlier call did not ask for
    settings.configure(wanted)
    if seam == "s3":
        _install_load_stats(command_line)
    return _status(seams.check(seams.NEEDED["s1"]) if seam == "s1" else {})


def revert():
    """Undo everything `apply()` changed, newest first, release the buffers, and return the `Status`."""
    global _seam
    while _undo:
        _undo.pop()[1]()
    _seam = None
    settings.configure(settings.DISABLED)
    _release_buffers()
    return _status({})


def status():
    """`Status` of this process. Imports Megatron-Core to check the seams; changes nothing, raises nothing."""
    if _seam == "s3":  # the replaced name is ours now: what it stood for was checked when it was replaced
        return _status(seams.check([name for name in seams.CHECKS if name != "moe_layer"]))
    return _status(seams.check())


def _status(findings):
    try:
        version = ".".join(map(str, seams.core_version()))
    except seams.SeamError:
        version = None
    module = sys.modules.get("megatron_patches.buffers")
    return Status(
        _seam,
        version,
        findings,
        tuple(sentence for sentence, _ in _undo),
        settings.current(),
        module.describe() if module else (),
    )


def _set(module, name, value):
    """Replace an attribute and remember how to put it back."""
    before = module.__dict__.get(name, _ABSENT)

    def restore():
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)

    setattr(module, name, value)
    _undo.append((f"{module.__name__}.{name}", restore))


def _install_dispatcher(_wanted):
    from megatron_patches import dispatcher

    _set(
        importlib.import_module(f"{seams.MOE}.moe_layer"),
        "MoEFlexTokenDispatcher",
        dispatcher.HybridEPTokenDispatcher,
    )


def _install_balance():
    """Let MoE layers hand their experts to the balancer; without it the class stays Megatron's own."""
    from megatron_patches import balance

    layer = importlib.import_module(f"{seams.MOE}.moe_layer").MoELayer
    if not any(sentence == "MoELayer.__init__" for sentence, _ in _undo):
        _set(layer, "__init__", balance.layer_init(layer.__init__))


def _install_rehoming():
    """Let optimizers move experts after their steps, and Megatron-LM's checkpoints find them where they began."""
    from megatron_patches import balance_slow

    if any(sentence == "megatron.core.optimizer.get_megatron_optimizer" for sentence, _ in _undo):
        return
    importlib.import_module("megatron.core.optimizer")
    for name, wrapper, modules in (
        ("get_megatron_optimizer", balance_slow.optimizer_wrapper, ("core.optimizer", "training.training")),
        ("save_checkpoint", balance_slow.save_wrapper, ("training.checkpointing", "training.training")),
    ):
        for module in (sys.modules.get(f"megatron.{part}") for part in modules):
            if module is not None and hasattr(module, name):
                _set(module, name, wrapper(getattr(module, name)))
    _undo.append(("models under slow balancing", balance_slow.release))


def _install_load_stats(command_line):
    """Let routers be counted, where flags may still ask for it or settings or environment do."""
    from megatron_patches import load_stats

    installed = any(sentence == load_stats.SENTENCE for sentence, _ in _undo)
    if installed or not (command_line or load_stats.wanted()):
        return
    _undo.append((load_stats.SENTENCE, load_stats.release))
    schedules = importlib.import_module(load_stats.SCHEDULES)
    for name in load_stats.NAMES:
        _set(schedules, name, load_stats.schedule(getattr(schedules, name)))
    layer = importlib.import_module(f"{seams.MOE}.moe_layer").MoELayer
    before = layer.__init__  # no _set: the balancer knows its own change of this method by its sentence
    _undo.append(("routers of new MoE layers", lambda: setattr(layer, "__init__", before)))
    layer.__init__ = load_stats.layer_init(before)


def install_compute(wanted):
    """What `wanted` asks for around the exchange: experts and router guards. Idempotent; SeamError, nothing changed.

    Called by apply(), and once flags are parsed; Megatron stays its own where nothing is asked."""
    for name, asked in (("experts", wanted.grouped_gemm), ("router_training", wanted.guards_routers)):
        if not asked or any(sentence.startswith(f"{name}: ") for sentence, _ in _undo):
            continue
        seams.require(name)
        module = importlib.import_module(f"megatron_patches.{name}")
        module.install(functools.partial(_replace, name))


def _replace(what, owner, name, value):
    """_set under the name of the part that asked for it."""
    _set(owner, name, value)
    sentence, restore = _undo.pop()
    _undo.append((f"{what}: {sentence}", restore))


def _install_as_deep_ep(wanted):
    """Serve as deep_ep, then let fused_a2a bind it: it decides when imported, so import it anew."""
    from hybrid_ep import compat

    fused = importlib.import_module(f"{seams.MOE}.fused_a2a")
    tokens = importlib.import_module(f"{seams.MOE}.token_dispatcher")
    names_before = dict(fused.__dict__)

    def restore_fused():
        fused.__dict__.clear()
        fused.__dict__.update(names_before)

    _undo.append(("sys.modules['deep_ep']", compat.uninstall))
    served = compat.install_as_deep_ep()  # refuses to hide a real deep_ep
    if wanted.buffer_class is not None:
        served.HybridEPBuffer = wanted.buffer_class
    _undo.append((f"{fused.__name__} bound to it", restore_fused))
    importlib.reload(fused)
    if not fused.HAVE_HYBRIDEP:
        raise seams.SeamError("fused_a2a: HybridEPBuffer was not taken from the package deep_ep we serve")
    for name in ("hybrid_ep_dispatch", "hybrid_ep_combine"):
        _set(tokens, name, getattr(fused, name))


def _release_buffers():
    module = sys.modules.get("megatron_patches.buffers")
    if module is not None:
        module.release()
