"""Every FP8 mode of the dialects trains: the systems' own words make products in the formats that
they say."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.dialects import smp
from megaprec.dialects.translate import DIALECTS
from megaprec.fp8 import linear
from megaprec.fp8.formats import E4M3, E5M2
from megaprec.fp8.quantize import Codes
from tests.dialects import test_modes
from tests.fp8.test_training import MODEL, run
from tests.layouts import batches, share_of
from tests.ranks import run_ranks

HYBRID = {(E4M3, E4M3), (E5M2, E4M3)}
ALIKE = {(E4M3, E4M3)}
BF16 = {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


def nemo(recipe: str, **fields: Any) -> tuple[str, Any]:
    return "nemo", {"recipe": recipe, "fp8_param_gather": False, **fields}


def autocast(recipe: Any) -> tuple[str, Any]:
    return "smp", BF16 | {"fp8_autocast": smp.fp8_autocast(fp8_recipe=recipe)}


MODES: dict[str, tuple[tuple[str, Any], set[tuple[torch.dtype, torch.dtype]]]] = {
    "NeMo bf16_with_fp8_mixed": (nemo("bf16_with_fp8_mixed"), HYBRID),
    "NeMo bf16_with_fp8_mixed, weight gradients wide": (
        nemo("bf16_with_fp8_mixed", fp8_wgrad=False),
        HYBRID,
    ),
    "NeMo fp16_with_fp8_mixed": (
        nemo("fp16_with_fp8_mixed", fp16_initial_loss_scale=2.0**10),
        HYBRID,
    ),
    "NeMo bf16_with_fp8_current_scaling_mixed": (
        nemo("bf16_with_fp8_current_scaling_mixed", first_last_layers_bf16=False),
        HYBRID,
    ),
    "NeMo bf16_with_mxfp8_mixed": (nemo("bf16_with_mxfp8_mixed", fp8="e4m3"), ALIKE),
    "SMP DelayedScaling": (autocast(smp.DelayedScaling(amax_history_len=32)), HYBRID),
    "SMP DelayedScaling E4M3": (autocast(smp.DelayedScaling(fp8_format=smp.Format.E4M3)), ALIKE),
    "SMP Float8CurrentScaling": (autocast(smp.Float8CurrentScaling()), HYBRID),
    "SMP MXFP8BlockScaling": (autocast(smp.MXFP8BlockScaling()), ALIKE),
}
LIMIT = 40  # steps; a loss scale of 2^32 halves until it does not overflow


def train_one(mesh: DeviceMesh | None, system: str, config: Any) -> tuple[list[Any], set[Any]]:
    """Reports up to the third applied step, and the formats of the factors of all products."""
    made = DIALECTS[system].resolve(config)
    seen = set[Any]()
    multiply = linear.multiply
    add = linear.add_product_

    def noted(a: Codes, b: Codes, *others: Any, **options: Any) -> Any:
        seen.add((a.values.dtype, b.values.dtype))
        return multiply(a, b, *others, **options)

    def noted_add(total: Any, a: Codes, b: Codes, *others: Any) -> None:
        seen.add((a.values.dtype, b.values.dtype, total.dtype))
        add(total, a, b, *others)

    with (
        patch.object(test_modes, "MODEL", MODEL),
        patch.multiple(linear, multiply=noted, add_product_=noted_add),
    ):
        engine = test_modes.make(mesh, made.plan, True, 1.0)
        reports = []
        for number in range(LIMIT):
            if sum(r.changed for r in reports) == 3:
                break
            share = share_of(mesh, batches(run())[sum(r.changed for r in reports)])
            reports.append(engine.step(share, 1e-2, number))
    return reports, seen


def train_rank(
    mesh: DeviceMesh, modes: Sequence[tuple[str, Any]]
) -> list[tuple[list[Any], set[Any]]]:
    return [train_one(mesh, *mode) for mode in modes]


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, list[tuple[list[Any], set[Any]]]]:
    ranks = run_ranks(train_rank, {"tp": 2, "pp": 2}, modes=[mode for mode, _ in MODES.values()])
    return {name: [rank[n] for rank in ranks] for n, name in enumerate(MODES)}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", MODES)
def test_a_mode_trains_on_four_ranks_in_the_formats_that_it_names(
    name: str, four_ranks: Any
) -> None:
    (system, config), formats = MODES[name]
    reports, _ = train_one(None, system, config)
    for ours, seen in four_ranks[name]:
        assert [r.outcome for r in ours] == [r.outcome for r in reports]
        assert [r.loss_scale for r in ours] == [r.loss_scale for r in reports]
        assert {pair[:2] for pair in seen} == formats
        into_gradients = {pair[2] for pair in seen if len(pair) == 3}
        reduced = torch.float16 if "fp16" in name else torch.float32
        assert into_gradients == (set() if "wide" in name else {reduced})
        for one, other in zip(ours, reports, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-2)
    assert [r.outcome for r in reports] == ["applied"] * 3


@pytest.mark.slow
def test_loss_scaling_is_on_top_of_fp8() -> None:
    """A scale of 2^32 overflows in half precision until it has fallen; FP8's own scales neither
    hide it nor suffer."""
    reports, _ = train_one(None, *nemo("fp16_with_fp8_mixed", fp16_hysteresis=1))
    outcomes = [r.outcome for r in reports]
    assert outcomes[0] == "skipped_overflow" and outcomes.count("applied") == 3
    assert reports[-1].loss_scale < 2.0**32
    unscaled, _ = train_one(None, *nemo("bf16_with_fp8_mixed"))
    assert [r.loss for r in reports if r.changed] == pytest.approx(
        [r.loss for r in unscaled], rel=1e-2
    )
