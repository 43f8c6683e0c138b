"""Real text to train on: files -> Megatron's indexed dataset, one byte a token, split by file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import text_files
from .config import DataConfig, RunConfig
from .text_files import END_OF_DOCUMENT

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset


@dataclass(frozen=True)
class Corpus:
    """A cached pair of indexed datasets. Prefixes name .bin/.idx files; entropies are nats a byte."""

    key: str
    train_prefix: str
    held_out_prefix: str
    num_train_files: int
    num_held_out_files: int
    train_bytes: int
    held_out_bytes: int
    unigram_entropy: float
    """Entropy of the held-out bytes: what the best model that ignores all context would reach there."""


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution with these counts, shape [vocab_size]."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def build_corpus(data: DataConfig) -> Corpus:
    """Reads the text and returns its cache entry, written first if it is new. Atomic, safe to race."""
    texts = text_files.read(data)
    splits, sizes, key = texts.splits, texts.sizes, texts.key
    folder = Path(data.cache_dir, key).absolute()
    if not (folder / "corpus.json").is_file():
        _write_entry(folder, splits, sizes, key)
    facts = json.loads((folder / "corpus.json").read_text())
    return Corpus(train_prefix=str(folder / "train"), held_out_prefix=str(folder / "held_out"), **facts)


def _write_entry(folder: Path, splits: dict[str, list[bytes]], sizes: dict[str, int], key: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder.parent))
    try:
        for name, texts in splits.items():
            _write_indexed(staging / name, texts)
        counts = np.zeros(256, dtype=np.int64)
        for text in splits["held_out"]:
            counts += np.bincount(np.frombuffer(text, np.uint8), minlength=256)
        counts[END_OF_DOCUMENT] = len(splits["held_out"])
        facts = {
            "key": key,
            "num_train_files": len(splits["train"]),
            "num_held_out_files": len(splits["held_out"]),
            "train_bytes": sizes["train"],
            "held_out_bytes": sizes["held_out"],
            "unigram_entropy": unigram_entropy(counts),
        }
        (staging / "corpus.json").write_text(json.dumps(facts, indent=1))
        try:
            staging.rename(folder)
        except OSError:
            if not (folder / "corpus.json").is_file():  # lost a race to an equal entry? fine. Otherwise not.
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_indexed(prefix: Path, texts: Iterable[bytes]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8)
    for text in texts:
        tokens = np.frombuffer(text + bytes([END_OF_DOCUMENT]), np.uint8).copy()
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


class ByteTokenizer:
    """What GPTDataset asks of a tokenizer, for text whose tokens are its bytes."""

    vocab_size = 256
    eod = END_OF_DOCUMENT
    pad = -1  # no token is padding: samples are cut from one long stream
    unique_identifiers = {"class": "recipes.text_data.ByteTokenizer", "vocab_size": "256"}


def build_datasets(config: RunConfig, corpus: Corpus) -> tuple[GPTDataset, GPTDataset]:
    """(train, held_out) GPTDatasets; sample -> dict with `tokens` and `labels`, int64 [seq_length].

    Collective when torch.distributed is initialised: rank 0 writes the shuffle index, the others read it.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    schedule = config.schedule
    dataset_config = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.model.seq_length,
        blend_per_split=[([corpus.train_prefix], None), ([corpus.held_out_prefix], None), None],
        path_to_cache=str(Path(corpus.train_prefix).parent / "index"),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [schedule.train_steps * config.global_batch_size, schedule.eval_sequences, None]
    train, held_out, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config).build()
    return train, held_out
