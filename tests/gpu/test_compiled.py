"""What is compiled for a run is as close to float64 as what it stands for, and serves every call of
a step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.engine.engine import Engine
from models.engine.passes import Share
from parallel.leaves import Leaves
from parallel.mesh import make_mesh, world
from tools.config.run_file import RunConfig, load_run
from tools.training.compiling import leaf_calls, try_calls

LARGE = [
    "model.family=llama",
    "model.layers=4",
    "model.hidden=1024",
    "model.heads=8",
    "model.kv_heads=2",
    "model.ffn=3584",
    "model.vocab=128256",
    "model.max_positions=2048",
    "train.seq_length=2048",
    "train.micro_batch=1",
    "train.global_batch=2",
]
SMALL = [
    "model.family=llama",
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=96",
    "model.vocab=300",
    "train.seq_length=32",
    "train.micro_batch=1",
    "train.global_batch=2",
]
SIZES = {"cpu": SMALL, "cuda": LARGE}
CASES: list[Any] = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def loaded(device: str, *keys: str) -> RunConfig:
    return load_run(None, [*SIZES[device], "data.vocab_size=300", "train.steps=2", *keys])


def compiled_leaves(config: RunConfig, device: str) -> Leaves:
    """All forms of the run, each of which must compile and be right."""
    mode = config.compile_mode(device)
    if mode == "off":
        return Leaves()
    calls = leaf_calls(config, config.model, None, torch.device(device))
    forms, reasons = try_calls(calls)
    assert reasons == {}
    names = ", ".join(sorted({call.name for call in forms}))
    return Leaves(forms, names, by_region=mode == "block")


def losses(config: RunConfig, device: str, leaves: Leaves) -> list[float]:
    """The losses of two steps."""
    with world(device):
        engine = Engine.build(
            config.model,
            config.plan,
            make_mesh(device=device),
            config.schedule,
            replace(config.engine_options, leaves=leaves),
        )
        rows = (config.train.global_batch, config.train.seq_length + 1)
        ids = torch.randint(0, config.model.vocab, rows, generator=torch.Generator().manual_seed(0))
        share = Share(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        return [engine.step(share, 1e-3, number).loss for number in range(2)]


@pytest.mark.parametrize("mode", ["leaves", "block"])
@pytest.mark.parametrize("device", CASES)
def test_compiled_steps_are_as_close_to_float64_as_plain_ones(device: str, mode: str) -> None:
    exact_config = loaded(device, "precision.compute=fp64", "train.compile=off")
    exact = losses(exact_config, device, Leaves())
    plain = losses(loaded(device, "precision.compute=bf16"), device, Leaves())
    config = loaded(device, "precision.compute=bf16", f"train.compile={mode}")
    leaves = compiled_leaves(config, device)
    compiled = losses(config, device, leaves)
    assert not leaves.misses, "a call of a step has no compiled form"
    for ours, theirs, expected in zip(compiled, plain, exact, strict=True):
        # four times: two steps and several layers of rounding, not one
        assert abs(ours - expected) <= 4 * abs(theirs - expected) + 2e-3 * expected
