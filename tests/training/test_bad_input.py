"""What a user gets wrong: a line for each problem with key, value and remedy, exit code 2, and
nothing written."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprec.tokens.indexed import IndexedWriter
from tests.refusals import sentence
from tests.runs import checkpoint, edit_index, train, write_run
from tools.cli import main


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose data lies in its own folder, and some bad things beside it."""
    folder = tmp_path_factory.mktemp("runs")
    file = write_run(folder)
    assert train(file, "data.cache=", "train.steps=2", "checkpoint.every=1") == 0
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("some words only")
    with IndexedWriter(folder / "ids", 1000) as writer:
        writer.add_document(list(range(900)))
    shutil.copy(folder / "ids.bin", folder / "broken.bin")
    (folder / "broken.idx").write_bytes((folder / "ids.idx").read_bytes()[:40])
    return file


@pytest.fixture
def refused(
    run_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Checks that the command refuses its arguments with these lines, each a regular expression for
    one, and writes nothing. <folder> in them is the folder of the run file; the shell stands
    there."""
    folder = run_file.parent
    monkeypatch.chdir(folder)

    def check(arguments: list[str], *lines: str) -> None:
        before = state(folder)
        _ = capfd.readouterr()
        code = main([argument.replace("<folder>", str(folder)) for argument in arguments])
        out, err = capfd.readouterr()
        assert code == 2
        assert out == ""
        said = [
            line for line in err.splitlines() if not line.startswith("building the data set of ")
        ]
        assert len(said) == len(lines), err
        for line, expected in zip(said, lines, strict=True):
            assert re.fullmatch(expected.replace("<folder>", re.escape(str(folder))), line), (
                f"{line}\n{expected}"
            )
        assert state(folder) == before

    return check


def state(folder: Path) -> dict[Path, bytes]:
    """Every file but what a run in a new folder, which is `fresh` in these tests, has prepared of
    its data."""
    files = (path for path in folder.rglob("*") if path.is_file() and "fresh" not in path.parts)
    return {path: path.read_bytes() for path in files}


NEW = ["data.cache=", "train.folder=fresh"]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["train.qqqq=3"], [r"train.qqqq = 3 \(command line\): no such key"]),
        (
            ["train.stpes=3"],
            [r"train.stpes = 3 \(command line\): no such key; did you mean train.steps\?"],
        ),
        (
            ["trian.steps=3"],
            [r"\[trian\] \(command line\): no such table; did you mean \[train\]\?"],
        ),
        (["train.steps=six"], [r'train.steps = "six" \(command line\): must be a valid integer']),
        (
            ["parallel.tensor=3"],
            [
                sentence(
                    "config.tensor_sizes",
                    tensor=3,
                    sizes=re.compile(r"model\.heads 4, "),
                    possible="1, 2, 4",
                )
            ],
        ),
        (
            ["precision.loss_scale=1e39"],
            [
                re.escape("precision.loss_scale = 1e+39: ")
                + sentence("optimizer.loss_scale_range", scale=1e39)
            ],
        ),
        (
            ["precision.compute=fp16", "precision.initial_scale=1e39"],
            [
                re.escape("precision.initial_scale = 1e+39: ")
                + sentence("optimizer.scaler_range", initial=1e39)
            ],
        ),
        (
            ["parallel.pipeline=3"],
            [sentence("config.too_many_stages", pipeline="parallel.pipeline 3", layers=2)],
        ),
        (
            ["parallel.data=3"],
            [
                sentence(
                    "config.global_batch",
                    global_batch=8,
                    micro_batch=2,
                    data=3,
                    product=6,
                    possible="6 or 12",
                )
            ],
        ),
        (
            ["model.vocab=100"],
            [sentence("config.small_vocab", vocab=100, vocab_size=330)],
        ),
        (
            ["train.stpes=3", "model.hidden=17", "parallel.tensor=3", "parallel.data=3"],
            [
                "train.stpes .*",
                "model." + sentence("model.hidden_not_multiple", hidden=17, heads=4),
                "train.global_batch 8 .*",
            ],
        ),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_a_wrong_run_file_is_refused_with_all_its_problems(
    overrides: list[str], lines: list[str], refused: Callable[..., None]
) -> None:
    refused(["train", "my.toml", *overrides], *lines)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.source", '"near"'),
        ("data.tokenizer", '"near"'),
        ("data.validation", '[{name = "a", source = "near"}]'),
        ("data.blend", '[{source = "near", weight = 1}]'),
        ("train.init_from", '"near"'),
        ("train.branch_from", '"near"'),
    ],
)
def test_a_path_that_is_not_found_but_lies_beside_the_run_file_is_named(
    key: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, (table, name) = tmp_path, key.split(".")
    (folder / "conf").mkdir()
    monkeypatch.chdir(folder)
    own = [
        line
        for line in write_run(folder).read_text().splitlines()
        if not re.match("source|blend", line)
    ]
    assert f"[{table}]" in own
    own.insert(own.index(f"[{table}]") + 1, f"{name} = {value}")
    (folder / "conf" / "run.toml").write_text("\n".join(own))
    capfd.readouterr()
    given = [] if key in ("data.source", "data.blend") else ["data.source=python"]
    for there in (False, True):
        if there:
            (folder / "conf" / "near").touch()
        assert main(["train", "conf/run.toml", *given]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        said = "conf/near is there: a path in a run file is relative to the working directory"
        assert line.endswith(said if there else "nor is there conf/near, beside the run file"), line
    assert main(["train", "conf/run.toml", *given, f"{key}={value.replace('near', 'other')}"]) == 2
    assert "conf" not in capfd.readouterr().err, (
        "what the command line says is meant from the working directory"
    )


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["data.source=nowhere.txt"],
            [
                r'data.source = "nowhere.txt": '
                + sentence("data.source_missing", name="nowhere.txt", folder=" in <folder>")
            ],
        ),
        (
            ["data.source=empty.txt"],
            ['data.source = "empty.txt": ' + sentence("data.source_empty", name="empty.txt")],
        ),
        (
            ["data.source=short.txt"],
            [
                'data.source = "short.txt", data.vocab_size = 330: '
                + sentence(
                    "data.vocabulary_not_learnable",
                    vocab_size=330,
                    problem=re.compile(r"^there are only \d+ pieces .* or more text$"),
                )
            ],
        ),
        (
            ["data.source=short.txt", "data.tokenizer=data/text.model"],
            [
                'data.source = "short.txt", .*seq_length = 16: '
                + sentence(
                    "data.data_too_short",
                    num_tokens=re.compile(r"^\d+$"),
                    samples=2,
                    seq_length=16,
                    needed_tokens=33,
                )
            ],
        ),
        (
            ["data.source=broken", "model.vocab=1000"],
            [
                'data.source = "broken": '
                + sentence("data.index_corrupt", path="broken.idx", why=re.compile("^truncated: "))
            ],
        ),
        (
            ["data.source=ids", "model.vocab=500"],
            [
                'data.source = "ids", model.vocab = 500, .*: '
                + sentence(
                    "data.vocabulary_too_small",
                    prefix="ids",
                    low=0,
                    high=899,
                    vocab=500,
                    needed=900,
                )
            ],
        ),
        (
            ["data.tokenizer=data/text.model", "model.vocab=200"],
            [
                "data.tokenizer = .*: "
                + sentence("training.vocabulary_below_tokenizer", size=200, tokens=330)
            ],
        ),
        (
            ["data.source=ids"],
            [(sentence("training.vocabulary_unknown"))],
        ),
        (
            ["data.source=ids.bin"],
            ['data.source = "ids.bin": ' + sentence("training.data_set_prefix", source="ids")],
        ),
        (
            ["data.tokenizer=."],
            [
                'data.tokenizer = ".": '
                + sentence(
                    "data.tokenizer_file_unusable",
                    path=".",
                    problem=" is a folder",
                    inside=re.compile(r"^a SentencePiece \.model or"),
                )
            ],
        ),
        (
            ["data.tokenizer=my.toml"],
            ['data.tokenizer = "my.toml": ' + sentence("data.not_a_tokenizer", path="my.toml")],
        ),
        (
            ["data.source=ids", "model.vocab=900", "log.sample=x"],
            [sentence("training.sample_without_tokenizer")],
        ),
        (
            ["train.device=cuda"],
            [sentence("command.too_few_devices", devices=0, ranks=1)],
        ),
        (
            ["train.folder=my.toml"],
            [
                sentence(
                    "command.folder_is_file",
                    key="train.folder",
                    folder="my.toml",
                    existing="<folder>/my.toml",
                )
            ],
        ),
        (
            ["data.source=<folder>"],
            [
                sentence(
                    "command.folder_in_source",
                    written="train.folder",
                    folder="fresh",
                    key="data.source",
                    source="<folder>",
                )
            ],
        ),
        (
            ['data.validation=[{name = "all", source = "<folder>"}]', "train.eval_every=1"],
            [
                sentence(
                    "command.folder_in_source",
                    written="train.folder",
                    folder="fresh",
                    key="data.validation all",
                    source="<folder>",
                )
            ],
        ),
        (
            [
                "train.device=cuda",
                "train.folder=my.toml",
                "data.source=nowhere",
                "data.tokenizer=nothing",
            ],
            ["train.device .*", "train.folder .*", "data.source .*", "data.tokenizer .*"],
        ),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] and "\\" not in value[0] else "",
)
def test_what_is_not_as_the_run_file_says_is_found_before_any_rank_starts(
    overrides: list[str],
    lines: list[str],
    refused: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(
        "tools.commands.train.train_rank", lambda *_: pytest.fail("a rank was started")
    )
    refused(["train", "my.toml", *NEW, *overrides], *lines)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["model.hidden=32", "model.heads=8"],
            [
                sentence("training.other_model", key="hidden", value=32, saved=16),
                sentence("training.other_model", key="heads", value=8, saved=4),
                sentence("training.not_resumable", path="<folder>/run/checkpoints/step_00000002"),
            ],
        ),
        (
            ["data.vocab_size=320"],
            [
                (
                    sentence(
                        "training.vocabulary_differs",
                        vocab_size=320,
                        size=330,
                        remedy=re.compile("--allow tokenizer"),
                    )
                )
            ],
        ),
        (
            ["data.cache=fresh", "data.max_chars=15000"],
            [
                sentence(
                    "training.other_text",
                    key="data.source",
                    names='"<folder>/text.txt"',
                    path=re.compile("^<folder>/run/.*step_00000002$"),
                )
            ],
        ),
        (
            ["checkpoint.resume=false"],
            [sentence("training.resume_false", path=re.compile("^<folder>/run/"))],
        ),
    ],
    ids=["sizes", "data", "tokenizer", "no resume"],
)
def test_a_folder_with_a_checkpoint_of_another_run_is_left_alone(
    overrides: list[str], lines: list[str], refused: Callable[..., None]
) -> None:
    refused(["train", "my.toml", "data.cache=", *overrides], *lines)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("file", ["checkpoint.json", "model-00000.safetensors"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    file: str, keep: bool, run_file: Path, refused: Callable[..., None]
) -> None:
    fresh = shutil.copytree(run_file.parent / "run", run_file.parent / "damaged" / file / str(keep))
    damaged = checkpoint(fresh, 2)
    os.truncate(damaged / file, 100)
    if not keep:
        shutil.rmtree(checkpoint(fresh, 1))
    if "model" in file:
        what = sentence("checkpoint.file_size", file=damaged / file)
    else:
        what = sentence("checkpoint.not_a_checkpoint", path=damaged)
    instead = "go on from step_00000001" if keep else "start anew"
    remedy = sentence(
        "convert.newest_damaged",
        path=damaged,
        remedy=f"restore it, or move it away to {instead}",
    )
    refused(
        ["train", "my.toml", "data.cache=<folder>/run/data", f"train.folder={fresh}"], what, remedy
    )
    refused(["generate", str(fresh), "--prompt", "x"], what)


@pytest.mark.parametrize("lost", ["model", "tokenizer", "progress", "watch"])
def test_a_checkpoint_that_another_program_saved_is_refused(
    lost: str, run_file: Path, refused: Callable[..., None]
) -> None:
    folder = shutil.copytree(run_file.parent / "run", run_file.parent / "foreign" / lost)
    found = checkpoint(folder, 2)
    edit_index(found, lambda index: index.pop(lost))
    line = sentence("convert.run_keys_missing", path=found, key=lost)
    refused(["train", "my.toml", "data.cache=<folder>/run/data", f"train.folder={folder}"], line)
    if lost == "model":
        refused(["generate", str(folder), "--prompt", "x"], line)
    if lost == "tokenizer":  # such a checkpoint is read, with a tokenizer that is given
        refused(["generate", str(folder), "--prompt", "x"], sentence("text.no_tokenizer"))


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["train", "nowhere.toml"],
            [
                sentence(
                    "config.run_file_unreadable",
                    path="nowhere.toml",
                    reason="No such file or directory",
                )
            ],
        ),
        (["train", "text.txt"], [sentence("config.not_toml", path="text.txt")]),
        (
            ["generate", "nowhere", "--prompt", "x"],
            [sentence("text.no_checkpoint", path="nowhere", problem="does not exist")],
        ),
        (
            ["generate", ".", "--prompt", "x"],
            [sentence("text.no_checkpoint", path=".", problem="has no checkpoint")],
        ),
        (
            ["generate", "my.toml", "--prompt", "x"],
            [sentence("text.no_checkpoint", path="my.toml", problem="is not a folder")],
        ),
        (
            ["generate", "run", "--prompt", "x", "--tokens=-1", "--temperature=nan", "--top-k=-1"],
            [
                "--tokens -1: give 0 to 1048576",
                r"--temperature nan: give 0 \(.*",
                "--top-k -1: give at least 1.*",
            ],
        ),
    ],
    ids=["no run file", "no TOML", "no checkpoint", "folder", "file", "options"],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], lines: list[str], refused: Callable[..., None]
) -> None:
    refused(arguments, *lines)


@pytest.mark.parametrize(
    ("rank", "run", "told"),
    [("0", "torchrun's", True), ("1", "torchrun's", False), ("0", "megaprec_1", False)],
)
def test_a_world_of_another_size_is_refused_before_it_is_joined_and_told_once(
    rank: str,
    run: str,
    told: bool,
    refused: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = {
        "RANK": rank,
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "LOCAL_RANK": rank,
    }
    for name, value in {**joined, "TORCHELASTIC_RUN_ID": run}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "tools.training.rank.world", lambda device: pytest.fail("the world was joined")
    )
    line = sentence(
        "config.world_size",
        world_size=3,
        keys="parallel.tensor 1 x parallel.pipeline 1 x parallel.data 1",
        ranks_of_layout=1,
        advice=re.compile(r" parallel\.data = 3"),
    )
    refused(["train", "my.toml", "parallel.tensor=1"], *([line] if told else []))


def test_ranks_take_a_cuda_device_each_or_none_does(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "tools.training.rank.world", lambda device, *rest, **more: devices.append(device) or 1 / 0
    )
    for name, value in {
        "RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    for local, world in ((2, 4), (4, 4)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        with pytest.raises(ZeroDivisionError):
            train(run_file, "parallel.data=4")
    assert devices == ["cuda", "cpu"]


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_the_command_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "megaprec", "keys"]
    done = subprocess.run(
        command,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_text_of_a_blend_that_cannot_be_read_is_told_with_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"body": "a text without the field"}\n' * 20)
    blend = '[{source = "text.txt", weight = 1.0}, {source = "rows.jsonl", weight = 1.0}]'
    source = f'source = "{tmp_path}/text.txt"'
    file.write_text(file.read_text().replace(source, f"blend = {blend}"))
    capfd.readouterr()
    assert main(["train", str(file), "data.cache=", "train.folder=new"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith('data.blend[1].source = "rows.jsonl": rows.jsonl:1: ')
    assert "blend[0]" not in line
