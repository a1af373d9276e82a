#!/bin/sh
# Trains examples/modes.toml in the modes of six systems and draws how far the loss of each is from that in FP32:
#     sh examples/modes.sh runs/modes.png [key=value ...]
# More keys go to every run, as in: sh examples/modes.sh runs/modes.png train.steps=20 parallel.tensor=2
set -e
picture=$1
shift
more="$*"

run() { # name, then the keys of its mode
    name=$1
    shift
    # shellcheck disable=SC2086
    megaprec train examples/modes.toml "train.folder=runs/modes/$name" "$@" $more
}

run fp32 precision.compute=fp32
run bf16 precision.compute=bf16
run fp16 precision.compute=fp16 precision.initial_scale=65536.0
run nxd 'precision.nxd={optimizer_config={zero_one_enabled=true}}'
run nxd-legacy 'precision.nxd={}' parallel.zero=false
run smp-fsdp 'precision.smp={mixed_precision={param_dtype="bfloat16"}}'
run smp-fp8 'precision.smp={mixed_precision={param_dtype="bfloat16"}, fp8_autocast={enabled=true}}'
run colossalai-torch 'precision.colossalai={fp16={mode="TORCH"}}'
run colossalai-apex-o1 'precision.colossalai={fp16={mode="APEX", opt_level="O1"}}'
run colossalai-apex-o2 'precision.colossalai={fp16={mode="APEX", opt_level="O2"}}'
run colossalai-parallel 'precision.colossalai={fp16={mode="PARALLEL", initial_scale=65536.0}}'
run internevo-bf16 'precision.internevo={dtype="torch.bfloat16"}'
run internevo-tf32 'precision.internevo={dtype="torch.tf32"}'
run nemo-bf16 'precision.nemo={recipe="bf16_mixed"}'
run nemo-fp16 'precision.nemo={recipe="fp16_mixed", fp16_initial_loss_scale=65536.0}'
run nemo-bf16-fp8 'precision.nemo={recipe="bf16_with_fp8_mixed", fp8_param_gather=false}'
run nemo-fp16-fp8 'precision.nemo={recipe="fp16_with_fp8_mixed", fp8_param_gather=false, fp16_initial_loss_scale=65536.0}'
megaprec compare runs/modes/* --against runs/modes/fp32 -o "$picture"
