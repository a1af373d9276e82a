from colossalai.engine import AMP_TYPE

TRAIN_ITERS = 10
DECAY_ITERS = 4
GLOBAL_BATCH_SIZE = 32
EPOCHS = 1

SEQ_LENGTH = 512
DEPTH = 12
HIDDEN_SIZE = 768

parallel = dict(
    pipeline=dict(size=2),
    tensor=dict(size=2, mode='1d'),
)

fp16 = dict(
    mode=AMP_TYPE.PARALLEL,
    clip_grad=1.0,
    initial_scale=2 ** 20,
    growth_interval=500,
    hysteresis=4,
)

hooks = [
    dict(type='LogMetricByEpochHook'),
    dict(type='LossHook'),
]
