"""Ranks that are processes, on the PTX machine: each has a machine of its own, and they map each other's memory as the
stand-in shares it (file descriptors, IPC handles). ProcessWorld starts main() in the place of its own."""

from __future__ import annotations

from dataclasses import replace

from ptx_machine import Choices

from hybrid_ep.local_ranks import LocalRank


class Reporting:
    """A rank's end of its pipe to the test: an answer becomes an error where the machine has something to report."""

    def __init__(self, pipe, library):
        self._pipe, self._library = pipe, library

    def recv(self):
        return self._pipe.recv()

    def send(self, answer) -> None:
        if reports := self._library.reports():
            self._library.forget_reports()
            said = "the PTX machine reports:\n" + "\n".join(reports[:10])
            answer = ("error", ({"type": "Reports", "message": said}, said))
        self._pipe.send(answer)


def main(choices: Choices, job: LocalRank, port: int) -> None:
    """Of a rank's process: world.py's, which is itself here, on a machine."""
    import torch_cuda
    import world

    library = torch_cuda.install(replace(choices, seed=choices.seed + job.rank))
    job.pipe = Reporting(job.pipe, library)
    with library.modes():
        world._main(job, port)
