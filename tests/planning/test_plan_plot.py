"""The picture of a plan shows the numbers that the plan prints."""

from pathlib import Path

import pytest

from tests.refusals import shows
from tools.analysis.planning.bottleneck import named_seconds
from tools.analysis.planning.device import target_of
from tools.analysis.planning.memory import MemoryModel, activations_over_time
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.search import plan_run
from tools.analysis.planning.speed import passes_of, simulated_spans
from tools.cli import main
from tools.config.run_file import RunConfig, load_run

SMALL = (
    'model.family="llama"',
    "model.layers=8",
    "model.hidden=64",
    "model.heads=4",
    "model.ffn=128",
    "model.vocab=4096",
    "precision.compute=bf16",
    "train.steps=10",
    "train.global_batch=16",
    "train.micro_batch=1",
    "train.seq_length=32",
)
LAYOUTS = {
    "one rank": (),
    "1f1b": ("parallel.pipeline=4",),
    "interleaved": (
        "parallel.pipeline=2",
        "parallel.chunks=2",
        'parallel.schedule="interleaved"',
    ),
    "zb-v": ("parallel.pipeline=2", 'parallel.schedule="zb-v"'),
}


def small_run(layout: str) -> RunConfig:
    return load_run(None, [*SMALL, *LAYOUTS[layout]]).on_device("cuda")


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_that_is_drawn_is_that_of_the_instructions_when_they_run(layout: str) -> None:
    config = small_run(layout)
    target = target_of(config, "H100")
    assert target.gpu
    assumed = assumptions_of(target.gpu, config.plan)
    assert assumed
    memory = MemoryModel(target.device)
    planned = plan_run(config, memory, assumed)
    passes = passes_of(config, all_passes=True)
    kept = memory.kept(config, passes.costs)
    spans = simulated_spans(config, passes, assumed)
    for rank, nbytes in enumerate(planned.ranks):
        curve = activations_over_time(config, passes, kept, spans, rank)
        assert max(curve.nbytes) == nbytes.activations
        assert curve.seconds == sorted(curve.seconds)
        # what is kept grows and shrinks with the passes that have run, and messages come on top
        ended = sorted((span.end, span) for span in spans if span.rank == rank)
        message = max_message(config)
        for seconds, in_use in zip(curve.seconds[1::2], curve.nbytes[1::2], strict=True):
            done = [span.instruction for end, span in ended if end <= seconds]
            held = sum(kept[item.stage].growth_after(item) for item in done)
            assert 0 <= in_use - held <= 8 * message


def max_message(config: RunConfig) -> int:
    """Bytes of an activation between two stages, in bf16."""
    train = config.train
    return 2 * train.seq_length * train.micro_batch * config.model.hidden


def test_gpipe_of_many_micro_batches_is_drawn_with_all_of_them() -> None:
    config = load_run(
        None, [*SMALL, "parallel.pipeline=4", 'parallel.schedule="gpipe"', "train.global_batch=512"]
    ).on_device("cuda")
    target = target_of(config, "H100")
    assert target.gpu
    assumed = assumptions_of(target.gpu, config.plan)
    assert assumed
    memory = MemoryModel(target.device)
    planned = plan_run(config, memory, assumed)
    assert passes_of(config).more
    passes = passes_of(config, all_passes=True)
    spans = simulated_spans(config, passes, assumed)
    kept = memory.kept(config, passes.costs)
    curve = activations_over_time(config, passes, kept, spans, planned.fullest)
    assert max(curve.nbytes) == planned.ranks[planned.fullest].activations


def test_a_step_of_more_passes_than_can_be_drawn_is_planned_and_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    picture = tmp_path / "plan.svg"
    keys = [*SMALL, *LAYOUTS["1f1b"], "train.global_batch=16384"]
    assert main(["plan", str(run_file), *keys, "--gpu", "H100", "--plot", str(picture)]) == 2
    said = capsys.readouterr()
    assert "verdict    fits" in said.out
    assert shows(said.err, "planning.plot_passes", passes=4 * 16384)
    assert not picture.exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kinds_of_a_step_that_are_drawn_add_up_to_the_step(layout: str) -> None:
    config = small_run(layout)
    target = target_of(config, "H100")
    assert target.gpu
    assumed = assumptions_of(target.gpu, config.plan)
    predicted = plan_run(config, MemoryModel(target.device), assumed).prediction
    assert predicted
    assert sum(named_seconds(predicted).values()) == pytest.approx(predicted.seconds)


def test_a_picture_has_every_kind_that_takes_time(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    arguments = [*SMALL, *LAYOUTS["1f1b"], "--gpu", "H100", "--plot", str(picture)]
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    assert main(["plan", str(run_file), *arguments]) == 0
    drawn = picture.read_text()
    for name in ("matrix products", "attention", "waiting for other stages", "the fullest"):
        assert name in drawn
    assert "traffic within stages" not in drawn


@pytest.mark.parametrize(
    ("picture", "more", "code"),
    [
        ("plan.pdf", ("--gpu", "H100"), "plots.suffix"),
        ("none/plan.svg", ("--gpu", "H100"), "command.plot_folder"),
        ("plan.svg", ("--gpu-memory", "80GB"), "planning.plot_speeds"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_by_name(
    picture: str,
    more: tuple[str, ...],
    code: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    path = tmp_path / picture
    assert main(["plan", str(run_file), *SMALL, *more, "--plot", str(path)]) == 2
    assert shows(capsys.readouterr().err, code, path=path)
    assert not path.exists()
