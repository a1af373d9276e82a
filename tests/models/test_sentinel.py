"""Bits that are flipped in what the sentinel checks are found and laid to the right rank; sound
runs are not accused.

The flips are in `tests/flips.py`. Each is planted after a clean check; the checked step must leave
nothing behind, and taken again without the flip it must be the step of an undisturbed run.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling
from models.engine.engine import Engine
from models.engine.sentinel import Sentinel
from parallel.activation_checkpoint import Recompute
from tests.flips import SAMPLES, Flip, Setting, all_found, clean, make_engine, same, state, take
from tests.ranks import run_ranks

MLP = "layers.1.mlp"
LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "pp2": {"pp": 2},
    "dp2 x pp2": {"dp": 2, "pp": 2},
    "tp2 x dp2": {"tp": 2, "dp": 2},
}


def judged(layout: str, flips: list[Flip], setting: Setting | None = None) -> list[dict[str, Any]]:
    """The faults that are found, the same on every rank."""
    ranks = run_ranks(all_found, LAYOUTS[layout], setting=setting or Setting(), flips=flips)
    assert all(rank == ranks[0] for rank in ranks), "ranks give different verdicts"
    missed = [flip for flip, fault in zip(flips, ranks[0], strict=True) if fault is None]
    assert not missed, f"not found: {missed}"
    return ranks[0]


def transients(rank: int, module: str = MLP) -> list[Flip]:
    """Flips that happen once, on a rank that holds the module."""
    weight = f"{module}.down.weight"
    kinds = {"activation": module, "activation gradient": module, "parameter gradient": weight}
    return [Flip(rank, kind, at) for kind, at in kinds.items()]


@pytest.mark.slow
def test_with_three_replicas_the_majority_names_the_rank() -> None:
    flips = [Flip(1, "weight", "layers.0.mlp.up.weight"), Flip(2, "activation", MLP, steady=True)]
    weight, steady = judged("dp3", flips)
    assert (weight["kind"], weight["ranks"], weight["certain"], weight["sound"]) == (
        "weights",
        [1],
        True,
        False,
    )
    assert weight["what"] == "weight layers.0.mlp.up.weight"
    assert (steady["kind"], steady["ranks"], steady["certain"]) == ("computation", [2], True)
    assert (steady["module"], steady["direction"]) == (MLP, "forward")
    assert not steady["transient"]
    assert steady["sound"]


@pytest.mark.slow
def test_with_two_replicas_a_fault_that_passes_is_laid_to_its_rank_and_one_that_stays_to_both() -> (
    None
):
    forward, backward, gradient, steady = judged(
        "dp2", [*transients(1), Flip(1, "activation", MLP, steady=True)]
    )
    for fault, direction in ((forward, "forward"), (backward, "backward"), (gradient, "backward")):
        assert (fault["ranks"], fault["certain"], fault["transient"]) == ([1], True, True)
        assert (fault["module"].startswith(MLP), fault["direction"]) == (True, direction)
    assert (steady["ranks"], steady["certain"], steady["module"]) == ([0, 1], False, MLP)


@pytest.mark.slow
def test_a_rank_is_named_where_replicas_count_other_numbers_of_tokens() -> None:
    setting = Setting(masked=True, model=(("mtp_layers", 2),))
    for fault in judged("dp2", transients(1), setting):
        assert (fault["ranks"], fault["certain"], fault["transient"]) == ([1], True, True)


@pytest.mark.slow
def test_one_process_finds_faults_that_pass_and_weights_that_are_not_their_masters() -> None:
    flips = [*transients(0), Flip(0, "weight", "layers.0.mlp.up.weight")]
    *passing, weight = judged("single", flips, Setting(compute="bf16"))
    assert all(fault["ranks"] == [0] and fault["transient"] for fault in passing)
    assert (weight["kind"], weight["ranks"], weight["certain"]) == ("weights", [0], True)


@pytest.mark.slow
def test_a_message_that_arrives_changed_names_both_ends() -> None:
    flips = [
        Flip(0, "sent"),
        Flip(1, "received"),
        Flip(1, "sent", back=True),
        Flip(0, "received", back=True),
    ]
    for fault, flip in zip(judged("pp2", flips), flips, strict=True):
        ends = ["stage 1", "stage 0"] if flip.back else ["stage 0", "stage 1"]
        assert (fault["kind"], sorted(fault["ranks"])) == ("message", [0, 1])
        assert (
            fault["what"]
            == f"the {'gradient' if flip.back else 'activation'} from {ends[0]} to {ends[1]}"
        )


@pytest.mark.slow
def test_replicated_parameters_are_compared_over_tensor_ranks_too() -> None:
    (fault,) = judged("tp2 x dp2", [Flip(3, "weight", "layers.0.attention_norm.weight")])
    assert (fault["ranks"], fault["certain"]) == ([3], True)  # of four copies


@pytest.mark.slow
def test_the_gradient_of_a_single_micro_batch_is_compared_although_its_reduction_overlaps() -> None:
    overlapping = Setting(micro_batch=6, overlap=True)
    flips = [
        Flip(1, "gradient before its reduction", f"{MLP}.down.weight"),
        Flip(0, "activation gradient", MLP),
    ]
    gradient, backward = judged("dp2", flips, overlapping)
    assert (gradient["what"], gradient["ranks"]) == (f"the gradient of {MLP}.down.weight", [1])
    assert (backward["module"], backward["ranks"]) == (MLP, [0])


def test_reduced_gradients_are_compared_where_replicas_hold_the_same() -> None:
    (fault,) = judged(
        "dp3", [Flip(1, "reduced gradient", f"{MLP}.down.weight")], Setting(zero_size=1)
    )
    assert (fault["kind"], fault["ranks"], fault["certain"]) == ("gradients", [1], True)


SPREAD = (("experts", 4), ("experts_per_token", 2))


@pytest.mark.cases(0, slow=1)
@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        ("dp2", Setting(model=SPREAD, micro_batch=3, expert=2)),
        (
            "tp2 x dp2",
            Setting(model=SPREAD, micro_batch=3, compute="bf16", expert=2, expert_tensor=1),
        ),
        ("tp2 x dp2", Setting(model=SPREAD, micro_batch=3, expert=2, zero_size=1)),
    ],
)
def test_where_tokens_travel_to_experts_a_fault_that_passes_is_laid_to_its_rank(
    layout: str, setting: Setting
) -> None:
    """Wherever the wrong numbers travel to: the rank that has them first is to blame."""
    ranks = 2 if layout == "dp2" else 4
    attention = "layers.0.attention"
    for rank in (0, ranks - 1):
        flips = [Flip(rank, "activation", attention), Flip(rank, "activation gradient", MLP)]
        for fault, module in zip(judged(layout, flips, setting), (attention, MLP), strict=True):
            assert rank in fault["ranks"] and fault["transient"] and fault["certain"], fault
            assert len(fault["ranks"]) == 1 or "tp2" in layout, fault
            assert fault["module"].startswith(module), fault


@pytest.mark.slow
def test_copies_of_an_expert_are_compared_and_different_experts_are_not() -> None:
    """On four ranks, ranks 0 and 2 hold experts 0 and 1, and ranks 1 and 3 the others."""
    setting = Setting(model=SPREAD, compute="bf16", micro_batch=3, expert=2, expert_tensor=1)
    held = f"{MLP}.experts.0.down.weight"
    weight, gradient = judged(
        "tp2 x dp2",
        [Flip(2, "weight", held), Flip(2, "reduced gradient", held)],
        replace(setting, zero_size=1),
    )
    assert (weight["kind"], weight["ranks"], weight["certain"]) == ("weights", [2], True), (
        "it has the right masters"
    )
    assert (gradient["kind"], gradient["ranks"], gradient["certain"]) == (
        "gradients",
        [0, 2],
        False,
    )


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_flipped_on_any_rank_of_any_layout_is_found_there(layout: str) -> None:
    world = 1
    for size in LAYOUTS[layout].values():
        world *= size
    pipeline = LAYOUTS[layout].get("pp", 1)
    tensor = LAYOUTS[layout].get("tp", 1)
    setting = Setting(compute="bf16", micro_batch=SAMPLES // LAYOUTS[layout].get("dp", 1) // 2)
    for rank in range(world):
        stage = rank * pipeline // world
        module = f"layers.{stage}.mlp" if pipeline > 1 else MLP
        for fault in judged(layout, transients(rank, module), setting):
            assert rank in fault["ranks"], fault
            assert len(fault["ranks"]) == 1 or tensor > 1, fault
            assert fault["module"].startswith(module), fault


SETTINGS = [
    Setting(),
    Setting(compute="bf16", zero_size=1),
    Setting(compute="fp16", scaling=LossScaling("dynamic", initial=2.0**12), overlap=True),
    Setting(compute="bf16", fp8=FP8Recipe("delayed"), model=(("hidden", 32), ("ffn", 32))),
    Setting(compute="bf16", fp8=FP8Recipe("current"), model=(("hidden", 32), ("ffn", 32))),
    Setting(compute="bf16", changes=(("rounding", "stochastic"),)),
    Setting(model=(("family", "gpt2"), ("kv_heads", 4))),
    Setting(model=(("experts", 4), ("experts_per_token", 2))),
    Setting(recompute=Recompute(fraction=1.0)),
    Setting(recompute=Recompute(modules=("attention", "norm")), model=(("tied", True),)),
    Setting(micro_batch=6, overlap=True),
    Setting(micro_batch=1),
]
WITH_PIPELINE = [Setting(kind="zb-h1"), Setting(kind="gpipe", model=(("tied", True),))]
WITH_TENSOR = [Setting(sequence=True), Setting(sequence=True, compute="bf16")]


def possible(layout: str) -> list[Setting]:
    sizes = LAYOUTS[layout]
    more = [*(WITH_PIPELINE if "pp" in sizes else ()), *(WITH_TENSOR if "tp" in sizes else ())]
    return [s for s in SETTINGS if fits(s, sizes.get("dp", 1))] + more


def fits(setting: Setting, dp: int) -> bool:
    return SAMPLES % (dp * setting.micro_batch) == 0


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", ["single", "dp2", "pp2"])
def test_a_sound_run_is_never_accused_and_is_bit_for_bit_the_run_without_checks(
    layout: str,
) -> None:
    some = random.Random(layout).sample(possible(layout), 3)
    assert run_ranks(clean, LAYOUTS[layout], settings=some, steps=3)[0] == 9


CASES = [
    (layout, setting, seed)
    for layout in LAYOUTS
    for setting in possible(layout)
    for seed in range(3)
]


@pytest.mark.campaign
@pytest.mark.parametrize(("layout", "setting", "seed"), CASES)
def test_no_false_alarm_in_ten_thousand_checks(layout: str, setting: Setting, seed: int) -> None:
    steps = -(-10_000 // len(CASES))
    assert (
        run_ranks(
            clean, LAYOUTS[layout], settings=[replace(setting, seed=100 + seed)], steps=steps
        )[0]
        == steps
    )


def noisy(generator: torch.Generator | None) -> Engine:
    """An engine whose second feed-forward adds random numbers."""
    engine = make_engine(None, Setting())

    def add(module: torch.nn.Module, args: object, made: torch.Tensor) -> torch.Tensor:
        return made + torch.rand(made.shape, generator=generator) / 100

    engine.stages[0].get_submodule(MLP).register_forward_hook(add)
    return engine


def test_the_check_leaves_torchs_random_numbers_where_they_were() -> None:
    engine = noisy(None)
    plain = noisy(None)
    sentinel = Sentinel(engine, exact=False)
    for number in range(2):
        losses = []
        for each, checked in ((engine, sentinel), (plain, None)):
            torch.manual_seed(number)
            losses.append(take(each, None, number, checked))
        assert losses[0] == losses[1]
        assert same(state(engine), state(plain))


def test_a_computation_that_is_never_the_same_twice_accuses_no_rank() -> None:
    engine = noisy(torch.Generator())
    sentinel = Sentinel(engine, exact=False)
    before = state(engine)
    take(engine, None, 0, sentinel)
    assert not sentinel.recomputes
    assert not same(state(engine), before), "the step was not applied"
    take(engine, None, 1, sentinel)
