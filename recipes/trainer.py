"""One rank of a training run over Megatron-Core: model, data, optimizer, the loop and what it measures."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from . import checkpoint, step_profile
from .config import RunConfig
from .dispatch_meter import DispatchMeter, imbalance
from .model import build_model, logical_owners, moe_layers
from .text_data import Corpus, build_datasets
from .wait_meter import WaitMeter

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.optimizer.optimizer import MegatronOptimizer

Emit = Callable[[str, dict[str, Any]], None]


def join_process_groups(config: RunConfig, rank: int, store: dist.Store) -> None:
    """gloo world over `store`, then Megatron's groups over the world, then its seeds."""
    torch.set_num_threads(config.runtime.threads_per_rank)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=config.parallel.num_ranks,
        timeout=timedelta(seconds=config.runtime.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=config.parallel.expert_parallel_size, expert_tensor_parallel_size=1
    )
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)


def leave_process_groups(config: RunConfig) -> None:
    """Releases what belongs to the groups, then the groups. Collective."""
    if config.parallel.dispatcher == "hybrid_ep":
        import megatron_patches

        megatron_patches.release_buffers()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


# Of one micro-batch: the loss to differentiate, and what the schedule reports.
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Trainer:
    """Trains one run on this rank. All public methods are collective over the ranks of the job.

    emit(kind, fields): called on every rank; the caller decides whose events count.
    stop_requested(): asked once a step; when it says yes on any rank, all ranks stop after the same step.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        checkpoint_dir: Path,
        resume: bool,
        emit: Emit,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.config, self.emit, self.stop_requested = config, emit, stop_requested
        self.checkpoint_dir = checkpoint_dir
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.train_data, self.held_out_data = build_datasets(config, corpus)
        self.model = build_model(config)
        self.net = self._wrap()
        self.optimizer = self._make_optimizer()
        self.scheduler = self._make_scheduler()
        self.meter = DispatchMeter(moe_layers(self.model), config.model.num_experts)
        self.waits = WaitMeter(config.parallel.expert_parallel_size)
        self.step, self.saved_step = 0, -1
        if resume:
            self.step = checkpoint.load(checkpoint_dir, self.model, self.optimizer, self.scheduler)
            self.saved_step = self.step
        seq = config.model.seq_length
        positions = torch.arange(seq, dtype=torch.int64, device="cpu")
        self.positions = positions.expand(config.schedule.micro_batch_size, seq)
        self.mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device="cpu").triu(1)  # True = may not be seen

    def train(self, stop_after: int | None = None) -> str:
        """Runs to the end (returns "done"), to step `stop_after` ("paused") or to a request ("stopped")."""
        schedule, logging = self.config.schedule, self.config.logging
        num_params = self._count_parameters()
        self.emit("start", {"step": self.step, "num_parameters": num_params})
        if self.step == 0:
            self.emit("held_out", {"step": 0, "held_out_loss": self.evaluate()})
        outcome = "done"
        while self.step < schedule.train_steps:
            record, stop = self._profiled_step() if self.step + 1 == logging.profile_step else self.train_step()
            ends = self.step == schedule.train_steps
            if self.step % schedule.eval_every == 0 or ends:
                record["held_out_loss"] = self.evaluate()
            if self.step % logging.checkpoint_every == 0:
                self.save_checkpoint()
            self.emit("step", record)
            if not ends and (stop or self.step == stop_after):
                outcome = "stopped" if stop else "paused"
                break
        self.save_checkpoint()
        return outcome

    def _profiled_step(self) -> tuple[dict[str, Any], bool]:
        """train_step, and what it launches on this rank as an event."""
        outcome, taken = step_profile.profiled(self.train_step)
        self.emit("profile", {"step": self.step, **taken})
        return outcome

    def train_step(self) -> tuple[dict[str, Any], bool]:
        """One optimizer step; (its metrics, whether any rank was asked to stop)."""
        start = time.perf_counter()
        schedule = self.config.schedule
        self.waits.take()  # of an evaluation since
        lr = self.optimizer.param_groups[0]["lr"]
        self.net.train()
        self.net.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(range(schedule.num_microbatches)),
            model=self.net,
            num_microbatches=schedule.num_microbatches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=schedule.micro_batch_size,
            decoder_seq_length=self.config.model.seq_length,
        )
        owners = [logical_owners(layer) for layer in moe_layers(self.model)]  # the step may end with moves
        ok, grad_norm, _ = self.optimizer.step()
        loss = sum(part["loss"].item() for part in losses) / len(losses)
        if not ok or not math.isfinite(loss):
            raise FloatingPointError(
                f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}; lower optimizer.lr or raise "
                "schedule.warmup_steps"
            )
        self.scheduler.step(increment=1)
        self.step += 1
        record, stop = self._gather_metrics(loss, owners)
        step_s = time.perf_counter() - start
        record = {
            "step": self.step,
            "train_loss": record.pop("train_loss"),
            "grad_norm": float(grad_norm),
            "lr": lr,
            "tokens": self.step * self.config.tokens_per_step,
            "step_s": step_s,
            "tokens_per_s": self.config.tokens_per_step / step_s,
            **record,
        }
        return record, stop

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out sequences, nats a token; the same number on every rank."""
        schedule = self.config.schedule
        self.net.eval()
        total = torch.zeros(1, dtype=torch.float64, device="cpu")
        per_round = self.num_ranks * schedule.micro_batch_size
        for first in range(self.rank * schedule.micro_batch_size, schedule.eval_sequences, per_round):
            tokens, labels = self._batch(self.held_out_data, first)
            total += self.model(tokens, self.positions, self.mask, labels=labels).double().sum()
        dist.all_reduce(total)
        self.net.train()
        return total.item() / (schedule.eval_sequences * self.config.model.seq_length)

    def save_checkpoint(self) -> None:
        """Writes a checkpoint of the current step, unless it exists."""
        if self.saved_step != self.step:
            checkpoint.save(self.checkpoint_dir, self.step, self.model, self.optimizer, self.scheduler)
            self.saved_step = self.step

    def _batch(self, dataset: GPTDataset, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        samples = [dataset[first + i] for i in range(self.config.schedule.micro_batch_size)]
        return torch.stack([s["tokens"] for s in samples]), torch.stack([s["labels"] for s in samples])

    def _forward_step(self, micro_batches: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        schedule = self.config.schedule
        # The data position is a function of the step, so a checkpoint need not hold it.
        batch = self.step * schedule.num_microbatches + next(micro_batches)
        first = (batch * self.num_ranks + self.rank) * schedule.micro_batch_size
        tokens, labels = self._batch(self.train_data, first)
        output = model(tokens, self.positions, self.mask, labels=labels)

        def loss_func(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = per_token.float().mean()
            return loss, {"loss": loss.detach()}

        return output, loss_func

    def _gather_metrics(self, loss: float, owners: list[list[int]]) -> tuple[dict[str, Any], bool]:
        """One small all-gather a step: loss, times, rows per expert and the wish to stop of every rank."""
        seconds, load = self.meter.take()
        ep = self.config.parallel.expert_parallel_size
        scalars = [loss, seconds["dispatch"], seconds["combine"], float(self.stop_requested()), peak_memory_bytes()]
        head = torch.tensor(scalars, dtype=torch.float64, device="cpu")
        mine = torch.cat([head, self.waits.take(), load.double().flatten()])
        gathered = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, mine)
        everyone, waited, sent = torch.stack(gathered).split([len(head), ep, load.numel()], dim=1)
        loss, dispatch_s, combine_s, _ = everyone[:, :4].mean(0).tolist()
        layers, experts = load.shape
        # An EP group is a run of ep consecutive ranks; inside it rows are summed over the senders.
        per_group = sent.reshape(-1, ep, layers, experts).sum(1)
        per_rank = imbalance(per_group.reshape(-1, layers, ep, experts // ep).sum(-1))
        per_expert = per_group.sum(0)
        record = {
            "train_loss": loss,
            "dispatch_s": dispatch_s,
            "combine_s": combine_s,
            "rank_imbalance": per_rank.mean().item(),
            "rank_imbalance_max": per_rank.max().item(),
            "expert_imbalance": imbalance(per_expert).mean().item(),
            "expert_load": per_expert.long().tolist(),
            "rank_sent": sent.reshape(self.num_ranks, layers, ep, -1).sum((1, 3)).long().tolist(),
            "rank_waited": [[round(s, 6) for s in row] for row in waited.tolist()],
            "memory_bytes": int(everyone[:, 4].max()),
        }
        if (migrator := getattr(self.optimizer, "hybrid_ep_migrator", None)) is not None:
            index = torch.tensor(owners, dtype=torch.int64, device="cpu").expand(len(per_group), -1, -1)
            now = imbalance(per_group.gather(2, index).reshape(-1, layers, ep, experts // ep).sum(-1))
            record |= {
                "balanced_imbalance": now.mean().item(),
                "balanced_imbalance_max": now.max().item(),
                "moved_experts": migrator.moved,
            }
        if self.config.parallel.balance in ("exact", "both"):  # the latest micro-batch; all ranks have the same plans
            plans = [layer.token_dispatcher._comm_manager.last_plan for layer in moe_layers(self.model)]
            record["balanced_imbalance"] = sum(plan.imbalance() for plan in plans) / len(plans)
            record["balanced_imbalance_max"] = max(plan.imbalance() for plan in plans)
            record["clones"] = sum(plan.num_copies for plan in plans) / len(plans)
            record["balanced_rank_load"] = [plan.tokens_of_ranks().tolist() for plan in plans]
        return record, bool(everyone[:, 3].any())

    def _count_parameters(self) -> int:
        """Parameters of the whole model: dense ones once, experts of all ranks of an EP group."""
        dense = sum(p.numel() for n, p in self.model.named_parameters() if ".experts." not in n)
        experts = sum(p.numel() for n, p in self.model.named_parameters() if ".experts." in n)
        return dense + experts * self.config.parallel.expert_parallel_size

    def _wrap(self) -> DistributedDataParallel:
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=self.config.optimizer.distributed,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
        )
        megatron_config = self.model.config
        megatron_config.finalize_model_grads_func = finalize_model_grads
        return DistributedDataParallel(megatron_config, ddp_config, self.model)

    def _make_optimizer(self) -> MegatronOptimizer:
        wanted = self.config.optimizer
        return megatron_optimizer.get_megatron_optimizer(  # looked up now: megatron_patches may have wrapped it
            OptimizerConfig(
                optimizer="adam",
                lr=wanted.lr,
                min_lr=wanted.min_lr,
                weight_decay=wanted.weight_decay,
                adam_beta1=wanted.adam_beta1,
                adam_beta2=wanted.adam_beta2,
                adam_eps=wanted.adam_eps,
                clip_grad=wanted.clip_grad,
                bf16=self.model.config.bf16,
                params_dtype=self.model.config.params_dtype,
                use_distributed_optimizer=wanted.distributed,
            ),
            [self.net],
        )

    def _make_scheduler(self) -> OptimizerParamScheduler:
        wanted, schedule = self.config.optimizer, self.config.schedule
        scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=wanted.lr,
            min_lr=wanted.min_lr,
            lr_warmup_steps=schedule.warmup_steps,
            lr_decay_steps=schedule.train_steps,
            lr_decay_style="cosine",
            start_wd=wanted.weight_decay,
            end_wd=wanted.weight_decay,
            wd_incr_steps=schedule.train_steps,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        # The rate of step 0 is 0; training starts with the rate of step 1.
        scheduler.step(increment=1)
        return scheduler


def peak_memory_bytes() -> int:
    """The most that this process has held so far: device memory of torch on a GPU, resident memory on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
