import argparse
import os

import neuronx_distributed as nxd
import torch_xla.core.xla_model as xm
from transformers import AutoConfig, LlamaForCausalLM


def build(args):
    model_config = AutoConfig.from_pretrained(args.model_path)
    model_config.use_cache = False

    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        pipeline_config={
            "num_microbatches": args.num_microbatches,
            "auto_partition": True,
            "input_names": ["input_ids", "attention_mask", "labels"],
        },
        optimizer_config={"zero_one_enabled": True, "max_grad_norm": 0.5},
        sequence_parallel=args.use_sequence_parallel,
        activation_checkpoint_config="full" if args.checkpoint_everything else None,
        mixed_precision_config={"use_fp32_grad_acc": True, "use_master_weights_in_ckpt": True},
    )
    model = nxd.initialize_parallel_model(nxd_config, lambda: LlamaForCausalLM(model_config))
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=args.lr)
    return model, optimizer


def train(args):
    model, optimizer = build(args)
    device = xm.xla_device()
    for step, batch in enumerate(loader(args, device)):
        loss = model.run_train(**batch)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.logging_interval == 0 and os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") is None:
            print(step, loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", type=str)
    parser.add_argument("--tensor_parallel_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    train(parser.parse_args())
