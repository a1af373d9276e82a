JOB_NAME = "typo"
hybrid_zero_optimizer = dict(clip_grad_norm=1.0)
model = dict(
    num_attention_heads=32,
    hidden_size=4096,
    num_layers=32,
    dtype="torch.bfloat",
)
