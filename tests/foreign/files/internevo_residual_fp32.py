grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
hybrid_zero_optimizer = {
    "overlap_sync_grad": False,
    "overlap_sync_param": False,
    "reduce_bucket_size": 2**28,
    "clip_grad_norm": 1.0,
}
use_fp32_norm = True
model = {
    "num_attention_heads": 12,
    "hidden_size": 768,
    "num_layers": 12,
    "vocab_size": 50304,
    "dtype": "torch.half",
    "norm_type": "layernorm",
    "residual_in_fp32": True,
    "drop_rate": 0.1,
    "attn_drop_rate": 0.0,
}
parallel = {"zero1": {"size": -1}, "tensor": {"size": 1}, "pipeline": {"size": 1}}
