import os

grad_scaler = dict(fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), max_scale=2**24, hysteresis=2)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True,
    overlap_sync_param=False,
    clip_grad_norm=float(os.environ["CLIP"]),
)
model = dict(num_attention_heads=32, hidden_size=4096, num_layers=32, dtype="torch.bfloat16")
parallel = dict(zero1=dict(size=-1))
