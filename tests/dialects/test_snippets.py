"""The examples of the five systems' own documentation, as they stand there, give the plan that the
page describes.

`...` for what a page leaves out, `{TRAINER_ARGS}` for what a reader puts in and `torch.bfloat16()`
are the pages' own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling
from tests.runs import steps, train_on, write_run
from tools.commands.precision import PrecisionOfFile, read_precision
from tools.config.tables.native_keys import native_keys_of
from tools.console.toml import toml

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
NXD = """
mixed_precision_config = {
"use_master_weights": True,
"use_fp32_grad_acc": True,
"use_master_weights_in_ckpt": False,
}
config = {
...
"mixed_precision_config": mixed_precision_config,
}
"""
NXD_OFF = NXD.replace("True", "False")
NXD_DEFAULT = """
# same as `mixed_precision_config = None`
mixed_precision_config = {
"use_master_weights": optimizer_config["zero_one_enabled"],
"use_fp32_grad_acc": optimizer_config["zero_one_enabled"],
"use_master_weights_in_ckpt": False,
}
optimizer_config = {"zero_one_enabled": True}
"""
SMP_FP8 = """
import torch.sagemaker as tsm
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
tsm.init()
model = tsm.transform(model)
fp8_format = Format.HYBRID
fp8_recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=32, amax_compute_algo="max")
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe, fp8_group=tsm.state.world_process_group):
    out = model(inp)
loss = out.sum()
loss.backward()
"""
SMP_FSDP = """
from torch.distributed.fsdp import MixedPrecision
dtype = torch.bfloat16
mixed_precision_policy = MixedPrecision( param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype )
model = FSDP( model, ..., mixed_precision=mixed_precision_policy )
"""
TORCH = """
from colossalai.engine import AMP_TYPE
fp16=dict(
mode=AMP_TYPE.TORCH,
# below are default values for grad scaler
init_scale=2.**16,
growth_factor=2.0,
backoff_factor=0.5,
growth_interval=2000,
enabled=True
)
"""
APEX = """
from colossalai.engine import AMP_TYPE
fp16 = dict(
mode=AMP_TYPE.APEX,
enabled=True,
opt_level='O1',
cast_model_type=None,
patch_torch_functions=None,
keep_batchnorm_fp32=None,
master_weights=None,
loss_scale=None,
cast_model_outputs=None,
num_losses=1,
verbosity=1,
min_loss_scale=None,
max_loss_scale=16777216.0
)
"""
PARALLEL = """
from colossalai.engine import AMP_TYPE
fp16 = dict(
mode=AMP_TYPE.PARALLEL,
clip_grad=0,
log_num_zeros_in_grad=False,
initial_scale=2 ** 32,
min_scale=1,
growth_factor=2,
backoff_factor=0.5,
growth_interval=1000,
hysteresis=2
)
"""
NAIVE_MODEL = """
class MlpModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(4, 1, bias=False)
        self.linear2 = nn.Linear(1, 4, bias=False)
        set_fp32_attr_to_module(model.linear2)
model = MlpModel()
model = NaiveAMPModel(
    model=model,
    output_to_fp32=True,
    dtype=torch.bfloat16(),
    sync_buffer=False,
)
"""
TF32 = """
model = dict(
    checkpoint=False,
    num_attention_heads=NUM_ATTENTION_HEAD,
    embed_split_hidden=True,
    vocab_size=VOCAB_SIZE,
    embed_grad_scale=1,
    parallel_output=True,
    hidden_size=HIDDEN_SIZE,
    num_layers=NUM_LAYER,
    mlp_ratio=MLP_RATIO,
    apply_post_layer_norm=False,
    dtype="torch.tf32",
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-5,
    use_flash_attn=True,
    num_chunks=1,
)
"""
NEMO = """
import nemo_run as run
from nemo import lightning as nl
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed, fp16_mixed
trainer_args = {TRAINER_ARGS}
trainer_bf16 = run.Config(
nl.Trainer,
plugins=bf16_mixed(),
**trainer_args,
)
"""
NEMO_FP16 = NEMO.replace("bf16", "fp16")
NEMO_FP8 = NEMO.replace("_mixed", "_with_fp8_mixed").replace(
    "trainer_args =", "fp8_args = {FP8_ARGS}\ntrainer_args ="
)
NEMO_FP8 = NEMO_FP8.replace("**trainer_args,", "**trainer_args,\n**fp8_args,")
RECIPE = """
from functools import partial
from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed, fp16_mixed
recipe = partial(llm.llama3_8b.pretrain_recipe)()
recipe.trainer.plugins = fp16_mixed()
"""
DELAYED = FP8Recipe(reduce_over="stage", parameters=True)
SNIPPETS: dict[str, tuple[str, dict[str, Any]]] = {
    "nxd": (
        NXD,
        {"compute": BF16, "masters": FP32, "gradients": FP32, "masters_in_checkpoint": False},
    ),
    "nxd default": (NXD_DEFAULT, {"masters": FP32, "gradients": FP32, "rounding": "nearest"}),
    "nxd off": (NXD_OFF, {"masters": BF16, "gradients": BF16, "rounding": "stochastic"}),
    "smp fp8": (SMP_FP8, {"fp8": FP8Recipe(history_length=32)}),
    "smp fsdp": (
        SMP_FSDP,
        {"parameters": BF16, "reduce": BF16, "buffers": BF16, "masters": FP32},
    ),
    "torch": (TORCH, {"parameters": FP32, "compute": FP16}),
    "apex": (APEX, {"parameters": FP32, "compute": FP16}),
    "parallel": (
        PARALLEL,
        {"parameters": FP16, "scaling": LossScaling("dynamic", 2.0**32, maximum=2.0**32)},
    ),
    "naive model": (NAIVE_MODEL, {"parameters": BF16, "output": FP32}),
    "tf32": (TF32, {"parameters": FP32, "tf32": True}),
    "nemo bf16": (NEMO, {"parameters": BF16, "reduce": FP32}),
    "nemo fp16": (NEMO_FP16, {"parameters": FP16, "reduce": FP16}),
    "nemo fp8": (NEMO_FP8, {"parameters": BF16, "fp8": DELAYED}),
    "nemo recipe": (RECIPE, {"parameters": FP16, "scaling": LossScaling("dynamic", 2.0**32)}),
}


def read(name: str, folder: Path) -> PrecisionOfFile:
    path = folder / "snippet.py"
    path.write_text(SNIPPETS[name][0])
    return read_precision(path)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_gives_the_plan_that_its_page_describes(name: str, tmp_path: Path) -> None:
    plan = read(name, tmp_path).plan
    expected = SNIPPETS[name][1]
    assert {field: getattr(plan, field) for field in expected} == expected


def trained(name: str, folder: Path, tensor: int, pipeline: int) -> list[dict[str, Any]]:
    """Five steps of a small run with the snippet's plan; scales begin low enough for all of them to
    be applied."""
    found = read(name, folder)
    scaling = replace(found.plan.scaling, initial=min(found.plan.scaling.initial, 1024.0))
    keys = native_keys_of(replace(found.plan, scaling=scaling))
    keys |= {
        key: entry.value
        for key, entry in found.settings.items()
        if key in ("optimizer.clip", "parallel.zero")
    }
    keys |= {"model.hidden": 32, "model.ffn": 64, "train.steps": 5}
    told = [f"{key}={toml(value)}" for key, value in keys.items()]
    return steps(train_on(write_run(folder), *told, tensor=tensor, pipeline=pipeline))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["smp fp8", "parallel"])
def test_a_snippets_plan_trains_in_a_layout(name: str, tmp_path: Path) -> None:
    assert [step["outcome"] for step in trained(name, tmp_path, 2, 1)] == ["applied"] * 5


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", SNIPPETS)
def test_every_snippets_plan_trains_in_every_layout(
    name: str, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    made = trained(name, tmp_path, tensor, pipeline)
    assert [step["outcome"] for step in made] == ["applied"] * 5
    assert made[-1]["loss"] < made[0]["loss"]
