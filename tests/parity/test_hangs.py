"""A layout that hangs is reported with what each rank waits in, long before gloo loses patience."""

import json
import re
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from parallel.pipeline.executor import Executor, StageHooks
from parallel.pipeline.instructions import Instruction, Op
from parallel.pipeline.p2p import P2P
from tests.parity.test_command import ROOT, TRAIN, command, own_model
from tests.ranks import run_ranks
from tools.config.run_file import RunConfig, load_run
from tools.training.ends import SIGNALS, Stopped
from tools.verify.parity import ranks
from tools.verify.parity.hang_watch import (
    Trail,
    Watch,
    describe_position,
    odd_ranks,
    recorded_position,
)
from tools.verify.parity.layouts import fitted, requested_layouts
from tools.verify.parity.ranks import PENDING, RecordedRun, corpus_of, run_together
from tools.verify.parity.record import Plan, record
from tools.verify.parity.runs import LayoutLimits, in_float64, made_ready, with_random_tokens

PATIENCE = 4.0
LONE_BARRIER = (
    "y = self.down(",
    "torch.distributed.barrier() if self.context.tp.rank == 0 else None\n        y = self.down(",
)
TIED_END = ('name="embedding"', 'name="embedding", tied=tied')


def hung(run: RunConfig, axes: dict[str, int]) -> dict[int, dict[str, Any]]:
    """Where the ranks of a layout are when they are found to hang."""
    folder = Path(mkdtemp(prefix="megaprec_test_"))
    RecordedRun(run, Plan(1), folder).write()
    with (
        Watch(folder, 2, PATIENCE) as watch,
        pytest.raises(pytest.fail.Exception, match="the process died"),
    ):
        run_ranks(watched, axes, folder=folder)
    return watch.stuck


def watched(mesh: DeviceMesh, folder: Path) -> None:
    with recorded_position(folder / f"{dist.get_rank()}.at") as trail:
        run = RecordedRun.read(folder)
        record(run.config, corpus_of(run.config), mesh, run.plan, run.folder, trail)


def of_own_model(folder: Path, layout: str, *changes: tuple[str, str]) -> RunConfig:
    text = (ROOT / "examples" / "own_model.py").read_text()
    for one, other in changes:
        assert one in text
        text = text.replace(one, other)
    (folder / "mine.py").write_text(text)
    keys = [
        f"model.factory={folder}/mine.py:build",
        f"train.folder={folder}/run",
        "model.tied=true",
    ]
    config = made_ready(
        load_run(ROOT / "examples" / "own_model.toml", keys),
        LayoutLimits(2, 2, 2),
        False,
        2,
        folder,
    )
    config = in_float64(with_random_tokens(config, 3, folder))
    (said,) = requested_layouts([layout], config.parallel)
    return config.model_copy(update={"parallel": fitted(config, said).parallel})


@pytest.mark.slow
def test_a_tied_head_without_tied_is_found_where_the_other_end_waits_for_it(tmp_path: Path) -> None:
    stuck = hung(of_own_model(tmp_path, "pp=2", TIED_END), {"pp": 2})
    assert stuck.keys() == {0, 1}
    said = [describe_position(rank, one) for rank, one in sorted(stuck.items())]
    assert said[0].startswith("rank 0 waits in sum over tied at megaprec/optim/model_buffers.py")
    assert said[1].startswith("rank 1 waits in sum over world at megaprec/optim/optimizer.py")
    assert odd_ranks(stuck), "the two wait for different things"


def test_a_barrier_that_one_rank_alone_enters_is_named_with_instruction_and_module(
    tmp_path: Path,
) -> None:
    stuck = hung(of_own_model(tmp_path, "tp=2", LONE_BARRIER), {"tp": 2})
    said = [describe_position(rank, one) for rank, one in sorted(stuck.items())]
    assert said[0].startswith("rank 0 waits in barrier at ")
    assert "mine.py" in said[0]
    assert "instruction F0.0, layers.0" in said[0]
    assert re.match("rank 1 waits in (sum|gather) over tp at ", said[1])


def test_a_wait_within_an_instruction_is_recorded_with_it() -> None:
    trail = Trail()
    waits: list[dict[str, Any]] = []

    class Waiting(StageHooks):
        def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
            trail.begin()
            waits.append(trail.now())
            trail.end()
            return torch.ones(())

    links = P2P.open(Axis("pp"), (0,), (), torch.float32)
    program = (Instruction(Op.FORWARD, 0, 2),)
    with torch.no_grad():
        Executor(program, links, Waiting(), position=trail.position).run()
    assert waits[0]["instruction"] == "F0.2"
    trail.begin()
    assert "instruction" not in trail.now(), "the passes are over"


# --- from end to end


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("layout", "change", "expected"),
    [
        ("pp=2", TIED_END, "waits in sum over tied"),
        ("tp=2", LONE_BARRIER, "rank 0 waits in barrier"),
    ],
)
@pytest.mark.usefixtures("forked_python")
def test_the_command_reports_a_hang_long_before_gloo_gives_up_and_goes_on(
    layout: str,
    change: tuple[str, str],
    expected: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = time.monotonic()
    monkeypatch.setattr(run_together, "__defaults__", (PATIENCE,))
    arguments = own_model(tmp_path, change)
    assert command(*arguments, "model.tied=true", "--json", "--layouts", layout, "dp=2") == 1
    assert time.monotonic() - start < 1500
    made = json.loads(capfd.readouterr().out)
    hangs, other = sorted(made["layouts"], key=lambda one: one["verdict"] != "wrong")
    assert hangs["layout"] == layout
    assert hangs["first"]["phase"] == "hang"
    assert expected in hangs["first"]["place"]
    assert len(hangs["ranks_at"]) == 2
    assert other["verdict"] == "proven", "a layout after one that hangs is tried all the same"


# --- what becomes of the other layouts


class Launches:
    """Stands in for the launcher: each launch ends as `codes` say, having done some of what is to
    do."""

    def __init__(self, *codes: tuple[int, int]) -> None:
        self.codes = list(codes)
        self.asked = list[list[str]]()

    def __call__(self, argv: list[str], ranks: int, threads: int) -> int:
        folder, (done, code) = Path(argv[1]), self.codes.pop(0)
        names = (folder / PENDING).read_text().splitlines()
        self.asked.append(names)
        for name in names[:done]:
            for rank in range(ranks):
                (folder / name / f"{rank}.json").touch()
        if code == 1:
            (folder / names[done] / "1.failed").write_text("rank 1: ValueError: no")
        return code


def taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *codes: tuple[int, int]
) -> tuple[list[Any], list[list[str]]]:
    """What became of three runs, and which were asked for in each launch."""
    launches = Launches(*codes)
    monkeypatch.setattr(ranks, "launch_local", launches)
    config = load_run(None, ["model.preset=llama-demo", "parallel.data=2", *TRAIN])
    found = run_together(
        [RecordedRun(config, Plan(1), folder / "all" / name) for name in "abc"], folder / "all"
    )
    return found, launches.asked


def test_after_a_layout_that_fails_the_others_are_launched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, requested_layouts = taken(tmp_path, monkeypatch, (1, 1), (1, 0))
    assert [one.why if one else None for one in found] == [
        None,
        "its ranks ended with code 1: rank 1: ValueError: no",
        None,
    ]
    assert requested_layouts == [["a", "b", "c"], ["c"]]


def test_a_rank_that_a_signal_ends_is_a_failure_and_being_told_to_stop_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = taken(tmp_path / "one", monkeypatch, (0, 134), (2, 0))
    assert [one and one.why for one in found] == ["a rank was ended by signal 6", None, None]
    for number in SIGNALS:
        with pytest.raises(Stopped) as stopped:
            taken(tmp_path / number.name, monkeypatch, (1, 128 + number))
        assert stopped.value.exit_code == 128 + number
