"""GPU recipes: parameters as published, layouts that are refused, memory to the byte, scripts that a shell reads."""

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.perf import memory as counted
from hybrid_ep.perf.step_time import step
from recipes import CLUSTER_RECIPES, get_recipe, megatron_arguments, memory, sbatch
from recipes.cluster_summary import describe, job_of, predict
from recipes.hardware import HARDWARE

VARIANTS = [(name, hardware) for name in CLUSTER_RECIPES for hardware in HARDWARE]
# The tensors of the published checkpoints, summed; DeepSeek-V3 without its multi-token-prediction layer.
PUBLISHED = {
    "deepseek_v3": 671_026_419_200,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert CLUSTER_RECIPES[name]("h100_8x400g").architecture.total_params == PUBLISHED[name]


def said_of_launches(run):
    return [line for line in describe(run).splitlines() if line.startswith("launches of layers are")]


def test_dear_launches_are_said_with_a_larger_micro_batch_that_fits():
    run = CLUSTER_RECIPES["mixtral_8x7b"]("b200_8x400g").derive(micro_batch_size=1)
    (line,) = said_of_launches(run)
    size, seconds = re.search(r"--set micro_batch_size=(\d+) .* take ([\d.]+) s", line).groups()
    larger = run.derive(micro_batch_size=int(size))
    assert memory.check_fits(larger) and step(job_of(larger)).seconds == pytest.approx(float(seconds), abs=0.006)
    assert step(job_of(run)).seconds > 1.1 * float(seconds)
    (full,) = said_of_launches(CLUSTER_RECIPES["deepseek_v3"]("b200_8x400g"))
    assert full.endswith("no larger micro_batch_size fits memory and batch, and overlap allows no more recompute")
    assert not said_of_launches(CLUSTER_RECIPES["mixtral_8x7b"]("gb200_nvl72"))


def test_deepep_stands_beside_the_run_with_the_row_of_its_rate():
    run = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g").derive(expert=32)
    (line,) = [line for line in describe(run).splitlines() if line.startswith("  deepep_v1")]
    assert line.endswith("recipes do not start it; rate of DeepEP V1 docs: H800 at EP 32, fp8, top-4 groups")


@pytest.mark.parametrize("name, hardware", VARIANTS)
def test_every_variant_fits_and_describes_itself(name, hardware):
    run = CLUSTER_RECIPES[name](hardware)
    text = describe(run)
    assert f"{memory.registered_bytes(run):,} bytes" in text
    assert re.search(r"step time: \d+\.\d\d s, [\d,]+ tokens/s and \d+ TFLOP/s a GPU", text)
    layers = "".join("".join(chunks) for chunks in run.stages())
    assert layers.count("t") == run.architecture.num_layers


def test_stage_parameters_add_up_to_the_model():
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    model = run.architecture
    mtp = model.moe_dense_params + model.mtp_extra_params + model.num_experts * model.expert_params
    parts = counted.parameters(job_of(run))
    assert sum(dense + experts * run.expert for dense, experts in parts) == model.total_params + mtp


def test_what_does_not_fit_is_refused_with_the_number_that_is_over():
    run = CLUSTER_RECIPES["mixtral_8x7b"]("h100_8x400g").derive(num_hosts=1, pipeline=1, virtual_pipeline=1)
    over = memory.per_gpu(run).total - memory.budget_bytes(run)
    assert over > 0
    with pytest.raises(ValueError, match=f"{over / 1e9:.1f} GB over the 72.0 GB") as refused:
        memory.check_fits(run)
    assert "; use a longer pipeline," in str(refused.value), "more replicas shard the optimizer alone"
    run = CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(num_hosts=1)
    with pytest.raises(ValueError, match="num_hosts=1: qwen3_30b.*; use num_hosts=4, a longer pipeline"):
        memory.check_fits(run)
    assert memory.check_fits(run.derive(num_hosts=4))


BALANCED = {"precision": "bf16", "overlap": False, "balance": "exact", "moments": "fp32", "recompute": "selective"}


def test_the_balancers_memory_is_counted_and_refused_with_the_number():
    plain = CLUSTER_RECIPES["qwen3_30b_a3b"]("b200_8x400g").derive(precision="bf16", overlap=False)
    run = plain.derive(balance="exact", spare_slots=2)
    expert = 3 * 2048 * 768
    by_kernels = memory.spare_bytes(run) + 2 * expert * 2  # 2 of weights, 4 of gradients; 2 of the GEMM's
    assert 2 * expert * 6 <= memory.spare_bytes(run) < 2 * expert * 6 + 2**20
    for push, clones in (("auto", by_kernels), ("kernels", by_kernels), ("torch", 2 * expert * 16)):
        pushed = run.derive(balance_push=push)
        assert memory.clone_bytes(pushed) == clones == memory.per_gpu(pushed).clones, push
        assert f"({clones:,} bytes)" in describe(pushed)
    over_nodes = run.derive(ranks_per_node=run.domain // 2)
    assert over_nodes.pushed_by == "kernels", "clones stay in the domains of their owners"
    assert 2 * expert * 8 <= memory.clone_bytes(over_nodes) < by_kernels + 2**20
    anywhere = over_nodes.derive(balance_clones="anywhere")
    assert anywhere.pushed_by == "kernels"
    rings = 4 * over_nodes.domain * 64 * 32 * 1024  # on one other node
    far = memory.clone_bytes(anywhere.derive(balance_push="kernels"))
    assert rings <= far - memory.clone_bytes(over_nodes) < rings + 2**18
    by_torch = memory.clone_bytes(anywhere.derive(balance_push="torch"))
    assert by_torch == 2 * expert * 16 and memory.clone_bytes(anywhere) == max(far, by_torch)
    with_clones, without = memory.per_gpu(run), memory.per_gpu(plain)
    assert without.clones == 0
    assert memory.registered_bytes(run) > memory.registered_bytes(plain), "spare slots are columns of the map"
    assert with_clones.activations == without.activations, "our grouped experts make their activations again, too"
    assert memory.per_gpu(plain.derive(balance="slow")).clones == 0
    least = next(
        n for n in range(100, 4000, 100) if memory.per_gpu(run.derive(spare_slots=n)).total > memory.budget_bytes(run)
    )
    over = memory.per_gpu(run.derive(spare_slots=least)).total - memory.budget_bytes(run)
    clones = memory.clone_bytes(run.derive(spare_slots=least))
    with pytest.raises(ValueError, match=rf"clones {clones / 1e9:.1f}, .* {over / 1e9:.1f} GB over the 162.0 GB"):
        describe(run.derive(spare_slots=least))


@pytest.mark.parametrize("name, hardware", VARIANTS)
def test_every_variant_takes_the_balancer(name, hardware):
    run = CLUSTER_RECIPES[name](hardware).derive(**BALANCED)
    flags = megatron_arguments.megatron_arguments(run)
    assert flags[flags.index("--hybrid-ep-balance") + 1] == "exact" and "--hybrid-ep-grouped-gemm" in flags
    assert flags[flags.index("--hybrid-ep-spare-slots") + 1] == "1" and "--hybrid-ep-balance-interval" not in flags
    assert not {"--overlap-param-gather", "--fp8-format"} & set(flags)
    assert {"moe_act", "--moe-grouped-gemm"} <= set(flags), "Megatron takes the one with the other alone"
    kept = megatron_arguments.megatron_arguments(run.derive(recompute="layernorm"))
    assert not {"moe_act", "--moe-grouped-gemm"} & set(kept)
    assert flags[flags.index("--hybrid-ep-balance-clones") + 1] == "auto"
    assert flags[flags.index("--hybrid-ep-balance-push") + 1] == "auto"
    slow = megatron_arguments.megatron_arguments(run.derive(balance="slow", balance_interval=7))
    assert slow[slow.index("--hybrid-ep-balance-interval") + 1] == "7"
    assert not {"--hybrid-ep-spare-slots", "--hybrid-ep-balance-clones", "--hybrid-ep-balance-push"} & set(slow)


def test_the_balancer_keeps_the_overlap_of_a_layout_and_forwards_have_slots_of_their_own():
    shipped = CLUSTER_RECIPES["qwen3_235b_a22b"]("h100_8x400g")
    assert shipped.overlap
    run = shipped.derive(**{name: value for name, value in BALANCED.items() if name != "overlap"})
    flags = megatron_arguments.megatron_arguments(run)
    assert {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--hybrid-ep-grouped-gemm"} <= set(flags)
    plain, weights = run.derive(overlap=False), 3 * 4096 * 1536 * 2
    more = memory.clone_bytes(run) - memory.clone_bytes(plain)
    assert more == memory.spare_bytes(run, gradients=False) and weights <= more < weights + 2**20
    by_torch = [memory.clone_bytes(one.derive(balance_push="torch")) for one in (run, plain)]
    assert by_torch[0] - by_torch[1] == weights


def test_experts_of_the_balancer_multiply_in_fp8_where_the_model_does():
    run = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g")
    flags = megatron_arguments.megatron_arguments(run.derive(**BALANCED | {"precision": "fp8"}))
    assert value(flags, "--hybrid-ep-grouped-gemm-precision") == "fp8" and value(flags, "--fp8-recipe") == "blockwise"
    assert "--hybrid-ep-grouped-gemm-precision" not in megatron_arguments.megatron_arguments(run.derive(**BALANCED))
    told = [predict(run.derive(**BALANCED | {"precision": p})) for p in ("fp8", "bf16")]
    assert ["quantising" in text for text in told] == [True, False] and "quantising" not in predict(run)
    with pytest.raises(ValueError, match="needs --set fp8_params=no$"):
        run.derive(**BALANCED | {"precision": "fp8", "fp8_params": "yes"})
    with pytest.raises(ValueError, match="needs --set precision=bf16$"):
        CLUSTER_RECIPES["deepseek_v3"]("b200_8x400g").derive(**BALANCED | {"precision": "mxfp8"})


def test_quantised_rows_and_static_ones_reach_the_run():
    run = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g").derive(**BALANCED)
    flags = megatron_arguments.megatron_arguments(run)
    assert not {"--hybrid-ep-static-rows", "--hybrid-ep-dispatch-dtype"} & set(flags)
    more = run.derive(static_rows="drop", dispatch_dtype="fp8")
    flags = megatron_arguments.megatron_arguments(more)
    assert flags[flags.index("--hybrid-ep-static-rows") + 1] == "drop"
    assert flags[flags.index("--hybrid-ep-dispatch-dtype") + 1] == "fp8"
    assert run.clones_stay and not more.clones_stay, "static rows want all ranks level: clones anywhere"
    assert run.pushed_by == more.pushed_by == "kernels"
    assert step(job_of(more)).exchange_us < step(job_of(run)).exchange_us


BAD = [
    ({"expert": 7}, "expert=7: must divide the 128 experts; give expert=4 or expert=8"),
    ({"num_hosts": 3, "expert": 16}, "expert=16"),
    (
        {"num_hosts": 1, "pipeline": 4, "expert": 8},
        "num_hosts=1: gives 2 GPUs a stage of pipeline=4, which expert=8 must divide; give num_hosts=4, 32 GPUs, the "
        "fewest with these sizes, or a multiple",
    ),
    ({"global_batch_size": 5}, "; give global_batch_size="),
    ({"precision": "mxfp8"}, "precision='mxfp8'"),
    ({"pipeline_layout": "Et|L"}, "pipeline_layout='Et|L'"),
    ({"expert": "8"}, "must be of type int"),
    ({"experts": 8}, "experts=8: unknown"),
    (
        {"balance": "exact", "precision": "fp8", "sharding": "megatron_fsdp", "pipeline": 1},
        "balance='exact': needs --set sharding=distributed_optimizer",
    ),
    ({"balance": "magic"}, "balance='magic'"),
    ({"spare_slots": 0}, "spare_slots=0"),
    ({"balance_push": "mail"}, "balance_push='mail': use one of auto, kernels, torch"),
    ({"static_rows": "drop"}, "static_rows='drop': only exact balancing makes rows of every rank alike"),
    ({**BALANCED, "balance": "slow", "static_rows": "grow"}, "static_rows='grow': only exact"),
    ({"static_rows": "lose"}, "static_rows='lose': use one of none, grow, drop, raise"),
    ({"dispatch_dtype": "fp8", "dispatcher": "alltoall"}, "dispatch_dtype='fp8': only hybrid_ep sends quantised rows"),
    ({"dispatch_dtype": "int8"}, "dispatch_dtype='int8': use one of bf16, fp8, mxfp8"),
    ({"num_sms": 133}, "num_sms=133: must be at most 132, the SMs of an H100"),
    ({"balance_clones": "far"}, "balance_clones='far': use one of auto, node, near, anywhere"),
    (
        {"balance": "slow", "overlap": True, "dispatcher": "alltoall", "recompute": "selective"},
        "needs --set dispatcher=hybrid_ep",
    ),
    ({"recompute": "layernorm,mlp"}, "leave mlp out: all its layers have experts"),
    ({"recompute": "mla_up_proj"}, "leave mla_up_proj out"),
    ({"recompute": "layernorm,"}, "recompute='layernorm,'"),
    ({"recompute": "moe", "overlap": True}, "leave moe out"),
    ({"fp8_params": "yes"}, "fp8_params='yes'"),
    ({"balance": "slow", "moments": "bf16"}, "needs --set moments=fp32"),
    ({"gc_interval": -1}, "gc_interval=-1"),
    ({"recompute": "some"}, "recompute='some'"),
    ({"data_path": "x"}, "tokenizer=''"),
    ({"pipeline": 0}, "pipeline=0"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[message for _, message in BAD])
def test_impossible_layouts_are_refused(changes, message):
    with pytest.raises(ValueError) as refusal:
        CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(**changes)
    assert message in str(refusal.value)


@pytest.mark.parametrize("value, said", [(True, "yes"), (False, "no")])
def test_yes_and_no_of_yaml_are_words(value, said):
    run = CLUSTER_RECIPES["qwen3_30b_a3b"]("h100_8x400g").derive(apex=value)
    assert run.apex == said
    with pytest.raises(ValueError, match=f"dispatcher='{said}'"):
        run.derive(dispatcher=value)


def test_more_flags_come_last():
    run = CLUSTER_RECIPES["mixtral_8x7b"]("h100_8x400g").derive(megatron_args="--lr 1e-5 --wandb-project 'a b'")
    assert megatron_arguments.megatron_arguments(run)[-4:] == ["--lr", "1e-5", "--wandb-project", "a b"]
    for bad in ("lr 1", "--lr 'x"):
        with pytest.raises(ValueError, match="megatron_args="):
            run.derive(megatron_args=bad)


def test_hybrid_ep_sees_the_nvlink_domain():
    gb200 = megatron_arguments.megatron_arguments(CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72"))
    assert gb200[gb200.index("--hybrid-ep-ranks-per-node") + 1] == "64"


def flags_of(**changes):
    recipe, hardware = changes.pop("recipe", "deepseek_v3"), changes.pop("hardware", "gb200_nvl72")
    return megatron_arguments.megatron_arguments(CLUSTER_RECIPES[recipe](hardware).derive(**changes))


def value(flags, name):
    return flags[flags.index(name) + 1]


def test_recompute_is_a_list_of_megatron_s_modules():
    flags = flags_of(recompute="mla_up_proj,mlp")
    at = flags.index("--recompute-modules")
    assert flags[at + 1 : at + 3] == ["mla_up_proj", "mlp"] and flags[at + 3].startswith("--")
    assert value(flags, "--recompute-granularity") == "selective"
    assert "--recompute-granularity" not in flags_of(recompute="none")
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    kept = {
        r: memory.per_gpu(run.derive(recompute=r)).activations
        for r in ("none", "layernorm", "layernorm,moe_act", "selective", "full")
    }
    assert list(kept.values()) == sorted(kept.values(), reverse=True) and len(set(kept.values())) == len(kept)
    everything = memory.per_gpu(run.derive(recompute="layernorm,mla_up_proj,mlp,moe")).activations
    assert kept["full"] < everything < kept["selective"]


def test_memory_and_speed_options_are_on_where_they_fit():
    on = flags_of()
    assert {
        "--fp8-param-gather",
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "--moe-router-fusion",
        "--manual-gc",
        "--cross-entropy-loss-fusion",
        "--use-precision-aware-optimizer",
    } <= set(on)
    assert value(on, "--exp-avg-dtype") == value(on, "--exp-avg-sq-dtype") == "bf16"  # as the model's report has it
    assert value(on, "--cross-entropy-fusion-impl") == "native" and value(on, "--manual-gc-interval") == "100"
    off = flags_of(fp8_params="no", fusions="no", gc_interval=0, moments="fp32")
    assert not {
        "--fp8-param-gather",
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "--moe-router-fusion",
        "--manual-gc",
        "--cross-entropy-loss-fusion",
        "--use-precision-aware-optimizer",
    } & set(off)
    assert "--fp8-param-gather" not in flags_of(hardware="h100_8x400g")  # blocks of 128: as NVIDIA's recipes
    assert "--moe-router-fusion" not in flags_of(megatron_args="--hybrid-ep-router-guard stop")
    assert "--moe-router-fusion" not in flags_of(**BALANCED) and "--fp8-param-gather" not in flags_of(**BALANCED)


def test_layers_graphed_up_to_dispatch_are_asked_for_by_name():
    flags = flags_of(cuda_graphs="router")
    at = flags.index("--cuda-graph-scope")
    assert flags[at + 1 : at + 5] == ["attn", "moe_router", "moe_preprocess", "--te-rng-tracker"]
    assert value(flags, "--cuda-graph-impl") == "transformer_engine" and "--cuda-graph-impl" not in flags_of()
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72").derive(cuda_graphs="attn")
    assert megatron_arguments.environment(run)["NCCL_GRAPH_REGISTER"] == "0"
    assert "NCCL_GRAPH_REGISTER" not in megatron_arguments.environment(run.derive(expandable_segments=False))
    for recompute in ("full", "layernorm,moe"):
        with pytest.raises(ValueError, match=r"recompute.*cuda_graphs='attn'"):
            run.derive(recompute=recompute, overlap=False)
    with pytest.raises(ValueError, match="cuda_graphs.*none, attn, router"):
        run.derive(cuda_graphs="moe")


def test_bytes_of_moments_and_of_weights_in_8_bits_are_counted():
    run = CLUSTER_RECIPES["deepseek_v3"]("gb200_nvl72")
    need, plain = memory.per_gpu(run), memory.per_gpu(run.derive(moments="fp32", fp8_params="no"))
    assert need.optimizer * 12 == plain.optimizer * 8 and need.weights * 4 == plain.weights * 2
    assert need.activations == plain.activations


def test_down_projections_of_latent_attention_are_whole_on_every_tensor_rank():
    run = CLUSTER_RECIPES["deepseek_v3"]("h100_8x400g")
    m = run.architecture
    one = run.derive(tensor=1, num_hosts=64)
    rank = 3  # layers with experts alone
    layers = "".join(run.stages()[rank]).count("t")
    dense, halved = (counted.parameters(job_of(r))[rank][0] for r in (one, run))
    whole = m.hidden_size * (m.q_lora_rank + m.kv_lora_rank + m.rope_head_dim) + m.q_lora_rank + m.kv_lora_rank
    whole += 2 * m.hidden_size + m.hidden_size * m.num_experts + m.num_experts
    assert "".join(run.stages()[rank]) == "t" * layers and halved == (dense - layers * whole) // 2 + layers * whole


def test_rotary_factors_are_for_published_weights_alone():
    assert not {"--rotary-scaling-factor", "--mscale"} & set(flags_of())
    flags = flags_of(published_weights=True)
    assert [value(flags, f) for f in ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim")] == [
        "40.0",
        "1.0",
        "1.0",
    ]
    assert "--mscale" not in flags_of(recipe="qwen3_30b_a3b", published_weights=True)


NASTY = "a b'; touch /tmp/x; $(false) \"`"
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=12) | st.just(NASTY)


@settings(max_examples=25, deadline=None)
@given(
    command=st.lists(WORDS, min_size=1, max_size=4),
    preflight=st.lists(WORDS, max_size=3),
    container=WORDS,
    value=WORDS,
    workdir=st.text(st.characters(codec="utf-8", exclude_characters="\n\0/."), max_size=12),
)
def test_every_word_survives_the_shell(command, preflight, container, value, workdir):
    """The whole script, run with an srun that notes where it is, a variable of the environment and its words."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "w" / workdir).mkdir(parents=True)
        job = sbatch.Job(
            "j",
            folder,
            f"{folder}/w/{workdir}",
            1,
            1,
            command,
            preflight,
            container=container,
            environment={"SAID": value},
        )
        note = 'printf \'%s\\0\' "$PWD" "$SAID" "$#" "$@" >> "$NOTE"'
        for name, text in (("scontrol", "echo n1 NodeAddr=10.0.0.1"), ("srun", note)):
            (Path(folder) / name).write_text(f"#!/bin/bash\n{text}\n")
            (Path(folder) / name).chmod(0o755)
        env = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "NOTE": f"{folder}/note",
            "LC_ALL": "C.UTF-8",
        }
        subprocess.run(["bash", "-c", sbatch.script(job)], env=env, check=True, capture_output=True)
        said = (Path(folder) / "note").read_bytes().decode().split("\0")[:-1]
    calls = []
    while said:
        calls.append(said[: 3 + int(said[2])])
        said = said[len(calls[-1]) :]
    image = ["--container-image", container, "--container-workdir", job.workdir] if container else []
    assert all(call[0] == f"{folder}/w/{workdir}".rstrip("/") and call[1] == value for call in calls)
    ranks = calls[-1][3:]
    assert ranks[: 2 + len(image)] == ["--kill-on-bad-exit=1", "--label", *image] and ranks[-len(command) :] == command
    assert ranks[-len(command) - 1] == "rank" and len(calls) == 1 + bool(preflight)
    if preflight:
        assert calls[0][3:] == ["--label", "--ntasks-per-node=1", "--ntasks=1", *image, *preflight]


@pytest.fixture
def stub_slurm(tmp_path, monkeypatch):
    """scontrol and srun that do what a job of one node would see; srun does not run its command."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("scontrol", "echo n1 NodeAddr=10.0.0.1"), ("srun", "echo ran")):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")


def test_a_job_that_gets_no_further_gives_up(tmp_path, stub_slurm, monkeypatch):
    folder = tmp_path / "a run, it's mine"
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoint").mkdir()
    job = sbatch.Job("j", "/r", "/", 1, 1, ["x"], ["y"], starts=2)
    text = sbatch.script(job).replace("/r/", shlex.quote(str(folder)) + "/")  # no #SBATCH line can hold such a name

    def start():
        return subprocess.run(["bash", "-c", text], text=True, capture_output=True, check=False)

    assert [start().returncode for _ in range(3)] == [0, 0, 1]
    assert "2 starts from the same checkpoint (none) and none newer: giving up" in start().stdout
    (folder / "checkpoint" / "latest").write_text("step_3")  # progress: as many starts again
    assert [start().returncode for _ in range(3)] == [0, 0, 1]
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # somebody mended it and submitted it anew
    assert start().returncode == 0


def test_variables_reach_the_ranks_quoted(tmp_path):
    job = sbatch.Job("j", "/r", "/", 1, 1, ["x"], ["y"], environment={"A": NASTY})
    (line,) = [line for line in sbatch.script(job).splitlines() if line.startswith("export A=")]
    said = subprocess.run(["bash", "-c", f'{line}; printf %s "$A"'], text=True, capture_output=True, check=True)
    assert said.stdout == NASTY
    with pytest.raises(ValueError, match="environment='A=1; B'"):
        sbatch.Job("j", "/r", "/", 1, 1, ["x"], ["y"], environment={"A=1; B": "c"})


@pytest.mark.parametrize(
    "recipe, hardware, variables",
    [
        ("deepseek_v3", "h100_8x400g", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),  # tensor parallel
        ("qwen3_235b_a22b", "h100_8x400g", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),  # overlap of expert communication
        ("mixtral_8x7b", "h100_8x400g", {}),
        ("deepseek_v3", "gb200_nvl72", {}),
    ],
)
def test_variables_are_those_that_megatron_asks_for(recipe, hardware, variables):
    run = CLUSTER_RECIPES[recipe](hardware)
    grows = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert megatron_arguments.environment(run) == {**variables, **grows}
    assert megatron_arguments.environment(run.derive(expandable_segments=False)) == variables


@pytest.mark.parametrize("field", ["name", "partition", "account", "time"])
def test_slurm_lines_take_no_tricks(field):
    values = dict(name="j", folder="/r", workdir="/", nodes=1, tasks_per_node=1, command=["x"], preflight=["y"])
    with pytest.raises(ValueError, match=field):
        sbatch.Job(**{**values, field: "x\n#SBATCH --uid=0"})


def test_times_are_those_that_slurm_takes():
    """The forms of sbatch's manual, and the words of its parser."""
    values = dict(name="j", folder="/r", workdir="/", nodes=1, tasks_per_node=1, command=["x"], preflight=["y"])
    for good in (
        "",
        "0",
        "90",
        "90:00",
        "24:00:00",
        "2-0",
        "1-12",
        "1-12:30",
        "1-12:30:00",
        "UNLIMITED",
        "infinite",
        "-1",
    ):
        text = sbatch.script(sbatch.Job(**values, time=good))
        assert (f"#SBATCH --time={good}\n" in text) == bool(good)
    for bad in ("banana", "1h", "1-", "-5", "1:2:3:4", "1-2:3:4:5", "1-2-3", ":30", "1.5", "24:00:"):
        with pytest.raises(ValueError, match="is no time of Slurm; write minutes, MM:SS"):
            sbatch.Job(**values, time=bad)


def test_names_of_the_step_model_are_understood():
    run = CLUSTER_RECIPES["mixtral_8x7b"]("b200_8").derive(dispatcher="a2a")
    assert (run.dispatcher, run.hardware.name) == ("alltoall", "b200_8x400g")
    with pytest.raises(ValueError, match="cluster='gb200_nvl36': .* simulate, report, tune and bench predict it"):
        CLUSTER_RECIPES["mixtral_8x7b"]("gb200_nvl36")
    small = get_recipe("tiny_cpu").derive(parallel={"dispatcher": "a2a"})
    assert small.parallel.dispatcher == "alltoall"
