"""A folder of Hugging Face's goes through a run and back with its own special ids, settings of
generation, template and tokenizer, and each entry that the run has changed is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.published import BOS, EOS, PAD, folder_of, tokenizers, transformers, written
from tests.runs import checkpoint, train
from tools.cli import main

TURN = 3  # the token that ends a turn of a chat, beside the one that ends a text
GENERATION = {
    "bos_token_id": BOS,
    "do_sample": True,
    "eos_token_id": [EOS, TURN],
    "pad_token_id": PAD,
    "suppress_tokens": [PAD, 7],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json_of(file) | keys))


class Chat:
    """An instruct model as published, and a run file that begins with it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder = folder_of("llama", place / "hf")
        change(self.folder / "config.json", eos_token_id=[EOS, TURN])
        (self.folder / "generation_config.json").write_text(json.dumps(GENERATION))
        (self.folder / "chat_template.jinja").write_text(TEMPLATE)
        self.file = written(place, self.folder)

    def keys(self, run: str, *more: str) -> list[str]:
        return [f"train.folder={self.place / run}", f"data.cache={self.place / 'data'}", *more]

    def export(self, run: str) -> Path:
        """The newest checkpoint of a run as a folder."""
        out = self.place / f"{run}_hf"
        assert main(["convert", str(self.place / run), str(out), "--no-verify"]) == 0
        return out

    def assert_own(self, out: Path) -> None:
        """The folder says what the published one says, besides its weights."""
        assert json_of(out / "generation_config.json") == GENERATION
        assert json_of(out / "tokenizer.json") == json_of(self.folder / "tokenizer.json")
        before = json_of(self.folder / "config.json")
        after = json_of(out / "config.json")
        assert {key: after.get(key) for key in IDS} == {key: before.get(key) for key in IDS}
        settings = json_of(self.folder / "tokenizer_config.json")
        classes = {"tokenizer_class": "PreTrainedTokenizerFast"}
        assert json_of(out / "tokenizer_config.json").items() >= (settings | classes).items()
        assert (out / "chat_template.jinja").read_text() == TEMPLATE


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(tmp_path_factory.mktemp("chat"))


def test_a_folder_goes_through_a_run_with_all_that_it_says(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    out = chat.place / "exported"
    keys = chat.keys("run", "train.steps=2")
    assert train(chat.file, *keys, "--no-verify", "--export-hf", str(out)) == 0
    chat.assert_own(out)
    assert "_token_id" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_goes_through_runs_of_every_kind_with_all_that_it_says(chat: Chat) -> None:
    keys = ("optimizer.ema=0.9", "checkpoint.keep=all")
    assert train(chat.file, *chat.keys("first", "train.steps=1", *keys), "--no-verify") == 0
    assert train(chat.file, *chat.keys("first", "train.steps=2", *keys)) == 0
    chat.assert_own(chat.export("first"))

    branch = [f"train.branch_from={checkpoint(chat.place / 'first', 1)}", 'train.init_from=""']
    branch += [f"data.tokenizer={chat.folder / 'tokenizer.json'}"]
    assert train(chat.file, *chat.keys("branch", "train.steps=2", *keys, *branch)) == 0
    chat.assert_own(chat.export("branch"))

    second = [f"train.init_from={chat.place / 'first'}"]
    assert train(chat.file, *chat.keys("second", *second), "--no-verify") == 0
    chat.assert_own(chat.export("second"))

    averaged = chat.place / "averaged"
    assert main(["convert", str(chat.place / "first"), str(averaged), "--ema", "--no-verify"]) == 0
    chat.assert_own(averaged)

    merged = chat.place / "merged"
    inputs = [str(chat.place / run) for run in ("first", "second")]
    assert main(["merge", *inputs, "--out", str(merged)]) == 0
    chat.assert_own(chat.export("merged"))


def with_other_tokens(chat: Chat) -> Path:
    """A tokenizer with the published one's special tokens in other places, without that of id 7;
    returns its file."""
    made = tokenizers.Tokenizer.from_file(str(chat.folder / "tokenizer.json"))
    turn = made.id_to_token(TURN)
    new = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    new.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<unk>", "<bos>", turn, "<pad>", "<eos>"]
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=300, special_tokens=special)
    new.train_from_iterator(["the model learns to say what it has seen"], trainer)
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=new, **names)
    fast.save_pretrained(chat.place / "tokens")
    return chat.place / "tokens/tokenizer.json"


@pytest.mark.slow
def test_ids_follow_their_tokens_into_another_tokenizer_and_each_change_is_named(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"data.tokenizer={with_other_tokens(chat)}", "data.begin=1")
    keys = (*keys, f"data.cache={chat.place / 'other_data'}")
    allow = ("--allow", "tokenizer", "--no-verify")
    assert train(chat.file, *chat.keys("other"), *keys, *allow) == 0
    capsys.readouterr()
    out = chat.export("other")
    generation = json_of(out / "generation_config.json")
    moved = {"bos_token_id": 1, "eos_token_id": [4, 2], "pad_token_id": 3, "suppress_tokens": [3]}
    assert generation == GENERATION | moved
    printed = capsys.readouterr().out
    for key, value in moved.items():
        line = f"{key} of generation_config.json: {GENERATION[key]} -> {value}"
        assert line in printed, key


def test_another_begin_and_end_in_training_are_said(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(chat.file, *chat.keys("begin", "data.begin=5"), "--no-verify") == 0
    capsys.readouterr()
    out = chat.export("begin")
    assert json_of(out / "config.json")["bos_token_id"] == 5
    assert json_of(out / "generation_config.json") == GENERATION | {"bos_token_id": 5}
    printed = capsys.readouterr().out
    for file in ("config.json", "generation_config.json"):
        line = f"bos_token_id of {file}: {BOS} -> 5: documents of the run begin with it"
        assert line in printed, file
