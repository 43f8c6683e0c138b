"""Tuning files: blocks and chunks of dispatch and combine, and up to how many tokens the latency path is faster, found
by device and shape. `hybrid-ep tune` writes them.

A file is JSON with a list of entries; an entry says what it was tuned for and what came out. A buffer that is given a
file and finds no entry for itself raises: settings for another machine or shape are not a fallback."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

SCHEMA = "hybrid_ep.tuning/1"
_TOKENS_WITHIN = 2.0  # an entry serves up to so many times more or fewer tokens than it was tuned with


class Key(NamedTuple):
    """What must be equal for an entry to fit."""

    num_ranks: int
    num_local_ranks: int
    hidden: int
    num_experts: int


@dataclass(frozen=True)
class Settings:
    """Blocks (SMs) of an operation, tokens of its rail messages."""

    num_sms_dispatch: int
    num_sms_combine: int
    chunk_dispatch: int
    chunk_combine: int


@dataclass(frozen=True)
class Entry:
    """`device`: name of the GPU or CPU, or words of it ("H100"). topk and dtype are for the reader: a buffer is made
    before it knows them."""

    device: str
    key: Key
    tokens: int
    topk: int
    dtype: str
    settings: Settings

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        shape = {**self.key._asdict(), "tokens": self.tokens, "topk": self.topk, "dtype": self.dtype}
        return {"device": self.device, "shape": shape, "settings": asdict(self.settings)}

    def __str__(self) -> str:
        k = self.key
        return (
            f"{self.device}, {k.num_ranks} ranks in nodes of {k.num_local_ranks}, hidden {k.hidden}, "
            f"{k.num_experts} experts, {self.tokens} tokens"
        )


@dataclass(frozen=True)
class Crossover:
    """Up to how many tokens a rank the latency path was faster than the other one on a device and shape; 0: with none
    that was tried. topk and dtype are for the reader."""

    device: str
    key: Key
    topk: int
    dtype: str
    latency_tokens: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        shape = {**self.key._asdict(), "topk": self.topk, "dtype": self.dtype}
        return {"device": self.device, "shape": shape, "latency_tokens": self.latency_tokens}


_E = TypeVar("_E", Entry, Crossover)


@dataclass(frozen=True)
class Table:
    """A file's entries, and the device that asks. identity: equal on all ranks that hold the same file and device."""

    path: str
    device: str
    entries: tuple[Entry, ...]
    identity: str
    crossovers: tuple[Crossover, ...] = ()

    def find(self, key: Key, tokens: int) -> Settings:
        """The settings of the entry for this device and `key` whose number of tokens is nearest, at most a factor of
        two away; one that has the device's whole name goes before those with words of it. ValueError says what the file
        has instead."""
        near = [
            e
            for e in self.entries
            if e.key == key and max(e.tokens, tokens) <= _TOKENS_WITHIN * max(1, min(e.tokens, tokens))
        ]
        fitting = _of_device(near, self.device)
        if not fitting:
            wanted = Entry(self.device, key, tokens, 0, "", Settings(0, 0, 0, 0))
            listed = "; ".join(map(str, self.entries)) or "nothing"
            raise ValueError(
                f"tuning={self.path!r} has no entry for {wanted} (up to twice or half as many); it has: "
                f"{listed}. Run 'hybrid-ep tune' for this device and shape, or give no tuning file"
            )
        return min(fitting, key=lambda e: max(e.tokens, tokens) / max(1, min(e.tokens, tokens))).settings

    def crossover(self, key: Key) -> int | None:
        """Up to how many tokens a rank the latency path is faster here: the least of what the file has for this device
        and `key`, with whatever topk and dtype, by the device's whole name if it has any of it, else by words of it;
        None: it says nothing of them."""
        said = _of_device([c for c in self.crossovers if c.key == key], self.device)
        return min((c.latency_tokens for c in said), default=None)


def load(path: Any, device: str) -> Table:
    """The file at `path` (str or Path) for `device`. ValueError when it is missing or is no tuning file."""
    try:
        text = Path(path).read_text()
        document = json.loads(text)
    except TypeError:
        raise ValueError(f"tuning={path!r} must be the path of a file that 'hybrid-ep tune' wrote") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tuning={str(path)!r} cannot be read ({error}); give a file that 'hybrid-ep tune' "
            "wrote, in the argument or in HYBRID_EP_TUNING, or neither"
        ) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"tuning={str(path)!r} is {found!r}, not {SCHEMA!r}; write it again with 'hybrid-ep tune'")
    try:
        entries = tuple(_entry(e) for e in document["entries"])
        crossovers = tuple(_crossover(c) for c in document.get("crossovers", ()))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"tuning={str(path)!r}: an entry is damaged ({error!r}); write it again with 'hybrid-ep tune'"
        ) from None
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Table(str(path), device, entries, f"sha256 {digest} on {device}", crossovers)


def _entry(e: dict[str, Any]) -> Entry:
    shape = e["shape"]
    settings = Settings(**{f.name: e["settings"][f.name] for f in fields(Settings)})
    _require_integers(1, shape["tokens"], *asdict(settings).values())
    return Entry(str(e["device"]), _key(shape), shape["tokens"], shape["topk"], shape["dtype"], settings)


def _crossover(c: dict[str, Any]) -> Crossover:
    shape = c["shape"]
    _require_integers(0, c["latency_tokens"])
    return Crossover(str(c["device"]), _key(shape), shape["topk"], shape["dtype"], c["latency_tokens"])


def _key(shape: dict[str, Any]) -> Key:
    key = Key(*(shape[name] for name in Key._fields))
    _require_integers(1, *key)
    return key


def _require_integers(least: int, *numbers: Any) -> None:
    if any(not isinstance(n, int) or isinstance(n, bool) or n < least for n in numbers):
        raise TypeError(f"numbers must be integers of at least {least}, not {list(numbers)}")


def _of_device(found: list[_E], name: str) -> list[_E]:
    """Those with `name`, as measurements on it have; else those with words of it, as predictions have."""
    return [e for e in found if e.device.lower() == name.lower()] or [e for e in found if _is_device(e.device, name)]


def _is_device(entry: str, name: str) -> bool:
    """Whether an entry's device is `name` or whole words of it: "B200" is in "NVIDIA B200", not in "NVIDIA GB200"."""
    return re.search(rf"(?<!\w){re.escape(entry)}(?!\w)", name, re.IGNORECASE) is not None


def device_name(device: torch.device) -> str:
    """Of a GPU its name, else of this machine's CPU."""
    import torch  # here: the flags of `hybrid-ep tune` import this module, and torch takes seconds

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """As Linux names it; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
