"""Pre-trains a small GPT with NeMo, from data or from noise."""

import argparse
import os
import signal

import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.api import train
from nemo.collections.llm.gpt.data import MockDataModule, PreTrainingDataModule
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning import NeMoLogger
from nemo.lightning.pytorch.callbacks import ModelCheckpoint, ParameterDebugger
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.utils.exp_manager import TimingCallback

EXPERIMENT = os.environ.get("EXPERIMENT", "gpt_126m")


def get_args():
    parser = argparse.ArgumentParser(description="Pre-trains a small GPT")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--experiment-dir", type=str, default="/results")
    parser.add_argument("--data-path", type=str, nargs="*")
    parser.add_argument("--index-mapping-dir", type=str)
    parser.add_argument("--seq-length", type=int, default=2048)
    return parser.parse_args()


def data_module(args, tokenizer):
    if not args.data_path:
        return MockDataModule(seq_length=args.seq_length, global_batch_size=32, micro_batch_size=4)
    return PreTrainingDataModule(
        paths=args.data_path,
        seq_length=args.seq_length,
        global_batch_size=32,
        micro_batch_size=4,
        seed=1234,
        tokenizer=tokenizer,
        split="990,9,1",
        index_mapping_dir=args.index_mapping_dir,
    )


def main():
    args = get_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tokenizer = get_nmt_tokenizer("megatron", "GPT2BPETokenizer", vocab_file="vocab.json", merges_file="merges.txt")
    config = llm.GPTConfig(
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=3072,
        num_attention_heads=12,
        seq_length=args.seq_length,
        init_method_std=0.023,
        hidden_dropout=0.1,
        layernorm_epsilon=1e-5,
        make_vocab_size_divisible_by=128,
    )
    model = llm.GPTModel(config, tokenizer=tokenizer)
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=args.tp_size,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True),
        ckpt_include_optimizer=True,
    )
    checkpoint = ModelCheckpoint(
        save_last=True,
        monitor="reduced_train_loss",
        save_top_k=1,
        every_n_train_steps=50,
        dirpath=args.experiment_dir,
    )
    debugger = ParameterDebugger(param_fn=torch.norm, grad_fn=torch.norm, log_on_hooks=["on_train_end"])
    loggers = [TensorBoardLogger(save_dir=args.experiment_dir), WandbLogger(name=EXPERIMENT, offline=True)]
    optimizer = OptimizerConfig(optimizer="adam", lr=args.lr, use_distributed_optimizer=True, bf16=True)
    trainer = nl.Trainer(
        devices=args.devices,
        max_steps=args.max_steps,
        accelerator="gpu",
        strategy=strategy,
        logger=loggers,
        callbacks=[checkpoint, debugger, TimingCallback()],
        log_every_n_steps=1,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
    )
    schedule = CosineAnnealingScheduler(warmup_steps=10, constant_steps=0, min_lr=args.lr / 10)
    train(
        model=model,
        data=data_module(args, tokenizer),
        trainer=trainer,
        log=NeMoLogger(log_dir=args.experiment_dir, name=EXPERIMENT),
        tokenizer="data",
        optim=MegatronOptimizerModule(config=optimizer, lr_scheduler=schedule),
    )


if __name__ == "__main__":
    main()
