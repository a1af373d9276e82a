"""A text continued token by token, in pieces that can be printed as they come."""

import unicodedata
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.text.tokenizer import Tokenizer
from models.decoder.kv_cache import CachedStage
from tools.inference.load import LoadedModel
from tools.inference.sampling import Sampling


def escape_control_characters(text: str) -> str:
    """Return `text` for a terminal, with control characters, which an untrained model may emit, as
    U+FFFD."""
    shown = []
    for character in text:
        is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
        shown.append("\ufffd" if is_control else character)
    return "".join(shown)


class Generation:
    """The text that continues a prompt. Iterating it, once, yields the text in pieces.

    finish: why the text ended, known at the end. "end": the model ended the document; "stop": a
    stop string came, which is left out; "length": `tokens` tokens were generated.
    tokens: number of tokens generated so far, the token that ends a document included.
    slid: True if the text has outgrown the model's positions. Each further token then sees only the
    newest tokens that fit, and the cache is of no use.

    Only tokens that the tokenizer has are chosen, though a model's vocabulary is often padded with
    others. Raises UserError for an empty prompt if the model has no token to begin a document with.
    """

    def __init__(
        self,
        model: LoadedModel[CachedStage],
        prompt: str,
        tokens: int,
        sampling: Sampling,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._limit = tokens
        self._sampling = sampling
        self._tokenizer = _require_tokenizer(model)
        self._stop = tuple(stop)
        self._barred = _barred(self._tokenizer, model.stage.config.vocab)
        self._generator = torch.Generator().manual_seed(seed)
        # Without a prompt the token before a document is all that a text can begin with.
        begin = model.prompt_begin if prompt else model.begin
        before = [] if begin is None else [begin]
        self._ids = before + self._tokenizer.encode(prompt)
        self._prompt_length = len(self._ids)
        self.finish = ""
        self.slid = False
        if not self._ids:
            raise UserError.of("text.prompt_empty")

    @property
    def ids(self) -> list[int]:
        """Return the tokens generated so far."""
        return self._ids[self._prompt_length :]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        """Yield text as soon as it is certain: whole characters, and no beginning of a stop
        string."""
        yielded = 0  # characters
        text = ""
        for text in self._texts():
            stop = _earliest(text, self._stop)
            if stop is not None:
                self.finish = "stop"
                yield text[yielded:stop]
                return
            certain = len(text) - _possible_stop_length(text, self._stop)
            if certain > yielded:
                yield text[yielded:certain]
                yielded = certain
        yield text[yielded:]

    def _texts(self) -> Iterator[str]:
        """Yield the text so far after each token, without a character at its end that is not
        complete."""
        # Decoded together with the prompt, for a token's text may depend on the one before.
        prompt = self._tokenizer.decode(self._ids)
        yield ""
        for _ in self._append_tokens():
            text = self._tokenizer.decode(self._ids)
            # a character of several tokens may not be complete yet
            yield text[len(prompt) :].rstrip("\ufffd")

    def _append_tokens(self) -> Iterator[int]:
        """Choose and append tokens, and yield each but one that ends the document; set `finish` at
        the end."""
        stage = self._model.stage
        positions = stage.config.max_positions
        stage.start(min(self._prompt_length + self._limit, positions))
        new_ids = self._ids  # that the cache does not have
        for _ in range(self._limit):
            # The cache holds positions that no longer apply: the newest tokens are computed anew.
            if len(self._ids) > positions:
                self.slid = True
                stage.start(positions)
                new_ids = self._ids[-positions:]
            ids = torch.tensor(new_ids, device=self._model.device)
            # drawn on the CPU: a seed gives the same text wherever the same logits come from
            logits = stage.extend(ids[:, None])[0].cpu()
            token = self._sampling.choose(logits, self._generator, self._barred)
            new_ids = [token]
            self._ids.append(token)
            if token in self._model.ends:
                self.finish = "end"
                return
            yield token
        self.finish = "length"


def _require_tokenizer(model: LoadedModel[CachedStage]) -> Tokenizer:
    if model.tokenizer is None:
        raise UserError.of("text.no_tokenizer")
    return model.tokenizer


def _barred(tokenizer: Tokenizer, vocab: int) -> Tensor | None:
    """Return [vocab], True for ids that the tokenizer has no token for; None if it has one for
    each."""
    barred_ids = [*range(tokenizer.vocab_size, vocab), *tokenizer.holes]
    if not barred_ids:
        return None
    barred = torch.zeros(vocab, dtype=torch.bool)
    return barred.index_fill(0, torch.tensor(barred_ids), True)


def _earliest(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of the stop strings begins in the text; None if there is none."""
    positions = [text.find(word) for word in stop]
    return min((position for position in positions if position >= 0), default=None)


def _possible_stop_length(text: str, stop: Sequence[str]) -> int:
    """Return the number of characters at the end of the text that may turn out to begin a stop
    string."""
    longest = 0
    for word in stop:
        for length in range(1, len(word)):
            if text.endswith(word[:length]):
                longest = max(longest, length)
    return longest
