"""Text data: deterministic order and split, content-addressed cache, Megatron reads back the bytes."""

import math
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from recipes import get_recipe, text_data, text_files
from recipes.config import DataConfig

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.version_free,
]


@pytest.fixture
def texts(tmp_path):
    """A folder of 60 files, large enough to train on, one of them unusable because it holds byte 0."""
    folder = tmp_path / "texts"
    rng = np.random.default_rng(0)
    for index in range(60):
        path = folder / f"part{index % 7}" / f"file{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.integers(97, 123, 32_000, dtype=np.uint8).tobytes())
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "ignored.bin").write_bytes(b"not text")
    return folder


@pytest.fixture
def data(texts, tmp_path):
    return DataConfig(source=str(texts), held_out_one_in=5, cache_dir=str(tmp_path / "cache"))


def test_files_are_ordered_by_path_and_split_by_path(texts):
    names = [name for name, _ in text_files.list_files(str(texts))]
    assert names == sorted(names) and len(names) == 61 and "ignored.bin" not in names
    held_out = [name for name in names if text_files.is_held_out(name, 5)]
    assert 0 < len(held_out) < 30
    assert held_out == [name for name in names if text_files.is_held_out(name, 5)]


def test_standard_library_has_no_tests_and_no_site_packages():
    names = [name for name, _ in text_files.list_files("python_stdlib")]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_the_corpus_is_the_files(texts, data):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    corpus = text_data.build_corpus(data)
    files = [(name, path) for name, path in text_files.list_files(str(texts)) if name != "binary.txt"]
    for prefix, held_out in ((corpus.train_prefix, False), (corpus.held_out_prefix, True)):
        mine = [path for name, path in files if text_files.is_held_out(name, 5) is held_out]
        wanted = [path.read_bytes() + b"\0" for path in mine]
        read = IndexedDataset(prefix)
        assert [bytes(read[index]) for index in range(len(read))] == wanted
    assert corpus.num_train_files + corpus.num_held_out_files == 60


def test_the_cache_is_keyed_by_content(texts, data):
    first = text_data.build_corpus(data)
    written = os.stat(f"{first.train_prefix}.bin").st_mtime_ns
    assert text_data.build_corpus(data) == first
    assert os.stat(f"{first.train_prefix}.bin").st_mtime_ns == written, "rewritten, not reused"
    changed = texts / "part3" / "file3.txt"
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    assert text_data.build_corpus(data).key != first.key


def test_entropy_of_known_distributions():
    assert text_data.unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4), abs=1e-12)
    assert text_data.unigram_entropy(np.array([0, 9])) == 0.0
    assert text_data.unigram_entropy(np.array([3, 1])) == pytest.approx(0.5623351446, abs=1e-9)


def test_entropy_counts_the_held_out_text_only(texts, data):
    corpus = text_data.build_corpus(data)
    held_out = b"".join(
        path.read_bytes() + b"\0" for name, path in text_files.list_files(str(texts)) if text_files.is_held_out(name, 5)
    )
    counts = np.bincount(np.frombuffer(held_out, np.uint8), minlength=256)
    assert corpus.held_out_bytes == len(held_out)
    assert corpus.unigram_entropy == pytest.approx(text_data.unigram_entropy(counts), abs=1e-12)


def test_samples_are_reproducible_and_shifted_by_one(data):
    config = get_recipe("tiny_cpu_smoke")
    corpus = text_data.build_corpus(data)
    train, held_out = text_data.build_datasets(config, corpus)
    again, _ = text_data.build_datasets(config, corpus)
    assert len(held_out) >= config.schedule.eval_sequences
    seen = set()
    for index in range(config.schedule.train_steps * config.global_batch_size):
        sample = train[index]
        assert sample["tokens"].shape == (config.model.seq_length,)
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
        assert (sample["tokens"] == again[index]["tokens"]).all()
        seen.add(bytes(sample["tokens"].to(dtype=torch.uint8).numpy()))
    assert len(seen) == config.schedule.train_steps * config.global_batch_size, "a sample was repeated"


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(data):
    config = get_recipe("tiny_cpu_smoke")
    corpus = text_data.build_corpus(data)
    short, _ = text_data.build_datasets(config, corpus)
    long, _ = text_data.build_datasets(config.derive(schedule={"train_steps": 500}), corpus)
    assert all((short[index]["tokens"] == long[index]["tokens"]).all() for index in range(24))


@pytest.mark.parametrize(("source", "message"), [("/nonexistent", "no such folder"), (None, "at least 1 MiB")])
def test_unusable_sources_are_refused(source, message, tmp_path):
    (tmp_path / "small.txt").write_text("too little")
    data = DataConfig(source=source or str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=message):
        text_data.build_corpus(data)
