"""Runs whose sequences are cut over ranks: what is refused before launch, and the layouts that they
fit into."""

import re

import pytest

from megaprec.errors import UserError
from tests.refusals import sentence
from tools.config.layouts import in_words, largest_fitting
from tools.config.run_file import RunConfig, load_run

TRAIN = ["train.steps=2", "train.global_batch=8", "train.micro_batch=1", "train.seq_length=32"]


def run(*keys: str) -> RunConfig:
    return load_run(None, ["model.preset=llama-demo", *TRAIN, "parallel.context=2", *keys])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["train.seq_length=34"],
            sentence("model.context_length", length=34, multiple=4, rule="2 x parallel.context"),
        ),
        (
            ["parallel.tensor=4", "parallel.sequence=true", "train.seq_length=36"],
            sentence(
                "model.context_length", length=36, multiple=8, rule=re.compile(r"parallel\.c")
            ),
        ),
        (
            ["train.numerics=canonical", "train.threads=1"],
            sentence("model.context_canonical", here="parallel.context = 2"),
        ),
        (["train.sentinel=2"], sentence("config.context_sentinel", context=2, sentinel=2)),
        (
            ["model.factory=mine.py:build"],
            sentence("model.context_factory", factory="mine.py:build", here="parallel.context = 2"),
        ),
        (
            ["precision.compute=bf16", "precision.attention=bf16", "precision.scores=bf16"],
            "precision.scores = bf16: ",
        ),
        (['data.lm_eval=["piqa"]'], sentence("config.context_lm_eval", context=2)),
        (
            ["parallel.zero_size=3"],
            sentence(
                "config.zero_size",
                ranks="parallel.data 1 x parallel.context 2 = 2",
                divisors="1, 2",
            ),
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_before_launch(keys: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        run(*keys)
    assert any(re.search(said, problem) for problem in raised.value.problems), raised.value.problems


def test_ranks_that_share_sequences_hold_copies_and_take_no_samples() -> None:
    config = run("parallel.data=2", "parallel.tensor=2", "parallel.zero_size=4")
    assert (config.world_size, config.num_microbatches, config.parallel.copies) == (8, 4, 4)
    assert in_words(config.parallel) == "tensor 2 x pipeline 1 x context 2 x data 2 = 8 ranks"


def test_fewer_ranks_keep_sequences_cut_as_long_as_a_replica_fits() -> None:
    config = run("parallel.data=2")
    found = []
    for ranks in (4, 3, 2, 1):
        fitting = largest_fitting(config, ranks)
        assert fitting is not None
        found.append((fitting.parallel.context, fitting.parallel.data))
    assert found == [(2, 2), (2, 1), (2, 1), (1, 1)]


def test_a_key_about_cut_sequences_without_effect_is_noted() -> None:
    assert any(
        "parallel.context_by" in note
        for note in run("parallel.context=1", "parallel.context_by=gather").notes
    )
    assert not run("parallel.context_by=gather").notes
