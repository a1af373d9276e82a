"""Canonical runs: what is refused before launch, what is noted, and a resume in another layout."""

import re
from pathlib import Path

import pytest
import torch

from megaprec.errors import UserError
from tests.refusals import sentence, shows
from tests.runs import checkpoint, tensors, train, train_on, write_run
from tools.config.run_file import load_run

CANONICAL = ['train.numerics="canonical"', "train.threads=1"]
BASE = ["model.preset=llama-demo", "train.steps=4", "train.global_batch=8", "train.micro_batch=8"]
BASE += ["train.seq_length=64", *CANONICAL]

REFUSED = {
    "parallel.tensor=4": sentence("config.canonical_tensor", tensor=4, canonical_shards=2),
    "train.seq_length=63": sentence(
        "config.canonical_sizes", shards=2, sizes=re.compile("^train.seq_length 63")
    ),
    "train.canonical_shards=3": sentence(
        "config.canonical_sizes", shards=3, sizes=re.compile("^train.seq_length 64, model.heads")
    ),
    "train.canonical_shards=0": "train.canonical_shards = 0",
    "train.threads=0": sentence("config.canonical_threads"),
    'model.factory="mine.py:build"': sentence("config.canonical_factory", factory="mine.py:build"),
    "train.sentinel=2": sentence("config.canonical_sentinel", sentinel=2),
    'data.lm_eval=["one"]': sentence("config.canonical_lm_eval"),
    "parallel.data=3": sentence("optimizer.canonical_ranks", ranks=3),
    "precision.residual=fp32 precision.compute=bf16 precision.pipeline=bf16": sentence(
        "config.canonical_pipeline", pipeline="bf16"
    ),
    "fp8.kind=delayed fp8.history=te": sentence("config.canonical_history"),
    "fp8.kind=delayed fp8.reduce_amax=false": sentence("config.canonical_amaxes"),
    "fp8.kind=delayed fp8.backend=transformer_engine": sentence(
        "config.canonical_fp8_backend", backend="transformer_engine"
    ),
    "fp8.kind=delayed fp8.shadow_every=2": sentence("config.canonical_shadow", shadow_every=2),
}
NOTED = {
    "parallel.sequence=true": "parallel.sequence = true has no effect",
    "train.numerics=fast train.canonical_shards=4": "train.canonical_shards = 4 has no effect with train.numerics",
}
ONE_MICROBATCH = [*CANONICAL, "train.micro_batch=8", "optimizer.clip=0.0"]


def problems(asked: str) -> list[str]:
    try:
        load_run(None, [*BASE, *asked.split()])
    except UserError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("asked", REFUSED)
def test_what_cannot_be_canonical_is_refused_by_name(asked: str) -> None:
    assert any(re.search(REFUSED[asked], problem) for problem in problems(asked)), problems(asked)


@pytest.mark.parametrize("asked", sorted(REFUSED.keys() - {"train.canonical_shards=0"}))
def test_what_is_refused_is_no_problem_of_fast_numerics(asked: str) -> None:
    """Each rule is about canonical numerics; other rules may refuse the same keys in their own
    words."""
    assert not any("canonical" in problem for problem in problems(f"{asked} train.numerics=fast"))


@pytest.mark.parametrize("asked", NOTED)
def test_a_key_without_effect_is_noted(asked: str) -> None:
    assert any(NOTED[asked] in note for note in load_run(None, [*BASE, *asked.split()]).notes)
    assert not load_run(None, BASE).notes


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose canonical run has been trained for six steps, with checkpoints at 3 and
    6."""
    file = write_run(tmp_path_factory.mktemp("canonical"))
    assert train(file, *ONE_MICROBATCH) == 0
    return file


@pytest.mark.slow
def test_another_number_of_shards_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, *ONE_MICROBATCH, "train.canonical_shards=4", "train.steps=7") == 2
    assert shows(
        capsys.readouterr().err,
        "training.other_shards",
        key="train.canonical_shards",
        shards=4,
        saved=2,
    )


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}])
def test_a_run_goes_on_in_another_layout_with_the_same_bits(
    file: Path, tmp_path: Path, layout: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(file, *ONE_MICROBATCH, f"train.folder={folder}", "train.steps=3") == 0
    train_on(file, *ONE_MICROBATCH, f"train.folder={folder}", **layout)
    assert "not bit for bit" not in capfd.readouterr().out
    straight, moved = (tensors(checkpoint(path, 6)) for path in (file.parent / "run", folder))
    assert straight.keys() == moved.keys()
    assert not [key for key in straight if not torch.equal(straight[key], moved[key])]
