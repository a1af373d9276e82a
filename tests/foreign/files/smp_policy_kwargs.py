import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

mp_args = dict(param_dtype=torch.float16, reduce_dtype=torch.float32)


def setup(model, args):
    mp_args["buffer_dtype"] = torch.float16
    model = FSDP(model, mixed_precision=MixedPrecision(**mp_args, cast_forward_inputs=True), device_id=args.local_rank)
    scaler = ShardedGradScaler(init_scale=2.0**12, growth_interval=500)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return model, optimizer, scaler


def step(model, optimizer, scaler, batch):
    loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
