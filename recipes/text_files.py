"""Files of text, read and split into a part to train on and one to hold out; text_data makes the dataset of them.

The default text is the source of Python's standard library, which every machine with Python has. Byte 0
never occurs in source text, so it serves as the end-of-document token and the vocabulary stays 256.
Nothing here imports torch: a folder that holds no text is refused before a run has one of its own.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .config import DataConfig

END_OF_DOCUMENT = 0
_FORMAT = 1  # part of the key: raise it when the layout of an entry of text_data's cache changes
_SUFFIXES = {".py", ".txt", ".md", ".rst"}
# Tests repeat themselves, and distributions disagree on whether to ship them or these tools.
_STDLIB_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
_MIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Texts:
    """splits: the files' bytes, "train" and "held_out". sizes: of both in tokens. key: a hash of all of it."""

    splits: dict[str, list[bytes]]
    sizes: dict[str, int]
    key: str


def list_files(source: str) -> list[tuple[str, Path]]:
    """(relative path, file) of every text file of `source`, ordered by relative path."""
    if source == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skipped, suffixes = _STDLIB_SKIPPED, {".py"}
    else:
        root, skipped, suffixes = Path(source), {".git", "__pycache__"}, _SUFFIXES
        if not root.is_dir():
            raise ValueError(f"data.source={source!r}: no such folder; name one, or python_stdlib")
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        for name in names:
            path = Path(folder, name)
            if path.suffix in suffixes:
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def is_held_out(relative_path: str, one_in: int) -> bool:
    """Whether a file belongs to the held-out split: a property of its path alone."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8], "big") % one_in == 0


def read(data: DataConfig) -> Texts:
    """ValueError where the source is no folder, or holds too little."""
    splits: dict[str, list[bytes]] = {"train": [], "held_out": []}
    digest = hashlib.sha256(f"{_FORMAT} {data.held_out_one_in}".encode())
    for relative_path, path in list_files(data.source):
        text = path.read_bytes()
        if not text or END_OF_DOCUMENT in text:
            continue
        digest.update(f"{relative_path} {len(text)}\n".encode())
        digest.update(text)
        split = "held_out" if is_held_out(relative_path, data.held_out_one_in) else "train"
        splits[split].append(text)
    sizes = {name: sum(len(text) + 1 for text in texts) for name, texts in splits.items()}
    if sizes["train"] < _MIN_BYTES or not splits["held_out"]:
        raise ValueError(
            f"data.source={data.source!r}: {sizes['train']} bytes to train on, {sizes['held_out']} held out; "
            "at least 1 MiB and one held-out file are needed. Install Python's full standard library "
            "(Debian and Ubuntu: apt install libpython3-stdlib) or set data.source to a folder of text"
        )
    return Texts(splits, sizes, digest.hexdigest()[:16])
