"""Every family trains under ZeRO-2 and 3 as under ZeRO-1 and as the plain model, where memory that
nobody has written to holds NaN.

The norm of the gradients is summed buffer by buffer, and ZeRO-3 has other buffers. So nothing is
clipped where bits are compared, and the norm in a report may differ in its last bit.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.layouts import Result, Run, train_all
from tests.models.test_parity import MODELS, require_plain_model
from tests.optim.test_overlap import require_same_bits

STAGES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"shard_gradients": True},
    3: {"shard_weights": True, "overlap": True},
}

EIGHT_EXPERTS = {"experts": 8}
# With experts on ranks of their own, their number is one that the ranks divide.
FAMILIES: dict[str, dict[str, Any]] = {
    model: sizes | EIGHT_EXPERTS if "experts" in sizes else sizes for model, sizes in MODELS.items()
}
# A small bucket holds few parameters, and gets its memory from the first gradient of these alone.
OPTIONS = {"bucket": 300}
NUMBERS: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "bf16, biases in fp32": {"compute": "bf16", "changes": {"keep_fp32": ("*.bias",)}},
    "bf16, norms in fp32": {"compute": "bf16", "changes": {"keep_fp32": ("*norm*",)}},
    "bf16 gradients": {"compute": "bf16", "changes": {"gradients": "bf16"}},
    "fp64": {"compute": "fp64"},
}
WITHOUT_BIASES = {
    "gpt2 without biases",
    "olmo2 of LayerNorms without biases",
    "llama",
    "olmo3 kv2",
    "gemma3",
    "deepseek_v2",
    "qwen3_next",
    "mixtral",
    "glm4_moe",
}
CASES = [
    (model, numbers)
    for numbers in NUMBERS
    for model in FAMILIES
    if "biases" not in numbers or model not in WITHOUT_BIASES
]
# tp, pp, dp, and the ranks among which experts are divided
PLACES = [(1, 1, 2, 1), (1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 4, 2), (1, 2, 2, 2)]


Results = dict[int, Result]  # by stage of ZeRO


@cache
def trained(
    models: tuple[str, ...], numbers: str, place: tuple[int, int, int, int]
) -> dict[str, Results]:
    """Each model under ZeRO-1, 2 and 3, with one micro-batch, all in one start."""
    tp, pp, dp, expert = place
    runs: list[Run] = []
    for model in models:
        for options in STAGES.values():
            has_experts = "experts" in FAMILIES[model]
            run = Run(
                FAMILIES[model],
                **NUMBERS[numbers],
                options={**OPTIONS, **options},
                expert=expert if has_experts else 1,
                micro_batch=8 // dp,
                steps=2,
                clip=0.0,
            )
            runs.append(run)
    results = iter(train_all(runs, tp, pp, dp))
    return {model: {stage: next(results) for stage in STAGES} for model in models}


def require_same_training(one: Result, other: Result) -> None:
    """The results of two runs have the same bits, but for the last one of the norm."""
    reports = zip(one.reports, other.reports, strict=True)
    for report, others in reports:
        assert others.grad_norm == pytest.approx(report.grad_norm, rel=1e-14)
    same_norms = [
        replace(others, grad_norm=report.grad_norm)
        for report, others in zip(one.reports, other.reports, strict=True)
    ]
    require_same_bits(one, replace(other, reports=same_norms))


def test_biases_of_experts_keep_their_gradients_where_their_memory_comes_late() -> None:
    """On the first stage of a pipeline no other gradient of the bucket comes before them."""
    results = trained(("gpt_oss",), "bf16, biases in fp32", (1, 2, 2, 1))["gpt_oss"]
    require_same_bits(results[1], results[2])


@pytest.mark.cases(0, sample=8)
@pytest.mark.parametrize(("model", "numbers"), CASES)
@pytest.mark.parametrize("place", PLACES, ids=lambda x: "tp{} pp{} dp{} expert{}".format(*x))
def test_every_family_has_the_bits_of_zero_1_under_zero_2_and_3(
    model: str,
    numbers: str,
    place: tuple[int, int, int, int],
    alike: list[dict[str, Any]],
) -> None:
    beside = (
        case["model"] for case in alike if (case["numbers"], case["place"]) == (numbers, place)
    )
    results = trained(tuple(dict.fromkeys(beside)), numbers, place)[model]
    assert all(report.outcome == "applied" for report in results[1].reports)
    require_same_bits(results[1], results[2])
    require_same_training(results[1], results[3])


@pytest.mark.cases(0, sample=4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "layout", [(1, 2, 2), (2, 1, 2)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_every_family_trains_the_plain_model_under_zero_2_and_3(
    model: str, stage: int, layout: tuple[int, int, int]
) -> None:
    run = Run(MODELS[model], options={**OPTIONS, **STAGES[stage]})
    (result,) = train_all([run], *layout)
    require_plain_model(model, result)
