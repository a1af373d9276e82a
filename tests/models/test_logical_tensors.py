"""Whole tensors by logical name become the weights of any layout's stages, before the optimizer is
made."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec import plan
from models import Engine, EngineOptions, ModelConfig, Share, build_stages, load_logical
from models.logical_shapes import logical_shapes
from parallel.pipeline.kinds import schedule
from tests import oracle
from tests.layouts import Fragment, assemble, fragments
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks
from tests.refusals import raises

FAMILIES = {name: MODELS[name] for name in ("gpt2", "llama tied biased", "mixtral", "qwen3_next")}
OPTIONS = EngineOptions(micro_batch=2, seq_length=8)


def drawn(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / 4
        for name, shape in logical_shapes(config).items()
    }


def batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, config.vocab, (4, 9), generator=torch.Generator().manual_seed(6))
    return ids[:, :-1], ids[:, 1:]


def first_step(mesh: DeviceMesh, config: ModelConfig) -> tuple[float, list[Fragment]]:
    """The loss of the first step, and the weights before it."""
    pipeline = mesh["pp"].size()
    planned = schedule("1f1b", pipeline, 2)
    stages = build_stages(config, plan("fp64"), mesh, planned, OPTIONS)
    load_logical(stages.by_number.values(), drawn(config))
    engine = Engine(stages, stages.make_optimizer())
    weights = fragments(engine.optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    tokens, targets = batch(config)
    return engine.step(Share(tokens, targets), 1e-3, 0).loss, weights


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)], ids=lambda x: "tp{} pp{}".format(*x))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_computes_with_these_weights(family: str, layout: tuple[int, int]) -> None:
    config = ModelConfig(**FAMILIES[family])
    tp, pp = layout
    ranks = run_ranks(first_step, {"tp": tp, "pp": pp, "dp": 1}, config=config)
    given = drawn(config)
    taken = assemble([weights for _, weights in ranks])
    assert taken.keys() == given.keys()
    assert all(torch.equal(taken[name], values) for name, values in given.items())
    loss, *_ = oracle.mean_loss(config, given, *batch(config), None)
    for of_rank, _ in ranks:
        assert of_rank == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_that_were_built_blank_have_the_same_weights(family: str) -> None:
    config = ModelConfig(**FAMILIES[family])
    drawn_then_loaded, blank = (
        build_stages(config, plan("fp64"), None, schedule("1f1b", 1, 2), options)
        for options in (OPTIONS, replace(OPTIONS, blank=True))
    )
    for stages in (drawn_then_loaded, blank):
        load_logical(stages.by_number.values(), drawn(config))
    expected = dict(drawn_then_loaded.by_number[0].named_parameters())
    found = dict(blank.by_number[0].named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in found.items())
    losses = [
        Engine(stages, stages.make_optimizer()).step(Share(*batch(config)), 1e-3, 0).loss
        for stages in (drawn_then_loaded, blank)
    ]
    assert losses[0] == losses[1]


def test_a_tensor_that_lacks_or_has_another_shape_changes_nothing() -> None:
    config = ModelConfig(**FAMILIES["gpt2"])
    stages = build_stages(config, plan("fp64"), None, schedule("1f1b", 1, 2), OPTIONS)
    before = [p.clone() for p in stages.by_number[0].parameters()]
    tensors = drawn(config)
    lacking = {name: values for name, values in tensors.items() if name != "final_norm.bias"}
    with raises("model.logical_missing", name="final_norm.bias"):
        load_logical(stages.by_number.values(), lacking)
    with raises("model.logical_shape", name="final_norm.bias", found="[3]"):
        load_logical(stages.by_number.values(), {**tensors, "final_norm.bias": torch.zeros(3)})
    after = stages.by_number[0].parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
