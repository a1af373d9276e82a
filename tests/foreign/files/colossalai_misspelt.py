from colossalai.amp import AMP_TYPE

NUM_EPOCHS = 10
fp16 = dict(
    mode=AMP_TYPE.TORCH,
    init_scale=2.0**14,
    growth_intervall=100,
)
clip_grad_norm = 1.0
