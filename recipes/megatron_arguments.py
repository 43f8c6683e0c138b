"""A `ClusterRun` in Megatron's words: the flags of pretrain_gpt.py, in groups that a person can read.

Checked against the parser and validation of Megatron-Core 0.17, 0.18 and 0.19; the wheel of 0.16 has neither.
"""

from __future__ import annotations

import importlib.util

from .cluster import ClusterRun

Arguments = list[str]


def megatron_arguments(run: ClusterRun, checkpoint_dir: str = "checkpoint", log_dir: str = "tensorboard") -> Arguments:
    """All flags, ready for a shell once quoted. Paths are used as they are."""
    return [
        *_model(run),
        *_attention(run),
        *_moe(run),
        *_parallel(run),
        *_precision(run),
        *_training(run),
        *_data(run),
        *_running(run, checkpoint_dir, log_dir),
        *run.more_flags(),
    ]


def environment(run: ClusterRun) -> dict[str, str]:
    """Variables that Megatron's validation wants set before the ranks start.

    CUDA_DEVICE_MAX_CONNECTIONS, up to Hopper: 1 with tensor parallelism, so that its communication kernels are issued
    before the GEMMs they hide behind; more than 1 where expert communication overlaps, which needs streams that do
    not queue behind one another. Blackwell needs neither; Megatron-FSDP refuses 1.
    """
    found = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if run.expandable_segments else {}
    if run.expandable_segments and run.cuda_graphs != "none":
        found["NCCL_GRAPH_REGISTER"] = "0"  # NCCL would register memory that such segments move
    if not run.hardware.hopper or run.sharding == "megatron_fsdp":
        return found
    if run.overlap:
        return {**found, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return {**found, "CUDA_DEVICE_MAX_CONNECTIONS": "1"} if run.tensor > 1 else found


def has_apex(run: ClusterRun) -> bool:
    """Whether apex's fused kernels are used; `auto` asks this Python."""
    return run.apex == "yes" or (run.apex == "auto" and importlib.util.find_spec("apex") is not None)


def _flags(**values: object) -> Arguments:
    """--name value; True is a bare flag."""
    out: Arguments = []
    for name, value in values.items():
        out.append("--" + name.replace("_", "-"))
        if value is not True:
            out.extend(map(str, value) if isinstance(value, list) else [str(value)])
    return out


def _model(run: ClusterRun) -> Arguments:
    m = run.architecture
    out = _flags(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        swiglu=True,
        disable_bias_linear=True,
        normalization="RMSNorm",
        norm_epsilon=m.norm_epsilon,
        position_embedding_type="rope",
        rotary_base=m.rotary_base,
        untie_embeddings_and_output_weights=True,
        seq_length=run.seq_length,
        max_position_embeddings=max(m.max_positions, run.seq_length),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="transformer_engine",
    )
    if m.num_mtp_layers:
        out += _flags(mtp_num_layers=m.num_mtp_layers, mtp_loss_scaling_factor=0.3)
    return out


def _attention(run: ClusterRun) -> Arguments:
    m = run.architecture
    out = _flags(num_attention_heads=m.num_attention_heads)
    if m.mla:
        out += _flags(
            multi_latent_attention=True,
            q_lora_rank=m.q_lora_rank,
            kv_lora_rank=m.kv_lora_rank,
            qk_head_dim=m.head_dim,
            qk_pos_emb_head_dim=m.rope_head_dim,
            v_head_dim=m.head_dim,
        )
        if run.published_weights:
            out += _flags(
                rotary_scaling_factor=m.rope_factor, mscale=m.rope_mscale, mscale_all_dim=m.rope_mscale_all_dim
            )
    else:
        out += _flags(group_query_attention=True, num_query_groups=m.num_query_groups, kv_channels=m.head_dim)
    return out + (_flags(qk_layernorm=True) if m.qk_layernorm else [])


def _moe(run: ClusterRun) -> Arguments:
    m = run.architecture
    forced = run.balancer == "force"
    out = _flags(
        num_experts=m.num_experts,
        moe_ffn_hidden_size=m.moe_ffn_hidden_size,
        moe_router_topk=m.topk,
        moe_router_score_function=m.score_function,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type=m.aux_loss,
        moe_aux_loss_coeff=m.aux_loss_coeff,
    )
    out += _flags(moe_grouped_gemm=True) if run.balance == "off" else _balance(run)
    if m.num_dense_layers:
        moe = m.num_layers - m.num_dense_layers
        out += _flags(moe_layer_freq=f"([0]*{m.num_dense_layers}+[1]*{moe})")
    if m.shared_ffn_hidden_size:
        out += _flags(moe_shared_expert_intermediate_size=m.shared_ffn_hidden_size)
    if m.router_num_groups:
        out += _flags(moe_router_num_groups=m.router_num_groups, moe_router_group_topk=m.router_group_topk)
    if m.topk_scaling_factor:
        out += _flags(moe_router_topk_scaling_factor=m.topk_scaling_factor)
    if m.expert_bias:
        out += _flags(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=m.bias_update_rate)
    if forced:
        out += _flags(moe_router_force_load_balancing=True)
    if run.fused:
        out += _flags(moe_router_fusion=True)
    if run.dispatcher == "alltoall":
        out += _flags(moe_token_dispatcher_type="alltoall", moe_permute_fusion=True)
    else:
        out += _flags(
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="hybridep",
            hybrid_ep=True,
            hybrid_ep_ranks_per_node=run.domain,
            hybrid_ep_num_sms=run.num_sms,
        )
        if run.dispatch_dtype != "bf16":
            out += _flags(hybrid_ep_dispatch_dtype=run.dispatch_dtype)
    if run.overlap:
        out += _flags(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    return out


def _balance(run: ClusterRun) -> Arguments:
    """The expert balancer, over our grouped experts: Transformer Engine's have no place for clones."""
    out = _flags(hybrid_ep_grouped_gemm=True, hybrid_ep_balance=run.balance)
    if "moe_act" in run.recompute_modules:
        out += _flags(moe_grouped_gemm=True)  # or Megatron would not take it; the experts are ours all the same
    if run.precision == "fp8":
        out += _flags(hybrid_ep_grouped_gemm_precision="fp8")  # --fp8-format says nothing of these experts
    if run.clones:
        out += _flags(hybrid_ep_spare_slots=run.clones, hybrid_ep_balance_clones=run.balance_clones)
        out += _flags(hybrid_ep_balance_push=run.balance_push)
    if run.static_rows != "none":
        out += _flags(hybrid_ep_static_rows=run.static_rows)
    return out + (_flags(hybrid_ep_balance_interval=run.balance_interval) if run.balance in ("slow", "both") else [])


def _parallel(run: ClusterRun) -> Arguments:
    out = _flags(
        tensor_model_parallel_size=run.tensor,
        pipeline_model_parallel_size=run.pipeline,
        expert_model_parallel_size=run.expert,
        expert_tensor_parallel_size=1,
    )
    if run.tensor > 1:
        out += _flags(sequence_parallel=True)
    if run.pipeline_layout:
        out += _flags(pipeline_model_parallel_layout=run.pipeline_layout)
    elif run.pipeline > 1:
        if run.virtual_pipeline > 1:
            out += _flags(num_virtual_stages_per_pipeline_rank=run.virtual_pipeline)
        if run.counts_ends_as_layers:
            out += _flags(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    if run.sharding == "megatron_fsdp":
        return out + _flags(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            use_distributed_optimizer=True,
            no_gradient_accumulation_fusion=True,
        )
    out += _flags(use_distributed_optimizer=True, overlap_grad_reduce=True)
    if run.balance == "off":  # weights are pushed and moved before the forward would have waited for them
        out += _flags(overlap_param_gather=True)
    return out + ([] if has_apex(run) else _flags(no_gradient_accumulation_fusion=True))


def _precision(run: ClusterRun) -> Arguments:
    out = _flags(bf16=True)
    if run.precision == "fp8":
        out += _flags(fp8_format="e4m3", fp8_recipe="blockwise")
    elif run.precision == "mxfp8":
        out += _flags(fp8_format="e4m3", fp8_recipe="mxfp8")
    if run.keeps_fp8_params:
        out += _flags(fp8_param_gather=True)
        if run.precision == "mxfp8":
            out += _flags(reuse_grad_buf_for_mxfp8_param_ag=True)
    if run.recompute == "full":
        out += _flags(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif run.recompute_modules:
        out += _flags(recompute_granularity="selective", recompute_modules=list(run.recompute_modules))
    return out


def _training(run: ClusterRun) -> Arguments:
    out = _flags(
        micro_batch_size=run.micro_batch_size,
        global_batch_size=run.global_batch_size,
        train_iters=run.train_steps,
        lr=run.lr,
        min_lr=f"{run.lr / 10:g}",
        lr_decay_style="cosine",
        lr_warmup_iters=min(2000, run.train_steps // 10),
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        init_method_std=run.architecture.init_method_std,
    )
    if run.moments != "fp32":
        out += _flags(use_precision_aware_optimizer=True, exp_avg_dtype=run.moments, exp_avg_sq_dtype=run.moments)
    if run.fused:
        out += _flags(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    if run.cuda_graphs != "none":  # "scope": its name in all supported releases; 0.19 calls it modules as well
        parts = ["attn", *(["moe_router", "moe_preprocess"] if run.cuda_graphs == "router" else [])]
        out += _flags(cuda_graph_impl="transformer_engine", cuda_graph_scope=parts, te_rng_tracker=True)
    return out + (_flags(manual_gc=True, manual_gc_interval=run.gc_interval) if run.gc_interval else [])


def _data(run: ClusterRun) -> Arguments:
    if run.data_path:
        return _flags(data_path=run.data_path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=run.tokenizer)
    # The null tokenizer adds one token of its own.
    return _flags(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=run.architecture.vocab_size - 1)


def _running(run: ClusterRun, checkpoint_dir: str, log_dir: str) -> Arguments:
    fmt = "fsdp_dtensor" if run.sharding == "megatron_fsdp" else "torch_dist"
    return _flags(
        save=checkpoint_dir,
        load=checkpoint_dir,
        save_interval=run.save_interval,
        ckpt_format=fmt,
        exit_signal_handler=True,
        tensorboard_dir=log_dir,
        log_interval=1,
        log_throughput=True,
        eval_iters=0,
        distributed_timeout_minutes=30,
    )
