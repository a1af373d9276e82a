"""The first lines of a run: what its parts have to say is printed."""

import re
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest

from megaprec.optim.rules.muon.rule import Muon
from megaprec.tokens.indexed import IndexedDataset
from tests.layouts import Run, make_engine
from tests.runs import write_run
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig
from tools.training import banner
from tools.training.banner import print_memory, print_start
from tools.training.corpus import Corpus, open_corpus
from tools.training.kernel_lines import kernel_lines


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("banner"))


def said_first(
    file: Path, keys: list[str], capsys: pytest.CaptureFixture[str], **given: Any
) -> str:
    config = resolve_run(file, keys)
    corpus: Corpus = open_corpus(config)
    capsys.readouterr()
    usual = {"resumed": None, "steps_done": 0, "refused_kernels": {}}
    print_start(config, corpus, "cpu", **{**usual, **given})
    return capsys.readouterr().out


def test_a_run_says_which_weights_are_in_fp8_and_why_others_are_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["fp8.first_layers=1", "fp8.kind=mx", "precision.compute=bf16"]
    said = said_first(file, keys, capsys)
    assert "fp8        mx, e4m3: products of 0 of 8 weights\n" in said
    assert "layers.0.mlp.down.weight: in bf16, for fp8.first_layers = 1\n" in said
    assert "fp8" not in said_first(file, ["precision.compute=bf16"], capsys)


def test_a_run_says_how_many_samples_its_data_has(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each target is the next token. Windows lie within what is cut into samples."""
    tokens = IndexedDataset(file.parent / "data/text").num_tokens
    length = 16
    tiled = said_first(file, ["data.held_out=0", f"train.seq_length={length}"], capsys)
    samples = (tokens - 1) // length
    assert f"{samples:,} samples an epoch\n" in tiled
    keys = ["data.held_out=0", f"train.seq_length={length}", "data.windows=random"]
    drawn = said_first(file, keys, capsys)
    windows = samples * length - length + 1
    assert f"{windows:,} windows to draw samples from\n" in drawn
    assert "an epoch" not in drawn


def test_kernels_are_named_without_memory_for_what_they_compute(file: Path) -> None:
    """Each of query, key and value would take 70 TB."""
    many = 1 << 20
    sizes = {"train.micro_batch": many, "train.global_batch": many, "train.seq_length": many}
    config = resolve_run(file, [f"{key}={size}" for key, size in sizes.items()])
    (line,) = kernel_lines(config, config.model, "cpu", {})
    assert line.startswith("attention  ")


@pytest.mark.parametrize(
    ("per_head", "counted"), [(False, "14 in number, "), (True, "14 in number (6 of them head by")]
)
def test_muon_says_how_many_matrices_it_takes_head_by_head(
    per_head: bool, counted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Query, key and value of two layers, of whose matrices each has seven."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 37}
    run = Run({"family": "llama", **sizes}, options={"rule": Muon(per_head=per_head)})
    optimizer = make_engine(None, run).optimizer
    capsys.readouterr()
    print_memory(optimizer)
    assert f"parameters on rank 0, {counted}" in capsys.readouterr().out


# a function whose result is printed, the key that asks for it, and what its line begins with
PARTS = [
    ("deletion_lines", [], ""),
    ("_describe_stages", ["parallel.pipeline=2"], "stages     "),
    ("resume_lines", [], ""),
]


@pytest.mark.parametrize(("name", "keys", "begin"), PARTS)
def test_what_a_part_has_to_say_is_printed(
    name: str,
    keys: list[str],
    begin: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = "a line" if begin else ["a line", "and another"]
    monkeypatch.setattr(banner, name, lambda *given: lines)
    resumed = {"resumed": file.parent / "run", "steps_done": 3} if name == "resume_lines" else {}
    said = said_first(file, keys, capsys, **resumed).splitlines()
    for line in [lines] if begin else lines:
        assert f"{begin}{line}" in said


def played(saved: list[int], config: RunConfig, steps_done: int) -> tuple[list[int], bool]:
    """Play the saves that are left of a run, one after the other: which of the checkpoints that are
    there go, and whether one goes that is still to be saved."""
    settings, there = config.checkpoint, list(saved)
    gone = list[int]()
    for step in range(steps_done + 1, config.train.steps + 1):
        if step == config.train.steps or (settings.every and step % settings.every == 0):
            there.append(step)
            newest = there[-int(settings.keep) :]
            kept = [s for s in there if s in newest or s in multiples(settings.keep_every, there)]
            gone += [s for s in there if s not in kept]
            there = kept
    return [step for step in gone if step in saved], any(step > steps_done for step in gone)


def multiples(every: int, steps: list[int]) -> list[int]:
    return [step for step in steps if every and step % every == 0]


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize(("every", "keep_every"), [(0, 0), (2, 0), (3, 0), (2, 4), (3, 2), (1, 3)])
def test_a_run_says_which_checkpoints_its_saves_will_delete_as_when_they_are_played(
    every: int, keep_every: int, keep: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resolve_run(
        file,
        [
            f"checkpoint.{k}={v}"
            for k, v in zip(("every", "keep_every", "keep"), (every, keep_every, keep), strict=True)
        ],
    )
    for steps_done, steps in combinations_with_replacement(range(10), 2):
        config = with_steps(whole, steps)
        saved = [step for step in range(1, steps_done + 1) if every and step % every == 0]
        paths = [Path(f"step_{step:08d}") for step in saved]
        monkeypatch.setattr(banner, "whole_checkpoints", lambda folder, p=paths: p)
        monkeypatch.setattr(banner, "made_here", lambda folder, p=paths: p)
        monkeypatch.setattr(banner, "damaged_beside", lambda newest: [])
        lines = list(banner.deletion_lines(config, steps_done))
        gone, later = played(saved, config, steps_done)
        assert len(lines) == bool(gone or later), (steps, steps_done)
        if lines:
            named = [int(step) for step in re.findall(r"step_(\d+)", lines[0])]
            assert named == gone[: len(named)] and bool(named) == bool(gone), (steps, steps_done)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["train.eval_samples=1"], "1 of {all} held-out samples: train.eval_samples = 1"),
        (
            ["train.eval_batches=1", "train.global_batch=2"],
            "2 of {all} held-out samples: train.eval_batches = 1 of train.global_batch = 2",
        ),
        (["train.eval_samples={all}"], None),
        (["train.eval_samples=100000"], None),
    ],
)
def test_a_run_says_which_part_of_a_set_an_evaluation_takes(
    keys: list[str], line: str | None, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    available = str(len(open_corpus(resolve_run(file)).evaluated["eval_loss"]))
    words = [key.replace("{all}", available) for key in ("train.eval_every=3", *keys)]
    said = said_first(file, words, capsys)
    told = [text for text in said.splitlines() if text.startswith("evaluated")]
    assert told == ([f"evaluated  {line.replace('{all}', available)}"] if line else [])
