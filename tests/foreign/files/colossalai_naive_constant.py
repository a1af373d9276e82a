from colossalai.amp import AMP_TYPE

BATCH_SIZE = 64
NUM_EPOCHS = 20
fp16 = dict(mode=AMP_TYPE.NAIVE, dynamic_grad_scale=False, initial_scale=1024, verbose=True)
