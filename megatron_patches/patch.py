"""apply, revert, status: the two hooks, every change recorded so that it can be undone exactly.

Hook "token_dispatcher" (the default) replaces the class `moe_layer.MoEFlexTokenDispatcher`; Megatron's configuration
keeps saying flex / hybridep, because the 1F1B schedule and the padding rules look at that name. Hook "deep_ep"
serves as the package `deep_ep`, and Megatron's own HybridEP manager calls hybrid_ep through it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from megatron_patches import hooks, parts, settings

_hook: str | None = None


@dataclasses.dataclass(frozen=True)
class Status:
    """What `status()` reports.

    * `hook`: "token_dispatcher", "deep_ep" or None. `megatron_core`: version, or None when it is not importable.
    * `hooks`: check -> "ok" or what changed. `patched`: "part: owner.name" of every change in force.
    * `settings`: values in force. `buffers`: one line a live buffer.
    """

    hook: str | None
    megatron_core: str | None
    hooks: dict[str, str]
    patched: tuple[str, ...]
    settings: settings.Settings
    buffers: tuple[str, ...]

    @property
    def applied(self) -> bool:
        """True while a patch is in force."""
        return self.hook is not None

    def __str__(self) -> str:
        rows = [f"megatron-core  {self.megatron_core or 'not importable'}", f"hook           {self.hook or 'none'}"]
        rows += [f"check          {name}: {text}" for name, text in self.hooks.items()]
        rows += [f"patched        {text}" for text in self.patched] or ["patched        nothing"]
        given = {k: v for k, v in self.settings.flat().items() if v is not None}
        rows += [f"settings       {given}"] + [f"buffer         {text}" for text in self.buffers]
        return "\n".join(rows)


def apply(
    hook: str = "token_dispatcher",
    *,
    ranks_per_node: int | None = None,
    num_sms: int | None = None,
    timeout_s: float | None = None,
    dispatch_dtype: str | None = None,
    buffer_class: type | None = None,
    command_line: bool = False,
    **options: Any,
) -> Status:
    """Make Megatron-Core dispatch its tokens through hybrid_ep. Affects the MoE layers built from now on.

    * `hook`: "token_dispatcher", our class in its place, or "deep_ep", hybrid_ep served under that name to Megatron's
      own manager. Their names until 0.1, "s3" and "s1", are understood with a FutureWarning.
    * `ranks_per_node`, `num_sms`, `timeout_s`, `dispatch_dtype`, `buffer_class`: see `settings.Exchange`. With
      "deep_ep" Megatron builds the buffer: only `buffer_class` applies, give the rest in the environment and in
      Megatron's flags.
    * `options`: the other keywords of `settings.Settings.of` (expert balancer, load statistics, tuning, grouped GEMM,
      router guards); only with "token_dispatcher".
    * `command_line`: add the `--hybrid-ep` flags to Megatron's parser and stay off until they are given.

    Returns the `Status`. Idempotent: again with the same hook only renews the settings.
    Raises ValueError for a bad argument, HookError for an unknown Megatron-Core (nothing is changed then).
    """
    global _hook
    hook = hooks.renamed(hook)
    if hook not in hooks.HOOKS:
        raise ValueError(f"hook is {hook!r}: give 'token_dispatcher' or 'deep_ep'")
    if _hook not in (None, hook):
        raise ValueError(f"hook is {hook!r}, but {_hook!r} is in force: call megatron_patches.revert() first")
    wanted = settings.Settings.of(
        enabled=not command_line,
        ranks_per_node=ranks_per_node,
        num_sms=num_sms,
        timeout_s=timeout_s,
        dispatch_dtype=dispatch_dtype,
        buffer_class=buffer_class,
        **options,
    )
    if hook == "deep_ep" and (options or command_line or ranks_per_node or num_sms or timeout_s or dispatch_dtype):
        raise ValueError(
            "hook 'deep_ep' takes only buffer_class: Megatron builds the buffer itself, so set "
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN, HYBRID_EP_TIMEOUT_S and Megatron's num_sms flag"
        )
    if _hook is None:
        hooks.require(hook)
        try:
            if hook == "token_dispatcher":
                parts.install_dispatcher()
                parts.install_recompute()
            else:
                parts.install_as_deep_ep(buffer_class)
            if command_line:
                parts.install_flags()
            parts.install_compute(wanted)
        except BaseException:
            revert()
            raise
        _hook = hook
    if hook == "token_dispatcher" and (command_line or wanted.balance.mode != "off"):
        parts.install_balance()
    if hook == "token_dispatcher" and (command_line or wanted.balance.migrates):
        parts.install_migrating()
    parts.install_compute(wanted)  # what an earlier call did not ask for
    settings.configure(wanted)
    if hook == "token_dispatcher":
        parts.install_load_stats(command_line)
    return _status(hooks.check(hooks.NEEDED["deep_ep"]) if hook == "deep_ep" else {})


def revert() -> Status:
    """Undo everything `apply()` changed, newest first, release the buffers, and return the `Status`."""
    global _hook
    parts.PATCHES.revert()
    _hook = None
    settings.configure(settings.DISABLED)
    _release_buffers()
    return _status({})


def status() -> Status:
    """`Status` of this process. Imports Megatron-Core to check the hooks; changes nothing, raises nothing."""
    if _hook == "token_dispatcher":  # the replaced name is ours now: what it stood for was checked when it was replaced
        return _status(hooks.check([name for name in hooks.CHECKS if name != "moe_layer"]))
    return _status(hooks.check())


def _status(findings: dict[str, str]) -> Status:
    version: str | None
    try:
        version = ".".join(map(str, hooks.core_version()))
    except hooks.HookError:
        version = None
    module = sys.modules.get("megatron_patches.buffers")
    return Status(
        _hook, version, findings, parts.PATCHES.describe(), settings.current(), module.describe() if module else ()
    )


def _release_buffers() -> None:
    module = sys.modules.get("megatron_patches.buffers")
    if module is not None:
        module.release()
