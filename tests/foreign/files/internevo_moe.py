JOB_NAME = "7b_moe_train"
model_type = "INTERNLM_MoE"

HIDDEN_SIZE = 4096
NUM_LAYER = 32

data = dict(seq_len=2048, micro_num=4, micro_bsz=2, total_steps=50000, train_folder="/mnt/data/train")
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
hybrid_zero_optimizer = dict(
    # overlap is not for experts
    overlap_sync_grad=False,
    overlap_sync_param=False,
    reduce_bucket_size=512 * 1024 * 1024,
    clip_grad_norm=1.0,
)
loss = dict(label_smoothing=0, moe_loss_coeff=0.1)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)

use_fp32_norm = False
model = dict(
    checkpoint=False,
    num_attention_heads=32,
    vocab_size=103168,
    hidden_size=HIDDEN_SIZE,
    num_layers=NUM_LAYER,
    mlp_ratio=4 / 3,
    dtype="torch.bfloat16",
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-5,
    num_experts=4,
    moe_use_residual=False,
    moe_type="GShard",
)
parallel = dict(zero1=dict(size=-1), tensor=dict(size=1, mode="mtp"), pipeline=dict(size=1), weight=dict(size=1))
