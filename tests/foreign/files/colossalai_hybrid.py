import argparse

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--tp", type=int, default=2)
    args = parser.parse_args()

    colossalai.launch_from_torch()
    coordinator = DistCoordinator()

    plugin = HybridParallelPlugin(
        tp_size=args.tp,
        pp_size=1,
        precision="bf16",
        zero_stage=1,
        enable_flash_attention=True,
        max_norm=1.0,
    )
    booster = Booster(plugin=plugin)

    config = LlamaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16)
    model = LlamaForCausalLM(config)
    optimizer = HybridAdam(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=1000, warmup_steps=50, eta_min=0.1 * args.lr)
    torch.set_default_dtype(torch.float)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)

    for epoch in range(args.num_epochs):
        coordinator.print_on_master(f"epoch {epoch}")
        for batch in loader(plugin):
            loss = model(**batch)[0]
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
