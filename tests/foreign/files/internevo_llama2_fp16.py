JOB_NAME = "7b_llama2_train"
model_type = "LLAMA2"
DO_ALERT = False

VOCAB_SIZE = 32000
SEQ_LEN = 2048
HIDDEN_SIZE = 4096
NUM_ATTENTION_HEAD = 32
NUM_KV_ATTENTION_HEAD = 32
MLP_RATIO = 2.6875
NUM_LAYER = 32

ckpt = dict(enable_save_ckpt=False, auto_resume=True, checkpoint_every=50)
data = dict(
    seq_len=SEQ_LEN,
    micro_num=8,
    micro_bsz=1,
    total_steps=20,
    rampup_batch_size="",
    train_folder=None,
    valid_folder=None,
)
grad_scaler = dict(
    fp16=dict(initial_scale=2**18, min_scale=2, growth_interval=2000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=1,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=False,
    overlap_sync_param=False,
    reduce_bucket_size=512 * 1024 * 1024,
    clip_grad_norm=1.0,
)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)

use_fp32_norm = False
model = dict(
    checkpoint=0.5,
    num_chunks=2,
    num_attention_heads=NUM_ATTENTION_HEAD,
    embed_split_hidden=True,
    vocab_size=VOCAB_SIZE,
    embed_grad_scale=1,
    parallel_output=True,
    hidden_size=HIDDEN_SIZE,
    num_layers=NUM_LAYER,
    no_bias=True,
    mlp_ratio=MLP_RATIO,
    apply_post_layer_norm=False,
    dtype="torch.float16",
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-6,
    num_kv_attention_heads=NUM_KV_ATTENTION_HEAD,
    use_flash_attn=True,
)
parallel = dict(
    zero1=dict(size=-1, fsdp=False),
    tensor=dict(size=4, mode="fsp"),
    pipeline=dict(size=2, interleaved_overlap=True),
    weight=dict(size=1, overlap=True, memory_pool=True),
)
cudnn_deterministic = False
monitor = dict(alert=dict(enable_feishu_alert=DO_ALERT), tensorboard=dict(queue_max_length=10))
