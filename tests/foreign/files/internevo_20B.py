_base_model = dict(
    dtype="torch.bfloat16",
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-5,
    vocab_size=103168,
    apply_post_layer_norm=False,
    num_chunks=1,
)
HIDDEN_SIZE = 5120
model = dict(_base_model, num_layers=60, hidden_size=HIDDEN_SIZE, num_attention_heads=40, mlp_ratio=8 / 3)
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
parallel = dict(zero1=dict(size=8), tensor=dict(size=4, mode="msp"), pipeline=dict(size=1))
