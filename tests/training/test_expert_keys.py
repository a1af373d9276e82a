"""parallel.expert and parallel.expert_tensor: what cannot be is refused before a launch; other
layouts keep them."""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from megaprec.errors import Problem, UserError
from models.config import ModelConfig
from tests.refusals import sentence
from tools.analysis.planning.search import least_bytes
from tools.config.layouts import fit_layout, in_words, largest_fitting, layout_problems
from tools.config.rules.expert_ranks import expert_replicas, replicas_sharing_state
from tools.config.run_file import RunConfig, load_run
from tools.config.sharding import sharding_of
from tools.config.tables.settings import Parallel, Train
from tools.verify.parity.layouts import fitted as for_parity
from tools.verify.parity.layouts import requested_layouts

RUN = [
    "model.family=mixtral",
    "model.experts=8",
    "model.layers=2",
    "model.heads=4",
    "model.hidden=16",
    "model.ffn=24",
]
RUN += [
    "model.vocab=50",
    "data.vocab_size=50",
    "train.steps=1",
    "train.global_batch=8",
    "train.micro_batch=1",
]
RUN += ["train.seq_length=8", "parallel.data=2", "parallel.tensor=2"]


def run(parallel: dict[str, Any]) -> RunConfig:
    model = ModelConfig(family="mixtral", layers=2, heads=4, hidden=16, ffn=24, experts=8)
    train = Train(steps=1, global_batch=8, micro_batch=1, seq_length=8)
    return RunConfig(model=model, train=train, parallel=Parallel(**parallel))


def said(*overrides: str) -> Sequence[str]:
    try:
        load_run(None, [*RUN, *overrides])
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("parallel.expert=3", sentence("config.experts_undivided", expert=3, experts=8, possible=": 1, 2 would")),
        (
            "parallel.expert=4",
            sentence("config.experts_misfit", expert=4, expert_tensor=2, problem=Problem.of("comm.experts_ranks", expert=4, expert_tensor=2, expert_ranks=8, data=2, tensor=2, stage_size=4), possible=": 1, 2 would"),
        ),
        (
            "parallel.expert_tensor=3",
            "parallel.expert_tensor 3: " + sentence("comm.experts_slices", expert_tensor=3, tensor=2),
        ),
        (
            "model.experts=0 parallel.expert=2",
            (sentence("config.experts_missing", keys="parallel.expert 2", reason="model.experts is 0", pronoun="it")),
        ),
        ("parallel.expert=2 train.numerics=canonical train.threads=1 train.canonical_shards=2", sentence("config.experts_canonical")),
        (
            ("parallel.expert_tensor=1 fp8.kind=delayed fp8.reduce_amax=false "
                "precision.compute=bf16"),
            (sentence("config.experts_amaxes", key="parallel.expert_tensor = 1")),
        ),
        (
            "parallel.expert=2 fp8.kind=current fp8.shadow_every=2 precision.compute=bf16",
            (sentence("config.experts_shadow", key="parallel.expert = 2", shadow_every=2)),
        ),
        (
            ("parallel.data=6 train.global_batch=12 parallel.zero_size=3 parallel.expert=4 "
                "parallel.expert_tensor=1"),
            "parallel.zero_size 3: " + sentence("optimizer.zero_with_experts", zero_size=3, tp=2),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(overrides: str, line: str) -> None:
    found = said(*overrides.split())
    assert any(re.search(line, one) for one in found), found


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.expert=2",
        "parallel.expert=4 parallel.expert_tensor=1",
        "parallel.expert=2 train.sentinel=2",
        'parallel.expert=2 train.eval_every=1 data.lm_eval=["x"]',
        "parallel.expert=2 fp8.kind=current precision.compute=bf16",
        "",
    ],
)
def test_what_can_be_is_not_refused(overrides: str) -> None:
    assert said(*overrides.split()) == ()


def test_fewer_ranks_share_as_many_experts_as_they_can() -> None:
    config = run({"tensor": 2, "data": 4, "expert": 8, "expert_tensor": 1})
    for ranks, (expert, slices) in {8: (8, 1), 4: (4, 1), 2: (2, 1), 1: (1, 1)}.items():
        found = largest_fitting(config, ranks)
        assert found is not None and not found.left_out
        assert (found.parallel.expert, found.parallel.expert_tensor) == (expert, slices), ranks
        assert not layout_problems(config, found.parallel)


def test_ranks_that_share_sequences_share_experts_too_when_there_are_fewer_of_them() -> None:
    config = run({"data": 2, "context": 4, "expert": 8})
    for ranks, axes in {
        8: (4, 2, 8),
        6: (4, 1, 4),
        3: (2, 1, 2),
        2: (2, 1, 2),
        1: (1, 1, 1),
    }.items():
        found = largest_fitting(config, ranks)
        assert (
            found is not None and not found.left_out and not layout_problems(config, found.parallel)
        )
        assert (found.parallel.context, found.parallel.data, found.parallel.expert) == axes, ranks


def test_every_layout_of_a_run_with_experts_on_ranks_fits() -> None:
    config = run({"tensor": 4, "data": 2, "expert": 4, "expert_tensor": 2})
    for tensor, data in product((1, 2, 4), (1, 2, 4, 8)):
        found = fit_layout(config, {"tensor": tensor, "data": data})
        assert found is not None, (tensor, data)
    asked_for = fit_layout(config, {"tensor": 2, "data": 1, "expert": 8})
    assert asked_for is None, "what is asked for is not made smaller"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data": 2, "expert": 2}, "tensor 1 x pipeline 1 x data 2 = 2 ranks, experts over 2"),
        (
            {"tensor": 2, "expert": 2, "expert_tensor": 1},
            "tensor 2 x pipeline 1 x data 1 = 2 ranks, experts over 2 in 1 slice",
        ),
        ({"tensor": 2, "expert_tensor": 1}, "tensor 2 x pipeline 1 x data 1 = 2 ranks, experts in 1 slice"),
        ({"tensor": 2, "expert_tensor": 2}, "tensor 2 x pipeline 1 x data 1 = 2 ranks"),
    ],
)  # fmt: skip
def test_the_ranks_of_experts_are_in_a_layouts_words(keys: dict[str, Any], words: str) -> None:
    assert in_words(Parallel(**keys)) == words


def test_parity_knows_short_names_for_them() -> None:
    config = run({})
    (keys,) = requested_layouts(["tp=2,dp=2,ep=4,etp=1"], config.parallel)
    found = for_parity(config, keys)
    assert found.name == "tp=2,dp=2,ep=4,etp=1"
    assert (found.parallel.expert, found.parallel.expert_tensor) == (4, 1)


def test_replicas_of_experts_and_those_that_share_their_state() -> None:
    assert (
        expert_replicas(Parallel(data=4, expert=2)),
        replicas_sharing_state(Parallel(data=4, expert=2)),
    ) == (2, 2)
    both = Parallel(data=4, tensor=2, expert=4, expert_tensor=1, zero_size=2)
    assert (expert_replicas(both), replicas_sharing_state(both)) == (2, 1)
    assert replicas_sharing_state(Parallel(data=4, expert=2, zero=False)) == 1
    assert sharding_of(run({"data": 4, "expert": 2})).replicas(True)[0].size == 2


def test_the_least_memory_of_a_rank_falls_with_its_experts() -> None:
    sizes = [least_bytes(run({"data": 4, "expert": expert, "zero": False})) for expert in (1, 2, 4)]
    assert sizes[0] > sizes[1] > sizes[2]
