import getpass

JOB_NAME = f"1b_{getpass.getuser()}"
model_type = "INTERNLM"
DO_ALERT = False

SEQ_LEN = 4096
HIDDEN_SIZE = 2048
NUM_ATTENTION_HEAD = 16
NUM_LAYER = 24
VOCAB_SIZE = 92544
CHECKPOINT_EVERY = 1000

ckpt = dict(
    enable_save_ckpt=True,
    save_ckpt_folder=f"boto3:s3://ckpts/{JOB_NAME}",
    load_ckpt_info=None,
    auto_resume=False,
    checkpoint_every=CHECKPOINT_EVERY,
    async_upload=True,
    async_upload_tmp_folder="/dev/shm/internlm_tmp_ckpt/",
    oss_snapshot_freq=int(CHECKPOINT_EVERY / 2),
)
data = dict(
    type="tokenized",
    seq_len=SEQ_LEN,
    micro_num=16,
    micro_bsz=1,
    valid_micro_num=4,
    valid_every=0,
    pack_sample_into_one=False,
    total_steps=100_000,
    skip_batches="",
    min_length=50,
    train_folder="/mnt/petrel/train",
    use_packed_dataset=True,
)
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True,
    overlap_sync_param=False,
    reduce_bucket_size=512 * 1024 * 1024,
    clip_grad_norm=1.0,
)
loss = dict(label_smoothing=0)
adam = dict(
    lr=3e-4,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_beta2_c=0,
    adam_eps=1e-8,
    weight_decay=0.1,
)
lr_scheduler = dict(
    total_steps=data["total_steps"],
    init_steps=0,
    warmup_ratio=0.025,
    eta_min=3e-5,
    last_epoch=-1,
)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
use_fp32_norm = False

model = dict(
    checkpoint=False,
    num_attention_heads=NUM_ATTENTION_HEAD,
    vocab_size=VOCAB_SIZE,
    embed_grad_scale=0.1,
    hidden_size=HIDDEN_SIZE,
    num_layers=NUM_LAYER,
    mlp_ratio=8 / 3,
    apply_post_layer_norm=False,
    dtype="torch.bfloat16",
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-5,
    num_chunks=1,
)
parallel = dict(
    zero1=dict(size=8),
    tensor=dict(size=1, mode="mtp"),
    pipeline=dict(size=1),
    weight=dict(size=1),
)

cudnn_deterministic = False
cudnn_benchmark = False
enable_tb = True
generation = dict(
    ckpt_folder="/mnt/ckpt",
    data_folder="/mnt/gen",
    batch_size=1,
    max_length=100,
    do_sample=True,
    temperature=1.0,
)
monitor = dict(
    alert=dict(
        enable_feishu_alert=DO_ALERT,
        feishu_alert_address=None,
        light_monitor_address=None,
        alert_file_path=f"llm_alter/{JOB_NAME}_alert.log",
    ),
    tensorboard=dict(queue_max_length=10),
)
