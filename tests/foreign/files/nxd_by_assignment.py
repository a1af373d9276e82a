import neuronx_distributed as nxd

use_zero_1 = True
checkpoint_masters = True

cfg = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "sequence_parallel": True}
cfg["pipeline_config"] = {"num_microbatches": 32, "virtual_pipeline_size": 1, "auto_partition": True}
cfg["optimizer_config"] = {"zero_one_enabled": use_zero_1, "grad_clipping": True}
cfg["mixed_precision_config"] = {"use_master_weights": True, "use_fp32_grad_acc": False}
cfg["optimizer_config"]["max_grad_norm"] = 2.0
cfg["mixed_precision_config"]["use_master_weights_in_ckpt"] = checkpoint_masters

nxd_config = nxd.neuronx_distributed_config(**cfg)
