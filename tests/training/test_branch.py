"""A branch goes on from a checkpoint of another run as that run would have done, and leaves that
run as it is."""

import json
import shutil
from pathlib import Path

import pytest

from tests.refusals import shows
from tests.runs import checkpoint, steps, tensors, train, train_on, write_run
from tools import cli
from tools.config.resolved_run import resolve_run
from tools.journal.journal import rewind
from tools.journal.records import read_branching, read_digests, read_events
from tools.training.elastic import newest_step, restart_event
from tools.verify.replay.overflow import replay

AT = 4  # the step of the checkpoint from which runs branch
LAST = 8
# the loss scale grows, and a part of the steps has another learning rate
KEYS = (
    f"train.steps={LAST}",
    "precision.compute=fp16",
    "precision.initial_scale=1024.0",
    "precision.growth_interval=2",
    "lr.schedule=cosine",
    "checkpoint.every=2",
    "checkpoint.keep=all",
    "log.digests=1",
)
CANONICAL = ("train.numerics=canonical",)
LAYOUTS = [{"tensor": 2}, {"pipeline": 2}, {"data": 2}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, whose run of LAST steps is in the folder `run` beside it."""
    file = write_run(tmp_path_factory.mktemp("branch"))
    assert train(file, *KEYS) == 0
    return file


@pytest.fixture(scope="module")
def first(file: Path) -> Path:
    return file.parent / "run"


def origin(first: Path) -> str:
    return f"train.branch_from={checkpoint(first, AT)}"


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """The bytes of all files, and when they were changed."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def states(folder: Path) -> dict[int, object]:
    """Digests of the state after each step."""
    digests = [record for record in read_digests(folder) if "loaded" not in record]
    return {record["step"]: (record["state"], record["tensors"]) for record in digests}


def assert_goes_on_as(branch: Path, straight: Path) -> None:
    """Every bit of the records and of the last checkpoint is that of the straight run."""
    assert steps(branch) == steps(straight)[AT:]
    after = {step: state for step, state in states(straight).items() if step > AT}
    assert states(branch) == after
    ours = tensors(checkpoint(branch, LAST))
    theirs = tensors(checkpoint(straight, LAST))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)
    indices = [
        json.loads((checkpoint(run, LAST) / "checkpoint.json").read_text())
        for run in (branch, straight)
    ]
    for key in ("progress", "watch", "optimizer", "data"):
        assert indices[0][key] == indices[1][key], key


def test_a_branch_takes_bit_for_bit_the_steps_of_the_run_that_went_on(
    file: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(first)
    branch = tmp_path / "branch"
    # saves of the branch delete, but only its own
    keys = ["checkpoint.every=2", "checkpoint.keep=1"]
    assert train(file, *KEYS, *keys, f"train.folder={branch}", origin(first)) == 0
    said = capsys.readouterr().out
    assert_goes_on_as(branch, first)
    assert contents(first) == before, "the first run is only read"
    assert [path.name for path in sorted((branch / "checkpoints").glob("step*"))] == [
        f"step_{LAST:08d}"
    ]
    assert f"branched   from {checkpoint(first, AT)}, steps {AT + 1} to {LAST} are left" in said
    assert "not bit for bit" not in said and "has no record" not in said


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_branch_in_the_layout_of_its_run_has_its_bits(
    file: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    straight = train_on(file, *KEYS, f"train.folder={tmp_path}/straight", **layout)
    branch = train_on(file, *KEYS, f"train.folder={tmp_path}/on", origin(straight), **layout)
    assert_goes_on_as(branch, straight)


@pytest.fixture(scope="module")
def canonical(file: Path) -> Path:
    """A canonical run on one process."""
    return train_on(file, *KEYS, *CANONICAL, f"train.folder={file.parent}/canonical")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_canonical_branch_has_the_bits_of_its_run_in_any_layout(
    file: Path, canonical: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    keys = [*KEYS, *CANONICAL, f"train.folder={tmp_path}/on", origin(canonical)]
    branch = train_on(file, *keys, **layout)
    for record, theirs in zip(steps(branch), steps(canonical)[AT:], strict=True):
        assert (record["step"], record["loss"], record["grad_norm"], record["loss_scale"]) == (
            theirs["step"],
            theirs["loss"],
            theirs["grad_norm"],
            theirs["loss_scale"],
        )
    after = {step: state for step, state in states(canonical).items() if step > AT}
    assert states(branch) == after


def test_a_branch_resumes_from_its_own_checkpoints_though_its_origin_is_gone(
    file: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "first"
    shutil.copytree(first, copy)
    branch = tmp_path / "branch"
    keys = [*KEYS, f"train.folder={branch}", origin(copy)]
    # the schedule is that of the whole run
    assert train(file, *keys, "train.steps=6", f"lr.length={LAST}") == 0
    shutil.rmtree(copy)
    assert train(file, *keys) == 0
    assert_goes_on_as(branch, first)
    said = capsys.readouterr().out
    assert f"resumed    from {checkpoint(branch, 6)}, steps 7 to {LAST} are left" in said
    assert "has no record" not in said
    assert [event["step"] for event in read_events(branch, "resume")] == [6]
    assert len(read_events(branch, "branched")) == 1


def test_the_newest_checkpoint_of_a_run_folder_is_the_origin_and_keys_are_compared(
    file: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = tmp_path / "branch"
    keys = [f"train.steps={LAST + 2}", "lr.peak=2e-2", f"train.folder={branch}"]
    assert train(file, *KEYS, *keys, f"train.branch_from={first}") == 0
    said = capsys.readouterr().out.splitlines()
    assert "changed    lr.peak: 0.01 -> 0.02 (not bit for bit)" in said
    event = read_branching(branch)
    assert event is not None
    assert event["step"] == LAST
    assert event["checkpoint"] == str(checkpoint(first, LAST))
    assert event["run"] == str(first)
    assert event["changed"] == [line[11:] for line in said if line.startswith("changed ")]
    assert [record["step"] for record in steps(branch)] == [LAST + 1, LAST + 2]
    assert not read_events(branch, "resume")


def test_compare_and_report_say_where_a_run_branched_and_bisect_goes_on_from_there(
    file: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = tmp_path / "branch"
    assert train(file, *KEYS, f"train.folder={branch}", origin(first)) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(first), str(branch)]) == 0
    said = capsys.readouterr().out
    assert f"branch is a branch of run: they part after step {AT}" in said
    assert cli.main(["compare", str(branch)]) == 0
    said = capsys.readouterr().out
    assert f"branch is a branch of {first}, from which it parts after step {AT}" in said
    page = tmp_path / "page.html"
    assert cli.main(["report", str(branch), "-o", str(page)]) == 0
    assert f"after step {AT} from {checkpoint(first, AT)}" in page.read_text()
    assert "has no record" not in page.read_text()
    assert cli.main(["bisect", str(first), str(branch)]) == 0


def flip(path: Path, first: Path) -> str:
    """A copy of the first run with a flipped bit in a tensor; returns its checkpoint."""
    shutil.copytree(first, path)
    (stored, *_) = sorted(checkpoint(path, AT).glob("*.safetensors"))
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    return str(checkpoint(path, AT))


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ("train.branch_from={folder}/none", "training.no_branch_checkpoint"),
        ("train.branch_from={folder}", "training.no_branch_checkpoint"),
        ("train.branch_from={damaged}", "checkpoint.digest_differs_newest"),
        ("train.branch_from={first} train.init_from={first}", "config.init_and_branch"),
        ("train.branch_from={first} model.family=gpt2", "training.no_origin"),
        ("train.branch_from={first} model.layers=3", "training.no_origin"),
        ("train.branch_from={first} data.held_out=0.2", "training.changes_on_branch"),
        ("train.branch_from={first} train.seed=7", "training.changes_on_branch"),
        ("train.branch_from={first} data.cache= data.source={other}", "training.other_text"),
        ("train.branch_from={first} train.steps=8", "training.no_step_after_branch"),
        ("train.branch_from={first} optimizer.name=Adagrad", "training.no_origin"),
    ],
)
def test_an_origin_that_does_not_fit_is_refused_in_one_line_and_nothing_is_written(
    keys: str, code: str, file: Path, first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text((file.parent / "text.txt").read_text(encoding="utf-8")[::-1], encoding="utf-8")
    damaged = flip(tmp_path / "damaged", first) if "{damaged}" in keys else ""
    given = keys.format(folder=tmp_path, first=first, damaged=damaged, other=other).split()
    before = contents(tmp_path) | contents(first)
    run = tmp_path / "run"
    steps_key = [] if "train.steps" in keys else ["train.steps=10"]
    assert train(file, *KEYS, f"train.folder={run}", *steps_key, *given) == 2
    said = capfd.readouterr()
    (line,) = said.err.splitlines()
    assert shows(line, code), line
    assert "move it away" not in line, "the run would find no origin then"
    assert not said.out
    assert not run.exists()
    assert contents(tmp_path) | contents(first) == before


def test_a_run_file_without_a_model_takes_the_checkpoints(
    file: Path, first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text(encoding="utf-8")
    bare = tmp_path / "bare.toml"
    bare.write_text(text[text.index("[data]") :], encoding="utf-8")
    copy = tmp_path / "first"
    shutil.copytree(first, copy)
    keys = [*KEYS, f"train.folder={tmp_path}/run"]
    half = ["train.steps=6", f"lr.length={LAST}"]
    assert train(bare, *keys, origin(copy), *half) == 0
    # of its own checkpoint from then on
    shutil.rmtree(copy)
    assert train(bare, *keys, origin(copy)) == 0
    assert_goes_on_as(tmp_path / "run", first)
    capfd.readouterr()
    assert train(bare, *KEYS, f"train.folder={tmp_path}/other", origin(copy)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert shows(line, "training.no_branch_checkpoint")


def test_differences_of_the_data_are_accepted_as_on_a_resume(
    file: Path, first: Path, tmp_path: Path
) -> None:
    keys = [*KEYS, f"train.folder={tmp_path}/run", f"train.steps={AT + 2}", origin(first)]
    assert train(file, *keys, "train.seed=7", "--allow", "seed") == 0
    assert [record["step"] for record in steps(tmp_path / "run")] == [AT + 1, AT + 2]


@pytest.mark.slow
def test_a_branch_that_left_no_checkpoint_begins_again_at_its_origin(
    file: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = tmp_path / "branch"
    keys = [*KEYS, f"train.folder={branch}", origin(first)]
    assert train(file, *keys, "checkpoint.every=0") == 0
    shutil.rmtree(branch / "checkpoints")
    capsys.readouterr()
    assert train(file, *keys) == 0
    assert_goes_on_as(branch, first)
    assert f"kept       {branch}/metrics.jsonl.old" in capsys.readouterr().out
    assert len(read_events(branch, "branched")) == 1


@pytest.mark.slow
def test_ranks_that_are_started_again_before_the_first_save_branch_once_more(
    file: Path, first: Path, tmp_path: Path
) -> None:
    branch = tmp_path / "branch"
    keys = [*KEYS, f"train.folder={branch}", origin(first)]
    assert train(file, *keys, "checkpoint.every=0") == 0
    shutil.rmtree(branch / "checkpoints")
    # as the launcher does
    step = newest_step(resolve_run(file, keys))
    assert step == AT
    rewind(branch, step, restart_event(step, 1, "rank 0 died", 2))
    assert train(file, *keys, "checkpoint.every=0") == 0
    assert_goes_on_as(branch, first)
    assert len(read_events(branch, "branched")) == len(read_events(branch, "restart")) == 1
    assert not (branch / "metrics.jsonl.old").exists()


def test_a_skipped_step_of_a_branch_is_repeated_from_its_origin(
    file: Path, first: Path, tmp_path: Path
) -> None:
    branch = tmp_path / "branch"
    scale = ["precision.scaling=constant", "precision.loss_scale=1e30", f"train.steps={AT + 2}"]
    code = train(file, *KEYS, *scale, f"train.folder={branch}", origin(first))
    assert code in (0, 3)
    (event, *_) = read_events(branch)
    repeated = replay(branch, event)
    assert repeated.start == checkpoint(first, AT).name


def test_a_branch_with_another_tokenizer_is_told_of_the_tokenizer_not_the_vocabulary(
    file: Path, first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text(encoding="utf-8")
    bare = tmp_path / "bare.toml"
    bare.write_text(text[text.index("[data]") :], encoding="utf-8")
    keys = [*KEYS, f"train.folder={tmp_path}/run", origin(first)]
    other = tmp_path / "other.model"
    words = ["data", "tokenizer", str(file.parent / "text.txt"), str(other), "--vocab-size", "340"]
    assert cli.main(words) == 0
    capfd.readouterr()
    assert train(bare, *keys, f"data.tokenizer={other}") == 2
    told = {"tokenizer": other, "tokens": 340, "size": 330}
    assert shows(capfd.readouterr().err, "training.tokenizer_of_branch", **told)
    assert train(bare, *keys, "data.vocab_size=340") == 2
    told = {"vocab_size": 340, "vocab": 330}
    assert shows(capfd.readouterr().err, "config.tokenizer_of_branch_missing", **told)
