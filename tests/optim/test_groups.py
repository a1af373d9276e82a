"""The laws of groups: torch's parameter groups by logical name, in any layout, also for a part of a
parameter."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.optim.rules.param_groups import Group, factors
from tests.layouts import Fragment, assemble
from tests.logical import (
    LAYOUTS,
    SHAPES,
    Case,
    Tensors,
    give,
    gradient,
    held,
    initial,
    make_optimizer,
    results,
)
from tests.ranks import run_ranks
from tests.refusals import raises, shows

CLOSE = 1e-12
LR = 1e-2
DECAY = 0.1
GROUPS = (
    Group("query.*", lr=2.0, weight_decay=0.5),
    Group("key.weight", lr=0.0),
    Group("*.bias", weight_decay=1.5, all_dims=True),
    Group("out*", lr=0.25, weight_decay=0.0),  # the bias was matched before
    Group("embedding.*", weight_decay=0.0),
    Group("scale", lr=4.0),
)
OTHERS = (Group("norm.*", lr=3.0, all_dims=True), Group("value.*", lr=0.5), Group("*", lr=1.5))


def expected(groups: Sequence[Sequence[Group]]) -> Tensors:
    """The weights after one step for each entry, by torch's parameter groups in float64, one for
    each tensor."""
    weights = {name: initial(name, torch.float64) for name in SHAPES}
    optimizer = torch.optim.AdamW(
        [{"params": [w]} for w in weights.values()], betas=(0.9, 0.95), foreach=False
    )
    for step, now in enumerate(groups):
        for (name, w), group in zip(weights.items(), optimizer.param_groups, strict=True):
            matching = [g for g in now if fnmatchcase(name, g.pattern)][:1]
            (of_group,) = matching or [Group("*")]
            decays = w.dim() >= 2 or of_group.all_dims
            decay = 1.0 if of_group.weight_decay is None else of_group.weight_decay
            group["lr"] = LR * (1.0 if of_group.lr is None else of_group.lr)
            group["weight_decay"] = DECAY * decay * decays
            w.grad = gradient(name, step)
        optimizer.step()
    return weights


def require_close(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=CLOSE, atol=CLOSE, msg=name)


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("axes", [{}, *LAYOUTS, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_factors_are_those_of_torchs_groups(axes: dict[str, int]) -> None:
    require_factors(axes)


def require_factors(axes: dict[str, int], before: Callable[[], None] | None = None) -> None:
    """Query, key and value are parts of one parameter; the embedding is tied."""
    chosen: list[tuple[Group, ...]] = [(), GROUPS, OTHERS, tuple(reversed(GROUPS))]
    cases = [Case("fp64", options={"groups": groups}, lr=LR) for groups in chosen]
    for groups, result in zip(chosen, results(cases, axes, before), strict=True):
        require_close(result.weights, expected([groups] * 4))


def test_groups_make_a_difference() -> None:
    """Or the test above would prove nothing."""
    plain = expected([()] * 4)
    grouped = expected([GROUPS] * 4)
    same = {name for name in SHAPES if torch.equal(plain[name], grouped[name])}
    assert same == {"value.weight", "norm.weight"}
    assert torch.equal(grouped["key.weight"], initial("key.weight", torch.float64))


def take_over(mesh: DeviceMesh) -> tuple[list[str], list[str], list[Fragment]]:
    """Two steps with one set of groups, two with others, which put the buffer into another
    order."""
    old = make_optimizer(mesh, Case("fp64", options={"groups": GROUPS}))
    for step in (0, 1):
        give(old, step)
        old.step(LR)
    new = make_optimizer(mesh, Case("fp64", options={"groups": OTHERS}))
    order = [
        [piece.part.name for buffer in some.all_buffers() for piece in buffer.pieces]
        for some in (old, new)
    ]
    new.load_state_dict(old.state_dict())
    for step in (2, 3):
        give(new, step)
        new.step(LR)
    return order[0], order[1], held(new)["weight"]


def test_state_is_taken_over_by_name_into_other_groups() -> None:

    ranks = run_ranks(take_over, {"dp": 2})
    before, after, _ = ranks[0]
    assert sorted(before) == sorted(after)
    assert before != after
    require_close(assemble([rank[2] for rank in ranks]), expected([GROUPS, GROUPS, OTHERS, OTHERS]))


def refuse_kept(mesh: DeviceMesh) -> list[str]:
    make_optimizer(mesh, Case(plan={"keep_fp32": ("output.bias", "norm.weight")}))
    with pytest.raises(UserError) as raised:
        make_optimizer(
            mesh, Case(plan={"keep_fp32": ("outptu.bias", "norm.*", "*norm.bias", "*norm.weight")})
        )
    return str(raised.value).splitlines()


def test_a_part_to_keep_in_fp32_that_matches_nothing_is_refused_on_every_rank() -> None:
    for (said,) in run_ranks(refuse_kept, {"pp": 2}):
        assert shows(
            said,
            "precision.pattern_unmatched",
            key="precision.keep_fp32",
            pattern="outptu.bias",
            hint=re.compile(r"did you mean output\.bias\?$"),
        )


def refuse(mesh: DeviceMesh) -> list[str]:
    """What is said on this rank; a pattern that matches on another stage only is fine."""
    make_optimizer(mesh, Case(options={"groups": [Group("output.bias"), Group("norm.weight")]}))
    with pytest.raises(UserError) as raised:
        make_optimizer(
            mesh, Case(options={"groups": [Group("Norm.*"), Group("norm.*"), Group("bias")]})
        )
    return str(raised.value).splitlines()


def test_a_pattern_that_matches_nothing_is_refused_on_every_rank() -> None:

    for said in run_ranks(refuse, {"pp": 2}):
        assert len(said) == 2
        assert shows(
            said[0],
            "precision.pattern_unmatched",
            key="optimizer.groups",
            pattern="Norm.*",
            examples=re.compile("^; names are like "),
        )
        assert shows(said[1], "precision.pattern_unmatched", key="optimizer.groups", pattern="bias")


@pytest.mark.parametrize("factor", [-0.1, float("inf"), float("nan")])
def test_a_factor_that_is_no_factor_is_refused(factor: float) -> None:
    with raises("optimizer.group_factor", name="lr", pattern="x"):
        Group("x", lr=factor)
    with raises("optimizer.group_factor", name="weight_decay"):
        Group("x", weight_decay=factor)


def test_the_first_match_decides_and_leaves_the_rest_as_usual() -> None:
    matrix = Part("a.weight", (2, 2))
    vector = Part("a.bias", (2,))
    groups = (Group("a.*", lr=0.5), Group("*.weight", lr=7.0, weight_decay=7.0))
    assert factors(matrix, groups) == (0.5, 1.0)
    assert factors(vector, groups) == (0.5, 0.0)
    assert factors(matrix, groups[::-1]) == (7.0, 7.0)
    assert factors(vector, ()) == (1.0, 0.0)
    assert factors(Part("A.weight", (2, 2)), groups) == (7.0, 7.0), "names differ in case"


NORMS = Part("layers.0.norm.weight", (4,))
MATRIX = Part("layers.0.up.weight", (4, 4))


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.0])
def test_a_factor_of_weight_decay_leaves_vectors_without_decay_unless_all_dims_are_asked_for(
    factor: float,
) -> None:
    of_layers = (Group("layers.*", weight_decay=factor),)
    assert factors(MATRIX, of_layers) == (1.0, factor)
    assert factors(NORMS, of_layers) == (1.0, 0.0)
    of_all = (Group("*norm*", weight_decay=factor, all_dims=True), *of_layers)
    assert factors(NORMS, of_all) == (1.0, factor)
    assert factors(MATRIX, of_all) == (1.0, factor)
    assert factors(NORMS, (Group("*", all_dims=True),)) == (1.0, 1.0)
    assert factors(MATRIX, (Group("*", lr=3.0, all_dims=True),)) == (3.0, 1.0)


def test_lr_factors_reach_an_optimizer_of_torch() -> None:
    """Whose state is made anew for each slice."""
    case = Case("fp64", rule=("RMSprop", {}), options={"groups": GROUPS}, lr=LR)
    weights = {name: initial(name, torch.float64) for name in SHAPES}
    decays = {name: factors(Part(name, SHAPES[name]), GROUPS) for name in SHAPES}
    made: list[dict[str, list[Tensor] | float]] = [
        {"params": [w], "lr": LR * decays[n][0], "weight_decay": DECAY * decays[n][1]}
        for n, w in weights.items()
    ]
    optimizer = torch.optim.RMSprop(made)
    for step in range(case.steps):
        for name, w in weights.items():
            w.grad = gradient(name, step)
        optimizer.step()
    require_close(results([case], {"dp": 2})[0].weights, weights)
