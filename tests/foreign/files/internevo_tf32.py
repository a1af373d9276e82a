JOB_NAME = "300m_tf32"
HIDDEN_SIZE = 1024

data = dict(seq_len=1024, micro_num=2, micro_bsz=4, total_steps=2000, train_folder="/mnt/data/train")
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=False, overlap_sync_param=False, reduce_bucket_size=64 * 1024 * 1024, clip_grad_norm=0.8
)
loss = dict(label_smoothing=0.1)
adam = dict(lr=5e-4, adam_beta1=0.9, adam_beta2=0.99, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.1)
use_fp32_norm = False

model = dict(
    num_chunks=1,
    checkpoint=0.25,
    dtype="torch.tf32",
    hidden_size=HIDDEN_SIZE,
    num_layers=24,
    num_attention_heads=HIDDEN_SIZE // 64,
    vocab_size=50304,
    mlp_ratio=4.0,
    norm_type="layernorm",
    layer_norm_epsilon=1e-6,
)
parallel = dict(zero1=dict(size=1), tensor=dict(size=1), pipeline=dict(size=1))
cudnn_deterministic = True
