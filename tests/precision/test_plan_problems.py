"""A plan whose dtypes do not go together is refused by the rule that it breaks, and by no other."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from megaprec.precision import plan as plan_module
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import PrecisionPlan, plan

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
FP64 = torch.float64
STORED = FP8Recipe(kind="current", parameters=True)
# a plan by name, what is changed of it, and the codes of what is wrong then
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("bf16", {}, set()),
    ("fp64", {}, set()),
    # moments
    ("bf16", {"moments": BF16}, set()),
    ("bf16", {"moments": FP16}, {"moments"}),
    # masters beside parameters
    ("bf16", {"masters": BF16}, set()),
    ("bf16", {"masters": FP16}, {"half_masters"}),
    ("fp16", {"masters": BF16}, {"half_masters"}),
    ("fp32", {"masters": BF16}, {"narrow_masters", "half_masters"}),
    # FP64 is of all or of none
    ("fp32", {"masters": FP64}, {"partly_fp64"}),
    ("fp32", {"moments": FP64}, {"partly_fp64"}),
    ("fp64", {"moments": FP32}, {"partly_fp64"}),
    # gradients and their sums
    ("bf16", {"gradients": BF16}, set()),
    ("bf16", {"gradients": FP16}, {"gradients"}),
    ("fp32", {"gradients": BF16}, {"gradients"}),
    ("fp32", {"reduce": FP64}, {"reduce_fp64"}),
    ("fp64", {"reduce": FP32}, set()),
    # activations
    ("bf16", {"residual": FP32}, set()),
    ("fp32", {"residual": BF16}, {"narrow_residual"}),
    ("bf16", {"scores": BF16}, set()),
    ("bf16", {"scores": FP16}, {"scores"}),
    ("fp32", {"scores": BF16}, {"scores"}),
    # masters in two parts, and stochastic rounding
    ("bf16", {"remainders": True}, set()),
    ("fp16", {"remainders": True}, {"split_masters"}),
    ("bf16", {"remainders": True, "masters": BF16}, {"split_masters"}),
    ("bf16", {"rounding": "stochastic"}, set()),
    ("fp16", {"rounding": "stochastic"}, {"stochastic_weights"}),
    ("bf16", {"rounding": "stochastic", "remainders": True}, {"stochastic_split"}),
    # FP8
    ("bf16", {"fp8": STORED}, set()),
    ("fp64", {"fp8": FP8Recipe(kind="current")}, {"fp8_in_fp64"}),
    ("bf16", {"fp8": STORED, "masters_in_checkpoint": False}, {"fp8_masters"}),
    ("bf16", {"fp8": STORED, "masters": BF16}, {"fp8_masters"}),
    ("bf16", {"fp8": FP8Recipe(kind="current"), "masters": BF16}, set()),
]


@pytest.mark.parametrize(("name", "changes", "codes"), CASES)
def test_a_plan_is_refused_by_each_rule_that_it_breaks_and_by_no_other(
    name: str, changes: dict[str, Any], codes: set[str]
) -> None:
    known = {each.name: getattr(plan(name), each.name) for each in fields(PrecisionPlan)}
    if not codes:
        PrecisionPlan(**known | changes)
        return
    with pytest.raises(UserError) as refused:
        PrecisionPlan(**known | changes)
    assert {problem.code for problem in refused.value.problems} == {
        f"precision.{code}" for code in codes
    }


def test_every_rule_of_a_plan_is_tried() -> None:
    source = Path(plan_module.__file__).read_text()
    of_plan = source[source.index("class PrecisionPlan") : source.index("def param_dtype")]
    codes = set(re.findall(r'Problem\.of\(\s*"precision\.(\w+)"', of_plan))
    assert codes == set().union(*(codes for _, _, codes in CASES))
