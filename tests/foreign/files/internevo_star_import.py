from internlm.utils.utils import read_base

with read_base():
    from configs._base_.default_runtime import *
    from configs._base_.models.internlm2_7B import *

JOB_NAME = "7b_train"
SEQ_LEN = 2048
data = dict(seq_len=SEQ_LEN, micro_num=4, micro_bsz=2, total_steps=50000, train_folder=None)
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
loss = dict(label_smoothing=0)
use_fp32_norm = False
