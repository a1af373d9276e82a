from colossalai.amp import AMP_TYPE

BATCH_SIZE = 128
DROP_RATE = 0.1
NUM_EPOCHS = 300

# the trial of 2022-03 diverged with a dynamic scale
fp16 = dict(
    mode=AMP_TYPE.APEX,
    opt_level='O2',
    keep_batchnorm_fp32="True",
    loss_scale="128.0",
)

clip_grad_norm = 0.5
gradient_accumulation = 4
cudnn_benchmark = True
logging = dict(root_path=f"./logs/{BATCH_SIZE}")
