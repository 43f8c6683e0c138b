"""tiny_cpu: a 4-layer, 16-expert, top-4 GPT that learns Python source text in minutes on two CPU cores.

Four ranks share the experts and are seen as 2 nodes x 2 ranks, so that every dispatch and combine crosses
the rail and the node as it would on a cluster. fp32, because CPUs without bf16 arithmetic emulate it: the
same step takes about three times as long in bf16, and fp32 makes losses comparable to 1e-6.
"""

from __future__ import annotations

from .config import (
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
)


def tiny_cpu() -> RunConfig:
    """The recipe of `make pretrain`."""
    return RunConfig(
        recipe="tiny_cpu",
        seed=1234,
        model=ModelConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            num_experts=16,
            topk=4,
            moe_ffn_hidden_size=128,
            aux_loss_coeff=1e-2,
            seq_length=256,
            vocab_size=256,
            dtype="fp32",
        ),
        parallel=ParallelConfig(num_ranks=4, expert_parallel_size=4, ranks_per_node=2, dispatcher="hybrid_ep"),
        data=DataConfig(source="python_stdlib", held_out_one_in=20),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, weight_decay=0.1, clip_grad=1.0),
        schedule=ScheduleConfig(
            train_steps=400, warmup_steps=25, micro_batch_size=2, num_microbatches=1, eval_every=50, eval_sequences=64
        ),
        runtime=RuntimeConfig(device="cpu", threads_per_rank=1, torch_compile=False, timeout_s=100.0),
        logging=LoggingConfig(line_every=10, checkpoint_every=200),
    )


def tiny_cpu_smoke() -> RunConfig:
    """tiny_cpu shrunk to seconds, with the same shape of parallelism."""
    return tiny_cpu().derive(
        recipe="tiny_cpu_smoke",
        model={"num_layers": 2, "hidden_size": 64, "moe_ffn_hidden_size": 32, "seq_length": 64},
        schedule={
            "train_steps": 6,
            "warmup_steps": 2,
            "micro_batch_size": 1,
            "eval_every": 3,
            "eval_sequences": 8,
            "must_learn": False,
        },
        logging={"line_every": 1, "checkpoint_every": 100, "wandb": False, "tensorboard": False},
    )
