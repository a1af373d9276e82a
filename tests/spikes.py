"""Runs in which spikes are planted: corrupt documents, a raised learning rate, words of memory that are overwritten.

Documents are as long as samples and in file order, so that a step's samples are known.
"""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from megaprec.comm.layout import layout_of
from megaprec.optim.decision.step_report import StepObserver
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.tokens.indexed import IndexedWriter
from tests.runs import train
from tools.training.trainer import Trainer

SEQ = 16
BATCH = 8
VOCAB = 64
USUAL = 32  # ids below are those of ordinary documents
WEIGHT = "layers.1.mlp.down.weight"
LARGE = 50.0  # what a fault of the memory writes
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


Planted = Mapping[int, tuple[Callable[[random.Random], Document], Sequence[int]]]


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


def train_with_fault(file: Path, kind: str, step: int, *overrides: str) -> int:
    """Trains with a word overwritten in a step: of a "weight" before it, or of a "gradient" after its
    reduction. (One bit of FP32 makes of a small number a small one, or one that overflows.)"""
    take = Trainer.step

    def faulty_step(self: Trainer) -> object:
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
            _overwrite(weights)
            return take(self)
        observer = _OverwrittenGradient()
        optimizer.observers.append(observer)
        report = take(self)
        optimizer.observers.remove(observer)
        return report

    with patch.object(Trainer, "step", faulty_step):
        return train(file, *overrides)


def _overwrite(values: torch.Tensor) -> None:
    """Put a large number in the place of the middle element."""
    values.view(-1)[values.numel() // 2] = LARGE


class _OverwrittenGradient(StepObserver):
    def gradients_ready(self, buffers: Sequence[Buffer], scale: torch.Tensor) -> None:
        largest = max(buffers, key=lambda buffer: buffer.local_grads.numel())
        _overwrite(largest.local_grads)
