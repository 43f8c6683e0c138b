"""Who sends to whom, from every record that says it, and refused by those that do not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybrid_ep.balance import report, sources, statistics
from hybrid_ep.cli import main


def jsonl(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def by_rank(rank, iterations=(5, 6)):
    """Statistics of one rank: `rank` + 1 tokens to expert 0, one to each other."""
    counts = np.ones((len(iterations), 2, 4), np.int64)
    counts[:, :, 0] = rank + 1
    return statistics.LoadStatistics(counts, tuple(iterations), (1, 2))


WANT = np.array([[8, 8], [12, 8]])  # of by_rank: two iterations of two layers, experts 0-1 and 2-3


def test_the_routing_trace_names_its_ranks(tmp_path):
    records = [{"step": s, "layer": 1, "rank": r, "top_indices": [[r, 2], [0, -1]]} for s in (7, 8) for r in (0, 1)]
    path = jsonl(tmp_path / "t.jsonl", records)
    assert sources.load(path, 2, 4).tolist() == [[4, 2], [4, 2]]
    assert sources.load(path, 4, 4, (8, 8)).tolist() == [[2, 0, 1, 0], [1, 1, 1, 0]]
    with pytest.raises(ValueError, match=r"t\.jsonl:1: names expert 2, but num_experts is 2"):
        sources.load(path, 2, 2)
    with pytest.raises(ValueError, match="does not divide 3 experts"):
        sources.load(path, 2)


def test_a_file_of_each_rank(tmp_path):
    pytest.importorskip("safetensors")
    for rank in range(2):
        statistics.save_tensorrt(tmp_path / "folder", by_rank(rank), topk=1, rank=rank, files=2)
    assert (sources.load(tmp_path / "folder", 2) == WANT).all()
    parts = statistics.parts_folder(tmp_path / "loads.jsonl")
    parts.mkdir()
    for rank in range(2):
        statistics.save_jsonl(parts / f"rank{rank}of2.jsonl", by_rank(rank, (5, 6) if rank else (5, 6, 7)))
    with pytest.warns(UserWarning, match="left out"):  # iteration 7, which rank 1 did not see
        assert (sources.load(tmp_path / "loads.jsonl", 2) == WANT).all()
    (parts / "rank1of2.jsonl").unlink()
    with pytest.raises(ValueError, match="1 files of 2 ranks"):
        sources.load(tmp_path / "loads.jsonl", 2)


SENT = np.array([[4, 4, 4, 4], [8, 4, 4, 4]])  # of by_rank(0) and by_rank(1)


def summed(path, name, own=None, sent=SENT, iterations=(5, 6)):
    """As a LoadCollector writes the two ranks' counts: (path, the counts)."""
    parts = [by_rank(rank) for rank in range(2)]
    whole = statistics.LoadStatistics(sum(part.counts for part in parts), parts[0].iterations, parts[0].layers)
    if name == "folder":
        pytest.importorskip("safetensors")
        statistics.save_tensorrt(path / name, whole, topk=1, files=1)
    else:
        statistics.save_jsonl(path / name, whole)
    sources.save(path / name, sent, iterations, own)
    return path / name, whole


KINDS = pytest.mark.parametrize("name", ["loads.jsonl", "folder"])


@KINDS
def test_counts_that_were_summed_say_it_beside(tmp_path, name):
    """Whole for its range, or a wider one, refused for a part, no obstacle to those who read counts."""
    path, whole = summed(tmp_path, name)
    for between in (None, (5, 6), (0, 1 << 31)):
        assert sources.load(path, 2, between=between).tolist() == WANT.tolist()
    assert sources.load(path, 4, 4).tolist() == SENT.tolist()
    with pytest.raises(ValueError, match=r"json.*summed over iterations 5 to 6, not from 5 to 5: leave --between out"):
        sources.load(path, 2, between=(5, 5))
    with pytest.raises(ValueError, match="does not divide 4 experts"):
        sources.load(path, 3)
    assert (statistics.load(path).counts == whole.counts).all()


@KINDS
@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"iterations": (5, 7)},
            r"of another record, of iterations 5 to 7: the counts are of 5 to 6, .*take the .* away",
        ),
        ({"sent": SENT + np.eye(2, 4, dtype=int)}, "of another record"),
        ({"sent": np.pad(SENT, ((0, 0), (0, 2)))}, "of another record"),
        ({"sent": SENT / 3}, "sources of rank 0 are not a list of whole numbers"),
        ({"sent": SENT - 5}, "sources of rank 0 are not a list of whole numbers"),
        ({"sent": SENT[:0]}, "of another record"),
    ],
)
def test_sources_of_other_counts_are_refused(tmp_path, name, wrong, message):
    path, _ = summed(tmp_path, name, **wrong)
    with pytest.raises(ValueError, match=message):
        sources.load(path, 2)


def test_a_folder_that_is_written_again_keeps_no_sources_of_before(tmp_path):
    path, _ = summed(tmp_path, "folder")
    for rank in range(2):
        statistics.save_tensorrt(path, by_rank(rank, (9,)), topk=1, rank=rank, files=2)
    assert sources.load(path, 2).tolist() == [[4, 4], [6, 4]]


@pytest.mark.parametrize("own, said", [(None, ""), ([0, 1], "44.4%"), ([1, 0], "55.6%"), ([0, 2], ""), ([0], "")])
def test_tokens_that_stay_are_known_where_ranks_of_groups_are(tmp_path, capsys, own, said):
    """[[8, 8], [12, 8]]: of 36, 16 go to the like-numbered rank, 20 to the other. Groups need not be neighbours."""
    path, _ = summed(tmp_path, "loads.jsonl", own)
    assert main(["balance", "report", str(path), "--ep", "2", "--sources"]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert ("stay on their rank" in found) == bool(said)
    assert not said or f"{said} stay on their rank" in found


def test_a_rank_without_routers_sends_nothing(tmp_path):
    """A pipeline stage of dense layers, in a run that ended early: its part is empty."""
    parts = statistics.parts_folder(tmp_path / "loads.jsonl")
    parts.mkdir()
    for rank in range(3):
        counted = by_rank(rank) if rank < 2 else statistics.LoadStatistics(np.zeros((2, 0, 0), np.int64), (5, 6), ())
        statistics.save_jsonl(parts / f"rank{rank}of3.jsonl", counted)
    assert sources.load(tmp_path / "loads.jsonl", 2).tolist() == [*WANT.tolist(), [0, 0]]


def test_metrics_of_a_recipe(tmp_path, capsys):
    lines = [{"step": 0, "held_out_loss": 5.5}]
    lines += [{"step": n, "expert_load": [[n, 3, 2, 2]], "rank_sent": [[n, 1], [3, 3]]} for n in (1, 2)]
    path = jsonl(tmp_path / "metrics.jsonl", lines)
    assert sources.load(path, 2).tolist() == [[3, 2], [6, 6]]
    with pytest.raises(ValueError, match="give --ep 2"):
        sources.load(path, 4)
    pytest.importorskip("matplotlib")
    assert main(["balance", "report", str(path), "--ep", "2", "--sources", "--plot", str(tmp_path / "p")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "most 1.41 (rank 1 to rank 0 of its group), least 0.47; 52.9% stay on their rank" in said
    assert "| 0 | 0.71 | 0.47 |" in said and (tmp_path / "p" / "sources.svg").is_file()


def test_what_a_record_cannot_say_is_refused(tmp_path):
    trace = {"step": 7, "layer": 1, "rank": 0, "top_indices": [[0, 2]]}
    sent = {"step": 8, "rank_sent": [[1, 1], [3, 3]]}
    path = jsonl(tmp_path / "t.jsonl", [trace, {**trace, "step": 9}])
    for between, message in (
        ((8, 7), "between is 8 to 7: give the first iteration and a last that is not before"),
        ((8, 8), r"t\.jsonl: has no iteration from 8 to 8 with tokens of ranks; it has 7 to 9: give others"),
        ((10, 99), r"t\.jsonl: has no iteration from 10 to 99"),
    ):
        with pytest.raises(ValueError, match=message):
            sources.load(path, 2, 4, between)
    for num_ranks in (0, -2):
        with pytest.raises(ValueError, match=f"num_ranks is {num_ranks}: give the ranks of a group"):
            sources.load(path, num_ranks, 4)
    for rank in (None, -1, "0", 1.0, True):
        with pytest.raises(ValueError, match=r"t\.jsonl:2: has rank .*: a line of the routing trace names the rank"):
            sources.load(jsonl(path, [trace, {**trace, "rank": rank}]), 2, 4)
    with pytest.raises(ValueError, match=r"t\.jsonl:1: has rank None"):
        sources.load(jsonl(path, [{"step": 7, "top_indices": [[0, 2]]}]), 2, 4)
    for wrong, message in (
        ({"top_indices": [[99999999999]]}, "names expert 99999999999, but there are at most"),
        ({"top_indices": [[0.5]]}, "top_indices are float64"),
        ({"step": 7.5}, "step is 7.5: give an integer"),
    ):
        with pytest.raises(ValueError, match=r"t\.jsonl:1: " + message):
            sources.load(jsonl(path, [trace | wrong]), 2)
    for mixed in ([trace, sent], [sent, trace], [trace | sent]):
        with pytest.raises(
            ValueError,
            match=rf"t\.jsonl:{len(mixed)}: mixes top_indices .* and rank_sent [^,]*, which count .* two ways: give a",
        ):
            sources.load(jsonl(path, mixed), 2, 4)
    assert sources.load(jsonl(path, [trace, sent]), 2, 4, (8, 8)).tolist() == [[1, 1], [3, 3]]
    for other in (trace, sent):
        with pytest.raises(ValueError, match=r"t\.jsonl:2: mixes .* and sources \(--hybrid-ep-load-stats\), which"):
            sources.load(jsonl(path, [other, {"iterations": [7, 8], "sources": [[1, 1, 0, 0]]}]), 2, 4)


def test_files_of_ranks_have_what_is_asked_for(tmp_path):
    parts = statistics.parts_folder(tmp_path / "loads.jsonl")
    parts.mkdir()
    for rank in range(2):
        statistics.save_jsonl(parts / f"rank{rank}of2.jsonl", by_rank(rank))
    assert sources.load(tmp_path / "loads.jsonl", 2, between=(6, 9)).tolist() == [[4, 4], [6, 4]]
    with pytest.raises(
        ValueError, match="has no iteration from 7 to 9 with tokens of ranks; it has 5 to 6: give others"
    ):
        sources.load(tmp_path / "loads.jsonl", 2, between=(7, 9))


def test_wide_groups_get_a_sentence_alone():
    text = sources.describe(np.ones((64, 32), np.int64), np.arange(64) % 32)
    assert "\n" not in text and "3.1% stay on their rank" in text


def test_counts_of_all_ranks_together_say_nothing(tmp_path, capsys):
    statistics.save_jsonl(tmp_path / "own.jsonl", by_rank(0))
    with pytest.raises(ValueError, match="does not say whose tokens it counts; metrics.jsonl"):
        sources.load(tmp_path / "own.jsonl", 2)
    with pytest.raises(ValueError, match="no such file"):
        sources.load(tmp_path / "nowhere", 2)
    for more, message in (
        (["--sources"], "needs --ep"),
        (["--layout", "tensorrt", "--sources"], "nothing but its table"),
    ):
        assert main(["balance", "report", str(tmp_path / "own.jsonl"), *more]) == 2
        assert message in capsys.readouterr().err


def test_the_layout_that_tensorrt_users_know(tmp_path, capsys):
    """Ranks of 2 and 2 experts: means, the sample's standard deviation, (max - mean) / mean, as their script says."""
    statistics.save_jsonl(tmp_path / "own.jsonl", by_rank(4))
    assert main(["balance", "report", str(tmp_path / "own.jsonl"), "--ep", "2", "--layout", "tensorrt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Load statistics:" and lines[1].split() == ["mean", "std", "imbalance-ratio"]
    assert [line.split() for line in lines[2:]] == [
        [name, "4.000000", "2.828427", "0.500000"] for name in ("1", "2", "average")
    ]
    assert len({len(line) for line in lines[1:]}) == 1
    assert "nan" in report.tensorrt_table(report.report(by_rank(0), 1), 1)  # one rank has no deviation
