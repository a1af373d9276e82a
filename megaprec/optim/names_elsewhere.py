"""Names of arguments of torch, Hugging Face and Megatron-LM, with what stands in their place here:
those of an optimizer, its rule, its groups and its learning rate."""

from megaprec.kinds import by_name

OF_THE_STEP = "it is an argument of the optimizer: ParallelAMPOptimizer(..., {}=...)"
OF_TORCH = (
    "leave it out, or give torch's own class: rule=TorchRule(torch.optim.AdamW, {{{!r}: ...}})"
)
ONE_PASS = "leave it out: an update is one pass over flat buffers"
TORCH_FLAGS = ("amsgrad", "maximize")

OPTIMIZER = by_name(
    {
        "it is of the rule: rule=AdamW(betas=(0.9, 0.95))": (
            "betas adam_betas adam_beta1 adam_beta2 beta1 beta2"
        ),
        "it is of the rule: rule=AdamW(eps=1e-8)": "eps adam_eps adam_epsilon epsilon",
        "it is of the rule: rule=SGD(momentum=0.9)": "momentum nesterov sgd_momentum dampening",
        "it is rule=, such as rule=AdamW()": "optim optimizer optimizer_cls optimizer_class",
        "it is lr=": "learning_rate max_lr peak_lr",
        "it is weight_decay=": "wd adam_weight_decay",
        "it is clip=": (
            "max_grad_norm clip_grad grad_clip clip_grad_norm max_norm gradient_clipping "
            "gradient_clip_val"
        ),
        "it is norm=": "norm_type p_norm",
        "it is zero_size=": (
            "zero zero_stage use_distributed_optimizer shard_optimizer_state distributed_optimizer"
        ),
        "it is shard_gradients=": "shard_grads reshard_gradients",
        "it is shard_weights=": (
            "shard_params shard_parameters fully_shard full_shard reshard_after_forward"
        ),
        "it is overlap=": "overlap_grad_reduce overlap_communication overlap_comm",
        "it is bucket=": "bucket_size bucket_cap_mb reduce_bucket_size",
        "it is ema=": "ema_decay use_ema",
        "it is offload=HostMemory()": "cpu_offload offload_optimizer optimizer_cpu_offload",
        "it is groups=, such as groups=[Group('*.bias', weight_decay=0.0)]": (
            "param_groups no_decay no_weight_decay_cond optimizer_grouped_parameters"
        ),
        "give the modules first, as a list: ParallelAMPOptimizer([model], ...)": (
            "params model module modules model_parameters"
        ),
        "give a plan second, such as plan('bf16')": (
            "precision dtype bf16 fp16 params_dtype mixed_precision cast_model_type"
        ),
        "it is of the plan: plan('fp16', LossScaling('dynamic', initial=2.0**16))": (
            "loss_scale initial_loss_scale init_scale grad_scaler scaler growth_interval "
            "growth_factor backoff_factor hysteresis min_loss_scale loss_scale_window"
        ),
        "give a mesh third, such as make_mesh(dp=8)": "process_group group device_mesh dp_group",
        "every report has num_zeros": "log_num_zeros_in_grad",
        "give each step its rate: optimizer.step(lr=...) or LRSchedule": (
            "min_lr lr_scheduler lr_scheduler_type scheduler warmup_steps warmup_ratio"
        ),
        ONE_PASS: "fused foreach capturable differentiable",
    }
) | {name: OF_TORCH.format(name) for name in TORCH_FLAGS}

RULE = (
    {name: OF_THE_STEP.format(name) for name in ("lr", "weight_decay")}
    | {"learning_rate": OF_THE_STEP.format("lr")}
    | {name: OF_TORCH.format(name) for name in TORCH_FLAGS}
    | by_name(
        {
            "it is betas=, a pair": "adam_betas adam_beta1 adam_beta2 beta1 beta2",
            "it is eps=": "adam_eps adam_epsilon epsilon",
            "it is momentum=": "sgd_momentum",
            ONE_PASS: "fused foreach capturable differentiable",
            "give the modules to the optimizer: ParallelAMPOptimizer([model], ...)": "params",
        }
    )
)

GROUP = by_name(
    {
        "it is pattern=, of names of tensors": "params name names match",
        "it is lr=, a factor": "lr_mult lr_scale lr_factor learning_rate",
        "it is weight_decay=, a factor": "wd_mult wd weight_decay_mult",
    }
)

SCHEDULE = by_name(
    {
        "it is kind=": "schedule type lr_scheduler_type decay_style lr_decay_style",
        "it is peak=": "lr learning_rate max_lr",
        "it is final=": "min_lr eta_min end_lr lr_end",
        "it is warmup=": "warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_steps",
        "it is total=": (
            "num_training_steps max_steps total_steps train_iters lr_decay_iters T_max steps"
        ),
        "it is decay=": "decay_steps num_decay_steps lr_wsd_decay_iters",
        "it is tail=": "lr_wsd_decay_style decay_type",
    }
)
