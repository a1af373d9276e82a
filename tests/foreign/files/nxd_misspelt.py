mixed_precision_config = {
    "use_master_weight": True,
    "use_fp32_grad_acc": True,
}
config = {
    "optimizer_config": {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
    "mixed_precision_config": mixed_precision_config,
}
