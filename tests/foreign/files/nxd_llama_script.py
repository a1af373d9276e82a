"""Pre-trains a Llama with tensor parallelism and ZeRO-1 on Trainium."""

import argparse
import math
import os
import queue
import time

import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from neuronx_distributed.parallel_layers import parallel_state
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig
from transformers.modeling_utils import PreTrainedModel

# torch.finfo gives the wrong minimum where floats are cast on the device
if os.environ.get("XLA_USE_BF16") or os.environ.get("XLA_DOWNCAST_BF16"):
    PreTrainedModel.get_parameter_dtype = lambda self: torch.bfloat16


class Throughput:
    def __init__(self, batch_size, world_size, grad_accum, window=10):
        self.seqs_per_iteration = batch_size * world_size * grad_accum
        self.window = window
        self.times = queue.Queue()
        self.total = 0.0
        self.start = time.time()

    def get(self):
        passed = time.time() - self.start
        self.total += passed
        self.times.put(passed)
        if self.times.qsize() > self.window:
            self.total -= self.times.get()
        self.start = time.time()
        return self.times.qsize() * self.seqs_per_iteration / self.total


def warmup_cosine(optimizer, warmup, total, floor=0.1):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        share = (step - warmup) / max(1, total - warmup)
        return max(floor, 0.5 * (1.0 + math.cos(math.pi * share)))

    return LambdaLR(optimizer, factor)


def allreduced(value, device):
    loss = torch.zeros(1, dtype=torch.double, device=device) + value
    return xm.all_reduce("sum", loss, groups=parallel_state.get_data_parallel_group(as_list=True))


def main(flags):
    torch.manual_seed(flags.seed)
    precision = {
        "use_master_weights": True,
        "use_fp32_grad_acc": True,
        "use_master_weights_in_ckpt": False,
    }
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=flags.tensor_parallel_size,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=bool(flags.sequence_parallel_enabled),
        activation_checkpoint_config="full",
        mixed_precision_config=precision,
    )
    model = nxd.initialize_parallel_model(nxd_config, build_model, False, LlamaConfig.from_json_file(flags.model_path))
    groups = [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, groups, lr=flags.lr, betas=(0.9, 0.95))
    scheduler = warmup_cosine(optimizer, flags.warmup_steps, flags.max_steps)
    device = xm.xla_device()
    throughput = Throughput(flags.batch_size, parallel_state.get_data_parallel_size(), flags.grad_accum_usteps)
    loader = pl.MpDeviceLoader(batches(flags), device)
    for step, micro in enumerate(loader):
        loss = model(**micro).loss / flags.grad_accum_usteps
        loss.backward()
        if (step + 1) % flags.grad_accum_usteps == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            xm.add_step_closure(lambda value: print(value.item(), throughput.get()), (allreduced(loss, device),))
    nxd.save_checkpoint(flags.output_dir, tag=f"step_{flags.max_steps}", model=model, optimizer=optimizer, use_xser=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", type=str, help="folder of the model's config.json")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup_steps", type=int, default=2000)
    parser.add_argument("--max_steps", type=int, default=10000)
    parser.add_argument("--grad_accum_usteps", type=int, default=64)
    parser.add_argument("--tensor_parallel_size", type=int, default=8)
    parser.add_argument("--sequence_parallel_enabled", action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--output_dir", type=str, default="./output")
    main(parser.parse_args())
