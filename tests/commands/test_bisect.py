"""`megaprec bisect`: what the records of two runs say, and what the steps taken again say."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import sentence, shows
from tests.runs import train, write_run
from tools import cli
from tools.config.run_file import load_run
from tools.training.step_records import STEP_FIELDS
from tools.verify.bisect.replay import decisive_entry
from tools.verify.bisect.sides import Side, must_be_equal, other_keys
from tools.verify.prove.proof import turn_one_sign

ADDED_OTHERWISE = [
    "parallel.tensor=2",
    "parallel.context=2",
    "parallel.data=2 parallel.expert=2 model.family=mixtral model.experts=4",
    "parallel.data=2 parallel.bucket=1000",
    "precision.compute=bf16",
    "fp8.kind=current precision.compute=bf16",
    "train.micro_batch=1",
    "train.threads=2",
    "train.compile=leaves",
    "train.numerics=canonical train.threads=1",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps, its records and checkpoints."""
    folder = tmp_path_factory.mktemp("bisect")
    file = write_run(folder)
    assert (
        train(file, "train.steps=3", "log.digests=1", "checkpoint.every=1", "checkpoint.keep=9")
        == 0
    )
    return folder


@pytest.fixture
def room(made: Path, tmp_path: Path) -> Path:
    """Two copies of the run, a and b."""
    for name in ("a", "b"):
        shutil.copytree(made / "run", tmp_path / name)
    return tmp_path


def bisected(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["bisect", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def edit(path: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record of a step."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["step"] == step:
            change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def one_digest(record: dict[str, Any]) -> None:
    record["state"] = record["tensors"]["exp_avg"]["layers.1.mlp.down.weight"] = "0" * 32


def test_runs_that_are_the_same_agree(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = bisected(capsys, room / "a", room / "b")
    assert (code, said["verdict"], said["records"]) == (
        0,
        "they agree",
        {"by": "digests", "steps": 3},
    )


def test_a_record_that_does_not_come_back_is_told_with_its_step_and_tensor(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(room / "b" / "digests.jsonl", 2, one_digest)
    code, said = bisected(capsys, room / "a", room / "b")
    first = said["records"]["first"]
    assert (code, first["step"], first["what"]) == (1, 2, "exp_avg layers.1.mlp.down.weight")
    assert said["replay"]["verdict"] == "proven" and said["replay"]["from_step"] == 1, (
        "from the checkpoint before"
    )
    assert "does not come back" in said["why"]


def test_without_digests_the_metrics_tell_the_step(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "a" / "digests.jsonl").unlink()
    edit(
        room / "b" / "metrics.jsonl",
        3,
        lambda record: record.update(loss=record["loss"] * (1 + 2.0**-50)),
    )
    code, said = bisected(capsys, room / "a", room / "b")
    first = said["records"]["first"]
    assert (code, said["records"]["by"], first["step"], first["what"]) == (1, "metrics", 3, "loss")


@pytest.mark.parametrize("step", [2, 3])
def test_steps_without_a_digest_are_compared_by_their_losses_too(
    step: int, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.rmtree(room / name / "checkpoints")
        edit(room / name / "digests.jsonl", step, lambda record: record.update(event="none"))
    edit(
        room / "b" / "metrics.jsonl",
        step,
        lambda record: record.update(loss=record["loss"] * (1 + 2.0**-50)),
    )
    code, said = bisected(capsys, room / "a", room / "b", "--steps", "1")
    first = said["records"]["first"]
    assert (code, said["records"]["by"], first["step"], first["what"]) == (
        1,
        "metrics",
        step,
        "loss",
    )


def test_steps_after_the_newest_digest_are_not_said_to_be_equal_in_every_bit(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(room / "b" / "digests.jsonl", 3, lambda record: record.update(event="none"))
    code, said = bisected(capsys, room / "a", room / "b")
    assert code == 0 and said["why"].startswith(
        "2 steps of digests agree: every bit is equal; 1 later step without a"
    )


def test_damaged_digests_are_named_and_metrics_do_not_stand_for_every_bit(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "b" / "digests.jsonl").write_text(
        '{"step": 1, "event": "other"}\nnot json\n', encoding="utf-8"
    )
    assert cli.main(["bisect", str(room / "a"), str(room / "b")]) == 0
    said = capsys.readouterr()
    assert (
        "digests.jsonl: line 2 is no record" in said.err
        and "1 of 2 lines are no digests" in said.err
    )
    assert "every bit is equal" not in said.out and "log.digests or --replay" in said.out


@pytest.mark.slow
def test_runs_of_other_keys_part_where_the_key_acts(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (room / "b" / "run.toml").read_text()
    (room / "b.toml").write_text(text.replace("peak = 0.01", "peak = 0.02"))
    code, said = bisected(capsys, room / "a" / "run.toml", room / "b.toml")
    assert (code, said["keys"]) == (1, ["lr.peak: 0.01 | 0.02"])
    first = said["replay"]["first"]
    assert (first["phase"], first["step"]) == ("update", 1)
    assert said["replay"]["likely_cause"].startswith("the run files differ in lr.peak")


def test_run_files_may_leave_the_model_to_the_weights_that_they_begin_with(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (made / "my.toml").read_text()
    text = text[text.index("[data]") :].replace("vocab_size = 330\n", "")
    text = text.replace("[train]\n", f'[train]\ninit_from = "{made / "run"}"\n')
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(
            text.replace(f'{made}/run"\n[', f'{tmp_path}/{name}"\n[')
        )
    code, said = bisected(capsys, tmp_path / "a.toml", tmp_path / "b.toml")
    assert (code, said["verdict"]) == (0, "they agree"), said


def test_steps_too_far_from_a_checkpoint_are_not_taken_again(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(room / "b" / "digests.jsonl", 3, one_digest)
    for name in ("a", "b"):
        shutil.rmtree(room / name / "checkpoints")
    code, said = bisected(capsys, room / "a", room / "b", "--steps", "2")
    assert (code, said["replay"]) == (1, None) and "give --steps 3 or more" in said["why"]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "otherwise", ["parallel.context=2", "train.micro_batch=1", "train.numerics=canonical"]
)
def test_runs_that_add_in_another_order_are_not_accused(
    otherwise: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_run(made / "my.toml", ["train.threads=1", otherwise])
    config.save_resolved(tmp_path)
    one = load_run(made / "my.toml", ["train.threads=1"])
    one.save_resolved(tmp_path / "one")
    code, said = bisected(capsys, tmp_path / "one" / "run.toml", tmp_path / "run.toml")
    assert (code, said["compared"]) == (0, "float64"), said


def turned(room: Path, step: int) -> str:
    """Turn a sign in b's checkpoint of the step; return where, as a record names it."""
    return turn_one_sign(room / "b" / "checkpoints" / f"step_{step:08}").replace("/", " ")


def test_a_checkpoint_that_was_changed_before_a_resume_is_named_and_not_the_step_after_it(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (room / "b" / "digests.jsonl").read_text().splitlines(keepends=True)
    before = json.loads(lines[1])
    after = json.loads(lines[2])
    what = turned(room, 2)
    kind, name = what.split(" ", 1)
    before["state"] = after["state"] = before["tensors"][kind][name] = after["tensors"][kind][
        name
    ] = "0" * 32
    loaded = {key: value for key, value in before.items() if key not in STEP_FIELDS} | {
        "loaded": "b/step_00000002"
    }
    (room / "b" / "digests.jsonl").write_text(
        "".join([*lines[:2], f"{json.dumps(loaded)}\n", json.dumps(after)])
    )
    code, said = bisected(capsys, room / "a", room / "b")
    first = said["records"]["first"]
    assert (code, first["step"], first["what"], first["loaded"]) == (1, 2, what, True)
    assert (
        f"the checkpoints of step 2 differ in {what}: one was changed after it was saved"
        in said["why"]
    )
    assert cli.main(["bisect", str(room / "a"), str(room / "b")]) == 1
    assert f"first difference in the state loaded after step 2: {what}" in capsys.readouterr().out


def test_steps_are_not_taken_again_from_a_checkpoint_that_only_one_run_had(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = turned(room, 2)
    edit(room / "b" / "digests.jsonl", 3, one_digest)
    code, said = bisected(capsys, room / "a", room / "b")
    assert code == 1 and said["replay"]["from_step"] == 1
    assert said["why"].startswith(
        f"the checkpoints of step 2 differ in {what}; the records differ, but"
    )


def test_runs_on_other_tokens_are_told_so(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        (made / "run" / "run.toml").read_text().replace(str(made / "data"), str(tmp_path / "data"))
    )
    (source,) = load_run(made / "my.toml").data.sources
    other = tmp_path / "other.txt"
    other.write_text(Path(source).read_text(encoding="utf-8").replace("a", "o"), encoding="utf-8")
    (tmp_path / "b.toml").write_text(
        text.replace(source, str(other)).replace(str(made / "run"), str(tmp_path / "b"))
    )
    code, said = bisected(capsys, made / "run" / "run.toml", tmp_path / "b.toml")
    assert code == 1 and said["keys"][0].startswith(f'data.source: "{source}" (')
    assert said["replay"]["likely_cause"].startswith("the run files differ in data.source")


@pytest.mark.parametrize(
    ("blend", "key"),
    [
        ("[{{source={0}, weight=[[0, 0.9], [9, 0.5]]}}, {{source={0}, weight=0.5}}]", "[0].weight"),
        ("[{{source={0}, weight=1}}, {{source={0}, weight=[[0, 0], [9, 1]]}}]", "_phases"),
        ("[{{source={0}, weight=1}}]", ""),
    ],
)
def test_other_weights_of_a_blend_are_a_key_that_differs(blend: str, key: str, made: Path) -> None:
    (source,) = load_run(made / "my.toml").data.sources
    sets = "[{{source={0}, weight=1}}, {{source={0}, weight=[[0, 0], [9, 1]]}}]"
    runs = []
    for entries, phases in ((sets, "steps"), (blend, "linear")):
        given = entries.format(json.dumps(source))
        keys = ["data.source=python", f"data.blend={given}", f"data.blend_phases={phases}"]
        runs.append(load_run(made / "my.toml", keys))
    assert [line for line in other_keys(*runs) if line.startswith(f"data.blend{key}: ")]
    assert not other_keys(runs[0], runs[0])


def test_data_that_is_gone_does_not_hide_what_the_records_say(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(room / "b" / "digests.jsonl", 2, one_digest)
    text = (room / "b" / "run.toml").read_text()
    (source,) = load_run(room / "b" / "run.toml").data.sources
    (room / "b" / "run.toml").write_text(text.replace(source, str(room / "gone.txt")))
    code, said = bisected(capsys, room / "a", room / "b")
    assert code == 1 and said["records"]["first"]["step"] == 2
    assert "a replay did not finish" in said["why"] and "gone.txt" in said["why"]


def test_in_one_layout_bits_must_be_equal_and_in_two_they_need_not(made: Path) -> None:
    def run(*overrides: str) -> Any:
        return load_run(made / "my.toml", overrides)

    assert must_be_equal(run(), run("parallel.recompute=full", "checkpoint.every=1"))
    assert must_be_equal(
        run(), run("optimizer.weight_decay=0.5", "train.seed=5", "data.source=other.txt")
    )
    for otherwise in ADDED_OTHERWISE:
        assert not must_be_equal(run(), run(*otherwise.split())), otherwise
    canonical = ("train.numerics=canonical", "train.threads=1")
    assert must_be_equal(run(*canonical), run(*canonical, "parallel.tensor=2"))
    assert not must_be_equal(run(*canonical), run(*canonical, "train.canonical_shards=4"))
    assert other_keys(run(), run("parallel.tensor=2", "log.every=3", "checkpoint.keep=1")) == []
    assert other_keys(run(), run("train.seed=5")) == ["train.seed: 1234 | 5"]
    assert other_keys(run(), run("model.vocab=500")) == []
    assert other_keys(run(), run("train.steps=9", "lr.length=5")) == [], (
        "a constant rate is the same"
    )
    assert other_keys(run(), run("lr.warmup=2")) == ["lr.warmup: 0 | 2"]
    begun = run().model_copy(
        update={"train": run().train.model_copy(update={"init_from": "other"})}
    )
    assert other_keys(run(), begun) == ['train.init_from: "" | "other"']


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / "b" / "run.toml").unlink(),
            sentence("bisect.not_a_run", path=re.compile("/b$")),
        ),
        (
            lambda folder: shutil.rmtree(folder / "b"),
            sentence("config.run_file_unreadable", path=re.compile("/b$")),
        ),
    ],
)
def test_bad_input_is_a_line(
    change: Callable[[Path], object], said: str, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(room)
    assert cli.main(["bisect", str(room / "a"), str(room / "b")]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert cli.main(["bisect", str(room / "a"), str(room / "a"), "--steps", "0"]) == 2


@pytest.mark.parametrize("other", ["a", "./a/", "b/../a"])
def test_one_run_given_twice_is_not_said_to_agree(
    other: str, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bisect", str(room / "a"), f"{room}/{other}"]) == 2
    assert shows(capsys.readouterr().err, "command.same_run")


def test_a_side_without_records_has_none(made: Path) -> None:
    side = Side.opened(str(made / "my.toml"))
    assert (side.digests, side.metrics, side.checkpoints_by_step()) == ({}, {}, {})


def test_runs_agree_only_if_both_are_proven_and_the_earlier_difference_counts() -> None:
    def entry(verdict: str, step: int = 0) -> dict[str, Any]:
        return {"verdict": verdict, "first": {"step": step}}

    proven = entry("proven")
    not_tried = entry("not tried")
    assert decisive_entry([proven, not_tried]) is not_tried
    early = entry("wrong", 1)
    assert decisive_entry([proven, not_tried, entry("wrong", 2), early]) is early
