"""How the ranks of a group meet: through the group's store only, every wait with a deadline that names who is
late.

A Rendezvous is one conversation (one buffer) on one group; two buffers on one group, or two groups over the
same ranks, never see each other's keys. Segments are opened so that no name outlives the set-up, whoever
fails."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import traceback
from _posixshmem import shm_unlink  # what multiprocessing.shared_memory is made of
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybrid_ep import _core
from hybrid_ep.errors import BootstrapError
from hybrid_ep.runtime.signatures import GroupLike, Segments

_E = TypeVar("_E")


class PosixSegments:
    """Segments of real processes: named POSIX shared memory."""

    create = staticmethod(_core.Segment.create)
    attach = staticmethod(_core.Segment.attach)

    @staticmethod
    def unlink(name: str) -> None:
        """Removes the name, whoever made it; nothing when it is gone already."""
        with contextlib.suppress(FileNotFoundError):
            shm_unlink(name)


@dataclass(frozen=True)
class GroupView:
    """What hybrid_ep needs of a process group. segments: how its ranks share memory. world_rank: this rank's number in
    the whole job, which is its number in the group where there is no job around it. torch_group: torch's own, if it is
    one."""

    rank: int
    size: int
    name: str
    store: dist.Store
    segments: Segments
    world_rank: int
    torch_group: dist.ProcessGroup | None = None

    @property
    def of_gpus(self) -> bool:
        """Whether nccl serves the group, on a machine where torch sees a GPU. A group that torch did not register, as
        some tests and launchers make them, has no backends to ask for."""
        if self.torch_group is None or not torch.cuda.is_available():
            return False
        try:
            return "nccl" in dist.get_backend_config(self.torch_group)
        except (TypeError, ValueError):
            return False

    @property
    def virtual(self) -> bool:
        """Whether its ranks are threads of one process, on one device."""
        return hasattr(self.segments, "on_device")

    @classmethod
    def of(cls, group: dist.ProcessGroup | GroupLike) -> GroupView:
        """From a torch ProcessGroup, or from any object with rank(), size(), group_name, store and
        segments."""
        if isinstance(group, dist.ProcessGroup):
            if hasattr(group, "get_group_store"):
                store = group.get_group_store()
            else:  # older PyTorch
                store = dist.distributed_c10d._world.pg_map[group][1]
            world_rank = dist.get_rank() if dist.is_initialized() else group.rank()
            return cls(group.rank(), group.size(), group.group_name, store, PosixSegments(), world_rank, group)
        if all(hasattr(group, a) for a in ("rank", "size", "group_name", "store", "segments")):
            return cls(group.rank(), group.size(), group.group_name, group.store, group.segments, group.rank())
        raise ValueError(
            f"group={group!r} is not a torch.distributed process group that this rank belongs to; call "
            "init_process_group and give torch.distributed.group.WORLD or a new_group() with this rank"
        )


class Rendezvous:
    """One conversation of all ranks of a group. Collective: all ranks make the same calls in the same
    order."""

    def __init__(self, view: GroupView, timeout_s: float):
        self.view, self.timeout_s = view, timeout_s
        # The n-th buffer that this rank makes on this group meets the n-th of every other rank. The count
        # lives in the store, so it starts anew with a new store.
        base = dist.PrefixStore(f"hybrid_ep/{view.name}", view.store)
        with self._needs_store("buffers"):
            self._store = dist.PrefixStore(str(base.add(f"buffers/{view.rank}", 1)), base)

    @contextlib.contextmanager
    def _needs_store(self, topic: str) -> Iterator[None]:
        """BootstrapError where the store's server is gone."""
        try:
            yield
        except dist.DistError as error:
            raise BootstrapError(
                f"rank {self.view.rank} lost the store of group {self.view.name!r} in {topic!r}: "
                f"{error}; the process that hosts it (usually rank 0) must live as long as buffers are made or grow"
            ) from error

    def exchange(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Publishes this rank's value (anything JSON can say) and returns everybody's, by rank.

        A topic is for one exchange: its keys are gone afterwards, so that a store that lives as long as a job does not
        grow with every buffer. BootstrapError when ranks are missing or the store is gone; ValueError when a rank
        refused to come."""
        with self._needs_store(topic):
            self._store.set(f"{topic}/{self.view.rank}", json.dumps({"value": value}))
            said = self._wait(topic, timeout_s or self.timeout_s)
        # The exchange has succeeded: a server that ends now, or that cannot delete, is no reason to fail it.
        with contextlib.suppress(dist.DistError, NotImplementedError):
            self._forget(topic)
        refused = {rank: s["refused"] for rank, s in enumerate(said) if "refused" in s}
        if refused:
            rank, why = next(iter(refused.items()))
            raise ValueError(
                f"rank{'s' if len(refused) > 1 else ''} {', '.join(map(str, refused))} of group "
                f"{self.view.name!r} refused the arguments; rank {rank} says: {why}"
            )
        return [s["value"] for s in said]

    def refuse(self, topic: str, error: Exception) -> None:
        """In place of exchange, on a rank that cannot come: the other ranks raise this error at once, in place of
        waiting for their deadlines. Does not wait."""
        with contextlib.suppress(dist.DistError, NotImplementedError):
            self._store.set(f"{topic}/{self.view.rank}", json.dumps({"refused": str(error)}))
            self._forget(topic)

    def _forget(self, topic: str) -> None:
        """Whoever is the last to have read a topic removes it."""
        if self._store.add(f"{topic}/read", 1) == self.view.size:
            for key in (*range(self.view.size), "read"):
                self._store.delete_key(f"{topic}/{key}")

    def _said(self, topic: str, rank: int) -> Any:
        text = self._store.get(f"{topic}/{rank}")
        try:
            return json.loads(text)
        except ValueError:
            raise BootstrapError(
                f"the store of group {self.view.name!r} has {text!r:.60} for {topic!r} of rank {rank}, which no rank "
                "wrote: a group of torch's backend 'fake' has none; use gloo or nccl, or hybrid_ep.testing.VirtualWorld"
            ) from None

    def _wait(self, topic: str, timeout_s: float) -> list[Any]:
        started, pause = time.monotonic(), 0.0005
        missing = list(range(self.view.size))
        while True:
            missing = [r for r in missing if not self._store.check([f"{topic}/{r}"])]
            if not missing:
                return [self._said(topic, r) for r in range(self.view.size)]
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise BootstrapError(
                    f"rank {self.view.rank} of group {self.view.name!r} waited {waited:.1f} s for "
                    f"{topic!r} of ranks {missing}; every rank of the group must make the same calls in the same order "
                    "(deadline: timeout_s or HYBRID_EP_TIMEOUT_S)",
                    missing,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)


def agree(answers: list[dict[str, Any]], what: str) -> None:
    """ValueError, the same on every rank, when a fact differs between ranks."""
    for name in answers[0]:
        values = [answer[name] for answer in answers]
        if any(v != values[0] for v in values):
            by_value: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                by_value.setdefault(repr(value), []).append(rank)
            said = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise ValueError(f"{what}: {name} must be the same on every rank, but is {said}")


class Part(NamedTuple):
    """Memory of every rank beside its segment. of: the ranks whose this one maps, itself among them.
    without: how to do without it, for the error when it cannot be mapped."""

    segments: Segments
    num_bytes: int
    of: range
    without: str = ""


def open_segments(
    meet: Rendezvous,
    segments: Segments,
    generation: int,
    num_bytes: int,
    make_engine: Callable[..., _E],
    less: str = "",
    beside: Part | None = None,
) -> _E:
    """Creates this rank's segment, attaches everybody's, makes the engine over them and removes the names. beside:
    further memory, whose segments, by the ranks that it is `of`, are make_engine's second argument. less: what would
    make it smaller, for the error when it does not fit.

    Collective. Either every rank returns its engine or every rank raises; no name is left behind in either
    case, nor when another rank dies on the way."""
    rank = meet.view.rank
    token = meet.exchange(f"{generation}/token", secrets.token_hex(8) if rank == 0 else None)[0]
    parts = [Part(segments, num_bytes, range(meet.view.size)), *([] if beside is None else [beside])]
    total = sum(part.num_bytes for part in parts)

    def name(part: int, of: int) -> str:
        return f"/hybrid_ep.{token}.{generation}.{f'{part}.' if part else ''}{of}"

    error: Exception | None = None
    own: list[_core.Segment] = []
    attached: list[list[_core.Segment]] = []
    engine: _E | None = None
    try:
        for n, part in enumerate(parts):  # also behind one that failed: who makes them then knows of this generation
            try:
                own.append(part.segments.create(name(n, rank), part.num_bytes))
            except MemoryError as e:  # said to all ranks below, as others are
                error = error or MemoryError(f"{e}{less}")
            except Exception as e:
                error = error or e
        all_well(meet, f"{generation}/created", error, total)
        try:
            for n, part in enumerate(parts):
                attached.append([])
                for r in part.of:  # without a name for a segment, which this frame would keep
                    attached[n].append(own[n] if r == rank else part.segments.attach(name(n, r), part.num_bytes))
            engine = make_engine(*attached)
        except Exception as e:
            traceback.clear_frames(e.__traceback__)  # make_engine's had them, too
            halfway = len(attached) > 1 and len(attached[-1]) < len(parts[-1].of)
            error = RuntimeError(f"{e}{parts[-1].without}") if halfway else e
        all_well(meet, f"{generation}/attached", error, total)
        assert engine is not None  # or the call before had raised
        return engine
    except BaseException:
        own, attached, engine = [], [], None  # who keeps the error keeps this frame: not the memory as well
        raise
    finally:
        for n, part in enumerate(parts):
            for r in part.of:  # everybody's: a rank that died cannot remove its own
                part.segments.unlink(name(n, r))


def all_well(meet: Rendezvous, topic: str, error: Exception | None, num_bytes: int) -> None:
    """Collective: this rank's error, or a BootstrapError that says whose registered memory was not set up; else
    nothing."""
    said = meet.exchange(topic, None if error is None else f"{type(error).__name__}: {error}")
    bad = {r: text for r, text in enumerate(said) if text is not None}
    if error is not None:
        raise error
    if bad:
        rank, why = next(iter(bad.items()))
        raise BootstrapError(
            f"ranks {list(bad)} could not set up a registered buffer of {num_bytes} bytes; rank {rank} says: {why}", bad
        )
