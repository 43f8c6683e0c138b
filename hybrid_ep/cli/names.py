"""Names that several commands take: one spelling, which is printed and documented, and what each command makes of it.

`launch` has Megatron's words; `report scaling --simulate` and `simulate --recommend` ask the step model, which has its
own for some. Both sides understand both, and what a command cannot do is refused with those that can."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from hybrid_ep.cli.parser import one_of, warn_renamed
from hybrid_ep.hardware import clusters
from hybrid_ep.perf.job_fields import modelled_recompute

OLD_CLUSTERS = {"b200_8": "b200_8x400g"}
_MODEL_WORDS = {"alltoall": "a2a"}  # dispatchers: as printed, as perf.step_time has it
_PRINTED = {word: name for name, word in _MODEL_WORDS.items()}
_MODEL_ALONE = "report scaling --simulate and simulate --recommend"
_KNOWN_TO = {
    "allgather": "CPU recipes of launch and recipes.pretrain",
    "published_hybrid_ep": _MODEL_ALONE,
    "node_dedup": _MODEL_ALONE,
    "deepep_v1": _MODEL_ALONE,
}


def add_cluster(add: Any, what: str, default: str | None = None, names: Collection[str] = clusters.CLUSTERS) -> None:
    """The flag --cluster. add: a parser's add_argument; names: those that the command takes, where it has not all."""
    add("--cluster", default=default, type=cluster_of(names), **{**one_of(names, what), "choices": None})


def cluster_of(names: Collection[str]) -> Any:
    """The type of a flag that takes one of `names`, old spellings too. Who else has a name in clusters.CLUSTERS passes:
    the command says why it does not take that one."""

    def parse(text: str) -> str:
        if (name := cluster(text)) not in clusters.CLUSTERS:
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(names)})")
        return name

    return parse


def cluster(text: str) -> str:
    """A cluster's name of today, with a warning where an older one was given; the caller knows which there are."""
    if text in OLD_CLUSTERS:
        warn_renamed(f"--cluster {text}", f"--cluster {OLD_CLUSTERS[text]}")
    return OLD_CLUSTERS.get(text, text)


def dispatcher(name: Any) -> Any:
    """The spelling that is printed; what is no dispatcher stays as it is, to be refused."""
    return _PRINTED.get(name, name) if isinstance(name, str) else name


def modelled_dispatcher(name: str) -> str:
    """The step model's word for it."""
    return _MODEL_WORDS.get(name, name)


def dispatcher_remedy(name: Any, known: Collection[str]) -> str:
    """What to say of a dispatcher that is none of `known`."""
    where = _KNOWN_TO.get(name) if isinstance(name, str) else None
    return f"use one of {', '.join(map(dispatcher, known))}" + (f"; {name} is known to {where}" if where else "")


def dispatcher_of(known: Collection[str]) -> Any:
    """The type of a flag that takes one of `known`, in the step model's words or in the printed ones."""

    def parse(text: str) -> str:
        if (name := dispatcher(text)) not in map(dispatcher, known):
            raise argparse.ArgumentTypeError(f"{text!r}: {dispatcher_remedy(text, known)}")
        return name

    return parse


def recompute(text: str) -> str:
    """The type of a flag that takes none, full, selective or modules: as it was given."""
    try:
        modelled_recompute(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def said_of_recompute(text: str) -> str:
    """As given, and what of it takes time in the step model where that is less."""
    counted = modelled_recompute(text)
    return text if counted == text else f"{text} (time counted: {counted})"
