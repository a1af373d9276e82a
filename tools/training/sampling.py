"""Sampling text from a trained model, on one process: token by token, from the most likely ones by temperature."""

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaprec.checkpoint.atomic import checkpoint_at
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.comm.layout import layout_of
from megaprec.data.tokenizer import Tokenizer, load_tokenizer
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.own_model import require_builtin
from models.stages import Stage, cuts
from parallel.context import Context
from tools.convert.train_state import read_model, read_tokenizer


def harmless(text: str) -> str:
    """Return `text` for a terminal, with control characters, which an untrained model may emit, as U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def find_checkpoint(path: Path) -> Path:
    """Return `path`, or the newest checkpoint of the run folder `path`. Raises UserError if there is none."""
    found = checkpoint_at(path)
    if found is None:
        there = "has no checkpoint" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {there}: give a run folder, or one of the folders step_... in its checkpoints")
    return found


def load_model(path: Path) -> tuple[Stage, Tokenizer]:
    """Return the whole model in FP32 on the CPU, whatever layout and precision it was trained in, and its tokenizer."""
    store = Store(path)
    config = read_model(store)
    require_builtin(config, "megaprec generate")
    if not (tokenizer := read_tokenizer(store)):
        raise UserError(f"{path} was trained on token ids without a tokenizer, so it cannot read a prompt")
    require_intact(store, store.files_of("weight") | {tokenizer.name})
    stage = Stage(config, Context(plan("fp32")), cuts(config, 1, config.max_positions)[0])
    with torch.no_grad():
        for parameter in stage.parameters():
            for part, first, last in layout_of(parameter).spans():
                parameter.view(-1)[first:last] = store.read("weight", part.name).reshape(-1)
    return stage, load_tokenizer(tokenizer)


@torch.no_grad()
def generate(
    model: Stage,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the text that continues `prompt`, in pieces, up to `tokens` tokens or the end of the document.

    temperature: divides the logits; 0 takes the most likely token. top_k: number of most likely tokens to sample from.
    """
    generator = torch.Generator().manual_seed(seed)
    start = [tokenizer.eos] if tokenizer.eos is not None else []
    ids = start + tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty and the tokenizer has no token to begin a document with: give a prompt")
    said = tokenizer.decode(ids)
    for _ in range(tokens):
        window = torch.tensor(ids[-model.config.max_positions :])
        chosen = _choose(model(window[:, None])[-1, 0], temperature, top_k, generator)
        if chosen == tokenizer.eos:
            return
        ids.append(chosen)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character of several tokens is not complete yet
            yield text[len(said) :]
            said = text


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Return the id of the next token. logits: [vocab]."""
    if temperature == 0:
        return int(logits.argmax())
    best, ids = logits.topk(min(top_k, len(logits)))
    return int(ids[torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)])
