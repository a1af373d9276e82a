"""What a run says of skipped steps, how it finds what broke them, and when it stops because of
them."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem
from parallel.layers import VocabParallelEmbedding
from tests.ranks import run_ranks
from tests.runs import checkpoint, steps, tensors, train, train_on, write_run
from tools import cli
from tools.config.run_file import load_run
from tools.journal.records import no_run, read_events
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

FALLING = (
    "precision.compute=fp16",
    "precision.hysteresis=1",
    "precision.growth_interval=2",
    "train.steps=9",
)
TOO_HIGH = (
    "precision.compute=fp16",
    "precision.loss_scale=1e30",
    "precision.patience=3",
    "train.steps=9",
)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("overflow"))


def explain(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["explain-overflow", str(folder), *more])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_run_that_cannot_recover_saves_its_last_good_state_and_stops_with_code_3(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(run_file, *TOO_HIGH, f"train.folder={folder}") == 3
    assert "stopped after step 3, state saved: 3 in a row" in capsys.readouterr().err
    assert [record["outcome"] for record in steps(folder)] == ["skipped_overflow"] * 3
    saved = tensors(checkpoint(folder, 3))
    assert all(t.isfinite().all() for t in saved.values())
    assert not any(t.any() for name, t in saved.items() if name.startswith("exp_avg")), (
        "no step was ever applied"
    )


def test_each_skipped_step_is_an_event_that_names_offenders_and_says_whether_to_care(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(run_file, *TOO_HIGH, f"train.folder={folder}")
    events = read_events(folder)
    assert [(e["step"], e["first_sample"], e["num_samples"]) for e in events] == [
        (1, 0, 8),
        (2, 8, 8),
        (3, 16, 8),
    ]
    assert all(e["offenders"] for e in events)
    code, said = explain(folder, capsys, "--last", "2")
    assert code == 0
    assert "step 1 " not in said
    assert "step 3 skipped at loss scale 1e+30, samples 16 to 23" in said
    assert events[-1]["offenders"][0]["name"] in said
    assert "3 in a row at a constant scale: this will not recover" in said


@pytest.mark.slow
def test_skips_in_a_row_are_counted_on_after_a_resume_but_one_who_starts_a_hopeless_run_again_has_new_patience(
    run_file: Path, tmp_path: Path
) -> None:
    run = (*TOO_HIGH, f"train.folder={tmp_path}")
    assert train(run_file, *run, "train.steps=2") == 3  # no step of the whole run was applied
    assert train(run_file, *run) == 3
    assert train(run_file, *run) == 3
    assert [event["skipped_in_a_row"] for event in read_events(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_searching_scale_is_said_to_be_normal_and_the_run_goes_on(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    high = (
        "precision.compute=fp16",
        "precision.initial_scale=67108864.0",
        "precision.hysteresis=1",
        "train.steps=20",
    )
    assert train(run_file, *high, f"train.folder={folder}") == 0
    outcomes = [record["outcome"] for record in steps(folder)]
    assert outcomes[0] == "skipped_overflow"
    assert outcomes[-1] == "applied"
    assert "normal, the scale falls until" in explain(folder, capsys)[1]


def test_a_run_without_skips_says_so_and_another_folder_is_refused(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(run_file, f"train.folder={folder}")
    assert explain(folder, capsys) == (0, f"{folder}: no step was skipped\n")
    for last in ("0", "-1"):
        assert explain(folder, capsys, f"--last={last}") == (
            2,
            f"{Problem.of('command.last', last=last)}\n",
        )
    code, said = explain(tmp_path, capsys)
    assert code == 2
    line = no_run(tmp_path)
    assert said == f"{line}\n"


# --- where it began


@pytest.mark.slow
def test_looking_into_skipped_steps_changes_no_bit_of_the_run(
    run_file: Path, tmp_path: Path
) -> None:
    run = (*FALLING, "precision.initial_scale=4e6", "model.attention_dropout=0.1")
    for layout in ({"tensor": 2, "data": 2}, {"pipeline": 2}):
        name = "-".join(layout)
        looked, not_looked = (
            train_on(
                run_file,
                *run,
                f"train.folder={tmp_path / name / value}",
                f"precision.trace_overflows={value}",
                **layout,
            )
            for value in ("true", "false")
        )
        assert steps(looked) == steps(not_looked)
        assert [e["first_sample"] for e in read_events(looked)] == [
            e["first_sample"] for e in read_events(not_looked)
        ]
        traced = [o["traced"] for e in read_events(looked) for o in e["offenders"]]
        assert sum(traced) >= 2
        assert not any(o["traced"] for e in read_events(not_looked) for o in e["offenders"])
        ours = checkpoint(looked, 9)
        theirs = checkpoint(not_looked, 9)
        assert Store(ours).index["optimizer"] == Store(theirs).index["optimizer"]
        after = tensors(ours)
        expected = tensors(theirs)
        assert after.keys() == expected.keys()
        assert all(torch.equal(after[name], expected[name]) for name in expected)


def pairs(tokens: Tensor) -> Tensor:
    """Each token and the one before it as one number, [b, s - 1] of [b, s]."""
    return tokens[:, :-1] * 1000 + tokens[:, 1:]


def a_pair_that_comes_late(run_file: Path) -> tuple[int, int, int]:
    """Two neighbours that first come in some step after the fourth, and there in one micro-batch
    only, not the first: the pair, the step, the micro-batch's number in the global batch."""
    samples = open_corpus(load_run(run_file)).train
    seen = set[int]()
    for step in range(1, 20):
        parts = [
            set(pairs(samples.batch(8 * (step - 1) + 2 * k, 2).tokens).flatten().tolist())
            for k in range(4)
        ]
        for number in (3, 2, 1):
            new = parts[number] - seen.union(*(part for part in parts if part is not parts[number]))
            if step > 4 and new:
                return min(new), step, number
        seen.update(*parts)
    pytest.fail("every pair comes early")


def make_infinite(pair: int, patch: pytest.MonkeyPatch) -> None:
    """What is looked up for the second of these two tokens is infinite."""
    inner = VocabParallelEmbedding.forward

    def forward(self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        bad = torch.nn.functional.pad(pairs(ids.t()) == pair, (1, 0))
        return inner(self, ids).masked_fill(bad.t().unsqueeze(-1), torch.inf)

    patch.setattr(VocabParallelEmbedding, "forward", forward)


def train_planted(mesh: DeviceMesh, file: Path, overrides: list[str], pair: int) -> None:
    config = load_run(file, overrides)
    with pytest.MonkeyPatch.context() as patch:
        make_infinite(pair, patch)
        Trainer(config, open_corpus(config), mesh).run()


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def planted(run_file: Path) -> tuple[Path, int, int, int]:
    """A run on two replicas of two stages that one pair of tokens breaks: folder, pair, step,
    global micro-batch."""
    pair, step, number = a_pair_that_comes_late(run_file)
    folder = run_file.parent / "planted"
    overrides = [
        "precision.compute=fp16",
        "precision.loss_scale=64",
        f"train.steps={step}",
        f"train.folder={folder}",
    ]
    overrides += ["parallel.data=2", "parallel.pipeline=2"]
    run_ranks(train_planted, {"dp": 2, "pp": 2}, file=run_file, overrides=overrides, pair=pair)
    return folder, pair, step, number


@pytest.mark.slow
def test_an_event_names_micro_batch_replica_and_the_samples_that_did_it(
    planted: tuple[Path, int, int, int], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pair, step, number = planted
    (event,) = read_events(folder)
    first = 8 * (step - 1) + 2 * number
    batch = open_corpus(load_run(run_file)).train.batch(first, 2)
    assert (pairs(batch.tokens) == pair).any()
    assert event["step"] == step
    assert event["offenders"][0]["name"] == "loss"
    for found in event["offenders"]:
        assert (found["dp_rank"], found["microbatch"]) == divmod(number, 2)
        assert (found["samples"], found["sample_ids"]) == ([first, first + 2], batch.ids.tolist())
    _, said = explain(folder, capsys)
    assert "(the loss itself)" in said
    assert f"{number % 2} of dp {number // 2}" in said
    assert ", ".join(map(str, batch.ids.tolist())) in said


def test_a_replay_on_one_process_names_the_module_and_writes_nothing(
    planted: tuple[Path, int, int, int],
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, pair, step, number = planted
    before = files(folder)
    make_infinite(pair, monkeypatch)
    code, said = explain(folder, capsys, "--replay", "--step", str(step))
    assert code == 0
    assert f"from step_{(step - 1) // 3 * 3:08d}" in said
    assert (
        f"step {step} again: first not finite in micro-batch {number} of the global batch" in said
    )
    assert "embedding (VocabParallelEmbedding)" in said
    assert "output of embedding, [16, 2, 16]" in said
    assert "embedding.weight" in said
    batch = open_corpus(load_run(run_file)).train.batch(8 * (step - 1) + 2 * number, 2)
    assert all(f"{sample}  " in said for sample in batch.ids.tolist())
    assert files(folder) == before


def test_a_replay_that_shows_nothing_says_so_and_why_that_may_be(
    planted: tuple[Path, int, int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the bug, from the initial weights, in a folder that was moved."""
    moved = Path(shutil.copytree(planted[0], tmp_path / "moved"))
    shutil.rmtree(moved / "checkpoints")
    code, said = explain(moved, capsys, "--replay")
    assert code == 0
    assert f"from the initial weights: repeating steps 1 to {planted[2] - 1}" in said
    assert f"step {planted[2]} again: all finite" in said
    assert "the run was on tensor 1 x pipeline 2 x data 2" in said


@pytest.mark.slow
def test_a_replay_finds_the_overflow_of_a_real_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_file, *FALLING, "precision.initial_scale=4e6", f"train.folder={tmp_path}")
    late = [e for e in read_events(tmp_path) if e["offenders"][0]["traced"]]
    assert late
    for event in late[-2:]:
        (where,) = {o["microbatch"] for o in event["offenders"][:1]}
        code, said = explain(tmp_path, capsys, "--replay", "--step", str(event["step"]))
        assert code == 0
        assert f"first not finite in micro-batch {where} of the global batch" in said
        assert "made in       fp16" in said


@pytest.mark.parametrize("what", ["no run.toml", "another batch", "no data"])
def test_what_a_replay_lacks_is_said_in_one_line(
    what: str,
    planted: tuple[Path, int, int, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(planted[0], tmp_path / "copy"))
    saved = (folder / "run.toml").read_text()
    data = next(line for line in saved.splitlines() if line.startswith("cache = "))
    changed = {
        "no run.toml": "# my own\n" + saved,
        "another batch": saved.replace("global_batch = 8", "global_batch = 4"),
        "no data": saved.replace(data, 'cache = "nowhere"'),
    }
    (folder / "run.toml").write_text(changed[what])
    expected = {
        "no run.toml": Problem.of("command.replay_no_run_file", folder=folder),
        "another batch": Problem.of(
            "command.replay_batch",
            step=planted[2],
            num_samples=8,
            global_batch=4,
            folder=folder,
        ),
        "no data": Problem.of("training.data_gone", index_file="nowhere/text.idx"),
    }
    code, said = explain(folder, capsys, "--replay")
    assert code == 2
    assert said.splitlines()[-1].startswith(expected[what])


def test_a_step_that_was_not_skipped_is_refused(
    planted: tuple[Path, int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = explain(planted[0], capsys, "--step", "1")
    assert (code, said) == (
        2,
        f"{Problem.of('command.step_not_skipped', step=1, skipped=planted[2])}\n",
    )


def test_a_run_that_is_to_raise_leaves_an_event_and_its_state_and_says_where_it_began(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train(run_file, *TOO_HIGH, "precision.on_nonfinite=raise", f"train.folder={tmp_path}") == 3
    )
    said = capsys.readouterr().err
    assert 'stopped after step 1, state saved: precision.on_nonfinite = "raise"' in said
    assert "first in micro-batch 0 of dp rank 0, samples 0 to 1 of the batch" in said
    (event,) = read_events(tmp_path)
    assert event["step"] == 1
    assert event["offenders"][0]["samples"] == [0, 2]
    assert [record["outcome"] for record in steps(tmp_path)] == ["skipped_overflow"]
    assert checkpoint(tmp_path, 1).is_dir()
