JOB_NAME = "7b_fp16"
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True, overlap_sync_param=False, reduce_bucket_size=512 * 1024 * 1024, clip_grad_norm=1.0
)
model = dict(
    num_attention_heads=32,
    hidden_size=4096,
    num_layers=32,
    dtype="torch.bfloat16",
    norm_type="rmsnorm",
)
parallel = dict(zero1=dict(size=-1), tensor=dict(size=1), pipeline=dict(size=1))

# no BF16 on these cards
model["dtype"] = "torch.float16"
model.update(dict(num_layers=16))
grad_scaler["fp16"]["initial_scale"] = 2**10
hybrid_zero_optimizer["clip_grad_norm"] /= 2
