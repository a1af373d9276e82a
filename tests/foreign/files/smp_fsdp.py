"""Fine-tunes a GPT-NeoX on p4d with the SageMaker model parallelism library."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

tsm.init()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--limit_all_gathers", type=int, default=1)
    parser.add_argument("--hf_name", type=str, default="EleutherAI/gpt-neox-20b")
    return parser.parse_args()


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = tsm.transform(AutoModelForCausalLM.from_pretrained(args.hf_name))

    dtype = torch.bfloat16
    mixed_precision_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=torch.float32)
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPTNeoXLayer})
    model = FSDP(
        model,
        auto_wrap_policy=wrap,
        mixed_precision=mixed_precision_policy,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=args.limit_all_gathers > 0,
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), lr=args.lr, weight_decay=0.2)
    for step, batch in enumerate(batches(args)):
        loss = model(**batch)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main(parse_args())
