from colossalai.amp import AMP_TYPE

# hyperparameters
BATCH_SIZE = 2048
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 200
WARMUP_EPOCHS = 16

# model
IMG_SIZE = 224
PATCH_SIZE = 16
HIDDEN_SIZE = 1024
DEPTH = 24
NUM_HEADS = 16
CHECKPOINT = True
SEQ_LENGTH = (IMG_SIZE // PATCH_SIZE) ** 2 + 1

# parallel
parallel = dict(
    pipeline=2,
    tensor=dict(mode='1d', size=2),
)

fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**14, hysteresis=1)
clip_grad_norm = 1.0

NUM_MICRO_BATCHES = parallel['pipeline']
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LENGTH, HIDDEN_SIZE)
