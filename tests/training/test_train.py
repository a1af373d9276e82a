"""`megaprec train` from end to end: any launcher and layout, resuming, dying, skipping, evaluating,
showing."""

import json
import multiprocessing
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint import atomic as checkpoint_folder
from megaprec.checkpoint import saving as checkpoint_state
from megaprec.checkpoint import shard_file as checkpoint_file
from megaprec.diagnose.position import Phase, Position
from megaprec.errors import Problem, UserError
from megaprec.resources import cores
from megaprec.text.training import train_sentencepiece
from megaprec.tokens.indexed import IndexedDataset
from parallel.mesh import broadcast_from_first
from tests.checkpoint.test_checkpoint import names
from tests.other_systems import slow
from tests.ranks import run_ranks
from tests.refusals import raises, sentence, shows
from tests.runs import (
    assert_close,
    checkpoint,
    losses,
    rewind,
    steps,
    tensors,
    train,
    train_on,
    write_run,
)
from tools.analysis.plots.drawing import PALETTE
from tools.analysis.plots.training_plot import plot_run
from tools.config.run_file import load_run
from tools.console.wrapped import say
from tools.journal.journal import Journal
from tools.training.corpus import open_corpus
from tools.training.prepare import prepare
from tools.training.prepared_files import open_prepared
from tools.training.stopping import ECHO_SECONDS

ROOT = Path(__file__).parents[2]
# the last part of the text is unlike the rest
EXACT = ["precision.compute=fp64", "train.eval_every=2", "data.held_out_from=end"]
FP16 = [
    "precision.compute=fp16",
    "precision.hysteresis=1",
    "precision.initial_scale=4294967296.0",  # the first steps overflow
]
FIELDS = {
    "step",
    "outcome",
    "loss",
    "grad_norm",
    "num_zeros",
    "loss_scale",
    "lr",
    "tokens",
    "skipped_total",
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def exact(run_file: Path) -> Path:
    """The run that all layouts are compared with: one process, float64, six steps, evaluated after
    every other."""
    folder = run_file.parent / "exact"
    assert train(run_file, *EXACT, f"train.folder={folder}") == 0
    return folder


# --- any launcher, any layout


def command(*arguments: object, torchrun: int = 0) -> list[str]:
    if torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    else:
        launcher = []
    return [sys.executable, *launcher, "-m", "megaprec", "train", *map(str, arguments)]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2)])
@pytest.mark.usefixtures("forked_python")
def test_the_command_and_torchrun_train_the_same_bits_and_one_process_the_same_steps(
    tensor: int, pipeline: int, run_file: Path, exact: Path, tmp_path: Path
) -> None:
    layout = [*EXACT, f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}"]
    for launcher, ranks in (("own", 0), ("torchrun", tensor * pipeline)):
        started = command(run_file, *layout, f"train.folder={tmp_path / launcher}", torchrun=ranks)
        subprocess.run(started, cwd=ROOT, check=True, capture_output=True, timeout=1200)
    assert steps(tmp_path / "own") == steps(tmp_path / "torchrun")
    assert_close(steps(tmp_path / "own"), steps(exact), 1e-10)


def test_another_layout_trains_and_evaluates_the_same_steps(
    run_file: Path, exact: Path, tmp_path: Path
) -> None:
    other = train_on(
        run_file,
        *EXACT,
        "parallel.sequence=true",
        "train.steps=2",
        f"train.folder={tmp_path}",
        tensor=2,
        data=2,
    )
    assert_close(steps(other), steps(exact)[:2], 1e-10)


def test_a_rank_tells_the_phases_of_its_run_in_their_order(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the preparation of the data may take as long as it takes, and no other."""
    entered: list[Phase] = []
    enter = Position.enter

    def noted(position: Position, phase: Phase, *step: int) -> None:
        entered.append(phase)
        enter(position, phase, *step)

    monkeypatch.setattr(Position, "enter", noted)
    words = ("train.steps=1", "train.eval_every=1", "checkpoint.every=1")
    assert train(run_file, f"train.folder={tmp_path}/run", *words) == 0
    phases = [Phase.PREPARATION, Phase.LOADING, Phase.STEP, Phase.EVALUATION, Phase.SAVE]
    assert list(dict.fromkeys(entered)) == phases


def test_evaluation_comes_when_it_is_due_and_changes_nothing(
    run_file: Path, exact: Path, tmp_path: Path
) -> None:
    train(run_file, *EXACT, "train.eval_every=0", f"train.folder={tmp_path}")
    evaluated = [record["step"] for record in steps(exact) if "eval_loss" in record]
    assert evaluated == [2, 4, 6]
    assert steps(tmp_path) == [
        {k: v for k, v in r.items() if k != "eval_loss"} for r in steps(exact)
    ]


def test_the_held_out_loss_is_that_of_text_that_is_not_trained_on(
    run_file: Path, exact: Path
) -> None:
    corpus = open_corpus(load_run(run_file))
    assert corpus.held_out is not None
    trained, held_out = (
        set(s.batch(0, len(s)).ids.tolist()) for s in (corpus.train, corpus.held_out)
    )
    assert not trained & held_out
    # it is of another kind, see write_run
    assert steps(exact)[-1]["eval_loss"] > steps(exact)[-1]["loss"] + 0.1


def told(mesh: DeviceMesh, file: str, wrong: bool) -> tuple[dict[str, str], str]:
    """On two ranks: what the second is told by the first, which is slower than the store's own
    patience."""
    store = dist.FileStore(file, 2)
    store.set_timeout(timedelta(seconds=0.1))

    def make() -> dict[str, str]:
        time.sleep(1.5)  # a FileStore looks at its clock once a second
        if wrong:
            raise UserError("no text")
        return {"made by": str(dist.get_rank())}

    try:
        return broadcast_from_first(store, make), ""
    except UserError as error:
        return {}, str(error)


@pytest.mark.slow
def test_what_rank_0_makes_or_cannot_make_is_told_to_all_however_long_it_takes(
    tmp_path: Path,
) -> None:
    assert (
        run_ranks(told, {"dp": 2}, file=str(tmp_path / "a"), wrong=False)
        == [({"made by": "0"}, "")] * 2
    )
    assert run_ranks(told, {"dp": 2}, file=str(tmp_path / "b"), wrong=True) == [({}, "no text")] * 2


def test_of_two_processes_that_need_the_same_data_one_builds_it_and_the_other_waits(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run(run_file, [f"data.cache={tmp_path}"])
    waits = threading.Event()
    built = []
    threads = []

    def learn(*arguments: Any) -> Path:
        built.append(threading.get_ident())
        if not threads:
            threads.append(threading.Thread(target=lambda: open_corpus(config)))
            threads[0].start()
            assert waits.wait(300)
        return train_sentencepiece(*arguments)

    monkeypatch.setattr("tools.training.data_building.train_sentencepiece", learn)
    monkeypatch.setattr("tools.training.data_building.say_busy", lambda _: waits.set())
    open_corpus(config)
    threads[0].join(300)
    assert len(built) == 1


def test_ranks_open_what_rank_0_named_and_name_what_they_miss(
    run_file: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run(run_file, [f"train.folder={exact}"])
    prefix = run_file.parent / "data" / "text"
    last = checkpoint(exact, 6)
    named = {
        "prefixes": [str(prefix)],
        "masked": [],
        "tokenizer": f"{prefix}.model",
        "checkpoint": str(checkpoint(exact, 3)),
    }
    unknown = {"identity": None, "notes": []}
    with ExitStack() as held:
        assert prepare(config, held).items() >= {**named, "checkpoint": str(last)}.items()
    monkeypatch.setattr(
        "tools.training.data_building.reusable", lambda *_: pytest.fail("a rank decided for itself")
    )
    corpus, start = open_prepared(config, named | unknown)
    assert (corpus.datasets[0].prefix, start) == (prefix, checkpoint(exact, 3))
    missing = {
        "prefixes": ["nowhere/text"],
        "masked": ["nowhere/text"],
        "tokenizer": "nowhere/text.model",
        "checkpoint": "nowhere/step_00000003",
    }
    with pytest.raises(UserError) as refused:
        open_prepared(config, missing)
    files = ["text.loss_mask", "text.idx", "text.bin", "text.model"]
    paths = [*files, "step_00000003/checkpoint.json"]
    for problem, path in zip(refused.value.problems, paths, strict=True):
        assert re.fullmatch(sentence("training.file_not_shared", path=f"nowhere/{path}"), problem)


# --- resuming


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        ({"tensor": 2, "data": 2}, ["precision.compute=bf16"]),
        (
            {"pipeline": 2, "data": 2},
            [*FP16, "precision.initial_scale=4e6", "precision.growth_interval=2"],
        ),
    ],
    ids=["bf16", "fp16"],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    layout: dict[str, int], compute: list[str], run_file: Path, tmp_path: Path
) -> None:
    whole = train_on(run_file, *compute, f"train.folder={tmp_path / 'whole'}", **layout)
    resumed = rewind(whole, tmp_path / "resumed", step=3)
    train_on(run_file, *compute, f"train.folder={resumed}", **layout)
    assert steps(resumed) == steps(whole)
    assert len({record["loss_scale"] for record in steps(whole)[3:]}) == (
        2 if "fp16" in compute[0] else 1
    )
    before = tensors(checkpoint(whole, 6))
    after = tensors(checkpoint(resumed, 6))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"tensor": 2, "pipeline": 2}),
        ({"tensor": 2, "pipeline": 2}, {"data": 2}),
        ({"data": 2}, {}),
    ],
    ids=["one-to-tp2pp2", "tp2pp2-to-dp2", "dp2-to-one"],
)
def test_a_run_goes_on_in_any_other_layout(
    first: dict[str, int], then: dict[str, int], run_file: Path, exact: Path, tmp_path: Path
) -> None:
    train_on(run_file, *EXACT, "train.steps=4", f"train.folder={tmp_path}", **first)
    train_on(run_file, *EXACT, f"train.folder={tmp_path}", **then)
    assert_close(steps(tmp_path), steps(exact), 1e-10)


def test_metrics_hold_every_step_once_though_a_line_was_torn_and_steps_were_repeated(
    run_file: Path, exact: Path, tmp_path: Path
) -> None:
    again = rewind(exact, tmp_path / "again", step=3)
    with (again / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "loss"')
    train(run_file, *EXACT, f"train.folder={again}", "train.steps=7")
    assert [record["step"] for record in steps(again)] == [1, 2, 3, 4, 5, 6, 7]
    assert steps(again)[:6] == steps(exact)
    for line in (again / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).keys() >= FIELDS | {"tokens_per_s"}


def test_a_run_that_is_done_says_so_and_changes_nothing(
    run_file: Path, exact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (exact / "metrics.jsonl").read_bytes()
    assert train(run_file, *EXACT, f"train.folder={exact}") == 0
    assert f"resumed    from {checkpoint(exact, 6)}, no step is left" in capsys.readouterr().out
    assert (exact / "metrics.jsonl").read_bytes() == before


def test_a_resumed_run_may_have_another_batch_without_a_jump_of_tokens_or_learning_rate(
    run_file: Path, tmp_path: Path
) -> None:
    run = [
        "lr.unit=samples",
        "lr.schedule=linear",
        f"train.folder={tmp_path}",
        "model.max_positions=16",
    ]
    smaller = ["train.global_batch=4", "train.seq_length=8", "train.steps=4"]
    assert train(run_file, *run, "train.steps=2") == 0
    assert train(run_file, *run, *smaller, "--allow", "seq_length") == 0
    schedule = load_run(run_file, [*run, *smaller]).lr_schedule
    assert [(record["tokens"], record["lr"]) for record in steps(tmp_path)[2:]] == [
        (2 * 8 * 16 + 4 * 8, schedule.at(2 * 8)),
        (2 * 8 * 16 + 2 * 4 * 8, schedule.at(2 * 8 + 4)),
    ]


@pytest.mark.slow
def test_records_of_a_run_that_left_no_checkpoint_are_put_aside(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kept in ("", ".old", ".old2"):
        assert train(run_file, f"train.folder={tmp_path}", f"train.steps={len(kept) + 1}") == 0
        assert (f"kept       {tmp_path}/metrics.jsonl{kept}," in capsys.readouterr().out) is bool(
            kept
        )
        shutil.rmtree(tmp_path / "checkpoints")
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in tmp_path.glob("metrics.jsonl*")
    }
    assert lengths == {"metrics.jsonl.old": 1, "metrics.jsonl.old2": 5, "metrics.jsonl": 6}


# --- dying


def die(*arguments: object, **options: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(descriptor: int, content: memoryview) -> None:
    os.write(descriptor, content[: len(content) // 2])
    die()


def _train_and_die(
    module: str, name: str, instead: Callable[..., None], file: Path, overrides: list[str]
) -> None:
    train(file, *overrides, "train.steps=2")
    setattr(sys.modules[module], name, instead)
    train(file, *overrides, "train.steps=4")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("module", "name", "instead", "step"),
    [
        (checkpoint_file, "write_all", write_half, 2),
        (checkpoint_state, "_write_index", die, 2),
        (checkpoint_state, "commit", die, 2),
        (
            checkpoint_folder,
            "_remove",
            die,
            4,
        ),  # of the checkpoint before, when the new one is whole
    ],
    ids=["in-a-file", "before-the-index", "before-the-rename", "before-the-old-one-goes"],
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint_to_go_on_from(
    module: Any,
    name: str,
    instead: Callable[..., None],
    step: int,
    run_file: Path,
    exact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = [*EXACT, "checkpoint.every=2", "checkpoint.keep=1", f"train.folder={tmp_path / 'run'}"]
    forked = multiprocessing.get_context("forkserver").Process(
        target=_train_and_die, args=(module.__name__, name, instead, run_file, run)
    )
    forked.start()
    forked.join(600)
    assert forked.exitcode == -signal.SIGKILL
    assert train(run_file, *run) == 0
    assert (
        f"resumed    from {checkpoint(tmp_path / 'run', step)}, steps {step + 1} to 6"
        in capsys.readouterr().out
    )
    assert steps(tmp_path / "run") == steps(exact)
    assert names(tmp_path / "run" / "checkpoints") == ["step_00000006"]


class Launched:
    """The command with two ranks on an endless run, past its first steps."""

    def __init__(self, file: Path, folder: Path) -> None:
        endless = [
            f"train.folder={folder}",
            "train.steps=1000000",
            "checkpoint.every=2",
            "parallel.tensor=2",
        ]
        endless += ["train.restarts=0"]
        environment = {
            name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
        }
        self.folder = folder
        self.process = subprocess.Popen(
            command(file, *EXACT, *endless, "train.threads=0"),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with killed_on_failure(self.process):
            until(lambda: (folder / "metrics.jsonl").is_file() and len(losses(folder)) > 2)
        self.ranks = {variables["RANK"]: pid for pid, variables in children(self.process.pid)}

    def end(self) -> tuple[int, list[str]]:
        """Exit code and lines of stderr; nothing of the run may be left."""
        said = self.process.communicate(timeout=1200)[1].splitlines()
        until(lambda: not any(map(runs, self.ranks.values())))
        return self.process.returncode, said


@contextmanager
def killed_on_failure(process: subprocess.Popen[str]) -> Iterator[None]:
    """An endless run does not outlive a test that has given it up."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


@pytest.fixture
def launched(run_file: Path, tmp_path: Path) -> Iterator[Launched]:
    run = Launched(run_file, tmp_path / "run")
    yield run
    for pid in (run.process.pid, *run.ranks.values()) if run.process.returncode is None else ():
        os.kill(pid, signal.SIGKILL)
    run.process.communicate()


def until(true: Callable[[], bool], seconds: float = 1200, every: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(every)


def stopped_in_mid_save(folder: Path, pid: int) -> bool:
    """Whether rank 0 was stopped while its checkpoint was not whole; else it goes on."""
    if any(folder.glob(".step_????????.partial/*.safetensors")):
        os.kill(pid, signal.SIGSTOP)
        if any(folder.glob(".step_????????.partial/*.safetensors")):
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Every rank that the launcher `pid` started, and its environment."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        lines = Path(f"/proc/{child}/environ").read_text().split("\0")
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        if "RANK" in variables:
            yield int(child), variables


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_is_named_last(launched: Launched) -> None:
    here = cores()
    ranks = dict(children(launched.process.pid))
    assert [variables["OMP_NUM_THREADS"] for variables in ranks.values()] == [
        str(max(1, here // 2))
    ] * 2
    os.kill(launched.ranks["1"], signal.SIGKILL)
    code, said = launched.end()
    assert code == 128 + signal.SIGKILL
    assert said[-1] == "rank 1 was ended by SIGKILL"


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *slow((signal.SIGTERM, 143))])
def test_a_signal_ends_all_ranks_in_one_line_their_state_saved(
    number: signal.Signals, code: int, launched: Launched
) -> None:
    for _ in range(2):  # ranks are in sessions of their own: Ctrl-C does not reach them either
        launched.process.send_signal(number)
    ended, said = launched.end()
    step = len(losses(launched.folder))
    assert (ended, said) == (
        code,
        [f"stopped by {number.name} after step {step}, state saved: the same command goes on"],
    )
    assert checkpoint_folder.latest(launched.folder / "checkpoints") == checkpoint(
        launched.folder, step
    )


@pytest.mark.slow
def test_a_second_signal_ends_at_once_what_cannot_finish_its_step(launched: Launched) -> None:
    os.kill(launched.ranks["1"], signal.SIGSTOP)
    launched.process.terminate()
    time.sleep(1.1 * ECHO_SECONDS)
    assert launched.process.poll() is None
    while (
        launched.process.poll() is None
    ):  # one that comes while a busy launcher still takes in the first is its echo
        launched.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            launched.process.wait(240)
    assert launched.end() == (143, ["stopped by SIGTERM"])


@pytest.mark.slow
def test_under_torchrun_a_signal_to_one_rank_is_enough(run_file: Path, tmp_path: Path) -> None:
    endless = [
        f"train.folder={tmp_path}",
        "train.steps=1000000",
        "checkpoint.every=0",
        "parallel.tensor=2",
    ]
    started = command(run_file, *EXACT, *endless, torchrun=2)
    with (
        subprocess.Popen(
            started, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as launcher,
        killed_on_failure(launcher),
    ):
        until(lambda: (tmp_path / "metrics.jsonl").is_file() and len(losses(tmp_path)) > 2)
        ranks = {variables["RANK"]: pid for pid, variables in children(launcher.pid)}
        os.kill(ranks["1"], signal.SIGUSR1)
        said = launcher.communicate(timeout=1200)[1]
    step = len(losses(tmp_path))
    assert f"stopped by SIGUSR1 after step {step}, state saved: the same command goes on\n" in said
    assert checkpoint_folder.latest(tmp_path / "checkpoints") == checkpoint(tmp_path, step)
    assert launcher.returncode


def require_a_second_run_refused(
    launched: Launched, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(run_file, *EXACT, f"train.folder={launched.folder}", "train.steps=1000000") == 2
    said = Problem.of("command.folder_in_use", folder=launched.folder)
    assert capfd.readouterr().err == f"{said}\n"
    taken = len(losses(launched.folder))
    until(lambda: len(losses(launched.folder)) > taken + 2)  # it goes on undisturbed
    with pytest.raises(UserError, match=sentence("command.folder_in_use")), ExitStack() as held:
        prepare(load_run(run_file, [*EXACT, f"train.folder={launched.folder}"]), held)


def test_of_two_runs_that_start_at_once_the_later_is_refused(
    run_file: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run(run_file, [*EXACT, f"train.folder={exact}"])
    # both have looked by now
    monkeypatch.setattr("tools.training.prepare.open_checked", lambda *_: open_corpus(config))
    with ExitStack() as first, ExitStack() as second:
        prepare(config, first)
        with raises("command.folder_in_use"):
            prepare(config, second)
    with ExitStack() as later:
        prepare(config, later)


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused_and_a_kill_in_mid_save_leaves_the_last_whole_checkpoint_and_no_rank(
    launched: Launched, run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    require_a_second_run_refused(launched, run_file, capfd)
    folder = launched.folder / "checkpoints"
    until(lambda: stopped_in_mid_save(folder, launched.ranks["0"]), every=0.001)
    launched.process.kill()
    launched.end()  # ranks do not outlive what started them
    (unfinished,) = folder.glob(".step_????????.partial")
    last = checkpoint_folder.latest(folder)
    assert last is not None
    assert f".{last.name}.partial" < unfinished.name
    step = int(last.name.removeprefix("step_"))
    assert (
        train(run_file, *EXACT, f"train.folder={launched.folder}", f"train.steps={step + 2}") == 0
    )
    assert f"resumed    from {last}, steps {step + 1} to {step + 2}" in capfd.readouterr().out
    assert [record["step"] for record in steps(launched.folder)] == list(range(1, step + 3))
    assert not unfinished.exists()


def test_a_run_without_a_step_left_leaves_the_record_of_what_was_trained(
    run_file: Path, tmp_path: Path
) -> None:
    run = [*EXACT, "train.steps=1", f"train.folder={tmp_path}"]
    assert train(run_file, *run) == 0
    record = (tmp_path / "run.toml").read_bytes()
    assert train(run_file, *run, "model.dropout=0.3") == 0
    assert (tmp_path / "run.toml").read_bytes() == record


@pytest.mark.parametrize(("every", "evaluated"), [(4, [4, 6]), (3, [3, 6]), (9, [6]), (0, [])])
def test_the_end_of_a_run_that_evaluates_is_evaluated_once(
    every: int, evaluated: list[int], run_file: Path, tmp_path: Path
) -> None:
    run = [f"train.eval_every={every}", "train.steps=6", f"train.folder={tmp_path}"]
    assert train(run_file, *run) == 0
    assert [record["step"] for record in steps(tmp_path) if "eval_loss" in record] == evaluated


# --- skipping, and the learning rate


def test_a_run_in_fp16_begins_at_a_scale_at_which_it_trains(run_file: Path, tmp_path: Path) -> None:
    run = ["precision.compute=fp16", "train.steps=4", f"train.folder={tmp_path}"]
    assert train(run_file, *run) == 0
    assert [record["outcome"] for record in steps(tmp_path)] == ["applied"] * 4


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("unit", ["steps", "samples"])
def test_a_skipped_step_consumes_samples_and_the_learning_rate_waits_for_it(
    unit: str, run_file: Path, tmp_path: Path
) -> None:
    overrides = [
        *FP16,
        "train.steps=44",
        "lr.schedule=linear",
        f"lr.unit={unit}",
        "lr.warmup=8",
        "lr.peak=2e-2",
    ]
    assert train(run_file, *overrides, f"train.folder={tmp_path}") == 0
    schedule = load_run(run_file, overrides).lr_schedule
    records = steps(tmp_path)
    applied = 0
    for number, record in enumerate(records, 1):
        assert record["lr"] == schedule.at(applied * (8 if unit == "samples" else 1))
        applied += record["outcome"] == "applied"
        assert record["outcome"] in ("applied", "skipped_overflow")
        assert record["skipped_total"] == number - applied
        assert record["tokens"] == number * 8 * 16
        # "inf" or "nan"
        assert isinstance(record["grad_norm"], str) == (record["outcome"] != "applied")
        assert ("overflow_in" in record) == (record["outcome"] != "applied")
    assert records[0]["loss_scale"] == 2.0**32
    assert records[0]["outcome"] == "skipped_overflow"
    assert 25 <= applied < 44
    assert sum(losses(tmp_path)[-3:]) / 3 < losses(tmp_path)[0] - 1


# --- data


@pytest.mark.slow
def test_the_same_text_is_the_same_run_however_it_is_given(run_file: Path, tmp_path: Path) -> None:
    text = (run_file.parent / "text.txt").read_text(encoding="utf-8")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"content": text}) + "\n")
    prefix = run_file.parent / "data" / "text"
    fresh = f"data.cache={tmp_path}"
    known = f"data.tokenizer={prefix}.model"
    alone = tmp_path / "alone"
    for suffix in (".bin", ".idx"):
        shutil.copy(prefix.with_suffix(suffix), alone.with_suffix(suffix))
    given = {
        "file": [],
        "folder": [f"data.source={tmp_path / 'texts'}", f"{fresh}/2", known],
        "jsonl": [
            f"data.source={tmp_path / 'lines.jsonl'}",
            "data.text_field=content",
            f"{fresh}/3",
            known,
        ],
        "tokens": [f"data.source={prefix}", known],
        "tokens alone": [f"data.source={alone}", "model.vocab=330"],
    }
    for name, overrides in given.items():
        assert train(run_file, *overrides, "train.steps=2", f"train.folder={tmp_path / name}") == 0
    assert all(steps(tmp_path / name) == steps(tmp_path / "file") for name in given)


def test_a_data_set_brings_the_tokenizer_that_was_built_with_it(run_file: Path) -> None:
    prefix = run_file.parent / "data" / "text"
    corpus = open_corpus(load_run(run_file, [f"data.source={prefix}"]))
    assert corpus.tokenizer is not None
    assert (corpus.tokenizer.path, corpus.model.vocab) == (Path(f"{prefix}.model"), 330)


def test_the_working_directory_need_not_be_writable(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(
        "tools.training.run_folder.os.access", lambda path, mode: path != tmp_path / "here"
    )
    assert train(run_file, "data.cache=", f"train.folder={tmp_path / 'run'}", "train.steps=1") == 0


def test_a_tilde_is_the_home_directory_wherever_a_run_names_a_path(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("train.folder", "data.cache", "data.tokenizer", "data.source")
    config = load_run(run_file, [f"{key}=~/x" for key in keys])
    assert {config.value(key) for key in keys} == {'"/home/me/x"'}


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_come_in_file_order_only_if_asked_for(
    shuffle: bool, run_file: Path, tmp_path: Path
) -> None:
    # so that training begins with the first token of the text
    given = ("data.held_out_from=end", f"data.shuffle={str(shuffle).lower()}")
    train(run_file, *given, f"train.folder={tmp_path}", "train.steps=1")
    stream = IndexedDataset(run_file.parent / "data" / "text")
    corpus = open_corpus(load_run(run_file, [*given]))
    in_order = torch.from_numpy(stream.tokens(0, 8 * 16)).view(8, 16)
    assert torch.equal(corpus.train.batch(0, 8).tokens, in_order) is not shuffle


def test_a_resumed_run_never_replaces_the_data_that_it_was_trained_on(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["data.cache=", f"train.folder={tmp_path}"]
    assert train(run_file, *own, "data.vocab_size=320", "train.steps=1", "checkpoint.every=9") == 0
    before = (tmp_path / "data" / "text.bin").read_bytes()
    capsys.readouterr()
    assert train(run_file, *own, "data.vocab_size=325") == 2
    assert shows(capsys.readouterr().err, "training.vocabulary_differs", vocab_size=325, size=320)
    assert train(run_file, *own, "data.vocab_size=320", "data.max_chars=9000") == 2
    assert shows(capsys.readouterr().err, "training.other_text")
    assert (tmp_path / "data" / "text.bin").read_bytes() == before


# --- what is shown


@pytest.mark.slow
def test_tensorboard_holds_the_numbers_of_metrics_also_after_a_resume(
    run_file: Path, tmp_path: Path
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(
        run_file, f"train.folder={tmp_path / 'run'}", 'log.to=["tensorboard"]', "train.eval_every=3"
    )
    again = rewind(tmp_path / "run", tmp_path / "again", step=3)
    train(
        run_file,
        f"train.folder={again}",
        'log.to=["tensorboard"]',
        "train.eval_every=3",
        "train.seed=99",
        "--allow",
        "seed",
    )
    read = events.EventAccumulator(str(again / "tensorboard")).Reload()
    for name in (FIELDS - {"step", "outcome"}) | {"eval_loss"}:
        kept = [(record["step"], record[name]) for record in steps(again) if name in record]
        assert [event.step for event in read.Scalars(name)] == [step for step, _ in kept]
        assert [event.value for event in read.Scalars(name)] == pytest.approx(
            [value for _, value in kept], rel=1e-6
        )


@pytest.mark.slow
def test_the_plot_is_a_picture_also_of_a_run_with_skipped_steps(
    run_file: Path, tmp_path: Path
) -> None:
    image = pytest.importorskip("matplotlib.image")
    train(run_file, *FP16, f"train.folder={tmp_path}", "log.plot=true", "train.eval_every=2")
    picture = tmp_path / "training.png"
    assert picture.stat().st_size > 10_000
    height, width, _ = image.imread(picture).shape
    assert 500 < height < width
    shown = torch.from_numpy(image.imread(picture))[..., :3].mul(255).round().view(-1, 3)
    for color, pixels in (
        (PALETTE["main"], 300),
        (PALETTE["other0"], 100),
        (PALETTE["red"], 30),
    ):  # training, held-out, skipped steps
        rgb = torch.tensor([int(color[at : at + 2], 16) for at in (1, 3, 5)])
        assert (shown == rgb).all(1).sum() > pixels


def test_without_matplotlib_there_is_no_plot_and_no_failure(
    run_file: Path, exact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_run(exact) is None
    assert train(run_file, *EXACT, f"train.folder={exact}", "log.plot=true") == 0
    assert "plots      none: pip install matplotlib" in capsys.readouterr().out


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[list[str]]:
    """Makes stdout and stderr a terminal; the list holds afterwards each state of each line that it
    showed."""
    ours, theirs = pty.openpty()
    received: list[bytes] = []
    shown: list[str] = []

    def read() -> None:
        while data := os.read(ours, 1 << 16):
            received.append(data)
            if data.endswith(b"\x04"):
                return

    reader = threading.Thread(target=read, daemon=True)
    with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as stream:
        for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        reader.start()
        try:
            yield shown
        finally:
            stream.write("\x04")
            stream.flush()
            reader.join(300)
            os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(received).decode())
    shown.extend(line.rstrip() for line in re.split(r"[\r\n\x04]+", text))


def test_a_terminal_shows_the_data_being_built_and_one_line_of_progress(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch, 80) as shown:
        train(
            run_file, "data.cache=", f"train.folder={tmp_path}", "train.eval_every=3", "log.every=2"
        )
    assert any(re.fullmatch(r"1 documents  [\d,]+ tokens .*%.*", line) for line in shown)
    bars = [
        line
        for line in shown
        if re.fullmatch(r"step \d/6 [━╸╺]+ loss \d\.\d{4}  [\d,]+ tokens/s  ETA \d:\d\d", line)
    ]
    assert bars[-1].startswith("step 6/6")
    numbers = r"loss \d\.\d{4}  lr \S+  grad norm \S+  scale 1"
    history = [line[5] for line in shown if re.match(rf"step \d/6  {numbers}", line)]
    assert history == ["2", "3", "4", "6"], (
        "the steps of log.every and those with a held-out loss stay above the bar"
    )
    assert len([line for line in shown if line.strip() in ("held-out loss", "loss")]) == 0
    assert max(len(line) for line in shown if "/" not in line or line.startswith("step")) <= 80


@pytest.mark.parametrize("columns", [80, 100, 132])
def test_no_number_is_broken_and_the_bar_has_20_columns_at_the_numbers_of_a_large_run(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        "outcome": "applied",
        "loss": 10.1234,
        "grad_norm": 0.01234,
        "lr": 3e-4,
        "loss_scale": 2.0**32,
        "skipped_total": 0,
    }
    with (
        terminal(monkeypatch, columns) as shown,
        Journal(tmp_path, 99_999, 250_000, 1, True) as journal,
    ):
        journal.write({"step": 100_000, **record, "tokens_per_s": 1_234_567.8, "seconds": 0.5})
        say("memory     " + "123,456,789.0 MB " * 30)
    parts = ["loss 10.1234", "grad norm 0.0123", "scale 2^32", "1,234,568 tokens/s", "ETA 20:50:00"]
    lines = "\n".join(shown)
    assert all(part in lines for part in parts)
    assert lines.count("123,456,789.0") == 30
    (bar,) = {
        found[0] for line in shown if (found := re.match(r"step 100000/250000 ([━╸╺]+) ", line))
    }
    assert len(re.sub(r"[^━╸╺]", "", bar)) >= 20
    # a note holds a path
    assert max(len(line) for line in shown if not line.startswith("note")) <= columns


def test_without_a_terminal_progress_is_plain_lines(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_file, *FP16, f"train.folder={tmp_path}", "log.every=5", "data.cache=")
    shown = capsys.readouterr()
    first, last = shown.err.splitlines()
    assert first == f"building the data set of {run_file.parent}/text.txt"
    assert "all 6 steps were skipped" in last
    lines = [line for line in shown.out.splitlines() if line.startswith("step ")]
    numbers = r"loss \d\.\d{4}  lr \S+  grad norm \S+  scale \S+  [\d,]+ tokens/s  \S+ [KMG]FLOP/s  ETA \d+:\d\d"
    assert all(
        re.fullmatch(rf"step \d/6  {numbers}  skipped_overflow in \S+ \(\d so far\)", line)
        for line in lines
    )
    assert "\x1b" not in shown.out
    assert len(lines) == 6  # each was skipped, and of that one hears


def test_lines_are_as_rare_as_asked_for(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_file, f"train.folder={tmp_path}", "log.every=4")
    shown = re.findall(r"^step (\d)/6", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["4", "6"]
