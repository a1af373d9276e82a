"""`megaprec prove`: what it proves, what it catches, and that a proof which would catch nothing is
none."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.checkpoint.reader import Store
from megaprec.diagnose.state_digest import StateDigest
from megaprec.optim.state.flat_buffer import Buffer
from tests.refusals import sentence, shows
from tests.runs import train, write_run
from tools import cli
from tools.commands import prove
from tools.config.tables.settings import Parallel
from tools.training.batches import Batches
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer
from tools.verify.parity.ranks import RunFailed
from tools.verify.prove.first_difference import by_step, first_parting
from tools.verify.prove.proof import turn_one_sign
from tools.verify.prove.runs import ProofRuns, _ready

Fault = Callable[[pytest.MonkeyPatch], object]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Fault]]:
    """Runs are taken in this process, on one rank. Yields the faults that are planted in runs, by
    name."""
    faults: dict[str, Fault] = {}

    def take(runs: ProofRuns, name: str, last: int, parallel: Parallel | None = None) -> None:
        config = _ready(runs.config, runs.folder / name, runs.folder / "data", last, parallel)
        newest = sorted((runs.folder / name / "checkpoints").glob("step_*"))[-1:]
        with pytest.MonkeyPatch.context() as patch:
            faults.get(name, lambda patch: None)(patch)
            Trainer(config, open_corpus(config), None, newest[0] if newest else None).run()

    monkeypatch.setattr(ProofRuns, "take", take)
    monkeypatch.setattr(prove, "other_layout", lambda config: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield faults
    torch.set_num_threads(threads)


def proven(file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["prove", str(file), *arguments])
    made = json.loads((file.parent / "run" / prove.FILE).read_text())
    return code, {row["row"]: row for row in made["rows"]} | {"verdict": made["verdict"]}


def verdicts(rows: dict[str, Any]) -> dict[str, str]:
    return {name: row["verdict"] for name, row in rows.items() if name != "verdict"}


def test_a_sound_run_is_proven_and_what_cannot_be_tried_is_told(
    file: Path, here: dict[str, Fault]
) -> None:
    code, rows = proven(file, "--steps", "2")
    assert code == 0 and rows["verdict"] == "proven"
    assert verdicts(rows) == {
        "again": "proven",
        "resumed": "proven",
        "loaded elsewhere": "not tried",
        "other layout": "not tried",
        "broken resume": "proven",
    }
    assert rows["broken resume"]["damaged"].startswith("exp_avg/")
    assert "exp_avg" in rows["broken resume"]["seen"][0]


def test_a_layout_that_was_asked_for_and_could_not_be_tried_leaves_the_run_unproven(
    file: Path, here: dict[str, Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = ProofRuns.take

    def take(runs: ProofRuns, name: str, last: int, parallel: Parallel | None = None) -> None:
        if parallel is not None:
            raise RunFailed(f"{name}: its ranks cannot be started")
        inner(runs, name, last)

    monkeypatch.setattr(ProofRuns, "take", take)
    code, rows = proven(file, "--steps", "2", "--layout", "dp=2")
    assert code == 2 and rows["verdict"] == "not tried"
    assert rows["loaded elsewhere"]["why"] == "loaded elsewhere: its ranks cannot be started"
    assert rows["broken resume"]["verdict"] == "proven"


def lose_moments(patch: pytest.MonkeyPatch) -> None:
    inner = Buffer.restore

    def restore(self: Buffer, name: str, first: int, values: torch.Tensor) -> None:
        inner(self, name, first, values * 0 if name == "exp_avg_sq" else values)

    patch.setattr(Buffer, "restore", restore)


def other_samples(patch: pytest.MonkeyPatch) -> None:
    inner = Batches._read
    patch.setattr(
        Batches,
        "_read",
        lambda self, samples, first, *others: inner(self, samples, first + 1, *others),
    )


def one_bit_of_a_weight(patch: pytest.MonkeyPatch) -> None:
    inner = Trainer._resume

    def resume(self: Trainer, checkpoint: Path) -> None:
        inner(self, checkpoint)
        self.engine.optimizer.all_buffers()[0].weights[3].view(torch.int32).bitwise_xor_(1)

    patch.setattr(Trainer, "_resume", resume)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    ("run", "fault", "place"),
    [
        ("resumed", one_bit_of_a_weight, "the state loaded after step 1: weight head.weight"),
        ("resumed", lose_moments, "the state loaded after step 1: exp_avg_sq embedding.weight and"),
        ("resumed", other_samples, "step 2: loss"),
        ("again", other_samples, "step 1: loss"),
    ],
)
def test_a_difference_is_found_and_its_place_is_named(
    file: Path, here: dict[str, Fault], run: str, fault: Fault, place: str
) -> None:
    here[run] = fault
    code, rows = proven(file, "--steps", "2")
    assert code == 1 and rows["verdict"] == rows[run]["verdict"] == "wrong"
    assert rows[run]["why"].startswith(place), rows[run]["why"]


def test_a_proof_whose_control_is_not_seen_is_worth_nothing(
    file: Path, here: dict[str, Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateDigest, "make", lambda self: {"weight": {"all": "0"}})
    code, rows = proven(file, "--steps", "2")
    assert code == 1 and rows["resumed"]["verdict"] == "proven"
    assert (
        rows["broken resume"]["verdict"] == "wrong"
        and "worth nothing" in rows["broken resume"]["why"]
    )


def test_a_run_that_fails_or_applies_no_step_is_not_tried(
    file: Path, here: dict[str, Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = proven(
        file, "precision.compute=fp16", "precision.initial_scale=1e30", "--steps", "2"
    )
    assert code == 2 and rows["verdict"] == "not tried"
    assert "no step was applied" in rows["resumed"]["why"]

    def fail(*_: object) -> None:
        raise RunFailed("straight: exit code 2: no such file")

    monkeypatch.setattr(ProofRuns, "take", fail)
    code, rows = proven(file, "--steps", "2")
    assert code == 2 and rows["straight"]["why"].endswith("no such file")


@pytest.mark.slow
def test_a_run_directory_goes_on_from_its_checkpoint_and_is_left_as_it_was(
    file: Path, here: dict[str, Fault], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, "train.steps=2", "checkpoint.every=0") == 0
    run = file.parent / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(["prove", str(run), "--steps", "2"]) == 0
    assert "steps 3 to 4, stopped after 3" in capsys.readouterr().out
    after = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != prove.FILE
    }
    assert after == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_not_its_copy(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, "train.steps=2", "checkpoint.every=0") == 0
    shard = max(
        (file.parent / "run/checkpoints").glob("step_*/*"), key=lambda path: path.stat().st_size
    )
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert cli.main(["prove", str(file.parent / "run"), "--steps", "2"]) == 2
    (row,) = json.loads((file.parent / "run" / prove.FILE).read_text())["rows"]
    assert (
        shows(
            row["why"],
            "checkpoint.digest_differs_newest",
            path=shard.parent,
            wrong=shard.name,
            verb="is",
        )
        and "megaprec_prove_" not in row["why"]
    )


def test_the_certificate_of_a_copied_run_directory_lies_in_the_copy(
    file: Path, here: dict[str, Fault]
) -> None:
    assert train(file, "train.steps=2", "checkpoint.every=0") == 0
    copy = Path(shutil.copytree(file.parent / "run", file.parent / "copy"))
    assert cli.main(["prove", str(copy), "--steps", "2"]) == 0
    assert (copy / prove.FILE).exists() and not (file.parent / "run" / prove.FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "1"], sentence("command.prove_steps", steps=1)),
        (["--layout", "tp=3"], "--layout tp=3: "),
        (["--layout", "tpp=2"], '^--layout "tpp=2": no such key "tpp"'),
        (["--layout", "tp=0"], '^--layout "tp=0": tensor: must be greater than 0'),
        (["--layout", "tp=2,tensor=1"], '^--layout "tp=2,tensor=1": tensor is given twice'),
    ],
)
def test_bad_input_is_a_line(
    file: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["prove", str(file), *arguments]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_turned_sign_is_one_element_and_the_checkpoint_still_counts_as_whole(file: Path) -> None:
    assert train(file, "train.steps=2") == 0
    path = file.parent / "run" / "checkpoints" / "step_00000002"
    before = {
        key: Store(path).read(*key.split("/", 1)).clone() for key in Store(path).index["tensors"]
    }
    damaged = turn_one_sign(path)
    after = {key: Store(path).read(*key.split("/", 1)) for key in Store(path).index["tensors"]}
    apart = {
        key: int((after[key] != before[key]).sum())
        for key in before
        if not torch.equal(after[key], before[key])
    }
    assert apart == {damaged: 1}
    assert torch.equal(after[damaged].abs(), before[damaged].abs())


def record(step: int, **changed: Any) -> dict[str, Any]:
    said = {
        "step": step,
        "outcome": "applied",
        "loss": 2.0,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "state": "s",
    }
    tables = {
        "numbers": {"steps": step},
        "progress": {"samples": 8},
        "tensors": {"weight": {"a": "1"}, "m": {"a": "2"}},
    }
    return said | tables | changed


def test_the_first_difference_is_the_earliest_step_and_in_it_the_earliest_cause() -> None:
    ours = by_step([record(1), record(2), record(3)])
    assert first_parting(ours, by_step([record(1), record(2)])) is None
    nan = by_step([record(1, loss=float("nan"))])
    assert first_parting(nan, by_step([record(1, loss=float("nan"))])) is None
    other = {"weight": {"a": "3"}, "m": {"a": "4"}}
    theirs = by_step([record(1), record(2, state="t", tensors=other), record(3, loss=3.0)])
    found = first_parting(ours, theirs)
    assert found is not None and (found.step, found.what, found.others) == (2, "m a", 1)
    found = first_parting(ours, by_step([record(1, state="t", progress={"samples": 9}, loss=3.0)]))
    assert found is not None and found.what == "progress samples" and found.others == 1


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"state": "t"}, "state"),
        ({"tensors": {"weight": {"a": "3"}, "m": {"a": "2"}}}, "weight a"),
        ({"progress": {"samples": 9}}, "progress samples"),
        ({"numbers": {"steps": 7}}, "optimizer steps"),
    ],
)
@pytest.mark.parametrize("state_only", [False, True])
def test_neither_the_digest_of_a_state_nor_its_tables_stand_for_the_other(
    changed: dict[str, Any], what: str, state_only: bool
) -> None:
    found = first_parting(by_step([record(1)]), by_step([record(1, **changed)]), state_only)
    assert found is not None and (found.what, found.others) == (what, 0)
