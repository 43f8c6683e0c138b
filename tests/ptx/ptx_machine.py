"""The PTX machine from Python: the library that runs on it, what it is told before it starts, and what it reports.

It is tests/ptx/machine, an interpreter of PTX on a CPU, under tests/ptx/runtime, a stand-in for the CUDA runtime.
scripts/build_cuda.py --interpreted builds the CUDA library with both inside. docs/ptx_machine.md says what it shows."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "cuda" / "interpreted" / "libhybrid_ep_cuda.so"
_SUCCESS, _NOT_READY = 0, 600


@dataclass(frozen=True)
class Choices:
    """seed: of the order in which streams, blocks and warps take turns. races: happens-before is judged, too."""

    seed: int = 0
    races: bool = False
    burst: int = 256  # instructions of a warp at once, at most
    copy_delay_ns: int = 3000  # that a bulk copy may take, at most
    split_percent: int = 2
    target: int = 90  # or 100, 103: compute capability, and so whose PTX
    num_devices: int = 1
    outsiders: bool = True  # host threads launch while kernels run: virtual time keeps to the machine's clock
    clock_speed: int = 1  # how fast that clock is, by the CPU time of the machine's thread
    apart: bool = False  # races: kernels of each stream count as another GPU's where scopes are judged


class _Choices(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("copy_delay_ns", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "races",
                "burst",
                "split_percent",
                "outsiders",
                "target",
                "num_devices",
                "clock_speed",
                "apart",
            )
        ),
    ]


class CudaError(RuntimeError):
    """A call of the stand-in failed; torch raises such errors as RuntimeError, too."""


class Library:
    """The built library. Every CUDA call that the stand-in has is an attribute; call() also checks its status."""

    def __init__(self, choices: Choices, path: Path = LIBRARY):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is not there; build it with 'python scripts/build_cuda.py --interpreted' (needs nvcc, no GPU)"
            )
        self.path, self.choices = path, choices
        self._c = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._c.cudaGetErrorString.restype = self._c.ptxm_text.restype = ctypes.c_char_p
        chosen = _Choices(**{name: int(getattr(choices, name)) for name, _ in _Choices._fields_})
        self._c.ptxm_choose(ctypes.byref(chosen))

    def call(self, name: str, *args) -> None:
        """Integers of 64 bits, ctypes objects. CudaError when the status is not success."""
        if status := self.status(name, *args):
            raise CudaError(f"CUDA error: {self._c.cudaGetErrorString(status).decode()} ({name})")

    def status(self, name: str, *args) -> int:
        return getattr(self._c, name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in args))

    def ready(self, name: str, *args) -> bool:
        """Of cudaStreamQuery and cudaEventQuery. Raises on errors."""
        status = self.status(name, *args)
        if status not in (_SUCCESS, _NOT_READY):
            raise CudaError(f"CUDA error: {self._c.cudaGetErrorString(status).decode()} ({name})")
        return status == _SUCCESS

    def made(self, name: str, *args) -> int:
        """What a call puts where its first argument points."""
        out = ctypes.c_uint64()
        self.call(name, ctypes.byref(out), *args)
        return out.value

    def span(self) -> tuple[int, int]:
        """The addresses of all devices' memory."""
        two = (ctypes.c_uint64 * 2)()
        self._c.ptxm_span(two)
        return two[0], two[1]

    def allocate_by(self, function: int, num_bytes: int, stream: int) -> int:
        """The address that an allocator's function (its own address) gives; 0 when it throws."""
        self._c.ptxm_allocate_by.restype = ctypes.c_void_p
        return self._c.ptxm_allocate_by(*(ctypes.c_uint64(a) for a in (function, num_bytes, stream))) or 0

    def counts(self) -> dict[str, int]:
        five = (ctypes.c_uint64 * 5)()
        self._c.ptxm_counts(five)
        names = ("launches", "thread_instructions", "warp_instructions", "bytes", "told_host")
        return dict(zip(names, five, strict=True))

    def write_counts(self, path: Path) -> None:
        """Instructions by kernel and line of PTX: 'kernel line thread-instructions warp-instructions'."""
        if self._c.ptxm_write_counts(os.fsencode(path)):
            raise OSError(f"{path} cannot be written")

    def reports(self) -> list[str]:
        text = ctypes.create_string_buffer(4096)
        found = []
        for i in range(self._c.ptxm_num_reports()):
            self._c.ptxm_report(i, text, ctypes.c_size_t(len(text)))
            found.append(text.value.decode(errors="replace"))
        return found

    def forget_reports(self) -> None:
        self._c.ptxm_forget_reports()

    def texts(self) -> list[str]:
        """The PTX that the library carries for the chosen target, one text a source file."""
        found = []
        while (text := self._c.ptxm_text(len(found))) is not None:
            found.append(text.decode())
        return found

    def edit(self, i: int, text: str) -> None:
        """Puts another text in the place of texts()[i]; before any kernel of it was asked for."""
        if self._c.ptxm_edit(i, text.encode()):
            raise RuntimeError("the PTX is in use already; edit it before the first buffer is made")

    def hold_copies(self, hold: bool) -> None:
        """While held, no copy begins: the copy engines have others' to do."""
        self._c.ptxm_hold_copies(ctypes.c_uint32(hold))

    def drop(self, call: str) -> None:
        """For mutants: from here on this call of the runtime does nothing and succeeds; "shared memory": every launch
        gets 128 bytes too few."""
        self._c.ptxm_drop(call.encode())
