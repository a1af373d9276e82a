"""The law of canonical numerics: every layout of tensor, pipeline and data ranks trains the same
model, bit for bit."""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load, save
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling
from models.decoder.virtual_stage import VirtualStage
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.pipeline.kinds import KINDS
from tests.layouts import SAMPLES, Result, Run, batches, make_engine, share_of, train, train_all
from tests.ranks import run_ranks

LLAMA = {
    "family": "llama",
    "vocab": 67,
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
}
GPT2 = {
    "family": "gpt2",
    "vocab": 67,
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "max_positions": 16,
    "tied": True,
}
GPT2 |= {"dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}
MIXTRAL = LLAMA | {
    "family": "mixtral",
    "experts": 4,
    "experts_per_token": 2,
    "router_aux_loss": 0.01,
    "router_z_loss": 0.01,
    "z_loss": 0.01,
}
WIDE = LLAMA | {"hidden": 256, "ffn": 512}  # shards of whole blocks of 128
LATENT = LLAMA | {"family": "deepseek_v3", "kv_heads": 4, "bias": True}
LATENT |= {
    "latent": {"query_rank": 24, "kv_rank": 16, "rope_dim": 8, "nope_dim": 12, "value_dim": 16}
}
# fewer heads of keys than virtual ranks
DELTA_NET = MIXTRAL | {"family": "qwen3_next", "shared_experts": 32, "shared_gate": True}
DELTA_NET |= {
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12},
    "delta_layers": (0,),
}
KIMI_DELTA = LATENT | {
    "family": "kimi_linear",
    "bias": False,
    "delta_net": {
        "key_heads": 4,
        "value_heads": 4,
        "key_dim": 8,
        "value_dim": 12,
        "gate_rank": 16,
    },
    "delta_layers": (0,),
}
# Mixers whose groups the virtual ranks share out, and experts beside a feed-forward.
HYBRID = LLAMA | {
    "family": "nemotron_h",
    "hybrid_pattern": "M*E-",
    "mamba": {"heads": 8, "head_dim": 6, "state_dim": 10, "groups": 4},
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 32,
    "dense_ffn": 64,
}
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "deepseek_v3": LATENT,
    "qwen3_next": DELTA_NET,
    "kimi_linear": KIMI_DELTA,
    "nemotron_h": HYBRID,
}
FALLING = LossScaling("dynamic", initial=2.0**20, hysteresis=1)  # its first steps overflow
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16"},
    "fp16": {"compute": "fp16", "scaling": FALLING},
    "delayed": {"compute": "bf16", "changes": {"fp8": FP8Recipe(history_length=2)}},
    "current": {"compute": "bf16", "changes": {"fp8": FP8Recipe(kind="current")}},
    "stored": {"compute": "bf16", "changes": {"fp8": FP8Recipe(kind="current", parameters=True)}},
    "blockwise": {
        "compute": "bf16",
        "changes": {"fp8": FP8Recipe(kind="blockwise")},
        "model": WIDE,
    },
    "stochastic": {"compute": "bf16", "changes": {"rounding": "stochastic"}},
}
WHOLE = Recompute(fraction=1.0)
PARTS = Recompute(modules=("attention", "activation", "norm"))
LAYOUTS: list[tuple[int, int, int, str, int]] = [  # tp, pp, dp, schedule, zero_size
    *((tp, 1, 1, "1f1b", 0) for tp in (2, 4)),
    *((1, 2, 1, kind, 0) for kind in ("gpipe", "zb-v", "interleaved")),
    *((1, 4, 1, kind, 0) for kind in ("1f1b", "zb-h1")),
    *((1, 1, dp, "1f1b", zero) for dp, zero in ((2, 0), (2, 1), (4, 0), (4, 2))),
    *((2, 2, 1, kind, 0) for kind in ("1f1b", "zb-h2", "interleaved")),
    *((2, 1, 2, "1f1b", zero) for zero in (0, 1)),
    *((1, 2, 2, kind, zero) for kind, zero in (("1f1b", 0), ("zb-v", 1))),
    *((2, 2, 2, kind, zero) for kind, zero in (("1f1b", 0), ("zb-h1", 1))),
    *((4, 2, 1, "1f1b", 0), (2, 4, 1, "gpipe", 0), (4, 1, 2, "1f1b", 0), (2, 1, 4, "1f1b", 2)),
    *((1, 2, 4, "1f1b", 0), (1, 4, 2, "zb-h1", 0)),
]
NORMS = (2.0, 3.0, float("inf"))
GRID = [  # layouts of the same run on one process follow each other
    (name, how, norm, layout)
    for name in MODELS
    for how in PRECISIONS
    for first, norm in enumerate(NORMS)
    for layout in LAYOUTS[first :: len(NORMS)]
]


def run_of(name: str, precision: str = "fp32", **others: Any) -> Run:
    """One micro-batch a step, so that pipelines of any length add the same gradients."""
    usual = {"model": MODELS[name], "shards": 4, "micro_batch": SAMPLES, "clip": 0.0}
    return Run(**usual | PRECISIONS[precision] | others)


def require_equal(a: Result, b: Result) -> None:
    """The losses, gradients and weights of two runs have the same bits; each run skipped the same
    steps."""
    assert [report.loss for report in a.reports] == [report.loss for report in b.reports]
    assert [repr(report.grad_norm) for report in a.reports] == [
        repr(report.grad_norm) for report in b.reports
    ]
    assert [report.outcome for report in a.reports] == [report.outcome for report in b.reports]
    assert [report.num_zeros for report in a.reports] == [report.num_zeros for report in b.reports]
    assert [repr(report.routers) for report in a.reports] == [
        repr(report.routers) for report in b.reports
    ]
    assert [report.z_loss for report in a.reports] == [report.z_loss for report in b.reports]
    assert a.after.keys() == b.after.keys()
    assert a.scaler == b.scaler
    wrong = [name for name in a.after if not torch.equal(a.after[name], b.after[name])]
    for ours, theirs in zip(a.grads, b.grads, strict=True):
        wrong += [
            f"gradient of {name}" for name in ours if not torch.equal(ours[name], theirs[name])
        ]
    assert not wrong, f"{len(wrong)} tensors differ: {wrong[:5]}"
    assert any(not torch.equal(a.before[name], a.after[name]) for name in a.after), (
        "nothing was trained"
    )


@pytest.mark.slow
def test_two_processes_train_the_bits_of_one() -> None:
    """Fewer key-value heads than virtual ranks, a tied and odd vocabulary with dropout, experts."""
    # of layers of several kinds one of each
    shallow = {
        name: model if "hybrid_pattern" in model else model | {"layers": 1}
        for name, model in MODELS.items()
    }
    runs = [run_of(name, "bf16", steps=2, model=shallow[name]) for name in MODELS]
    for alone, shared in zip(train_all(runs), train_all(runs, tp=2), strict=True):
        require_equal(alone, shared)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "kind"), [(1, 2, 1, "1f1b"), (2, 2, 1, "zb-h1"), (4, 1, 2, "1f1b")]
)
def test_layers_of_one_branch_have_the_bits_of_one_process(
    tp: int, pp: int, dp: int, kind: str
) -> None:
    """Whatever letters are on a pipeline rank: mixers and attention on one, experts on another."""
    run = run_of("nemotron_h", "bf16", micro_batch=2, clip=0.5)
    require_equal(train(run), train(replace(run, kind=kind), tp=tp, pp=pp, dp=dp))


def test_a_canonical_run_is_the_model_itself() -> None:
    """In float64 it agrees with the fast sums to rounding, and cutting the sequence changes no
    bit."""
    fast = run_of("gpt2", compute="fp64", steps=2, shards=0, model=GPT2 | {"layers": 1})
    plain, canonical, cut = train_all(
        [fast, replace(fast, shards=4), replace(fast, shards=4, sequence=True)]
    )
    for name, weights in plain.after.items():
        torch.testing.assert_close(canonical.after[name], weights, rtol=1e-10, atol=1e-12)
    require_equal(canonical, cut)


@pytest.mark.slow
def test_recomputation_changes_no_bit() -> None:
    model = MIXTRAL | {"layers": 1}
    runs = [
        run_of("mixtral", recompute=what, steps=2, model=model) for what in (KEEP, WHOLE, PARTS)
    ]
    keep, whole, parts = train_all(runs)
    require_equal(keep, whole)
    require_equal(keep, parts)


def test_one_virtual_rank_is_the_plain_stage() -> None:
    assert not isinstance(make_engine(None, run_of("llama", shards=1)).stages[0], VirtualStage)
    assert isinstance(make_engine(None, run_of("llama")).stages[0], VirtualStage)


def test_names_and_parameters_of_virtual_ranks_lie_side_by_side() -> None:
    stage = make_engine(None, run_of("llama", shards=2)).stages[0]
    names = [name for name, _ in stage.named_parameters()]
    assert names[:2] == ["shard0.head", "shard1.head"]
    assert len(names) == len(set(names)) == len(list(stage.parameters()))


def clipped(name: str, precision: str, norm: float) -> Run:
    """Four micro-batches a step, clipped by the norm given."""
    run = run_of(name, precision, steps=3, micro_batch=2, clip=0.5, options={"norm": norm})
    if precision == "blockwise":
        return replace(run, steps=3, shards=2, model=MODELS[name] | {"hidden": 256, "ffn": 512})
    return run


@lru_cache(maxsize=1)
def alone(name: str, precision: str, norm: float) -> Result:
    return train(clipped(name, precision, norm))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("name", "precision", "norm", "layout"), GRID, ids=lambda what: str(what).replace(" ", "")
)
def test_every_layout_trains_the_bits_of_one_process(
    name: str, precision: str, norm: float, layout: tuple[int, int, int, str, int]
) -> None:
    tp, pp, dp, kind, zero_size = layout
    run = clipped(name, precision, norm)
    other = replace(run, kind=kind, zero_size=zero_size, chunks=KINDS[kind].chunks)
    require_equal(alone(name, precision, norm), train(other, tp=min(tp, run.shards), pp=pp, dp=dp))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", KINDS)
def test_deferred_weight_gradients_keep_the_lockstep(kind: str) -> None:
    run = run_of("gpt2", "bf16", steps=2, kind=kind, micro_batch=2, chunks=KINDS[kind].chunks)
    require_equal(train(run, pp=2), train(run, tp=2, pp=2))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", MODELS)
def test_overlapped_reductions_keep_the_lockstep(name: str) -> None:
    run = run_of(name, steps=2, options={"overlap": True, "bucket": 1000})
    require_equal(train(replace(run, options={})), train(run, tp=2, dp=1))


def take_steps(mesh: DeviceMesh, run: Run, folder: Path, first: int, last: int) -> None:
    """The body of each rank: go on from the newest checkpoint in `folder`, if there is one, and
    save."""
    engine = make_engine(mesh, run)
    if first:
        load(checkpoint_path(folder, first), engine.optimizer, engine.fp8)
    for number, batch in list(enumerate(batches(run)))[first:last]:
        engine.step(share_of(mesh, batch), run.lr, number)
    save(folder, last, engine.optimizer, {}, fp8=engine.fp8)


def saved_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    store = Store(checkpoint_path(folder, step))
    return {key: store.read(*key.split("/", 1)) for key in store.index["tensors"]}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp16", "delayed"])
def test_a_run_that_changes_its_layout_three_times_is_the_undisturbed_run(
    tmp_path: Path, name: str, precision: str
) -> None:
    run = run_of(name, precision, steps=5, micro_batch=2, clip=0.5)
    layouts = random.Random(name + precision).sample(
        [(2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1)], 3
    )
    run_ranks(take_steps, {}, run=run, folder=tmp_path / "straight", first=0, last=5)
    for (first, last), (tp, pp, dp) in zip(
        pairwise((0, 1, 2, 3, 5)), [(1, 1, 1), *layouts], strict=True
    ):
        axes = {"pp": pp, "dp": dp, "tp": tp}
        run_ranks(take_steps, axes, run=run, folder=tmp_path / "changing", first=first, last=last)
    straight, changing = (saved_tensors(tmp_path / kind, 5) for kind in ("straight", "changing"))
    assert straight.keys() == changing.keys()
    assert not [key for key in straight if not torch.equal(straight[key], changing[key])]
