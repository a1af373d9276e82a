"""`megaprec generate`: text out of a checkpoint of any layout, on one process."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_hugging_face
from models.config import ModelConfig
from models.decoder.kv_cache import CachedStage
from tests import oracle
from tests.refusals import sentence, shows
from tests.runs import WORDS, checkpoint, train_on, write_run
from tools.cli import main
from tools.console import progress_bar
from tools.inference.generation import Generation, escape_control_characters
from tools.inference.load import load_model
from tools.inference.sampling import Sampling

PROMPT = "the model learns über Öl — 数"
STEPS = 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks wrote."""
    file = write_run(tmp_path_factory.mktemp("runs"))
    run = train_on(
        file, f"train.steps={STEPS}", "model.dropout=0", "lr.peak=2e-2", tensor=2, pipeline=2
    )
    return checkpoint(run, STEPS)


Generate = Callable[..., str]


@pytest.fixture
def generate(trained: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Runs the command on the trained checkpoint, or another, and returns what it wrote."""

    def run(*options: object, path: Path = trained, prompt: str = PROMPT) -> str:
        assert main(["generate", str(path), "--prompt", prompt, *map(str, options)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (PROMPT, 0),
        ("数", 1),
        ("", 8),
        (PROMPT, 30),
    ],  # 30 are more than fit into the model's positions
)
def test_greedy_text_is_what_a_plain_model_finds_likeliest(
    prompt: str, tokens: int, trained: Path, generate: Generate
) -> None:
    store = Store(trained)
    tokenizer = load_tokenizer(trained / "text.model")
    config = ModelConfig(**store.index["model"])
    weights = {name: store.read("weight", name).double() for name in store.shapes("weight")}
    assert tokenizer.eos is not None
    ids = [tokenizer.eos, *tokenizer.encode(prompt)]
    for _ in range(tokens):
        window = torch.tensor([ids[-config.max_positions :]])
        ids.append(int(oracle.logits(config, weights, window)[0, -1].argmax()))
    assert tokenizer.eos not in ids[1:]
    said = generate("--temperature", 0, "--tokens", tokens, prompt=prompt)
    assert said == tokenizer.decode(ids).rstrip("\ufffd") + "\n"


def test_a_trained_model_says_words_of_its_text(generate: Generate) -> None:
    said = generate("--tokens", 60, prompt="the model ").split()
    assert len([word for word in said if word in WORDS]) > 0.8 * len(said) > 5


def test_the_same_seed_gives_the_same_text_and_another_seed_another(generate: Generate) -> None:
    texts = [generate("--seed", seed, "--tokens", 20) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith(PROMPT) for text in texts)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("hugging_face", [False, True])
def test_no_token_is_chosen_that_the_tokenizer_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hugging_face: bool
) -> None:
    """A vocabulary is often padded: the model computes logits of ids that stand for nothing."""
    file = write_run(tmp_path)
    keys = ["model.vocab=700"]
    if hugging_face:
        definition = train_hugging_face(
            [(tmp_path / "text.txt").read_text("utf-8")], tmp_path / "tokenizer.json", 290
        )
        said = json.loads(definition.read_text("utf-8"))
        said["model"]["vocab"] |= {"far away": 400}
        definition.write_text(json.dumps(said), encoding="utf-8")
        keys += [f"data.tokenizer={definition}", f"data.cache={tmp_path}/other"]
    path = checkpoint(train_on(file, "train.steps=1", *keys), 1)
    tokenizer = load_model(path, CachedStage).tokenizer
    assert tokenizer and tokenizer.vocab_size == (401 if hugging_face else 330)
    known = set(tokenizer.vocabulary().values())
    assert len(known) == (291 if hugging_face else 330)
    for seed in range(3):
        made = Generation(
            load_model(path, CachedStage), "the", 20, Sampling(temperature=50, top_k=0), seed
        )
        assert "".join(made) and set(made.ids) <= known
    assert (
        main(["generate", str(path), "--prompt", "the", "--temperature", "50", "--top-k", "0"]) == 0
    )
    capsys.readouterr()


def test_one_likeliest_token_is_greedy_whatever_the_temperature(generate: Generate) -> None:
    assert generate("--top-k", 1, "--temperature", 5) == generate("--temperature", 0)


@pytest.mark.slow
def test_a_checkpoint_stands_alone_and_can_be_moved(
    trained: Path, generate: Generate, tmp_path: Path
) -> None:
    moved = shutil.copytree(trained, tmp_path / "elsewhere")
    run = shutil.copytree(
        trained.parent.parent, tmp_path / "run", ignore=shutil.ignore_patterns("data")
    )
    assert (
        generate(path=moved)
        == generate(path=run)
        == generate(path=run / "checkpoints")
        == generate()
    )


def test_control_characters_do_not_reach_a_terminal(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert escape_control_characters("a\tü\n\x1b[2J\x07") == "a\tü\n\ufffd[2J\ufffd"
    monkeypatch.setattr("tools.commands.generate.Generation.__iter__", lambda _: iter("\x1b[2J"))
    assert generate(prompt="x") == "x\x1b[2J\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate(prompt="x") == "x\ufffd[2J\n"


def test_text_beyond_the_positions_of_the_model_is_noted(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tokens, noted in ((4, False), (30, True)):
        assert main(["generate", str(trained), "--prompt", "the", "--tokens", str(tokens)]) == 0
        said = capsys.readouterr()
        note = (
            "note: the model has 16 positions (model.max_positions): beyond them, each token was "
            "chosen from the "
        )
        assert said.err == (note + "newest 16 tokens alone\n" if noted else "")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_of_several_prompts_is_continued_as_if_it_were_alone(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompts.txt").write_text("the text\n\nwhat it\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("über\n"))
    asked = [
        "--prompt",
        "model",
        "--prompt",
        "-",
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--tokens",
        "9",
    ]
    assert main(["generate", str(trained), *asked, "--json"]) == 0
    together = lines(capsys)
    assert [one["prompt"] for one in together] == ["model", "über", "the text", "what it"]
    for one in together:
        assert (
            main(["generate", str(trained), "--prompt", one["prompt"], "--tokens", "9", "--json"])
            == 0
        )
        assert lines(capsys) == [one]
        assert one["finish"] in ("length", "end") and one["tokens"] <= 9 and one["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("über\n"))
    assert main(["generate", str(trained), *asked]) == 0
    said = [
        f"--- prompt {n} of 4\n{one['prompt']}{one['text']}\n" for n, one in enumerate(together, 1)
    ]
    assert capsys.readouterr().out == "\n".join(said)


def test_texts_that_take_long_show_progress_on_stderr_where_no_text_appears_meanwhile(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "PLAIN_SECONDS", -1)
    asked = ["generate", str(trained), "--prompt", "the ", "--prompt", "model ", "--tokens", "9"]
    assert main([*asked, "--json"]) == 0
    said = capsys.readouterr()
    made = [json.loads(line) for line in said.out.splitlines()]
    for number, one in enumerate(made, 1):
        last = f"generating text {number} of 2  {one['tokens']} tokens"
        assert any(line.startswith(last) for line in said.err.splitlines())


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("stop", ["say", " ", "model learns to", "is nowhere"])
def test_the_text_ends_before_a_stop_string(
    stop: str, trained: Path, capsys: pytest.CaptureFixture[str], generate: Generate
) -> None:
    whole = generate("--tokens", 40, prompt="the ").removesuffix("\n")
    assert (
        main(
            [
                "generate",
                str(trained),
                "--prompt",
                "the ",
                "--tokens",
                "40",
                "--stop",
                stop,
                "--json",
            ]
        )
        == 0
    )
    (one,) = lines(capsys)
    continued = whole.removeprefix("the ")
    assert one["text"] == continued.partition(stop)[0]
    assert (one["finish"] == "stop") is (stop in continued)


def test_pieces_come_one_by_one_and_never_hold_a_part_of_a_stop_string(trained: Path) -> None:
    model = load_model(trained, CachedStage)
    pieces = [*Generation(model, "the ", 40, Sampling())]
    assert len(pieces) > 20
    stop = "".join(pieces)[30:36]
    held = [*Generation(model, "the ", 40, Sampling(), stop=[stop])]
    assert "".join(held) == "".join(pieces).partition(stop)[0]


def test_a_hugging_face_folder_says_what_the_checkpoint_says(
    trained: Path, tmp_path: Path, generate: Generate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(trained), str(tmp_path / "hf"), "--no-verify"]) == 0
    capsys.readouterr()
    assert generate("--tokens", 12, path=tmp_path / "hf") == generate("--tokens", 12)


def test_a_run_and_its_export_begin_documents_alike_whatever_the_tokenizer_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training puts the token that ends a document between two, and never the begin token of a
    tokenizer."""
    file = write_run(tmp_path)
    definition = train_hugging_face(
        [(tmp_path / "text.txt").read_text("utf-8")], tmp_path / "tokenizer.json", 290
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": "t", "eos_token": "<|endoftext|>"}'
    )
    keys = [f"data.tokenizer={definition}", f"data.cache={tmp_path}/other", "train.steps=1"]
    run = train_on(file, *keys)
    assert main(["convert", str(run), str(tmp_path / "hf"), "--no-verify"]) == 0
    assert (
        "name token 84 as bos_token, which nothing says to stand before documents"
        in capsys.readouterr().out
    )
    kept = checkpoint(run, 1) / "tokenizer_config.json"
    assert load_model(run, CachedStage).begin == load_model(tmp_path / "hf", CachedStage).begin == 0
    # settings of a checkpoint stay as they were saved
    kept.write_text(kept.read_text().replace('"t"', '"h"'))
    assert main(["generate", str(run), "--prompt", "the"]) == 2
    assert shows(
        capsys.readouterr().err,
        "checkpoint.digest_differs_newest",
        wrong="tokenizer_config.json",
        verb="is",
    )


@pytest.mark.slow
def test_what_transformers_says_of_the_exported_model_is_what_generate_says(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="needs transformers: the extra hf"
    )
    assert main(["convert", str(trained), str(tmp_path / "hf"), "--no-verify"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = tokenizer(f"{tokenizer.bos_token}the text", return_tensors="pt").input_ids
    expected = tokenizer.decode(
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0],
        skip_special_tokens=True,
    )
    capsys.readouterr()
    options = ["--prompt", "the text", "--tokens", "8", "--temperature", "0"]
    for folder in (trained, tmp_path / "hf"):
        assert main(["generate", str(folder), *options]) == 0
        assert capsys.readouterr().out == f"{expected}\n"


WRONG = {
    "--temperature 0 --top-k 5": "--top-k 5: --temperature 0 draws nothing; leave one of them out",
    "--temperature 0 --seed 3": "--seed 3: --temperature 0 draws nothing; leave one of them out",
    "--temperature -1": "--temperature -1: give 0 (always the most likely token) or more",
    "--top-k -1": "--top-k -1: give at least 1, or 0 for no such limit",
    "--top-p 0": "--top-p 0: give a number above 0 and at most 1, which is no limit",
    "--top-p nan": "--top-p nan: give a number above 0 and at most 1, which is no limit",
    "--min-p 1.5": "--min-p 1.5: give a number from 0, which is no limit, to 1",
    "--tokens -1": "--tokens -1: give 0 to 1048576",
    "--tokens 99999999999": "--tokens 99999999999: give 0 to 1048576",
    "--prompts no.txt": "--prompts no.txt: no such file",
    "--prompts /tmp": "--prompts /tmp is a folder",
    "--prompts /dev/null": "--prompts /dev/null is a device or a socket, not a regular file",
    "--prompt - --prompt -": "--prompt -: standard input can be read once; give it once",
    "--tokenizer no.json": Problem.of(
        "data.tokenizer_file_unusable",
        path="no.json",
        problem=": no such file",
        inside="a SentencePiece .model or a Hugging Face tokenizer.json",
    ),
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_refused_by_name(
    options: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(trained), "--prompt", "x", *options.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(WRONG[options]) and said.err.count("\n") == 1 and not said.out


def edited(folder: Path, name: str, **said: object) -> None:
    content = json.loads((folder / name).read_text("utf-8"))
    (folder / name).write_text(json.dumps(content | said))


IDS: dict[str, tuple[str, dict[str, object], str]] = {
    "beyond the model": (
        "config.json",
        {"bos_token_id": 99999},
        "bos_token_id = 99999 is not followed: no token has",
    ),
    "beyond the tokenizer": (
        "config.json",
        {"bos_token_id": 340},
        "bos_token_id = 340 is not followed",
    ),
    "several": (
        "config.json",
        {"bos_token_id": [5, 6]},
        "bos_token_id has 2 tokens: documents begin with the first, 5",
    ),
    "no number": (
        "generation_config.json",
        {"eos_token_id": "x"},
        "eos_token_id = 'x' of generation_config.json is not",
    ),
    "none": ("generation_config.json", {"eos_token_id": -1}, ""),
    "a choice of tokens": (
        "generation_config.json",
        {"temperature": 0.6, "repetition_penalty": 1.1},
        "temperature = 0.6, repetition_penalty = 1.1 of generation_config.json: not followed",
    ),
    "files of no tokenizer.json": (
        "tokenizer.json",
        {},
        "of merges.txt, tokenizer_config.json, vocab.json no tokenizer",
    ),
}


@pytest.mark.parametrize("case", IDS)
def test_what_a_folder_says_of_its_tokens_and_is_not_followed_is_noted(
    case: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (name, said, why) = tmp_path / "hf", IDS[case]
    assert main(["convert", str(trained), str(folder), "--no-verify"]) == 0
    edited(folder, name, **said)
    if name == "tokenizer.json":
        (folder / name).rename(folder / "vocab.json")
        (folder / "merges.txt").write_text("#version: 0.2\n")
    for path in (folder, tmp_path / "again"):
        capsys.readouterr()
        assert main(["generate", str(path), "--prompt", "the", "--tokens", "1"]) == (
            2 if name == "tokenizer.json" else 0
        )
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert len(notes) == bool(why) and all(why in note and str(path) in note for note in notes)
        if path == folder:
            assert (
                main(
                    [
                        "convert",
                        str(folder),
                        str(tmp_path / "again"),
                        "--to",
                        "megaprec",
                        "--no-verify",
                    ]
                )
                == 0
            )
            if name == "tokenizer.json":
                assert why in capsys.readouterr().out
                return


def test_another_tokenizer_than_the_models_own_is_noted(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train_hugging_face(
        ["the model says what it has seen\n" * 9], tmp_path / "tokenizer.json", 260
    )
    for file, notes in (
        (shutil.copy(trained / "text.model", tmp_path / "own.model"), 0),
        (other, 1),
    ):
        assert (
            main(
                [
                    "generate",
                    str(trained),
                    "--prompt",
                    "the",
                    "--tokens",
                    "1",
                    "--tokenizer",
                    str(file),
                ]
            )
            == 0
        )
        assert (
            capsys.readouterr().err.count(f"note: {file} is used, not {trained}/text.model")
            == notes
        )


@pytest.mark.parametrize("option", ["--prompts", "--prompt"])
def test_prompts_are_texts_as_those_of_a_data_set(
    option: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompts.txt"

    def run(content: bytes) -> int:
        file.write_bytes(content)
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", text)
        given = str(file) if option == "--prompts" else "-"
        return main(["generate", str(trained), option, given, "--tokens", "1", "--json"])

    assert run(b"\xef\xbb\xbfthe model\n") == 0
    assert [one["prompt"] for one in lines(capsys)] == ["the model"]
    for content, code in (
        (b"the \xff\n", "command.prompts_unreadable"),
        ("the".encode("utf-16-le"), "command.prompts_zero_bytes"),
    ):
        assert run(content) == 2
        (said,) = capsys.readouterr().err.splitlines()
        where = f"{option} {file if option == '--prompts' else '-'}"
        assert re.fullmatch(sentence(code, option=where), said)


def test_no_prompt_and_no_model_are_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(trained)]) == 2
    assert (
        capsys.readouterr().err
        == "give --prompt TEXT, --prompt - for standard input, or --prompts FILE\n"
    )
    assert main(["generate", "nowhere", "--prompt", "x"]) == 2
    assert (
        capsys.readouterr().err
        == f"{Problem.of('text.no_checkpoint', path='nowhere', problem='does not exist')}\n"
    )
