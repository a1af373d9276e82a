from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain


def main() -> None:
    cfg = llama3_8b_pretrain_config()
    cfg.mixed_precision = "bf16_with_fp8_delayed_scaling_mixed"
    cfg.train.train_iters = 20
    cfg.train.global_batch_size = 64
    cfg.validation.eval_interval = 10
    cfg.scheduler.lr_warmup_iters = 2
    cfg.model.tensor_model_parallel_size = 2
    cfg.optimizer.lr = 3e-4
    cfg.optimizer.clip_grad = 0.25
    cfg.logger.log_interval = 1
    cfg.checkpoint.save = "/checkpoints/llama3"
    pretrain(config=cfg, forward_step_func=forward_step)


if __name__ == "__main__":
    main()
