"""What no plan may say, whichever configuration it comes from."""

from typing import Any

import pytest
import torch

from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from tests.refusals import sentence

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bf16", {"moments": "fp16"}, sentence("precision.moments", moments="fp16")),
    (
        "fp32",
        {"masters": "bf16"},
        sentence("precision.narrow_masters", masters="bf16", parameters="fp32"),
    ),
    ("bf16", {"masters": "fp16"}, sentence("precision.half_masters")),
    (
        "bf16",
        {"gradients": "fp16"},
        sentence("precision.gradients", gradients="fp16", parameters="bf16"),
    ),
    ("fp16", {"masters": "split"}, sentence("precision.split_masters")),
    ("fp16", {"rounding": "stochastic"}, sentence("precision.stochastic_weights")),
    (
        "bf16",
        {"rounding": "stochastic", "masters": "split"},
        sentence("precision.stochastic_split"),
    ),
    ("bf16", {"masters": "fp64"}, sentence("precision.partly_fp64")),
    ("fp64", {"moments": "bf16"}, sentence("precision.partly_fp64")),
    ("fp32", {"moments": "fp64"}, sentence("precision.partly_fp64")),
    ("bf16", {"reduce": "fp64"}, sentence("precision.reduce_fp64", reduce="fp64")),
    (
        "bf16",
        {"reduce": "fp8"},
        "precision.reduce = 'fp8' is not known: use one of fp64, fp32, bf16, fp16",
    ),
]


@pytest.mark.parametrize(
    ("compute", "changes", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_plan_that_cannot_be_is_refused_with_a_reason(
    compute: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan(compute, **changes)


def test_a_kept_parameter_is_held_and_used_in_fp32() -> None:
    made = plan("bf16", keep_fp32=("head.*", "*norm*"))
    assert (made.param_dtype("head.weight"), made.compute_dtype("head.weight")) == (
        torch.float32,
        torch.float32,
    )
    assert (
        made.param_dtype("layers.0.mlp.up.weight"),
        made.compute_dtype("layers.0.mlp.up.weight"),
    ) == (torch.bfloat16,) * 2
    wide = plan("bf16", parameters="fp32", keep_fp32=("head.*",))
    assert (wide.param_dtype("x"), wide.compute_dtype("x"), wide.compute_dtype("head.weight")) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": 0.5}, sentence("optimizer.norm_range", norm=0.5)),
        ({"zero_size": 2}, sentence("comm.runs_do_not_divide", run_length=2)),
    ],
)
def test_an_optimizer_with_impossible_options_is_refused(
    options: dict[str, Any], message: str
) -> None:
    model = torch.nn.Linear(2, 2)
    attach_whole(model)
    with pytest.raises(UserError, match=message):
        ParallelAMPOptimizer([model], plan("fp32"), **options)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("float16", "fp16"),
        ("half", "fp16"),
        (torch.float16, "fp16"),
        ("torch.float16", "fp16"),
        ("bfloat16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("float32", "fp32"),
        ("float64", "fp64"),
    ],
)
def test_torchs_name_of_a_dtype_is_refused_once_with_ours(name: Any, ours: str) -> None:
    with pytest.raises(UserError) as raised:
        plan(name)
    assert raised.value.problems == (
        f'precision.compute = {name!r} is not known: its name here is "{ours}"',
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bf16-mixed", 'its name here is "bf16"'),
        ("16-mixed", 'its name here is "fp16"'),
        ("32-true", 'its name here is "fp32"'),
        ("64-true", 'its name here is "fp64"'),
        ("bf16-true", 'its name here is "bf16", with masters = "none"'),
        ("transformer-engine", "use one of fp64, fp32, bf16, fp16"),
    ],
)
def test_a_precision_by_a_name_of_lightning_is_refused_with_its_name_here(
    name: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(name)
    assert str(caught.value) == f"precision.compute = {name!r} is not known: {hint}"
