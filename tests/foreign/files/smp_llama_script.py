"""Trains a Llama 2 with SMP's tensor parallelism on top of FSDP."""

import argparse
import functools
import logging
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.delayed_param import DelayedParamIniter
from transformers import AutoModelForCausalLM, LlamaConfig

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)

SHARDING = {
    "full": ShardingStrategy.FULL_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
}
DTYPE = torch.bfloat16


def param_groups(model):
    plain, decayed = [], []
    for name, parameter in model.named_parameters():
        (plain if name.endswith("bias") or "norm" in name else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def compute_tflops(tokens_per_second, parameters, world_size):
    return 6 * tokens_per_second * parameters / world_size / 1e12


def evaluate(model, loader, batches=10):
    model.eval()
    total = torch.zeros(1, device="cuda", dtype=torch.float32)
    with torch.no_grad():
        for _, batch in zip(range(batches), loader):
            total += model(input_ids=batch, labels=batch)["loss"].float()
    dist.all_reduce(total)
    model.train()
    return (total / batches / dist.get_world_size()).item()


def main(args):
    tsm.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden_width,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        intermediate_size=11008,
        max_position_embeddings=args.max_context_width,
        use_cache=False,
    )
    with torch.device("meta") if args.delayed_param else nullcontext():
        model = tsm.transform(AutoModelForCausalLM.from_config(config))
    delayed = DelayedParamIniter(model) if args.delayed_param else None
    layer = type(model.model.layers[0])
    precision = MixedPrecision(param_dtype=DTYPE, reduce_dtype=torch.float32, buffer_dtype=DTYPE)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer}),
        mixed_precision=precision,
        sharding_strategy=SHARDING[args.sharding_strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=bool(args.forward_prefetch),
        param_init_fn=delayed.get_param_init_fn() if delayed else None,
        device_id=torch.cuda.current_device(),
        use_orig_params=False,
    )
    optimizer = torch.optim.AdamW(param_groups(model), lr=args.lr, betas=(0.9, 0.95), eps=1e-8)
    began = time.time()
    for step, batch in enumerate(loader(args)):
        loss = model(input_ids=batch, labels=batch)["loss"]
        loss.backward()
        model.clip_grad_norm_(args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and step % args.logging_freq == 0:
            tokens = (step + 1) * batch.numel() * world / (time.time() - began)
            logger.info("step %d loss %.4f tflops %.1f", step, loss.item(), compute_tflops(tokens, 7e9, world))
        if step and step % args.validation_freq == 0:
            logger.info("validation %.4f", evaluate(model, loader(args)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind, default in [("--lr", float, 3e-4), ("--grad_clip", float, 1.0), ("--num_layers", int, 32)]:
        parser.add_argument(name, type=kind, default=default)
    main(parser.parse_args())
