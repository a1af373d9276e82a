"""Runs in which spikes are planted: corrupt documents, a raised learning rate, flipped bits.

Documents are as long as samples and in file order, so that a step's samples are known.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from megaprec.comm.layout import layout_of
from megaprec.data.indexed import IndexedWriter
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.step_report import StepObserver
from tests.flips import flip_
from tests.runs import train
from tools.training.trainer import Trainer

SEQ = 16
BATCH = 8
VOCAB = 64
USUAL = 32  # ids below are those of ordinary documents
WEIGHT = "layers.1.mlp.down.weight"
LARGE = 20.0  # of what a flipped bit makes
RUN = """
[model]
layers = 2
hidden = 16
heads = 4
kv_heads = 2
ffn = 32
vocab = {vocab}
[data]
source = "{prefix}"
held_out = 0.0
shuffle = false
[lr]
peak = 1e-2
schedule = "constant"
warmup = 5
[optimizer]
clip = 0.5
[train]
steps = {steps}
global_batch = {batch}
micro_batch = 4
seq_length = {seq}
threads = 1
folder = "{folder}/run"
[checkpoint]
every = 8
keep = 100
[log]
plot = false
every = 1000
"""

Document = list[int]


def ordinary(dice: random.Random) -> Document:
    """A chain in which a token mostly follows from the one before."""
    tokens = [dice.randrange(USUAL)]
    while len(tokens) < SEQ:
        noise = dice.random() < 0.1
        tokens.append(dice.randrange(USUAL) if noise else (5 * tokens[-1] + 3) % USUAL)
    return tokens


def garbage(dice: random.Random) -> Document:
    """Ids that no ordinary document has."""
    return [dice.randrange(USUAL, VOCAB) for _ in range(SEQ)]


def backwards(dice: random.Random) -> Document:
    return ordinary(dice)[::-1]


def repeated(dice: random.Random) -> Document:
    return [VOCAB - 1] * SEQ


def stuck(dice: random.Random) -> Document:
    """One ordinary token again and again."""
    return [7] * SEQ


Planted = dict[int, tuple[Callable[[random.Random], Document], Sequence[int]]]


def write_spiky_run(folder: Path, steps: int, planted: Planted, seed: int = 0) -> Path:
    """A run file with its data set. planted: by step, the kind of the corrupt documents and their
    places in the step's batch."""
    dice = random.Random(seed)
    prefix = folder / "tokens"
    with IndexedWriter(prefix, VOCAB) as writer:
        for step in range(1, steps + 8):  # the batches after the last step are compared
            kind, places = planted.get(step, (ordinary, ()))
            for place in range(BATCH):
                writer.add_document(kind(dice) if place in places else ordinary(dice))
        writer.add_document([0, 1])
    path = folder / "spiky.toml"
    path.write_text(
        RUN.format(vocab=VOCAB, prefix=prefix, steps=steps, batch=BATCH, seq=SEQ, folder=folder)
    )
    return path


def copied(run: Path, to: Path, step: int) -> Path:
    """A copy of a run's folder with no checkpoint after `step`."""
    shutil.copytree(run, to)
    for later in (to / "checkpoints").glob("step_*"):
        if int(later.name.removeprefix("step_")) > step:
            shutil.rmtree(later)
    return to


def train_with_rate(file: Path, factor: float, raised: range, *overrides: str) -> int:
    """Trains with the learning rate times a factor in some steps."""
    usual = Trainer._learning_rate

    def rate(self: Trainer) -> float:
        return usual(self) * (factor if self.progress.step + 1 in raised else 1.0)

    with patch.object(Trainer, "_learning_rate", rate):
        return train(file, *overrides)


def train_with_flip(file: Path, kind: str, step: int, *overrides: str) -> int:
    """Trains with a bit flipped in a step: in a "weight" before it, or in a "gradient" after its
    reduction."""
    take = Trainer.step

    def flipped_step(self: Trainer) -> object:
        if self.progress.step + 1 != step:
            return take(self)
        optimizer = self.engine.optimizer
        if kind == "weight":
            weights = next(
                parameter.data
                for buffer in optimizer.all_buffers()
                for parameter in buffer.parameters
                if layout_of(parameter).parts[0].name == WEIGHT
            )
            _make_large(weights)
            return take(self)
        observer = _FlippedGradient()
        optimizer.observers.append(observer)
        report = take(self)
        optimizer.observers.remove(observer)
        return report

    with patch.object(Trainer, "step", flipped_step):
        return train(file, *overrides)


def _make_large(values: torch.Tensor) -> None:
    """Flip a bit of an exponent, so that an element becomes large but stays in range."""
    flat = values.view(-1)
    for bit in (26, 27, 28):  # the factor 2^8, 2^16 or 2^32, or its inverse
        flipped = (flat.view(torch.int32) ^ (1 << bit)).view(torch.float32).abs()
        places = ((flipped > LARGE) & (flipped < 1000 * LARGE)).nonzero()
        if len(places):
            place = int(places[len(places) // 2])
            flip_(flat[place : place + 1], bit)
            return
    raise AssertionError("no element becomes large by one bit")


class _FlippedGradient(StepObserver):
    def gradients_ready(self, buffers: Sequence[Buffer], scale: torch.Tensor) -> None:
        largest = max(buffers, key=lambda buffer: buffer.local_grads.numel())
        _make_large(largest.local_grads)
