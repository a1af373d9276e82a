"""Each run compares itself with what holds in every run, and says in one line what does not: faults
that all layouts share are told, and runs without one are not accused."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import models.engine.engine
import models.engine.passes
from megaprec.comm.layout import layout_of
from megaprec.optim.decision.step_report import StepObserver, StepReport
from megaprec.optim.state.flat_buffer import Buffer
from models.decoder.token_count import TokenCount, count_tokens
from tests.parity.oracle_runs import words_of
from tests.planting import put
from tests.ranks import run_ranks
from tests.runs import steps, tensors, write_run
from tests.training import clean_runs
from tools.analysis.verdict.verdict import lines, read_verdict
from tools.commands import report
from tools.config.own_rate import rate_of
from tools.config.run_file import load_run
from tools.journal.invariant_records import (
    COPIES,
    FIRST_LOSS,
    MOVEMENT,
    NAMES,
    NOT_TRIED,
    PROVEN,
    RATE,
    TOKENS,
    WRONG,
    InvariantFinding,
    read_findings,
)
from tools.journal.records import INVARIANT, read_all_events, read_events
from tools.training.branch import open_start
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

Change = Callable[[Trainer], object]
PART = "layers.0.mlp.up.weight"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def taken(
    file: Path,
    folder: Path,
    *words: str,
    change: Change | None = None,
    mesh: DeviceMesh | None = None,
) -> dict[str, InvariantFinding]:
    """A run, with a fault planted before its first step; what it has found."""
    config = load_run(file, [*words, f"train.folder={folder}"])
    start = open_start(config)
    trainer = Trainer(config, open_corpus(config), mesh, start.path if start else None)
    if change is not None:
        change(trainer)
    trainer.run()
    return read_findings(read_all_events(folder))


def only_wrong(found: dict[str, InvariantFinding]) -> tuple[str, str]:
    """The one invariant that was broken, and how."""
    ((name, finding),) = [one for one in found.items() if one[1].verdict == WRONG]
    return name, finding.why


def parameter_of(trainer: Trainer, name: str) -> nn.Parameter:
    for stage in trainer.engine.stages.values():
        for parameter in stage.parameters():
            if name in [part.name for part in layout_of(parameter).parts]:
                return parameter
    raise LookupError(name)


def write(trainer: Trainer, name: str, values: Callable[[Tensor], Tensor]) -> None:
    """Changes a tensor as it lies in the memory of the optimizer."""
    parameter = parameter_of(trainer, name)
    with torch.no_grad():
        parameter.data.copy_(values(parameter.data))


class After(StepObserver):
    """Calls a function after the outcome of one step is known. step: from 1."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._left = step
        self._act = act

    def outcome(self, report: StepReport) -> None:
        self._left -= 1
        if not self._left:
            self._act()


class Updated(StepObserver):
    """Calls a function after each update."""

    def __init__(self, act: Callable[[Sequence[Buffer]], object]) -> None:
        self._act = act

    def updated(self, buffers: Sequence[Buffer]) -> None:
        self._act(buffers)


@pytest.mark.parametrize("words", [[], ["model.layer_scalar=true"]])
def test_a_run_without_a_fault_proves_all_that_one_process_can(
    words: list[str], file: Path, tmp_path: Path
) -> None:
    found = taken(file, tmp_path / "run", *words)
    verdicts = {name: finding.verdict for name, finding in found.items()}
    assert verdicts == {**dict.fromkeys(NAMES, PROVEN), COPIES: NOT_TRIED}
    assert found[COPIES].why == "one rank holds all"
    assert not read_events(tmp_path / "run", INVARIANT)


def test_the_looks_at_a_run_leave_each_bit_of_it_as_it_is(file: Path, tmp_path: Path) -> None:
    class Blind:
        findings: ClassVar[dict[str, InvariantFinding]] = {}

        def before(self, step: int) -> None: ...

        def after(self, *arguments: Any) -> list[tuple[str, str]]:
            return []

    words = ("precision.compute=bf16", "checkpoint.every=2", "lr.warmup=2", "optimizer.ema=0.9")
    taken(file, tmp_path / "seen", *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_make_invariants", lambda self: Blind())
        taken(file, tmp_path / "unseen", *words)
    assert steps(tmp_path / "seen") == steps(tmp_path / "unseen")
    newest = "checkpoints/step_00000006"
    seen = tensors(tmp_path / "seen" / newest)
    unseen = tensors(tmp_path / "unseen" / newest)
    assert seen.keys() == unseen.keys()
    assert all(torch.equal(values, unseen[name]) for name, values in seen.items())


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("more", [[], ["model.mup_base_hidden=8"]])
def test_a_head_ten_times_as_large_is_told_by_the_first_loss(
    tied: str, more: list[str], file: Path, tmp_path: Path
) -> None:
    name = "embedding.weight" if tied == "true" else "head.weight"

    def larger(trainer: Trainer) -> None:
        write(trainer, name, lambda values: values * 10)

    words = [f"model.tied={tied}", "model.init_std=0.05", *more]
    if more:
        words[1] = "model.init_std=0.1"
    assert taken(file, tmp_path / "right", *words)[FIRST_LOSS].verdict == PROVEN
    broken, why = only_wrong(taken(file, tmp_path / "run", *words, change=larger))
    assert broken == FIRST_LOSS
    assert "that of fresh weights lies between" in why


@pytest.mark.parametrize("name", ["head.weight", "final_norm.weight"])
def test_logits_that_are_all_equal_are_told(name: str, file: Path, tmp_path: Path) -> None:
    found = taken(
        file,
        tmp_path / "run",
        change=lambda trainer: write(trainer, name, torch.zeros_like),
    )
    assert found[FIRST_LOSS].verdict == WRONG
    assert "all logits are equal" in found[FIRST_LOSS].why


def test_a_loss_below_that_of_fresh_weights_is_told(file: Path, tmp_path: Path) -> None:

    def knows(trainer: Trainer) -> None:
        put(trainer.engine.optimizer, "step", _with_loss(trainer, 4.0))

    broken, why = only_wrong(taken(file, tmp_path / "run", change=knows))
    assert (broken, why.startswith("the first loss is ")) == (FIRST_LOSS, True)


def _with_loss(trainer: Trainer, divisor: float) -> Callable[..., StepReport]:
    step = trainer.engine.optimizer.step

    def smaller(lr: Any, loss: Any, *others: Any) -> StepReport:
        return step(lr, loss / divisor, *others)

    return smaller


@pytest.mark.parametrize("words", [[], ["data.eod_mask_loss=true"]])
def test_a_mask_that_is_counted_twice_is_told(
    words: list[str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*arguments: Any, **named: Any) -> TokenCount:
        count = count_tokens(*arguments, **named)
        return TokenCount(lambda: count.total * 2)

    assert taken(file, tmp_path / "right", *words)[TOKENS].verdict == PROVEN
    monkeypatch.setattr(models.engine.passes, "count_tokens", twice)
    found = taken(file, tmp_path / "run", *words)
    assert found[TOKENS].verdict == WRONG
    assert found[TOKENS].why.startswith("losses were divided by ")


def test_samples_that_are_counted_but_not_read_are_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer._advance

    def skipping(self: Trainer, report: StepReport) -> None:
        advance(self, report)
        if self.progress.step == 2:
            advance(self, report)

    monkeypatch.setattr(Trainer, "_advance", skipping)
    broken, why = only_wrong(taken(file, tmp_path / "run"))
    assert broken == TOKENS
    assert why.startswith("the run stands at sample 24, ")


@pytest.mark.parametrize("unit", ["steps", "samples"])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_rate_that_is_one_step_late_is_told_once(
    schedule: str, unit: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: Trainer) -> float:
        size = 8 if unit == "samples" else 1
        return self.config.lr_schedule.at(max(0, self.progress.applied - 1) * size)

    length = 8 if unit == "samples" else 1
    words = [f"lr.schedule={schedule}", f"lr.unit={unit}", f"lr.warmup={2 * length}"]
    words.append(f"lr.decay={3 * length}")
    assert taken(file, tmp_path / "right", *words)[RATE].verdict == PROVEN
    monkeypatch.setattr(Trainer, "_learning_rate", late)
    broken, why = only_wrong(taken(file, tmp_path / "run", *words))
    assert broken == RATE
    assert "the schedule gives" in why
    assert len(read_events(tmp_path / "run", INVARIANT)) == 1


def test_a_parameter_that_is_frozen_by_accident_is_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = models.engine.engine.freeze

    def freezing(stages: Any, patterns: Sequence[str]) -> list[str]:
        return build(stages, [*patterns, PART])

    monkeypatch.setattr(models.engine.engine, "freeze", freezing)
    words = ["model.mlp=gelu"]
    broken, why = only_wrong(taken(file, tmp_path / "run", *words))
    assert (broken, why.startswith(f"{PART} cannot move")) == (MOVEMENT, True)


def test_a_parameter_that_the_update_leaves_out_is_told(file: Path, tmp_path: Path) -> None:
    def leave_out(trainer: Trainer) -> None:
        optimizer = trainer.engine.optimizer
        for cut in optimizer._buffer_spans:
            cut.spans[:] = [one for one in cut.spans if one.span.factors.lr == 1]

    words = [f'optimizer.groups=[{{pattern = "{PART}", lr = 0.5}}]']
    assert taken(file, tmp_path / "right", *words)[MOVEMENT].verdict == PROVEN
    broken, why = only_wrong(taken(file, tmp_path / "run", *words, change=leave_out))
    assert broken == MOVEMENT
    assert why == f"the step was applied, and {PART} did not move, in step 1"


def test_a_parameter_without_a_gradient_is_named(file: Path, tmp_path: Path) -> None:
    def cut_off(trainer: Trainer) -> None:
        write(trainer, "layers.0.mlp.down.weight", torch.zeros_like)
        write(trainer, "layers.0.mlp.up.weight", torch.zeros_like)

    found = taken(file, tmp_path / "run", "model.dropout=0.0", "train.steps=1", change=cut_off)
    assert found[MOVEMENT].verdict == PROVEN
    assert PART in found[MOVEMENT].why


def test_a_rate_too_small_for_the_dtype_is_named_and_no_fault(file: Path, tmp_path: Path) -> None:
    words = ["precision.compute=bf16", "precision.masters=none", "lr.peak=1e-6"]
    found = taken(file, tmp_path / "run", *words, "precision.rounding=nearest")
    assert found[MOVEMENT].verdict == PROVEN
    assert "too small an update for their dtype: " in found[MOVEMENT].why


@pytest.mark.parametrize(
    "words",
    [["precision.compute=fp16", "precision.initial_scale=1e30"], ["lr.warmup=4"]],
)
def test_a_step_that_should_move_nothing_and_does_is_told(
    words: list[str], file: Path, tmp_path: Path
) -> None:
    def planted(trainer: Trainer) -> None:
        def act() -> None:
            masters = trainer.engine.optimizer.all_buffers()[0].masters
            assert masters is not None
            masters[0] += 1

        trainer.engine.optimizer.observers.append(After(1, act))

    broken, why = only_wrong(taken(file, tmp_path / "run", *words, change=planted))
    assert broken == MOVEMENT
    assert " moved, in step 1" in why


def test_a_frozen_parameter_that_moves_is_told(file: Path, tmp_path: Path) -> None:
    words = ['optimizer.frozen=["embedding.*"]', "model.tied=false"]
    assert taken(file, tmp_path / "right", *words)[MOVEMENT].verdict == PROVEN

    def planted(trainer: Trainer) -> None:
        def act() -> None:
            write(trainer, "embedding.weight", lambda values: values + 1)

        trainer.engine.optimizer.observers.append(After(1, act))

    broken, why = only_wrong(taken(file, tmp_path / "run", *words, change=planted))
    assert (broken, why) == (MOVEMENT, "embedding.weight moved, though frozen, in step 1")


def differing(mesh: DeviceMesh, file: Path, folder: Path, at: int, words: list[str]) -> None:
    """A run in which a rank's copy of a norm changes in a step; 0: before the first."""

    def planted(trainer: Trainer) -> None:
        def act() -> None:
            if mesh.get_rank() == 1:
                write(trainer, "final_norm.weight", lambda values: values * 1.5)

        if at:
            trainer.engine.optimizer.observers.append(After(at, act))
        else:
            act()

    taken(file, folder, *words, change=planted, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "at"), [("dp", 0), ("dp", 6), ("tp", 0), ("cp", 6)])
def test_a_copy_that_differs_is_told(axis: str, at: int, file: Path, tmp_path: Path) -> None:
    key = {"dp": "data", "tp": "tensor", "cp": "context"}[axis]
    words = [f"parallel.{key}=2", "parallel.zero=false", "model.dropout=0.0"]
    run_ranks(differing, {axis: 2}, file=file, folder=tmp_path / "run", at=at, words=words)
    broken, why = only_wrong(read_findings(read_all_events(tmp_path / "run")))
    assert broken == COPIES
    assert "final_norm.weight" in why
    assert why.endswith(f", in step {at or 1}")


def test_what_is_wrong_is_in_the_line_of_the_step_the_report_and_the_verdict(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    taken(
        file,
        folder,
        "train.eval_every=3",
        change=lambda trainer: write(trainer, "head.weight", torch.zeros_like),
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "WRONG: " in line]
    assert len(said) == 1
    assert said[0].startswith("step 1/6 ")
    verdict = read_verdict(folder)
    assert verdict is not None
    assert [line for line in lines(verdict) if line.startswith("WRONG      first loss: ")]
    page = report.page(report.Run.read(folder))
    assert "all logits are equal" in page


def test_a_run_that_resumes_keeps_what_was_proven(file: Path, tmp_path: Path) -> None:
    taken(file, tmp_path / "run", "train.steps=3", "lr.length=6")
    found = taken(file, tmp_path / "run", "lr.length=6")
    assert found[FIRST_LOSS].verdict == PROVEN
    newest = read_all_events(tmp_path / "run")[-2]
    assert newest["verdicts"][FIRST_LOSS] == [NOT_TRIED, "the run began with weights"]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("initial", [0.0, 1e-4])
def test_the_formulas_of_rates_agree_at_each_step_and_after_the_last(
    schedule: str, warmup: int, initial: float
) -> None:
    for tail in ("exponential", "linear", "cosine", "sqrt"):
        words = [f"lr.schedule={schedule}", f"lr.warmup={warmup}", f"lr.initial={initial}"]
        words += ["lr.decay=5", f"lr.wsd_decay={tail}", "lr.final=1e-5", "lr.peak=3e-3"]
        config = load_run(None, [*words_of("llama"), *clean_runs.COMMON, *words, "train.steps=20"])
        for completed in range(25):
            expected = config.lr_schedule.at(completed)
            assert math.isclose(rate_of(config.lr, completed, 20), expected, rel_tol=1e-12)


@pytest.mark.cases(4, sample=8)
@pytest.mark.parametrize("seed", range(200))
def test_no_clean_run_is_accused(seed: int, file: Path, tmp_path: Path) -> None:
    found = clean_runs.findings(file, clean_runs.drawn(seed), tmp_path)
    assert not list(clean_runs.alarms(found))
