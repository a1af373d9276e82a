"""Products that are fused with their transfers over tensor ranks train what separate ones do, and
what a plain model of one process does."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.activation_checkpoint import Recompute
from parallel.leaves import LeafCall, Leaves
from parallel.pipeline.kinds import schedule
from tests import oracle
from tests.layouts import LENGTH, Run, batches, train_all
from tests.models.test_parity import CLOSE, MODELS, differing
from tests.other_systems import slow
from tests.parallel.test_fused_products import refuse_products, told
from tests.ranks import on_ranks
from tests.refusals import raises
from tools.config.run_file import load_run


@dataclass(frozen=True)
class Setting:
    """A layout (tp, pp, dp), models, and what their runs have besides."""

    layout: tuple[int, int, int]
    models: tuple[str, ...] = ("llama tied biased",)
    layers: int = 3
    keys: Mapping[str, Any] = field(default_factory=dict)


MODULES = Recompute(("attention", "activation", "norm"))
SETTINGS = {
    "tensor 2": Setting((2, 1, 1), ("llama tied biased", "deepseek_v2")),
    "other layers": Setting((2, 1, 1), ("gpt2", "nemotron_h with experts", "qwen3_next"), 4),
    "tensor 4": Setting((4, 1, 1), ("llama tied biased", "nemotron_h"), 3),
    "1f1b": Setting((2, 2, 1)),
    "zb-h1": Setting((2, 2, 1), keys={"kind": "zb-h1"}),
    "zb-v": Setting((2, 2, 1), layers=4, keys={"kind": "zb-v"}),
    "layers recomputed": Setting((2, 1, 1), keys={"recompute": Recompute(fraction=1.0)}),
    "modules recomputed": Setting((2, 1, 1), keys={"recompute": MODULES}),
    "ZeRO-2": Setting((2, 1, 2), keys={"options": {"shard_gradients": True}}),
}
FAST = ("tensor 2",)
ONE_LAYER = ["model.vocab=61", "model.layers=1", "model.hidden=16", "model.heads=2", "model.ffn=32"]
ONE_LAYER += ["data.vocab_size=61", "train.steps=1", "train.global_batch=2", "train.micro_batch=2"]
ONE_LAYER += ["train.seq_length=8", "parallel.tensor=2", "parallel.sequence=true"]


@pytest.mark.parametrize(
    "name", [*FAST, *slow(*((name,) for name in SETTINGS if name not in FAST))]
)
def test_fused_products_train_what_separate_ones_and_a_plain_model_do(name: str) -> None:
    setting = SETTINGS[name]
    models = [{**MODELS[model], "layers": setting.layers} for model in setting.models]
    apart = [Run(model, sequence=True, **setting.keys) for model in models]
    fused = [replace(run, async_tensor=True) for run in apart]
    results = train_all([*apart, *fused], *setting.layout)
    for run, theirs, ours in zip(apart, results, results[len(apart) :], strict=False):
        assert not differing(ours.before, theirs.before)
        plain = oracle.train(run.config, theirs.before, batches(run), run.lr, run.clip)
        for step, report in enumerate(ours.reports):
            other = theirs.reports[step]
            for loss in (other.loss, plain[step]["loss"]):
                assert report.loss == pytest.approx(loss, rel=CLOSE)
            for norm in (other.grad_norm, plain[step]["norm"]):
                assert report.grad_norm == pytest.approx(norm, rel=CLOSE)
            require_close(ours.grads[step], theirs.grads[step])
            require_close(ours.grads[step], plain[step]["grads"])
        require_close(ours.after, theirs.after)
        require_close(ours.after, plain[-1]["weights"])


def require_close(ours: dict[str, Tensor], theirs: Any) -> None:
    assert not (wrong := differing(ours, theirs)), f"they differ, by these ratios: {wrong}"


@on_ranks(tp=2)
def test_the_calls_that_are_compiled_are_those_of_separate_products(mesh: DeviceMesh) -> None:
    """Shapes and strides of regions and leaves included: others would run uncompiled."""
    model = ModelConfig(**MODELS["llama tied biased"])
    ((tokens, targets, _), *_) = batches(Run(MODELS["llama tied biased"], steps=1))

    def calls(fused: bool) -> dict[LeafCall, None]:
        noted: dict[LeafCall, None] = {}
        options = EngineOptions(
            len(tokens),
            LENGTH,
            sequence=True,
            async_tensor=fused,
            leaves=Leaves(recorded_calls=noted, by_region=True),
        )
        engine = Engine.build(model, plan("bf16"), mesh, schedule("1f1b", 1, 1), options)
        engine.step(Share(tokens, targets), 1e-2, 0)
        return noted

    separate = calls(fused=False)
    assert calls(fused=True) == separate
    assert {"add norm", "split heads"} <= {call.name for call in separate}


def engine_of_run(mesh: DeviceMesh, *keys: str) -> Engine:
    config = load_run(None, [*ONE_LAYER, *keys])
    return Engine.build(config.model, config.plan, mesh, config.schedule, config.engine_options)


def fused_in_a_step(mesh: DeviceMesh, *keys: str) -> Counter[str]:
    """How often a training step of the run calls each fused product."""
    engine = engine_of_run(mesh, *keys)
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    names: list[str] = []
    told(names)
    engine.step(Share(ids[:, :-1], ids[:, 1:]), 1e-3, 0)
    return Counter(names)


@on_ranks(tp=2)
def test_a_run_with_the_key_fuses_both_pairs_of_a_layer_and_the_head(mesh: DeviceMesh) -> None:
    pairs = 2  # attention, feed-forward
    head = 1
    assert fused_in_a_step(mesh, "parallel.async_tensor=true") == {
        "product_of_gathered": pairs + head,
        "sum_of_products": pairs,
        "gathered_and_product": pairs,
    }
    assert not fused_in_a_step(mesh)


@on_ranks(tp=2)
def test_an_engine_is_not_built_where_products_cannot_be_fused(mesh: DeviceMesh) -> None:
    refuse_products()
    with raises("parallel.async_tensor_unavailable", where="rank 1"):
        engine_of_run(mesh, "parallel.async_tensor=true")
    engine_of_run(mesh)
