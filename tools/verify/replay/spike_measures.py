"""The measures of a step that is repeated: its loss and gradient norm, those of its samples and
documents, and of tensors in the model. No measure changes the state of the run."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megaprec.optim.decision.step_report import StepObserver
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.tokens.blend import Blend
from megaprec.tokens.samples import Samples
from models.attention.packing import Packing
from models.engine.passes import Share
from models.engine.replay import trace_modules
from tools.training.corpus import Corpus
from tools.training.trainer import Trainer
from tools.verify.replay.repeated_run import NOTHING_ALLOWED

MOST_DOCUMENTS = 8  # of a sample that are named, those of the most loss
MOST_CHARS = 60  # of a document's text
NO_DOCUMENT = -1  # the document of a target that is padding


class BatchNumbers(NamedTuple):
    """The loss and the gradient norm of a batch."""

    loss: float
    norm: float


@dataclass(frozen=True)
class MeasuredDocument:
    """A document of a sample. number: in its data set. loss: mean over its tokens in the sample, in
    nats a token. text: its beginning there, "" without a tokenizer."""

    number: int
    tokens: int
    loss: float
    text: str


@dataclass(frozen=True)
class NamedSample:
    """A sample of a batch. id: as in the data set. position: in the batch, from 0. loss: mean
    over its tokens that count, in nats a token. dataset: the path of its data set without suffix.
    first_token: where it begins there."""

    id: int | str
    position: int
    loss: float
    dataset: str
    first_token: int
    documents: tuple[MeasuredDocument, ...]


class GradientNorms(StepObserver):
    """An observer of steps: the L2 norms of the gradients of logical tensors, without the loss
    scale, of the newest steps.

    newest: by name, one table for each of the last steps.
    """

    def __init__(self, steps: int) -> None:
        self.newest: deque[dict[str, float]] = deque(maxlen=steps)

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, skip: Tensor) -> None:
        """Keep the norm of each parameter's gradients of a step whose outcome is decided."""
        squares: dict[str, float] = {}
        for buffer in buffers:
            for owned in buffer.owned_pieces(buffer.start, buffer.stop):
                name = owned.piece.part.name
                gradients = buffer.local_grads[owned.in_shard].double() / scale
                squares[name] = squares.get(name, 0.0) + gradients.square().sum().item()
        self.newest.append({name: square**0.5 for name, square in squares.items()})


class Measures:
    """Measures at the present state of a trainer on one process.

    number: of the step whose dropout is drawn, from 0.
    """

    def __init__(self, trainer: Trainer, number: int, loss_scale: float) -> None:
        self._engine = trainer.engine
        self._trainer = trainer
        self._number = number
        self._loss_scale = loss_scale

    @property
    def micro_batch(self) -> int:
        """Return the number of samples of a micro-batch."""
        return self._trainer.config.train.micro_batch

    def batch(self, share: Share) -> BatchNumbers:
        """Return the numbers that a step with a share would have."""
        engine = self._engine
        with self._kept_state():
            state = engine.accumulate(share, self._number)
            report = engine.update(state, 0.0, NOTHING_ALLOWED)
        return BatchNumbers(report.loss, report.grad_norm)

    def gradients(self, share: Share) -> dict[str, float]:
        """Return the norm of the gradient of each logical tensor in a step with a share."""
        norms = GradientNorms(1)
        observers = self._engine.optimizer.observers
        observers.append(norms)
        self.batch(share)
        observers.remove(norms)
        return norms.newest[0]

    def magnitudes(self, share: Share, microbatch: int) -> dict[str, float]:
        """Return the largest magnitude of each tensor in the model, activations and their
        gradients, in a micro-batch, in the order of computation."""
        passes = self._engine.passes_for(share)
        trace = trace_modules(passes, share, self._number, microbatch, self._loss_scale)
        magnitudes: dict[str, float] = {}
        for tensor in trace.seen:
            magnitudes[tensor.what] = tensor.largest / self._scale_of(tensor.what)
        return magnitudes

    def _scale_of(self, what: str) -> float:
        """Return the factor that a tensor of a trace contains: the loss scale, or 1."""
        is_scaled = what.startswith("gradient") or what.endswith("its scale")
        return self._loss_scale if is_scaled else 1.0

    def sample_losses(self, share: Share) -> list[float]:
        """Return the mean loss of each sample, without dropout; NaN for one without a token that
        counts."""
        sums, counts = self._engine.evaluate_samples(share)
        return (sums / counts).tolist()

    def documents(self, share: Share, position: int, numbers: Tensor) -> list[float]:
        """Return the mean loss of each document of a sample, in ascending order of their numbers.

        numbers: int64 [s], of the document of each target.
        """
        losses: list[float] = []
        documents = numbers.unique().tolist()
        size = len(share.tokens)
        for start in range(0, len(documents), size):
            # each row of the share counts the tokens of another document
            of_rows = documents[start : start + size]
            rows = torch.full((size,), position)
            repeated = _take_rows(share, rows)
            counted = torch.zeros(share.tokens.shape)
            for row, document in enumerate(of_rows):
                counted[row] = numbers == document
            if repeated.mask is not None:
                counted = counted * repeated.mask
            by_row = self.sample_losses(replace(repeated, mask=counted))
            losses += by_row[: len(of_rows)]
        return losses

    @contextmanager
    def _kept_state(self) -> Iterator[None]:
        """Context manager that puts back what a step that is not applied changes: the loss scale
        and FP8's scales."""
        scaler = self._engine.optimizer.scaler
        saved_scaler = scaler.state_dict()
        fp8 = self._engine.fp8
        changing = (fp8.bank.scale, fp8.bank.history) if fp8.names else ()
        saved_tensors = [tensor.clone() for tensor in changing]
        try:
            yield
        finally:
            scaler.load_state_dict(saved_scaler)
            for tensor, saved in zip(changing, saved_tensors, strict=True):
                tensor.copy_(saved)


def without(share: Share, positions: Sequence[int]) -> Share:
    """Return a share in which some samples do not count in the loss."""
    return _counting(share, [position not in positions for position in range(len(share.tokens))])


def only(share: Share, position: int) -> Share:
    """Return a share in which one sample alone counts in the loss."""
    return _counting(share, [position == other for other in range(len(share.tokens))])


def _counting(share: Share, counts: Sequence[bool]) -> Share:
    """Return a share of which only the samples count that `counts` says."""
    mask = torch.ones(share.tokens.shape) if share.mask is None else share.mask
    factors = torch.tensor(counts, dtype=mask.dtype)
    return replace(share, mask=mask * factors[:, None])


def _take_rows(share: Share, rows: Tensor) -> Share:
    """Return a share of these samples. rows: int64 [samples]; a sample may occur repeatedly."""
    packing = share.packing
    return Share(
        share.tokens[rows],
        share.targets[rows],
        None if share.mask is None else share.mask[rows],
        packing=Packing(
            documents=None if packing.documents is None else packing.documents[rows],
            positions=None if packing.positions is None else packing.positions[rows],
        ),
    )


def name_sample(
    measures: Measures, corpus: Corpus, share: Share, first: int, position: int, loss: float
) -> NamedSample:
    """Return a sample of a batch with its documents.

    first: position of the batch's first sample in the run's order.
    """
    samples: Samples | Blend = corpus.train
    # a sequence may be a piece of a sample
    sample, piece = divmod(position, share.pieces)
    location = samples.location_of(first + sample)
    (label,) = samples.labels(samples.batch(first + sample, 1).ids)
    length = share.targets.shape[1]
    first_token = location.first_token + piece * length
    # the document of each target: of the whole sample, then of the piece
    known_numbers = location.documents()[1:]
    sample_numbers = np.full(share.pieces * length, NO_DOCUMENT, np.int64)
    sample_numbers[: len(known_numbers)] = known_numbers
    piece_numbers = sample_numbers[piece * length : (piece + 1) * length]
    document_of_target = torch.from_numpy(piece_numbers)
    losses = measures.documents(share, position, document_of_target)
    documents: list[MeasuredDocument] = []
    for number, document_loss in zip(document_of_target.unique().tolist(), losses, strict=True):
        if number == NO_DOCUMENT:
            continue
        targets = share.targets[position][document_of_target == number]
        documents.append(
            MeasuredDocument(number, len(targets), document_loss, _text(corpus, targets))
        )
    # a document of which one token is in the sample says little
    documents.sort(key=lambda document: -finite_or_lowest(document.loss * document.tokens))
    return NamedSample(
        id=label,
        position=position,
        loss=loss,
        dataset=str(location.dataset.prefix),
        first_token=first_token,
        documents=tuple(documents[:MOST_DOCUMENTS]),
    )


def finite_or_lowest(value: float) -> float:
    """Return a value to sort by, below all others if it is not finite."""
    return value if math.isfinite(value) else -math.inf


def _text(corpus: Corpus, tokens: Any) -> str:
    if corpus.tokenizer is None:
        return ""
    text = corpus.tokenizer.decode(tokens.tolist())
    return " ".join(text.split())[:MOST_CHARS]
