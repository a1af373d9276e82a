from colossalai.amp import AMP_TYPE

BATCH_SIZE = 128
DROP_RATE = 0.1
NUM_EPOCHS = 2
CONFIG_VERSION = (0, 1, 8)

fp16 = dict(mode=AMP_TYPE.APEX)

cudnn_benchmark = True
seed = 1024
