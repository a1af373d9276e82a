JOB_NAME = "7b_isp"
grad_scaler = dict(fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), max_scale=2**24, hysteresis=2)
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=False, clip_grad_norm=1.0)
model = dict(
    num_attention_heads=32,
    hidden_size=4096,
    num_layers=32,
    vocab_size=103168,
    mlp_ratio=8 / 3,
    dtype="torch.bfloat16",
)
parallel = dict(
    zero1=dict(size=-1),
    tensor=dict(size=2, mode="isp"),
    pipeline=dict(size=1),
    weight=dict(size=4, overlap=True, memory_pool=True),
)
