import argparse

import torch
from nemo import lightning as nl

parser = argparse.ArgumentParser()
parser.add_argument("--precision", type=str, default="bf16-mixed")
parser.add_argument("--devices", type=int, default=8)
args = parser.parse_args()

trainer = nl.Trainer(
    devices=args.devices,
    max_steps=100,
    accelerator="gpu",
    plugins=nl.MegatronMixedPrecision(
        precision=args.precision,
        params_dtype=torch.bfloat16 if "bf16" in args.precision else torch.float32,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    ),
)
