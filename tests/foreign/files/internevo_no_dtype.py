JOB_NAME = "baseline"
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=False, overlap_sync_param=False, reduce_bucket_size=2**26, clip_grad_norm=2.0
)
model = dict(num_attention_heads=8, hidden_size=512, num_layers=6, vocab_size=32000, norm_type="rmsnorm")
parallel = dict(zero1=4, tensor=1, pipeline=dict(size=1))
