"""Text, initial weights and batches of the published run, drawn as its program draws them.

One generator gives everything: weights first, then a batch ahead of each step, and before that the
batches of an evaluation where there is one. What is drawn and not used counts too: the weights of
linear layers and embeddings are drawn twice, and those of the head, which is tied, again.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.config import ModelConfig

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())
SEED = 1337


@dataclass(frozen=True)
class Setting:
    """The published run; a test changes its sizes. eval_batches: of each part of the text."""

    layers: int = 4
    heads: int = 4
    hidden: int = 128
    length: int = 64
    samples: int = 12
    steps: int = 2001
    eval_every: int = 250
    eval_batches: int = 20
    warmup: int = 100
    peak: float = 1e-3
    final: float = 1e-4
    std: float = 0.02

    @property
    def decay_end(self) -> int:
        return self.steps - 1

    def evaluates(self, step: int) -> bool:
        return step % self.eval_every == 0

    def lr(self, step: int) -> float:
        """A warm-up that begins above zero, and half a cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        passed = (step - self.warmup) / (self.decay_end - self.warmup)
        height = 0.5 * (1 + math.cos(math.pi * passed))
        return self.final + height * (self.peak - self.final)

    def model(self, vocab: int) -> ModelConfig:
        return ModelConfig(
            family="gpt2",
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            ffn=4 * self.hidden,
            vocab=vocab,
            max_positions=self.length,
            mlp="gelu_exact",
            bias=False,
            norm_bias=False,
        )


BETAS = (0.9, 0.99)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0
SETTING = Setting()


class Windows(NamedTuple):
    """Windows of one batch. tokens, targets: int64 [samples, length]."""

    tokens: Tensor
    targets: Tensor


class Drawn(NamedTuple):
    """What a step reads. evaluation: batches by part of the text, "train" and "held_out", that are
    evaluated before it; empty: none."""

    batch: Windows
    evaluation: dict[str, list[Windows]]


class Text(NamedTuple):
    """Characters by number. train, held_out: int64 [characters]."""

    characters: str
    train: Tensor
    held_out: Tensor


def read_text(path: Path) -> Text:
    """The text with its characters in the order of their code points, nine tenths of it to train
    on."""
    text = path.read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(characters)}
    ids = torch.tensor([number_of[character] for character in text])
    border = int(0.9 * len(ids))
    return Text(characters, ids[:border], ids[border:])


def is_published(path: Path) -> bool:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return digest == PUBLISHED["text"]["sha256"]


class Stream:
    """The draws of one run: `weights` first, then the steps."""

    def __init__(self, setting: Setting, text: Text) -> None:
        self.setting = setting
        self.text = text
        self._generator = torch.Generator().manual_seed(SEED)
        self.weights = self._draw_weights()

    def steps(self) -> Iterator[Drawn]:
        """Yield what each step reads."""
        setting = self.setting
        batch = self._draw_windows(self.text.train)
        for step in range(setting.steps):
            evaluation: dict[str, list[Windows]] = {}
            if setting.evaluates(step):
                for part, ids in (("train", self.text.train), ("held_out", self.text.held_out)):
                    evaluation[part] = [
                        self._draw_windows(ids) for _ in range(setting.eval_batches)
                    ]
            yield Drawn(batch, evaluation)
            batch = self._draw_windows(self.text.train)

    def _draw_windows(self, ids: Tensor) -> Windows:
        length = self.setting.length
        starts = torch.randint(
            len(ids) - length, (self.setting.samples,), generator=self._generator
        )
        tokens = torch.stack([ids[start : start + length] for start in starts])
        targets = torch.stack([ids[start + 1 : start + 1 + length] for start in starts])
        return Windows(tokens, targets)

    def _normal(self, *shape: int, std: float) -> Tensor:
        return torch.empty(shape).normal_(0, std, generator=self._generator)

    def _draw_unused(self, *shapes: tuple[int, int]) -> None:
        """Draw what linear layers begin with before they are given other weights."""
        for shape in shapes:
            torch.empty(shape).uniform_(generator=self._generator)

    def _draw_weights(self) -> dict[str, Tensor]:
        """Weights by logical name, float32."""
        setting = self.setting
        hidden = setting.hidden
        inner = 4 * hidden
        vocab = len(self.text.characters)
        std = setting.std
        output_std = std / math.sqrt(2 * setting.layers)
        # once by the modules' own rules
        self._normal(vocab, hidden, std=1)
        self._normal(setting.length, hidden, std=1)
        of_layer = ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))
        for _ in range(setting.layers):
            self._draw_unused(*of_layer)
        self._draw_unused((vocab, hidden))
        # once by the model's rule
        weights: dict[str, Tensor] = {}
        self._normal(vocab, hidden, std=std)  # the embedding, which the tied head draws again
        weights["positions.weight"] = self._normal(setting.length, hidden, std=std)
        for layer in range(setting.layers):
            qkv = self._normal(3 * hidden, hidden, std=std)
            for name, rows in zip(("query", "key", "value"), qkv.chunk(3), strict=True):
                weights[f"layers.{layer}.attention.{name}.weight"] = rows
            self._normal(hidden, hidden, std=std)
            weights[f"layers.{layer}.mlp.up.weight"] = self._normal(inner, hidden, std=std)
            self._normal(hidden, inner, std=std)
        weights["embedding.weight"] = self._normal(vocab, hidden, std=std)
        # and the outputs of both branches a third time
        for layer in range(setting.layers):
            output = self._normal(hidden, hidden, std=output_std)
            weights[f"layers.{layer}.attention.output.weight"] = output
            weights[f"layers.{layer}.mlp.down.weight"] = self._normal(hidden, inner, std=output_std)
        for layer in range(setting.layers):
            weights[f"layers.{layer}.attention_norm.weight"] = torch.ones(hidden)
            weights[f"layers.{layer}.mlp_norm.weight"] = torch.ones(hidden)
        weights["final_norm.weight"] = torch.ones(hidden)
        return weights
