"""Names of arguments of torch, Hugging Face and Megatron-LM for what a plan has, with its own."""

from megaprec.kinds import by_name

PLAN = by_name(
    {
        "it is compute=": "dtype precision mixed_precision autocast_dtype torch_dtype",
        "it is parameters=": "params_dtype param_dtype parameter_dtype",
        "it is gradients=": "grad_dtype main_grads_dtype grad_accum_dtype gradient_dtype",
        "it is reduce=": "reduce_dtype grad_reduce_in_fp32 communication_data_type",
        "it is masters=": "master_weights main_params_dtype master_dtype",
        "it is moments=": "exp_avg_dtype exp_avg_sq_dtype moment_dtype",
        "it is keep_fp32=, a tuple of patterns": "keep_batchnorm_fp32",
        "it is residual=": "fp32_residual_connection residual_in_fp32",
        "it is scores=": "attention_softmax_in_fp32",
        "it is scaling=, such as LossScaling('constant', 1024.0)": "loss_scale",
        "it is scaling=, such as LossScaling('dynamic', initial=2.0**16)": (
            "init_scale initial_scale initial_loss_scale grad_scaler"
        ),
        "it is cast_inputs=": "cast_forward_inputs",
    }
)
