"""What is printed of a text is what its tokens mean, whole characters only."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megaprec.text.encoding import EncodeRendered
from models.config import ModelConfig
from models.decoder.kv_cache import CachedStage
from tests.published import BOS, folder_of, transformers
from tools.inference.generation import Generation
from tools.inference.load import LoadedModel, load_model
from tools.inference.sampling import Sampling


class Bytes:
    """A tokenizer whose tokens are bytes, not all of which are whole characters; token 0 is the
    prompt's only one."""

    pieces = (b">", b"a", b" \xe2", b"\x82", b"\xac", b"bc\xf0", b"\xff")
    path = Path("none")
    vocab_size = len(pieces)
    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    unk: int | None = None
    holes: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    special: frozenset[str] = frozenset()
    encode_rendered: EncodeRendered | None = None

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[id] for id in ids).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {}


class Says:
    """A model that says given tokens."""

    config = SimpleNamespace(max_positions=99, vocab=Bytes.vocab_size)

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = iter(tokens)

    def start(self, length: int) -> None: ...

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(
            torch.tensor([next(self.tokens)]), Bytes.vocab_size
        ).float()


def pieces_of(tokens: list[int], *stop: str) -> tuple[list[str], Generation]:
    said = cast(CachedStage, Says(tokens))
    config = cast(ModelConfig, Says.config)
    model = LoadedModel(config, Bytes(), None, frozenset(), stage=said)
    text = Generation(model, "x", len(tokens), Sampling(temperature=0), stop=stop)
    return [piece for piece in text if piece], text


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, 2, 3, 4, 1], ["a", " ", "€", "a"]),
        ([1, 2], ["a", " "]),  # a space and a character that is not complete
        ([2, 1], [" ", "\ufffda"]),
        ([1, 5], ["a", "bc"]),
        ([6, 6, 1], ["\ufffd\ufffda"]),
        ([5, 6, 6], ["bc"]),
    ],
)
def test_of_a_token_with_a_part_of_a_character_the_whole_ones_are_said(
    tokens: list[int], said: list[str]
) -> None:
    pieces, text = pieces_of(tokens)
    assert pieces == said and text.finish == "length"
    assert "".join(pieces) == Bytes().decode(tokens).rstrip("\ufffd")


def test_a_text_stops_before_a_stop_string_whose_token_ends_within_a_character() -> None:
    pieces, text = pieces_of([1, 5, 6, 1, 1], "c")
    assert "".join(pieces) == "ab" and (text.finish, text.tokens) == ("stop", 2)


@pytest.mark.parametrize("bos", [None, BOS])
def test_a_prompt_has_the_tokens_that_transformers_gives_it(
    bos: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that names no begin token has none before a prompt."""
    folder = folder_of("llama", tmp_path / "hf", bos_token_id=bos)
    model = load_model(folder, CachedStage)
    read = list[list[int]]()
    extend = model.stage.extend

    def extend_and_record(tokens: torch.Tensor) -> torch.Tensor:
        read.append(tokens.flatten().tolist())
        return extend(tokens)

    monkeypatch.setattr(model.stage, "extend", extend_and_record)
    prompt = "the model learns"
    assert [*Generation(model, prompt, 2, Sampling(temperature=0))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    before = [] if bos is None else [bos]
    assert read[0] == [*before, *tokenizer(prompt)["input_ids"]]
    # Without a prompt a text begins as documents do.
    assert [*Generation(model, "", 1, Sampling(temperature=0))]
