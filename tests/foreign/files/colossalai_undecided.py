from colossalai.amp import AMP_TYPE

fp16 = dict(mode=AMP_TYPE.NAIVE) if NUM_GPUS > 1 else None
clip_grad_norm = 1.0
