"""Settings of a 7B run on two trn1.32xlarge, imported by train.py."""

import os

SEQ_LEN = 4096
WARMUP_STEPS = 100
TP_DEGREE = 8
OUTPUT_DIR = os.path.join("/fsx", "output", "llama2-7b")

os.environ["NEURON_CC_FLAGS"] = "--model-type transformer --distribution-strategy=llm-training"
os.environ["NEURON_FUSE_SOFTMAX"] = "1"
os.environ.setdefault("MALLOC_ARENA_MAX", "64")

optimizer_config = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0}

mixed_precision_config = {
    "use_master_weights": optimizer_config["zero_one_enabled"],
    "use_fp32_grad_acc": optimizer_config["zero_one_enabled"],
    "use_master_weights_in_ckpt": False,
}

config = {
    "tensor_parallel_size": TP_DEGREE,
    "pipeline_parallel_size": 1,
    "optimizer_config": optimizer_config,
    "sequence_parallel": True,
    "activation_checkpoint_config": "full",
    "mixed_precision_config": mixed_precision_config,
}

adamw = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
