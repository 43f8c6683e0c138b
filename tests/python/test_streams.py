"""async_finish, previous_event and comm_stream: accepted on a CPU, where every call has ended when it returns; and the
order of events on streams, with streams that write down what is asked of them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hybrid_ep import streams
from hybrid_ep.streams import EventOverlap
from hybrid_ep.testing import VirtualWorld

X = torch.arange(4 * 16).view(4, 16).bfloat16()
IDX = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0]])
ROUTED = {"hidden": X, "topk_idx": IDX, "topk_weights": torch.ones(4, 2)}


@pytest.fixture(scope="module")
def buffer():
    with VirtualWorld(1, 1).buffers(16, 8, 4, timeout_s=20, comm_stream="own")[0] as b:
        yield b


def test_every_verb_returns_one_element_more_on_a_cpu(buffer):
    for send, gather in (
        (buffer.dispatch, buffer.combine),
        (buffer.dispatch_with_permute, buffer.combine_with_unpermute),
    ):
        plain = send(**ROUTED)
        *results, sent = send(**ROUTED, async_finish=True, previous_event=EventOverlap.here("cpu"))
        assert len(results) == len(plain) and torch.equal(results[0], plain[0])
        with sent:
            pass
        out, probs, gathered = gather(hidden=results[0], handle=results[-1], async_finish=True, previous_event=sent)
        gathered.current_stream_wait()
        assert probs is None and torch.equal(out, gather(hidden=plain[0], handle=plain[-1])[0])


def test_bad_combinations_say_what_to_do(buffer):
    with VirtualWorld(1, 1).buffers(16, 8, 4, timeout_s=20)[0] as without:
        with pytest.raises(ValueError, match="previous_event is given.*async_finish=True"):
            without.dispatch(**ROUTED, previous_event=EventOverlap())
        without.dispatch(**ROUTED, previous_event=EventOverlap(), async_finish=True)
    for name, wrong in (
        ("async_finish", 1),
        ("async_finish", None),
        ("previous_event", torch.ones(1)),
        ("previous_event", True),
    ):
        with pytest.raises(ValueError, match=name):
            buffer.dispatch(**ROUTED, **{name: wrong})
    for wrong, said in ((True, "True must be"), ("mine", "'mine' must be"), (3, "'own'")):
        with pytest.raises(ValueError, match=f"comm_stream=.*{said}"):
            VirtualWorld(1, 1).buffers(16, 8, 4, comm_stream=wrong)
    buffer.dispatch(**ROUTED)  # and the buffer works


def test_a_stream_of_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(streams.torch, "Stream", SimpleNamespace)
    stream = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(ValueError, match="comm_stream is a stream of cuda:1, but this buffer runs on cpu; .*'own'"):
        streams.chosen(stream, torch.device("cpu"))
    assert streams.chosen(stream, torch.device("cuda", 1)) is stream


class Log:
    """Streams, events and tensors that write down what is asked of them."""

    def __init__(self, monkeypatch):
        self.lines: list[str] = []
        self.current = self.stream("caller")
        monkeypatch.setattr(streams.torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(streams.torch.cuda, "stream", self.entered)
        monkeypatch.setattr(streams, "_tensors", lambda value: [self.tensor("input" if len(value) == 2 else "rows")])

    def stream(self, name: str):
        def record_event() -> SimpleNamespace:
            self.lines.append(f"{name} records")
            return SimpleNamespace(name=f"event of {name}")

        return SimpleNamespace(
            name=name,
            device=torch.device("cpu"),
            record_event=record_event,
            wait_event=lambda e: self.lines.append(f"{name} waits for {e.name}"),
        )

    def tensor(self, name: str):
        return SimpleNamespace(record_stream=lambda s: self.lines.append(f"{name} used on {s.name}"), device=None)

    @contextlib.contextmanager
    def entered(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def call(self, own, **arguments):
        buffer = SimpleNamespace(comm_stream=own, stream_of_calls=lambda: own or self.comm)
        self.comm = self.stream("comm")

        @streams.on_comm_stream
        def verb(_):
            self.lines.append(f"kernel on {self.current.name}")
            return "x", "y", "z"

        return verb(buffer, **arguments)


def test_the_call_runs_between_the_callers_work(monkeypatch):
    log = Log(monkeypatch)
    assert log.call(log.stream("given")) == ("x", "y", "z")
    assert log.lines == [
        "caller records",
        "given waits for event of caller",
        "kernel on given",
        "given records",
        "input used on given",
        "rows used on caller",
        "caller waits for event of given",
    ]


def test_async_finish_leaves_the_wait_to_the_event(monkeypatch):
    log = Log(monkeypatch)
    *results, event = log.call(None, async_finish=True)
    assert results == ["x", "y", "z"]
    assert log.lines == [
        "caller records",
        "comm waits for event of caller",
        "kernel on comm",
        "comm records",
        "input used on comm",
        "rows used on caller",
    ]
    event.current_stream_wait()
    assert log.lines[-1] == "caller waits for event of comm"


def test_a_previous_event_replaces_the_wait_for_the_caller(monkeypatch):
    log = Log(monkeypatch)
    log.call(None, async_finish=True, previous_event=EventOverlap(SimpleNamespace(name="gate")))
    assert log.lines[:2] == ["comm waits for gate", "kernel on comm"]
    log.lines.clear()
    log.call(None, async_finish=True, previous_event=EventOverlap())  # passed long ago
    assert log.lines[0] == "kernel on comm"


@pytest.mark.parametrize("positional", [False, True])
def test_a_handle_of_another_stream_is_kept_for_this_one(monkeypatch, positional):
    log = Log(monkeypatch)
    plan, other = log.tensor("plan"), log.tensor("rows")
    monkeypatch.setattr(streams, "_tensors", lambda value: [] if value is None else value)

    @streams.on_comm_stream
    def verb(_, hidden, probs=None, handle=None, *, num_sms=None):
        log.lines.append(f"kernel on {log.current.name}")

    buffer = SimpleNamespace(comm_stream=None)
    verb(buffer, [other], None, [plan], num_sms=1) if positional else verb(buffer, [other], handle=[plan])
    assert log.lines == ["plan used on caller", "kernel on caller"]
    verb(buffer, [other])
    assert log.lines[2:] == ["kernel on caller"]


def test_a_stream_does_not_wait_for_itself(monkeypatch):
    log = Log(monkeypatch)
    with pytest.raises(ValueError, match="current stream is the buffer's comm_stream"):
        log.call(log.current)


def test_an_event_keeps_inputs_until_it_is_waited_for():
    class Tensor:
        dropped = False

        def __del__(self):
            Tensor.dropped = True

    event = EventOverlap(None, [Tensor()])
    assert not Tensor.dropped
    event.current_stream_wait()
    assert Tensor.dropped
