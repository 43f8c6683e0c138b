"""apply, revert, status: the two seams, every change recorded so that it can be undone exactly.

Seam "s3" (the default) replaces the class `moe_layer.MoEFlexTokenDispatcher`; Megatron's configuration
keeps saying flex / hybridep, because the 1F1B schedule and the padding rules look at that name. Seam "s1"
serves as the package `deep_ep`, and Megatron's own HybridEP manager calls hybrid_ep through it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from megatron_patches import parts, seams, settings

_seam: str | None = None


@dataclasses.dataclass(frozen=True)
class Status:
    """What `status()` reports.

    * `seam`: "s3", "s1" or None. `megatron_core`: version, or None when it is not importable.
    * `seams`: check -> "ok" or what changed. `patched`: "part: owner.name" of every change in force.
    * `settings`: values in force. `buffers`: one line a live buffer.
    """

    seam: str | None
    megatron_core: str | None
    seams: dict[str, str]
    patched: tuple[str, ...]
    settings: settings.Settings
    buffers: tuple[str, ...]

    @property
    def applied(self) -> bool:
        """True while a patch is in force."""
        return self.seam is not None

    def __str__(self) -> str:
        rows = [f"megatron-core  {self.megatron_core or 'not importable'}", f"seam           {self.seam or 'none'}"]
        rows += [f"check          {name}: {text}" for name, text in self.seams.items()]
        rows += [f"patched        {text}" for text in self.patched] or ["patched        nothing"]
        given = {k: v for k, v in self.settings.flat().items() if v is not None}
        rows += [f"settings       {given}"] + [f"buffer         {text}" for text in self.buffers]
        return "\n".join(rows)


def apply(
    seam: str = "s3",
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

    * `seam`: "s3" our token dispatcher, or "s1" hybrid_ep served as `deep_ep` to Megatron's own manager.
    * `ranks_per_node`, `num_sms`, `timeout_s`, `dispatch_dtype`, `buffer_class`: see `settings.Exchange`. With "s1"
      Megatron builds the buffer: only `buffer_class` applies, give the rest in the environment and in
      Megatron's flags.
    * `options`: the other keywords of `settings.Settings.of` (expert balancer, load statistics, tuning, grouped GEMM,
      router guards); only with "s3".
    * `command_line`: add the `--hybrid-ep` flags to Megatron's parser and stay off until they are given.

    Returns the `Status`. Idempotent: again with the same seam only renews the settings.
    Raises ValueError for a bad argument, SeamError for an unknown Megatron-Core (nothing is changed then).
    """
    global _seam
    if seam not in ("s3", "s1"):
        raise ValueError(f"seam is {seam!r}: give 's3' (token dispatcher) or 's1' (as deep_ep)")
    if _seam not in (None, seam):
        raise ValueError(f"seam is {seam!r}, but {_seam!r} is in force: call megatron_patches.revert() first")
    wanted = settings.Settings.of(
        enabled=not command_line,
        ranks_per_node=ranks_per_node,
        num_sms=num_sms,
        timeout_s=timeout_s,
        dispatch_dtype=dispatch_dtype,
        buffer_class=buffer_class,
        **options,
    )
    if seam == "s1" and (options or command_line or ranks_per_node or num_sms or timeout_s or dispatch_dtype):
        raise ValueError(
            "seam 's1' takes only buffer_class: Megatron builds the buffer itself, so set "
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN, HYBRID_EP_TIMEOUT_S and Megatron's num_sms flag"
        )
    if _seam is None:
        seams.require(seam)
        try:
            if seam == "s3":
                parts.install_dispatcher()
            else:
                parts.install_as_deep_ep(buffer_class)
            if command_line:
                parts.install_flags()
            parts.install_compute(wanted)
        except BaseException:
            revert()
            raise
        _seam = seam
    if seam == "s3" and (command_line or wanted.balance.mode != "off"):
        parts.install_balance()
    if seam == "s3" and (command_line or wanted.balance.rehomes):
        parts.install_rehoming()
    parts.install_compute(wanted)  # what an earlier call did not ask for
    settings.configure(wanted)
    if seam == "s3":
        parts.install_load_stats(command_line)
    return _status(seams.check(seams.NEEDED["s1"]) if seam == "s1" else {})


def revert() -> Status:
    """Undo everything `apply()` changed, newest first, release the buffers, and return the `Status`."""
    global _seam
    parts.PATCHES.revert()
    _seam = None
    settings.configure(settings.DISABLED)
    _release_buffers()
    return _status({})


def status() -> Status:
    """`Status` of this process. Imports Megatron-Core to check the seams; changes nothing, raises nothing."""
    if _seam == "s3":  # the replaced name is ours now: what it stood for was checked when it was replaced
        return _status(seams.check([name for name in seams.CHECKS if name != "moe_layer"]))
    return _status(seams.check())


def _status(findings: dict[str, str]) -> Status:
    version: str | None
    try:
        version = ".".join(map(str, seams.core_version()))
    except seams.SeamError:
        version = None
    module = sys.modules.get("megatron_patches.buffers")
    return Status(
        _seam, version, findings, parts.PATCHES.describe(), settings.current(), module.describe() if module else ()
    )


def _release_buffers() -> None:
    module = sys.modules.get("megatron_patches.buffers")
    if module is not None:
        module.release()
