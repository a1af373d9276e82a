"""Delayed histories in Transformer Engine's way: a rule of its own, each micro-batch, whatever the
schedule.

The rule is written down once more, in plain numbers, as `delayed_scaling.cu` and `quantization.py`
of Transformer Engine have it: a history [L] of which row 0 takes the amaxes of the pass that runs;
at its end the amax is the largest of all rows, or row 0, and then the rows are shifted. Row 0 that
is zero changes nothing; an amax that is zero, inf or NaN makes no scale. What a NaN does there
depends on the path; here it is an inf.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.fp8.formats import E4M3, E5M2
from megaprec.fp8.history import AmaxHistory
from megaprec.fp8.linear import FP8Gemm
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from tests.activation_bytes import kept_bytes
from tests.fp8.test_training import MODEL
from tests.layouts import LENGTH, Run, batches, make_engine, share_of
from tests.ranks import run_ranks
from tests.refusals import raises, sentence
from tests.runs import steps, train_on, write_run
from tools.config.run_file import load_run

F32 = np.float32
LARGEST = np.finfo(F32).max


class Plain:
    """One tensor's history and scale."""

    def __init__(self, length: int, algo: str, margin: int, largest: float) -> None:
        self.rows = [F32(0)] * length
        self.algo = algo
        self.limit = F32(largest * 2.0**-margin)
        self.scale = F32(1)

    def record(self, amax: float) -> None:
        self.rows[0] = max(self.rows[0], F32(math.inf if math.isnan(amax) else amax))

    def update(self) -> None:
        last = self.rows[0]
        amax = max(self.rows) if self.algo == "max" else last
        if last == 0:
            return
        if len(self.rows) > 1:
            self.rows = [F32(0), *self.rows[2:], last][: len(self.rows)]
        else:
            self.rows = [F32(0)]
        if 0 < amax < math.inf:
            with np.errstate(over="ignore"):
                self.scale = min(self.limit / amax, LARGEST)


def some_amax(dice: random.Random) -> float:
    kind = dice.random()
    if kind < 0.7:
        return float(F32(math.exp(dice.gauss(0, 5))))
    return dice.choice([0.0, math.inf, math.nan, 1e-44, 3e38])


@pytest.mark.cases(9, sample=1)
@pytest.mark.parametrize("seed", range(20))
def test_the_rule_is_transformer_engines(seed: int) -> None:
    """Random recipes, 300 updates each, of several micro-batches' amaxes or none."""
    dice = random.Random(seed)
    length = dice.randint(1, 6)
    algo = dice.choice(["max", "most_recent"])
    margin = dice.randint(-2, 3)
    recipe = FP8Recipe(history="te", history_length=length, amax_algo=algo, margin=margin)  # type: ignore[arg-type]
    ours = AmaxHistory(recipe, (E4M3, E5M2))
    theirs = [Plain(length, algo, margin, largest) for largest in (448.0, 57344.0)]
    for _ in range(300):
        for i, plain in enumerate(theirs):
            for _ in range(dice.randint(0, 3)):
                amax = some_amax(dice)
                ours.record(i, torch.tensor(amax))
                plain.record(amax)
        ours.roll(lambda now: None)
        for plain in theirs:
            plain.update()
        assert ours.scale.tolist() == [plain.scale for plain in theirs]
        assert ours.history[1:].t().tolist() == [
            list(map(float, _older(plain))) for plain in theirs
        ]


def _older(plain: Plain) -> list[np.float32]:
    """The history without row 0, and without what ours keeps in its place: the oldest."""
    return plain.rows[1:]


def test_an_amax_that_is_not_finite_freezes_the_scale_until_it_leaves_the_window() -> None:
    for history, expected in (
        ("te", [64.0, 64.0, 64.0, 64.0, 32.0]),
        ("step", [64.0, 64.0, 32.0, 32.0, 32.0]),
    ):
        bank = AmaxHistory(FP8Recipe(history=history, history_length=3), (E4M3,))  # type: ignore[arg-type]
        told = []
        for amax in (7.0, math.inf, 14.0, 3.5, 3.5):
            bank.record(0, torch.tensor(amax))
            bank.roll(lambda now: None)
            told.append(bank.scale.item())
        assert told == expected, history


class Watch:
    """Notes what an engine records and casts, by micro-batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.amaxes: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[]])
        self.casts: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[]])

    def __enter__(self) -> "Watch":
        advance = FP8State.advance
        cast = FP8Gemm._cast
        record = FP8State.record
        watch = self

        def advancing(state: FP8State) -> None:
            advance(state)
            for lists in (watch.amaxes, watch.casts):
                for entries in lists.values():
                    entries.append([])

        def casting(gemm: FP8Gemm, x: Tensor, role: Any, *rest: Any) -> Any:
            if role in gemm.scales:
                used = gemm.scales[role]
            else:
                used = gemm.state.scale(gemm.eligibility.name, role)
            watch.casts[gemm.eligibility.name, role][-1].append(used.item())
            return cast(gemm, x, role, *rest)

        def recording(state: FP8State, name: str, role: Any, amax: Tensor) -> None:
            watch.amaxes[name, role][-1].append(amax.item())
            record(state, name, role, amax)

        self.patches = [
            patch.object(FP8State, "advance", advancing),
            patch.object(FP8Gemm, "_cast", casting),
            patch.object(FP8State, "record", recording),
        ]
        for one in self.patches:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()


RECIPE = FP8Recipe(history="te", history_length=3)


def run_of(recipe: FP8Recipe = RECIPE, **others: Any) -> Run:
    return Run(MODEL, "fp32", changes={"fp8": recipe}, **others)


def take(engine: Engine, mesh: DeviceMesh | None, run: Run) -> list[float]:
    return [
        engine.step(share_of(mesh, batch), run.lr, n).loss for n, batch in enumerate(batches(run))
    ]


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_each_micro_batch_is_cast_by_the_scales_that_those_before_it_made(kind: str) -> None:
    run = run_of(kind=kind)
    engine = make_engine(None, run)
    with Watch(engine) as watch:
        take(engine, None, run)
    assert watch.casts
    for (name, role), entries in watch.amaxes.items():
        plain = Plain(3, "max", 0, 57344.0 if role == "gradient" else 448.0)
        expected = []
        for amaxes in entries:
            if amaxes:
                expected.append(float(plain.scale))
            for amax in amaxes:
                plain.record(amax)
            plain.update()
        assert len(expected) == 3 * 4, "one for each of 4 micro-batches in 3 steps"
        used = [
            scales[0]
            for scales, amaxes in zip(watch.casts[name, role], entries, strict=True)
            if amaxes
        ]
        assert used == expected, (name, role)
        i = engine.fp8.names.index(f"{name}.{role}")
        assert engine.fp8.bank.scale[i].item() == plain.scale
    assert (
        len({scale for entries in watch.casts.values() for some in entries for scale in some}) > 20
    )


def result(mesh: DeviceMesh | None, run: Run) -> tuple[list[float], dict[str, float]]:
    engine = make_engine(mesh, run)
    losses = take(engine, mesh, run)
    return losses, dict(zip(engine.fp8.names, engine.fp8.bank.scale.tolist(), strict=True))


@pytest.mark.slow
def test_schedules_that_order_passes_otherwise_train_the_same_bits() -> None:
    """The backward pass of a micro-batch casts by the scales of its own forward pass, however many
    came between."""
    assert result(None, run_of(kind="1f1b")) == result(None, run_of(kind="gpipe"))
    assert result(None, run_of(kind="1f1b")) != result(None, run_of(FP8Recipe(history_length=3)))


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zb-h1"])
def test_pipeline_stages_train_the_same_bits(kind: str) -> None:
    # the norm of a clipped step is summed in another order
    losses, scales = result(None, run_of(clip=0.0))
    ranks = run_ranks(result, {"pp": 2}, run=run_of(kind=kind, clip=0.0))
    assert all(rank[0] == losses for rank in ranks)
    assert ranks[0][1] | ranks[1][1] == scales


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_have_one_scale_for_each_tensor(sequence: bool) -> None:
    losses, scales = result(None, run_of(steps=2))
    for found, ours in run_ranks(result, {"tp": 2}, run=run_of(sequence=sequence, steps=2)):
        assert found == pytest.approx(losses, rel=1e-3)
        assert ours.keys() == scales.keys()
        for name, scale in ours.items():
            assert scale == pytest.approx(scales[name], rel=0.05), name


def test_replicas_agree_with_each_micro_batch() -> None:
    first, second = run_ranks(result, {"dp": 2}, run=run_of(options={"overlap": True}))
    assert first == second


def banks(trace: bool) -> Iterator[list[float]]:
    """Scales and history after steps of which each is skipped."""
    scaling = LossScaling("constant", 2.0**100)
    run = Run(MODEL, "fp16", scaling, changes={"fp8": RECIPE}, steps=2)
    engine = make_engine(None, run)
    engine.trace = trace
    for n, batch in enumerate(batches(run)):
        assert not engine.step(share_of(None, batch), run.lr, n).changed
        yield engine.fp8.bank.scale.tolist()
        yield engine.fp8.bank.history.flatten().tolist()


def test_a_second_look_at_a_skipped_step_leaves_scales_as_the_step_did() -> None:
    assert list(banks(trace=True)) == list(banks(trace=False))


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    keys = [
        "precision.compute=bf16",
        "fp8.kind=delayed",
        "fp8.history=te",
        "fp8.history_length=3",
        "fp8.pad=true",
    ]
    whole = steps(
        train_on(file, *keys, "train.steps=4", f"train.folder={tmp_path}/whole", pipeline=2)
    )
    for last in (2, 4):
        more = train_on(
            file,
            *keys,
            f"train.steps={last}",
            "lr.decay=4",
            f"train.folder={tmp_path}/cut",
            pipeline=2,
        )
    assert [record["loss"] for record in steps(more)] == [record["loss"] for record in whole]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "current"}, sentence("fp8.history_kind", history="te", kind="current")),
        ({"parameters": True}, sentence("fp8.history_weights", history="te")),
        ({"calibrate": 3}, sentence("fp8.history_weights", history="te")),
        ({"amax_algo": lambda history: history[0]}, sentence("fp8.history_function", history="te")),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        FP8Recipe(history="te", **changes)


def test_layers_that_are_made_again_are_refused() -> None:
    with raises("parallel.fp8_history_recompute"):
        Context(plan("bf16", fp8=RECIPE), recompute=Recompute(layers=1), fp8=FP8State(RECIPE))


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("parallel.recompute=full", sentence("config.history_recomputed")),
        ("fp8.shadow_every=5", "fp8.shadow_every = 5"),
    ],
)
def test_a_run_is_told_before_launch(key: str, says: str, tmp_path: Path) -> None:
    file = write_run(tmp_path)
    keys = ["precision.compute=bf16", "fp8.kind=delayed", "fp8.history=te"]
    assert load_run(file, keys).plan.fp8 == FP8Recipe(history="te")
    with pytest.raises(UserError, match=says) as refused:
        load_run(file, [*keys, key])
    assert all('fp8.history = "step"' in problem for problem in refused.value.problems)


@pytest.mark.slow
def test_its_memory_is_known_before_launch_and_a_pass_begins_when_all_products_are_there() -> None:
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "ffn": 48,
        "vocab": 64,
        "max_positions": 16,
    }
    config = ModelConfig(family="llama", **sizes)
    made = cuts(config, 2, 16)
    often, once = (
        kept_bytes(config, plan("bf16", fp8=recipe), made, EngineOptions(2, 16))
        for recipe in (RECIPE, FP8Recipe())
    )
    for te, step in zip(often, once, strict=True):
        assert te.activations > step.activations  # each forward pass stores its scales
    state = FP8State(RECIPE)
    with state.autocast(), pytest.raises(RuntimeError, match="registered after the first pass"):
        state.register([Part("layers.0.mlp.up.weight", (32, 32))])


def test_a_recipe_of_nemo_may_have_it_beside() -> None:
    keys = [
        "precision.nemo.recipe=bf16_with_fp8_mixed",
        "precision.nemo.fp8_param_gather=false",
        "fp8.history=te",
    ]
    minimal = [
        "model.preset=llama-demo",
        "train.steps=10",
        "train.global_batch=8",
        "train.micro_batch=2",
    ]
    made = load_run(None, [*minimal, f"train.seq_length={LENGTH}", *keys]).plan.fp8
    assert made is not None and (made.history, made.history_length) == ("te", 1024)
