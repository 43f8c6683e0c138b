"""The layouts that `launch --layouts` ranks, against all there are, and the committed table of what recipes ship."""

import dataclasses
import itertools
import re
import shlex
import sys

import pytest
from docs_pages import ROOT

from hybrid_ep.perf import recommend, stages, step_time
from recipes import CLUSTER_RECIPES, layouts, memory
from recipes.cluster_summary import describe, job_of
from recipes.hardware import HARDWARE
from recipes.launch_command import main, parse_changes

sys.path.insert(0, str(ROOT / "scripts"))
import layout_tables

sys.path.remove(str(ROOT / "scripts"))

MIXTRAL = CLUSTER_RECIPES["mixtral_8x7b"]("h100_8x400g")


def every_layout(run):
    """Without bounds and without a thought of what is slower: all that can be derived and fit."""
    recomputes = ("selective", "layernorm,moe", "full")
    powers = (1, 2, 4, 8)
    for sizes in itertools.product(powers, (*powers, 16), powers, powers, powers, recomputes):
        names = ("tensor", "pipeline", "virtual_pipeline", "expert", "micro_batch_size", "recompute")
        try:
            made = run.derive(**dict(zip(names, sizes, strict=True)))
        except ValueError:
            continue
        if (made.pipeline > 1 or made.virtual_pipeline == 1) and memory.per_gpu(made).total <= memory.budget_bytes(run):
            yield step_time.step(recommend.tuned(job_of(made))).seconds


def test_the_fastest_are_those_of_a_search_without_bounds():
    found = layouts.ranked(MIXTRAL, most=10)
    assert sorted(x.seconds for x in found) == pytest.approx(sorted(every_layout(MIXTRAL))[:10])
    for layout in found:
        made = MIXTRAL.derive(**layout.changes(MIXTRAL))
        assert made == layout.run and memory.check_fits(made).total == layout.need_bytes
    best = min(x.seconds for x in found)
    assert found[0].seconds <= best * 1.01 and all(
        len(found[0].changes(MIXTRAL)) <= len(x.changes(MIXTRAL)) for x in found if x.seconds <= best * 1.01
    )


@pytest.mark.parametrize(
    "name, hardware",
    [("qwen3_30b_a3b", "h100_8x400g"), ("mixtral_8x7b", "b200_8x400g"), ("qwen3_235b_a22b", "h100_8x400g")],
)
def test_launch_and_the_search_say_the_same_of_a_larger_micro_batch(name, hardware):
    """Its line has the words that make a layout which the search has too, with the same seconds."""
    run = CLUSTER_RECIPES[name](hardware)
    larger = layouts.with_larger_micro_batches(run)
    (said,) = [line for line in describe(run).splitlines() if line.startswith("launches of layers are")]
    if not larger:
        assert run.overlap and said.endswith("fits memory and batch, and overlap allows no more recompute")
        return
    best = min(larger, key=lambda layout: layout.seconds)
    if best.seconds >= step_time.step(job_of(run)).seconds:
        assert said.endswith("a larger micro_batch_size that fits is not predicted to be faster")
        return
    words = layouts.set_words(best.changes(run))
    assert said.endswith(f": {words} fits and is predicted to take {best.seconds:.2f} s")
    assert f"micro_batch_size={best.run.micro_batch_size}" in words
    made = run.derive(**parse_changes([w for w in shlex.split(words) if w != "--set"]))
    assert step_time.step(job_of(made)).seconds == best.seconds
    found = {layout.run: layout.seconds for layout in layouts.ranked(run, most=1000)}
    assert found[best.run] == best.seconds and run in found


def test_a_larger_micro_batch_that_more_recompute_makes_room_for_is_said():
    run = CLUSTER_RECIPES["qwen3_235b_a22b"]("b200_8x400g")
    assert run.recompute == "selective"
    (said,) = [line for line in describe(run).splitlines() if line.startswith("launches of layers are")]
    words, seconds = re.fullmatch(r".*step: (.*) fits and is predicted to take ([\d.]+) s", said).groups()
    made = run.derive(**parse_changes([w for w in shlex.split(words) if w != "--set"]))
    assert job_of(made).recompute in ("moe", "full") and memory.check_fits(made)
    with pytest.raises(ValueError, match="GB"):  # what the run recomputes makes no room for it
        memory.check_fits(run.derive(micro_batch_size=made.micro_batch_size))
    assert step_time.step(job_of(made)).seconds == pytest.approx(float(seconds), abs=0.006)
    assert float(seconds) < 0.97 * step_time.step(job_of(run)).seconds


def test_a_micro_batch_divides_the_batch():
    """Three sequences a replica: one a micro-batch, or all three where the run has so many itself."""
    b200 = CLUSTER_RECIPES["mixtral_8x7b"]("b200_8x400g")
    for size, found in ((1, {1}), (3, {1, 3})):
        run = b200.derive(global_batch_size=3 * b200.data, micro_batch_size=size)
        alike = [x.run for x in layouts.ranked(run, most=1000) if x.run.data == run.data]
        assert {made.micro_batch_size for made in alike} == found


def test_more_recompute_is_taken_only_where_less_does_not_fit():
    tight = dataclasses.replace(MIXTRAL, memory_reserve=0.7)
    found = layouts.ranked(tight, most=200)
    for layout in found:
        r = layout.run
        if r.recompute != "selective":
            assert memory.per_gpu(r.derive(recompute="selective")).total > memory.budget_bytes(tight)
    assert {x.run.recompute for x in found} > {"selective"}
    with pytest.raises(ValueError, match="no layout of mixtral_8x7b fits 64 GPUs"):
        layouts.ranked(dataclasses.replace(MIXTRAL, memory_reserve=0.99))


@pytest.mark.parametrize("chunks", [2, 4, 8, 16, 32, 64])
def test_equal_chunks_hold_the_whole_model(chunks):
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    text = stages.equal_layout(61, 1, chunks)
    assert text.replace("|", "") == "E" + "t" * 61 + "mL" and text.count("|") == chunks - 1
    written = {16: "Et*4|(tttt|)*14tmL", 32: "Et|(tt|)*30mL", 64: "E|(t|)*61m|L"}  # of published runs
    if chunks in written:
        made = [
            run.derive(pipeline_layout=one, pipeline=4, virtual_pipeline=chunks // 4) for one in (text, written[chunks])
        ]
        assert made[0].stages() == made[1].stages()
    with pytest.raises(ValueError, match="not 3 equal chunks"):
        stages.equal_layout(61, 1, 3)


def test_the_command_prints_words_that_make_the_first(capsys):
    """A run that is far from the best: the words behind `the first:` are taken, and make what the table says."""
    words = ["mixtral_8x7b", "--set", "expert=2", "--set", "pipeline=8", "--set", "virtual_pipeline=4"]
    assert main([*words, "--layouts"]) == 0
    said = capsys.readouterr().out
    own = [line for line in said.splitlines() if line.endswith("as it is")]
    (first,) = [line for line in said.splitlines() if line.startswith("the first: ")]
    pairs = [w for w in [*words[1:], *shlex.split(first.removeprefix("the first: "))] if w != "--set"]
    run = CLUSTER_RECIPES["mixtral_8x7b"]("h100_8x400g").derive(**parse_changes(pairs))
    seconds = layouts.own(run).seconds
    assert f"{seconds:.2f}" in said.splitlines()[3] and len(own) == 1
    assert seconds < float(own[0].split()[0])


def test_what_recipes_ship_is_near_the_fastest_of_the_committed_table():
    rows = [line.split(" | ") for line in layout_tables.OUT.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(CLUSTER_RECIPES) * len(layout_tables.CLUSTERS)
    for cells, (name, cluster) in zip(rows, itertools.product(CLUSTER_RECIPES, layout_tables.CLUSTERS), strict=True):
        run = CLUSTER_RECIPES[name](cluster)
        own = layouts.own(run)
        assert cells[0].removeprefix("| ") == name and cells[1].startswith(str(run.num_gpus))
        assert cells[3] == str(own) and cells[6] == f"{own.seconds:.2f}", "run `make tables`"
        assert own.seconds < float(cells[7]), "alltoall is faster"
        others_mbs = re.search(r"MBS (\d)", cells[8])[1] != str(run.micro_batch_size)
        assert own.seconds <= float(cells[10]) * (1.24 if others_mbs else 1.065)
        assert float(cells[12].rstrip("% |")) <= 7


@pytest.mark.parametrize("name", CLUSTER_RECIPES)
def test_what_recipes_ship_has_the_fewest_sms_of_nearly_the_fastest_exchange(name):
    for hardware in HARDWARE:
        job = job_of(CLUSTER_RECIPES[name](hardware))
        assert job.num_sms == recommend.tuned(job).num_sms, hardware


def test_virtual_stages_need_a_pipeline_and_micro_batches_that_it_divides():
    """As Megatron's interleaved schedule does at its start."""
    assert MIXTRAL.virtual_pipeline > 1 and MIXTRAL.pipeline == 4
    with pytest.raises(ValueError, match=r"global_batch_size=80: gives 5 micro-batches; .* a multiple of pipeline=4"):
        MIXTRAL.derive(global_batch_size=80)
    assert MIXTRAL.derive(global_batch_size=80, virtual_pipeline=1).num_microbatches == 5
    with pytest.raises(ValueError, match="virtual_pipeline=8: one pipeline stage has no virtual ones; use 1"):
        MIXTRAL.derive(pipeline=1)
