"""What a command cannot do with its run or its text it says in words of the user's."""

import json
from pathlib import Path

import pytest

from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import LONGEST_LINE, train_sentencepiece
from tests.refusals import raises
from tests.text.chat_material import make_tokenizer
from tests.text.test_chats import ASKS_FOR_THE_DAY
from tools.commands.doctor import _data_findings
from tools.commands.mup_check import _frozen_notes
from tools.commands.parity import _with_characters
from tools.config.run_file import RunConfig, load_run
from tools.training.corpus import open_corpus
from tools.verify.doctor.finding import OK, WRONG

WORDS = "the model learns "
SMALL = (
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "train.steps=2",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.seq_length=16",
)


def test_a_text_whose_lines_are_all_too_long_for_sentencepiece_is_refused_in_our_words(
    tmp_path: Path,
) -> None:
    line = WORDS * (LONGEST_LINE // len(WORDS) + 1)
    with raises("data.lines_too_long", longest=LONGEST_LINE):
        train_sentencepiece([line], tmp_path / "long", 280)
    # One line that is not leaves something to learn from.
    path = train_sentencepiece([line, WORDS * 50], tmp_path / "mixed", 280)
    assert load_tokenizer(path).vocab_size == 280


def run(folder: Path, *overrides: str) -> RunConfig:
    return load_run(None, [*SMALL, f"train.folder={folder}/run", *overrides])


def test_doctor_names_each_text_of_the_run_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text(WORDS)
    sources = [f"{{source='{tmp_path}/{name}.txt',weight=1}}" for name in ("here", "gone")]
    both = f"data.blend=[{','.join(sources)}]"
    (missing,) = _data_findings(run(tmp_path, both))
    assert (missing.check, missing.verdict) == ("data", WRONG)
    assert "gone.txt" in missing.message and "here.txt" not in missing.message
    (found,) = _data_findings(run(tmp_path, f"data.source={tmp_path}/here.txt"))
    assert (found.check, found.verdict) == ("data", OK)


def test_parity_has_the_vocabulary_of_the_characters_of_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 100)
    config = run(tmp_path, f"data.source={text}", "data.tokenizer=characters")
    sized, (note,) = _with_characters(config)
    assert sized.model.vocab == len(set(WORDS))
    assert f"{len(set(WORDS))} characters" in note
    text.unlink()
    unsized, (note,) = _with_characters(config)
    assert unsized == config
    assert "data.vocab_size = 4,096 stands for the number of its characters" in note


def test_mup_check_says_that_it_trains_what_is_frozen(tmp_path: Path) -> None:
    assert not [*_frozen_notes(run(tmp_path))]
    (note,) = _frozen_notes(run(tmp_path, 'optimizer.frozen=["*norm*"]'))
    assert note.startswith("optimizer.frozen has no effect on mup-check")


def test_a_run_tells_that_its_chat_template_asks_for_the_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer(tmp_path, ASKS_FOR_THE_DAY)
    rows = tmp_path / "rows.jsonl"
    message = {"role": "user", "content": WORDS * 9}
    rows.write_text(
        (json.dumps({"messages": [message, {**message, "role": "assistant"}]}) + "\n") * 50
    )
    keys = (f"data.source={rows}", "data.chat_template=tokenizer", f"data.tokenizer={tokenizer}")
    open_corpus(run(tmp_path, *keys))
    assert "asks for the day (strftime_now)" in " ".join(capsys.readouterr().err.split())
