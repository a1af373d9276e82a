"""A plan names the rules that it follows and that runs of one model alone confirm, and what it
takes kernels to compute."""

from dataclasses import replace

import pytest

from models.estimate.gpus import gpu_named
from tools.analysis.planning.assumed import assumed_lines
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.config.run_file import RunConfig, load_run

RUN = (
    "model.layers=2",
    "model.hidden=512",
    "model.heads=8",
    "model.ffn=1024",
    'precision.compute="bf16"',
    "train.steps=1",
    "train.global_batch=8",
    "train.micro_batch=1",
    "train.seq_length=512",
)
LLAMA = ('model.family="llama"', "model.vocab=4096")
MAMBA = (
    'model.family="nemotron_h"',
    'model.hybrid_pattern="M-"',
    "model.mamba={heads=16, head_dim=64, state_dim=64, groups=4}",
    "model.vocab=4096",
)


def config_of(*keys: str) -> RunConfig:
    return load_run(None, [*RUN, *keys]).on_device("cuda")


def on_gpu(config: RunConfig) -> Assumptions:
    gpu = gpu_named("H100")
    assert gpu
    assumed = assumptions_of(gpu, config.plan)
    assert assumed
    return assumed


def words(*keys: str, **changes: float) -> str:
    """Return the lines of a run on an H100, in one."""
    config = config_of(*keys)
    lines = assumed_lines(config, replace(on_gpu(config), **changes))
    return " ".join(line.strip() for line in lines)


def test_a_plan_of_a_common_run_names_no_rule_of_one_model() -> None:
    said = words(*LLAMA)
    assert "seen of one model" not in said
    assert "kernel" not in said


@pytest.mark.parametrize("mode", ["off", "leaves"])
def test_layers_that_are_not_compiled_are_said_to_rest_on_one_model(mode: str) -> None:
    compile_key = f'train.compile="{mode}"'
    said = words(*LLAMA, compile_key)
    assert "a layer that is not compiled takes 2.00 ms forward at least: seen of one model" in said
    measured = words(*LLAMA, compile_key, launch=1e-3)
    assert "seen of one model" not in measured


def test_a_head_that_is_not_aligned_is_said_to_rest_on_one_model() -> None:
    odd = 'model.family="llama"', "model.vocab=50257"
    rule = "a head of 50,257 words takes 3 times as long, not aligned: seen of one model"
    assert rule in words(*odd)
    assert "seen of one model" not in words(*odd, 'precision.compute="fp32"')
    assert "seen of one model" not in words(*odd, misaligned=1.0)


@pytest.mark.parametrize("key", ["train.deterministic=false", "train.deterministic=true"])
def test_recurrences_are_said_to_be_timed_as_by_kernels(key: str) -> None:
    """Whatever the run takes, which the plan names in a line of its own."""
    said = words(*MAMBA, key, "train.threads=1")
    assert "recurrent layers are timed as by kernels: plain torch is slower" in said


def test_products_that_are_fused_with_transfers_are_said_not_to_be_timed() -> None:
    keys = "parallel.tensor=2", "parallel.sequence=true", "parallel.async_tensor=true"
    said = "parallel.async_tensor is not timed, and its workspace is not counted"
    assert said in words(*LLAMA, *keys)
    assert said not in words(*LLAMA, *keys[:2])


def test_a_speed_of_memory_is_a_number_without_an_exponent() -> None:
    for bandwidth, expected in ((1708.5, "1,708"), (10234.0, "10,234"), (9.876, "9.88")):
        assert f"memory at {expected} GB/s between products" in words(*LLAMA, bandwidth=bandwidth)
