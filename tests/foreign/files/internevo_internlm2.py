JOB_NAME = "7b_internlm2_train"
model_type = "INTERNLM2_PUBLIC"
DO_ALERT = False

VOCAB_SIZE = 92544
SEQ_LEN = 4096
HIDDEN_SIZE = 4096
NUM_ATTENTION_HEAD = 32
NUM_KV_ATTENTION_HEAD = 8
MLP_RATIO = 3.5
NUM_LAYER = 32

CHECKPOINT_EVERY = 500
ckpt = dict(
    enable_save_ckpt=True,
    save_ckpt_folder="local:/mnt/ckpt/internlm2",
    auto_resume=False,
    checkpoint_every=CHECKPOINT_EVERY,
)
data = dict(
    seq_len=SEQ_LEN,
    micro_num=4,
    micro_bsz=1,
    valid_every=0,
    total_steps=20000,
    train_folder="/mnt/data/train",
    valid_folder=None,
    empty_cache_and_diag_interval=200,
    diag_outlier_ratio=1.1,
)
grad_scaler = dict(
    fp16=dict(initial_scale=2**14, min_scale=1, growth_interval=500),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**20,
    hysteresis=3,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True,
    overlap_sync_param=True,
    reduce_bucket_size=256 * 1024 * 1024,
    clip_grad_norm=0.5,
)
loss = dict(label_smoothing=0)
adam = dict(lr=3e-5, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(
    total_steps=data["total_steps"],
    init_steps=0,
    warmup_ratio=0.01,
    eta_min=1e-5,
    last_epoch=-1,
)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)

use_fp32_norm = True
model = dict(
    checkpoint=True,
    num_chunks=1,
    num_attention_heads=NUM_ATTENTION_HEAD,
    vocab_size=VOCAB_SIZE,
    embed_grad_scale=1,
    parallel_output=True,
    hidden_size=HIDDEN_SIZE,
    num_layers=NUM_LAYER,
    no_bias=True,
    mlp_ratio=MLP_RATIO,
    apply_post_layer_norm=False,
    dtype="torch.bfloat16",
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-5,
    num_kv_attention_heads=NUM_KV_ATTENTION_HEAD,
    use_flash_attn=True,
)
parallel = dict(
    zero1=dict(size=8),
    tensor=dict(size=2, mode="msp"),
    pipeline=dict(size=2),
    weight=dict(size=1),
)
cudnn_deterministic = False
cudnn_benchmark = False
