"""A stand-in for pretrain_gpt.py, which no wheel contains: its own flag through extra_args_provider,
Megatron's parse_args, then one MoE token dispatcher built the way MoELayer does. Prints what it found as
one line of JSON."""

import json


def add_own_arguments(parser):
    parser.add_argument_group(title="script").add_argument("--own-flag", type=int, default=0)
    return parser


def main():
    from megatron_patches import buffers, cpu

    cpu.install()
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_layer, moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.arguments import parse_args

    args = parse_args(add_own_arguments)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        add_bias_linear=False,
        moe_flex_dispatcher_backend=args.moe_flex_dispatcher_backend,
        use_cpu_initialization=True,
    )
    dispatcher = moe_layer.MoEFlexTokenDispatcher(
        4, [0, 1, 2, 3], config=config, pg_collection=moe_utils.get_default_pg_collection()
    )
    hidden = torch.randn(8, 1, 16)
    routing_map = torch.eye(4, dtype=torch.bool).repeat(2, 1)
    x, probs = dispatcher.dispatch_preprocess(hidden, routing_map, routing_map.float())
    rows, _, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, probs))
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
    manager = type(dispatcher._comm_manager)
    print(
        json.dumps(
            {
                "main": __name__ == "__main__",
                "own_flag": args.own_flag,
                "same": torch.equal(out, hidden),
                "args": [args.hybrid_ep, args.hybrid_ep_ranks_per_node, args.hybrid_ep_num_sms, args.hybrid_ep_timeout],
                "manager": f"{manager.__module__}.{manager.__qualname__}",
                "buffers": len(buffers.live()),
            }
        )
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
