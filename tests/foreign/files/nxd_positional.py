from neuronx_distributed import neuronx_distributed_config

config = neuronx_distributed_config(8, 4, 1, 1, {"num_microbatches": 8}, {"zero_one_enabled": True}, "full")
