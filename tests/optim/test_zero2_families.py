"""Every family trains under ZeRO-2 as under ZeRO-1 and as the plain model, where memory that nobody
has written to holds NaN."""

from functools import cache
from typing import Any

import pytest

from tests.layouts import Result, Run, train_all
from tests.models.test_parity import MODELS, require_plain_model
from tests.optim.test_overlap import require_same_bits

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


@cache
def trained(
    models: tuple[str, ...], numbers: str, place: tuple[int, int, int, int]
) -> dict[str, tuple[Result, Result]]:
    """Each model under ZeRO-1 and under ZeRO-2, with one micro-batch, all in one start."""
    tp, pp, dp, expert = place
    runs: list[Run] = []
    for model in models:
        for options in (OPTIONS, {**OPTIONS, "shard_gradients": True}):
            has_experts = "experts" in FAMILIES[model]
            run = Run(
                FAMILIES[model],
                **NUMBERS[numbers],
                options=options,
                expert=expert if has_experts else 1,
                micro_batch=8 // dp,
                steps=2,
            )
            runs.append(run)
    results = train_all(runs, tp, pp, dp)
    return dict(zip(models, zip(results[::2], results[1::2], strict=True), strict=True))


def test_biases_of_experts_keep_their_gradients_where_their_memory_comes_late() -> None:
    """On the first stage of a pipeline no other gradient of the bucket comes before them."""
    one, two = trained(("gpt_oss",), "bf16, biases in fp32", (1, 2, 2, 1))["gpt_oss"]
    require_same_bits(one, two)


@pytest.mark.cases(0, sample=8)
@pytest.mark.parametrize(("model", "numbers"), CASES)
@pytest.mark.parametrize("place", PLACES, ids=lambda x: "tp{} pp{} dp{} expert{}".format(*x))
def test_every_family_has_the_bits_of_zero_1_under_zero_2(
    model: str,
    numbers: str,
    place: tuple[int, int, int, int],
    alike: list[dict[str, Any]],
) -> None:
    beside = (
        case["model"] for case in alike if (case["numbers"], case["place"]) == (numbers, place)
    )
    one, two = trained(tuple(dict.fromkeys(beside)), numbers, place)[model]
    assert all(report.outcome == "applied" for report in one.reports)
    require_same_bits(one, two)


@pytest.mark.cases(0, sample=4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout", [(1, 2, 2), (2, 1, 2)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_every_family_trains_the_plain_model_under_zero_2(
    model: str, layout: tuple[int, int, int]
) -> None:
    run = Run(MODELS[model], options={**OPTIONS, "shard_gradients": True})
    (result,) = train_all([run], *layout)
    require_plain_model(model, result)
