"""Settings of the run of May.

That of April had fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O3") and clip_grad_norm = 0.1.
"""

from colossalai.amp import AMP_TYPE

NUM_EPOCHS = 10

# fp16 = dict(mode=AMP_TYPE.TORCH, init_scale=2.0**20)
fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=1 << 12, growth_interval=2_000)
# clip_grad_norm = 5.0
clip_grad_norm = 1.0

CHECKPOINT = f"ckpt/{NUM_EPOCHS}"
DESCRIPTION = "fp16 = dict(mode=AMP_TYPE.APEX); precision = 'fp32'"
