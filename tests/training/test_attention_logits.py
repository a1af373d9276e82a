"""The largest attention logits of a run: in its records, the same in every layout, and with QK-clip
at most the threshold in the step after."""

from pathlib import Path
from typing import Any

import pytest

from tests.refusals import raises
from tests.runs import steps, train_on, write_run
from tools.config.run_file import load_run

MINIMAL = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=4",
    "data.source=mine.txt",
    "train.steps=2",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.seq_length=8",
]
CLIP = "optimizer.qk_clip=100"
LOGITS = "log.attention_logits=true"
MAMBA = [
    "model.hybrid_pattern=MM",
    "model.mamba={heads=4,head_dim=4,state_dim=4,groups=2}",
    "model.positions=none",
]
REFUSED: list[tuple[str, list[str]]] = [
    ("config.logits_without_attention", [LOGITS, *MAMBA]),
    ("config.logits_factory", [LOGITS, 'model.factory="mine.py:build"']),
    ("config.logits_factory", [CLIP, 'model.factory="mine.py:build"']),
    ("config.logits_context", [LOGITS, "parallel.context=2"]),
    ("config.logits_context", [CLIP, "parallel.context=2"]),
    ("config.logits_canonical", [CLIP, "train.numerics=canonical", "train.threads=1"]),
    ("config.qk_clip_qk_norm", [CLIP, "model.qk_norm=true"]),
]


@pytest.mark.parametrize(("code", "keys"), REFUSED)
def test_what_cannot_be_looked_at_or_clipped_is_refused(code: str, keys: list[str]) -> None:
    with raises(code):
        load_run(None, [*MINIMAL, *keys])


def test_logits_of_normed_queries_and_keys_may_be_looked_at() -> None:
    assert load_run(None, [*MINIMAL, LOGITS, "model.qk_norm=true"]).log.attention_logits


def logits(records: list[dict[str, Any]]) -> list[list[list[float]]]:
    return [record["attention_logits"] for record in records]


def flat(record: list[list[float]]) -> list[float]:
    return [logit for layer in record for logit in layer]


def test_records_have_the_logits_of_all_layers_and_heads_the_same_in_each_layout(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path)
    keys = [LOGITS, "precision.compute=fp64", "train.steps=3", "model.dropout=0"]
    whole = logits(steps(train_on(file, *keys, f"train.folder={tmp_path}/whole")))
    cut = logits(steps(train_on(file, *keys, f"train.folder={tmp_path}/cut", tensor=2, pipeline=2)))
    assert len(whole) == 3
    assert [len(layer) for layer in whole[0]] == [4, 4]
    for one, other in zip(whole, cut, strict=True):
        assert flat(one) == pytest.approx(flat(other), rel=1e-5)


def test_logits_of_evaluations_and_of_earlier_steps_do_not_count(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    keys = [LOGITS, "train.steps=4", "model.init_std=0.7", "lr.peak=1e-4"]
    evaluated = ["train.eval_every=1", f"train.folder={tmp_path}/evaluated"]
    records = steps(train_on(file, *keys, *evaluated))
    assert logits(records) == logits(steps(train_on(file, *keys, f"train.folder={tmp_path}/not")))
    # what is never cleared does not fall
    largest = [max(flat(record)) for record in logits(records)]
    assert largest != sorted(largest)


def test_a_run_without_the_key_has_no_such_field(tmp_path: Path) -> None:
    assert "attention_logits" not in steps(train_on(write_run(tmp_path), "train.steps=1"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_clipped_run_keeps_its_logits_near_the_threshold(
    compute: str, rule: str, tmp_path: Path
) -> None:
    """Weights change between the measure and the clip, by one update."""
    file = write_run(tmp_path)
    keys = [
        LOGITS,
        f"precision.compute={compute}",
        f"optimizer.name={rule}",
        "model.init_std=0.7",
        "model.dropout=0",
        "train.steps=6",
        "lr.peak=1e-4",
    ]
    free = logits(steps(train_on(file, *keys, f"train.folder={tmp_path}/free", tensor=2)))
    clipped_to = ["optimizer.qk_clip=5", "parallel.zero=2", f"train.folder={tmp_path}/clipped"]
    clipped = logits(steps(train_on(file, *keys, *clipped_to, tensor=2, data=2)))
    assert flat(clipped[0]) == pytest.approx(flat(free[0]), rel=2e-2)
    assert max(flat(free[-1])) > 10
    # other batches have other largest logits
    assert max(flat(clipped[-1])) < 8
