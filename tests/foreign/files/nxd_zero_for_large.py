import neuronx_distributed as nxd


def config(args):
    optimizer_config = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
    if args.model_size > 13:
        optimizer_config["zero_one_enabled"] = True
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=8,
        optimizer_config=optimizer_config,
    )
