"""`megaprec init` writes a run file that trains as it is, and never replaces one."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from megaprec.text import training
from megaprec.text.sources import open_source
from tests.refusals import shows
from tools.cli import main
from tools.commands import init
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus
from tools.training.data_sources import check_sources

LINE = re.compile(r"(# .*\.|\[\w+\]|\w+ = .*|)")
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]


def words(count: int) -> str:
    dice = random.Random(0)
    return "\n".join(" ".join(dice.choices(WORDS, k=9)) for _ in range(count // 9))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "the same line again and again\n" * 30,
        words(900),
        words(30_000),
        "これは長い文章です。" * 40,
        "mostly é\n" + words(99),
    ],
    ids=["repeated", "small", "larger", "Japanese", "tiny"],
)
def test_the_run_that_is_written_can_be_trained_as_it_is(text: str, here: Path) -> None:
    (here / "my text").mkdir()
    (here / "my text" / "a.txt").write_text(text)
    assert main(["init", "my text"]) == 0
    config = load_run("run.toml")
    check_sources(config)
    corpus = open_corpus(config)
    train = len(corpus.train)
    held_out = corpus.held_out
    assert held_out is not None
    assert config.train.eval_samples <= len(held_out), "a run that is written begins with a warning"
    assert config.train.steps * config.train.global_batch <= 40 * train, (
        "no text is repeated without end"
    )
    assert load_run("run.toml").world_size == 1


@pytest.mark.parametrize(
    "text",
    [words(900), words(30_000), "これは長い文章です。" * 40],
    ids=["small", "larger", "Japanese"],
)
@pytest.mark.parametrize("preset", [None, "gpt2"])
def test_a_run_whose_tokens_are_characters_can_be_trained_as_it_is(
    preset: str | None, text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a.txt").write_text(text)
    of_preset = ["--preset", preset] if preset else []
    assert main(["init", "a.txt", "--characters", *of_preset]) == 0
    config = load_run("run.toml")
    assert config.data.of_characters
    assert "vocab_size" not in (here / "run.toml").read_text()
    corpus = open_corpus(config)
    assert corpus.model.vocab == len(set(text))
    assert corpus.held_out is not None
    assert f"{len(text):,} characters" in capsys.readouterr().out
    assert config.train.steps * config.train.global_batch <= 40 * len(corpus.train)


@pytest.mark.cases(2, sample=3)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_for_any_folder_is_accepted_by_train(
    seed: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of very different sizes and kinds: few words again and again, many words, many letters,
    JSONL."""
    monkeypatch.setattr(training.sample_lines, "__defaults__", (20_000,))
    monkeypatch.setattr(init, "SAMPLED_CHARS", 5_000)
    dice = random.Random(seed)
    (here / "text").mkdir()
    for number in range(dice.randint(1, 9)):
        letters = [
            chr(dice.choice((0x61, 0x4E00, 0x400)) + n) for n in range(dice.choice((3, 20, 400)))
        ]
        words = [
            "".join(dice.choices(letters, k=dice.randint(1, 8)))
            for _ in range(dice.choice((2, 30, 2000)))
        ]
        length = dice.choice((30, 300, 30_000)) if number else dice.choice((300, 60_000))
        lines = [" ".join(dice.choices(words, k=9)) for _ in range(max(3, length // 40))]
        if dice.random() < 0.3:
            rows = (json.dumps({"text": line}) for line in lines)
            (here / "text" / f"{number}.jsonl").write_text("\n".join(rows))
        else:
            (here / "text" / f"{number}.txt").write_text("\n".join(lines))
    assert main(["init", "text"]) == 0
    config = load_run("run.toml")
    check_sources(config)
    corpus = open_corpus(config)
    assert corpus.model.vocab == config.data.vocab_size
    assert corpus.held_out is not None


@pytest.mark.parametrize("packed", [False, True])
def test_sizes_follow_from_all_files_of_a_long_text(
    packed: bool, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second file has 2,600 characters of its own, more than the vocabulary of a text of this
    length."""
    monkeypatch.setattr(init, "SAMPLED_CHARS", 60_000)
    (here / "text").mkdir()
    (here / "text" / "a.txt").write_text(words(1 << 15))
    dice = random.Random(0)
    letters = [chr(0x4E00 + n) for n in range(2600)]
    content = "\n".join("".join(dice.choices(letters, k=50)) for _ in range(2000)).encode()
    (here / "text" / ("b.txt.gz" if packed else "b.txt")).write_bytes(
        gzip.compress(content) if packed else content
    )
    assert main(["init", "text"]) == 0
    told = capsys.readouterr().out.splitlines()[0]
    whole = sum(len(text) for _, text in open_source("text"))
    assert re.search(
        (
            f"about {whole:,} characters, .* tokens; the sizes follow from 60,000 of them, from "
            "all over the text"
        ),
        told,
    ), told
    config = load_run("run.toml")
    assert config.data.vocab_size > 2600
    assert open_corpus(config).model.vocab == config.data.vocab_size


@pytest.mark.parametrize("name", ["b.txt.gz", "b.jsonl"])
def test_a_short_text_is_counted_whole_though_sizes_of_its_files_do_not_tell(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file has more than its share of what is looked at."""
    monkeypatch.setattr(init, "SAMPLED_CHARS", 20_000)
    (here / "text").mkdir()
    long = words(3_000)
    (here / "text" / "a.txt").write_text(long)
    short = "some words of their own"
    content = json.dumps({"text": short}) if name.endswith("l") else short
    written = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    (here / "text" / name).write_bytes(written)
    assert 10_000 < len(long) < 19_000
    assert main(["init", "text"]) == 0
    assert (
        f"text       text: {len(long) + len(short):,} characters, about" in capsys.readouterr().out
    )


def test_every_key_that_is_written_has_a_comment_and_every_line_is_short(here: Path) -> None:
    (here / "a.jsonl").write_text('{"body": "some words of a text that is not long"}\n' * 60)
    assert (
        main(["init", "a.jsonl", "--text-field", "body", "--preset", "gpt2", "-o", "mine.toml"])
        == 0
    )
    lines = (here / "mine.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line]
    assert len(keys) > 12
    assert all(lines[number - 1].startswith("# ") for number in keys)
    assert not [line for line in lines if not LINE.fullmatch(line) and not line.startswith("# ")]
    assert max(map(len, lines)) <= 100
    config = load_run("mine.toml")
    assert (config.data.text_field, config.model.family, config.model.vocab) == ("body", "gpt2", 0)


def test_a_file_that_is_there_is_never_replaced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.toml").write_text("mine")
    assert main(["init"]) == 2
    assert shows(capsys.readouterr().err, "command.run_file_exists", output="run.toml")
    assert (here / "run.toml").read_text() == "mine"


def test_the_folder_of_a_run_is_not_within_its_text(here: Path) -> None:
    (here / "a.txt").write_text(words(900))
    assert main(["init", "."]) == 0
    assert here not in Path(load_run("run.toml").train.folder).resolve().parents


@pytest.mark.parametrize("text", ["", "a", "one line of text"])
def test_a_text_that_is_too_short_is_refused_and_nothing_is_written(text: str, here: Path) -> None:
    (here / "a.txt").write_text(text)
    assert main(["init", "a.txt"]) == 2
    assert not (here / "run.toml").exists()
