"""`megaprec generate`: text out of a checkpoint of any layout, on one process."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaprec.checkpoint.reader import Store
from megaprec.data.tokenizer import load_tokenizer
from models.config import ModelConfig
from tests import oracle
from tests.runs import WORDS, checkpoint, train_on, write_run
from tools.cli import main
from tools.training.sampling import harmless

PROMPT = "the model learns über Öl — 数"
STEPS = 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks wrote."""
    file = write_run(tmp_path_factory.mktemp("runs"))
    run = train_on(file, f"train.steps={STEPS}", "model.dropout=0", "lr.peak=2e-2", tensor=2, pipeline=2)
    return checkpoint(run, STEPS)


Generate = Callable[..., str]


@pytest.fixture
def generate(trained: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Runs the command on the trained checkpoint, or another, and returns what it wrote."""

    def run(*options: object, path: Path = trained, prompt: str = PROMPT) -> str:
        assert main(["generate", str(path), "--prompt", prompt, *map(str, options)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(PROMPT, 0), ("数", 1), ("", 8), (PROMPT, 30)],  # 30 are more than fit into the model's positions
)
def test_greedy_text_is_what_a_plain_model_finds_likeliest(
    prompt: str, tokens: int, trained: Path, generate: Generate
) -> None:
    store, tokenizer = Store(trained), load_tokenizer(trained / "text.model")
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


def test_one_likeliest_token_is_greedy_whatever_the_temperature(generate: Generate) -> None:
    assert generate("--top-k", 1, "--temperature", 5) == generate("--temperature", 0)


def test_a_checkpoint_stands_alone_and_can_be_moved(trained: Path, generate: Generate, tmp_path: Path) -> None:
    moved = shutil.copytree(trained, tmp_path / "elsewhere")
    run = shutil.copytree(trained.parent.parent, tmp_path / "run", ignore=shutil.ignore_patterns("data"))
    assert generate(path=moved) == generate(path=run) == generate(path=run / "checkpoints") == generate()


def test_control_characters_do_not_reach_a_terminal(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert harmless("a\tü\n\x1b[2J\x07") == "a\tü\n\ufffd[2J\ufffd"
    monkeypatch.setattr("tools.commands.generate.generate", lambda *_: iter("\x1b[2J"))
    assert generate(prompt="x") == "x\x1b[2J\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate(prompt="x") == "x\ufffd[2J\n"
