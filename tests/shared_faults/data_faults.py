"""Faults of what is trained on: labels, the loss, samples, and the place where a run goes on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.tokens import order, samples
from megaprec.tokens.held_out import Ranges
from megaprec.tokens.samples import Batch, Samples
from models.decoder.stages import Stage
from models.engine import engine, passes
from models.engine.passes import Passes
from tests.shared_faults.fault import Fault, change
from tools.training import resume

SAMPLE_TESTS = ("tests/tokens/test_samples.py", "tests/tokens/test_order.py")
LOSS_TESTS = ("tests/models/test_loss_mask.py", "tests/models/test_parity.py")
TRAIN = "tests/training/test_train.py"
TORN = "test_metrics_hold_every_step_once_though_a_line_was_torn_and_steps_were_repeated"
RESUME_TESTS = (f"{TRAIN}::{TORN}",)
MASKED = ("data.eod_mask_loss=true",)
RESUMED = ("checkpoint.every=2",)


def labels(of: Callable[[Batch], Tensor]) -> Callable[[], None]:
    """The targets of samples are others."""

    def make(inner: Any) -> Any:
        def batch(self: Samples, position: int, count: int) -> Batch:
            right = inner(self, position, count)
            return replace(right, targets=of(right))

        return batch

    return change(Samples, "batch", make)


def mean_of_means(inner: Any) -> Any:
    """Each micro-batch divides by the number of its own tokens that count."""

    def counted(self: Passes, state: Any, values: Tensor, rows: slice) -> Tensor:
        right = inner(self, state, values, rows)
        if state.share.mask is None:
            return right
        own = state.share.mask[rows].sum().clamp(min=1)
        replicas = self.optimizer.dp.size * self.schedule.microbatches
        return right * (state.divisor / (own * replicas)).to(right.dtype)

    return counted


def reversed_gradient(inner: Any) -> Any:
    def losses(self: Stage, logits: Tensor, targets: Tensor) -> Tensor:
        token_losses, log_sums = inner(self, logits, targets)
        return torch.stack((token_losses, 2 * log_sums.detach() - log_sums))

    return losses


def scaled_loss(changed: Callable[[Passes, Any, Tensor], Tensor]) -> Callable[[], None]:
    """The loss that is trained is changed(self, rows, loss)."""

    def make(inner: Any) -> Any:
        def loss(self: Passes, state: Any, stage: int, logits: Tensor, rows: slice) -> Tensor:
            return changed(self, rows, inner(self, state, stage, logits, rows))

        return loss

    return change(Passes, "scaled_loss", make)


def without_the_last(self: Passes, rows: slice, loss: Tensor) -> Tensor:
    is_last = rows.start > 0 and rows.stop == self._num_samples
    return loss * 0 if is_last else loss


def trained_everywhere(inner: Any) -> Any:
    def divide(total: int, held_out: int, rule: Any) -> tuple[Ranges, Ranges]:
        return Ranges.single(0, total), inner(total, held_out, rule)[1]

    return divide


def progress(changed: Callable[[Any, int], Any]) -> Callable[[], None]:
    """A resumed run goes on with changed(progress, samples of a batch)."""

    def make(inner: Any) -> Any:
        def resumed(checkpoint: Any, config: Any, corpus: Any) -> Any:
            return changed(inner(checkpoint, config, corpus), config.train.global_batch)

        return resumed

    return change(resume, "resumed_progress", make)


def without_moments(inner: Any) -> Any:
    def restore(self: Buffer, name: str, start: int, values: Tensor) -> None:
        inner(self, name, start, values * 0 if name in self.state else values)

    return restore


def without_steps(inner: Any) -> Any:
    def load(self: ParallelAMPOptimizer, numbers: dict[str, Any]) -> None:
        inner(self, {**numbers, "steps": 0})

    return load


def mean_of_samples(inner: Any) -> Any:
    def mean(numbers: Tensor) -> float:
        losses, counts = numbers
        there = counts > 0
        return (losses[there] / counts[there]).mean().item()

    return mean


FAULTS = {
    "labels not shifted": Fault(
        "each target is the token itself",
        labels(lambda batch: batch.tokens.clone()),
        "llama",
        SAMPLE_TESTS,
    ),
    "labels shifted by two": Fault(
        "each target is the token after the next",
        labels(lambda batch: batch.targets.roll(-1, 1)),
        "llama",
        SAMPLE_TESTS,
    ),
    "all tokens count": Fault(
        "targets that the mask leaves out are in the loss",
        change(Passes, "_masked", lambda inner: lambda self, state, values, rows: values),
        "llama",
        LOSS_TESTS,
        MASKED,
    ),
    "mean over padding": Fault(
        "the loss is divided by all tokens, those that do not count too",
        change(
            passes,
            "count_tokens",
            lambda inner: lambda **given: inner(**{**given, "mask": None}),
        ),
        "llama",
        LOSS_TESTS,
        MASKED,
    ),
    "mean of means": Fault(
        "the loss is the mean of those of micro-batches, not of tokens",
        change(Passes, "_masked", mean_of_means),
        "llama",
        LOSS_TESTS,
        MASKED,
    ),
    "held-out loss of samples": Fault(
        "a held-out loss is the mean of those of samples, not of tokens",
        change(engine, "mean_loss", mean_of_samples),
        "llama",
        ("tests/models/test_loss_mask.py",),
        MASKED,
    ),
    "z-loss with the wrong sign": Fault(
        "the z-loss drives logits apart",
        change(Stage, "losses_and_log_sums", reversed_gradient),
        "llama",
        ("tests/parallel/test_loss.py", "tests/models/test_parity.py"),
        ("model.z_loss=0.1",),
    ),
    "last micro-batch dropped": Fault(
        "the gradients of the last micro-batch are not in the sum",
        scaled_loss(without_the_last),
        "llama",
        LOSS_TESTS,
    ),
    "micro-batches divided by twice": Fault(
        "gradients are divided by the number of micro-batches once more",
        scaled_loss(lambda self, rows, loss: loss / self.schedule.microbatches),
        "llama",
        LOSS_TESTS,
    ),
    "samples repeated and lost": Fault(
        "each second sample is the one before it once more",
        change(
            order,
            "order",
            lambda inner: lambda positions, *rest: inner(positions - positions % 2, *rest),
        ),
        "llama",
        SAMPLE_TESTS,
    ),
    "each epoch the same": Fault(
        "samples are shuffled alike in each epoch",
        change(
            order,
            "permute",
            lambda inner: lambda indices, n, seed, epoch: inner(indices, n, seed, 0),
        ),
        "llama",
        SAMPLE_TESTS,
    ),
    "held-out text is trained on": Fault(
        "the samples of the evaluation are among those of training",
        change(samples, "divide", trained_everywhere),
        "llama",
        ("tests/tokens/test_samples.py", "tests/tokens/test_held_out.py"),
    ),
    "first tokens of documents count": Fault(
        "what begins a document is a target in spite of data.eod_mask_loss",
        change(
            Samples,
            "_counted",
            lambda inner: lambda self, start, length: np.ones(length, bool),
        ),
        "llama",
        SAMPLE_TESTS,
        MASKED,
    ),
    "resume skips a batch": Fault(
        "a resumed run leaves out a batch",
        progress(lambda right, batch: replace(right, samples=right.samples + batch)),
        "llama",
        RESUME_TESTS,
        RESUMED,
    ),
    "resume repeats a batch": Fault(
        "a resumed run takes the last batch again",
        progress(lambda right, batch: replace(right, samples=right.samples - batch)),
        "llama",
        RESUME_TESTS,
        RESUMED,
    ),
    "resume loses moments": Fault(
        "moments are zero after a resume",
        change(Buffer, "restore", without_moments),
        "llama",
        RESUME_TESTS,
        RESUMED,
    ),
    "resume loses the step count": Fault(
        "bias corrections begin anew after a resume",
        change(ParallelAMPOptimizer, "load_saved_numbers", without_steps),
        "llama",
        RESUME_TESTS,
        RESUMED,
    ),
    "resume begins the warm-up anew": Fault(
        "the rate of a resumed run is that of its first step",
        progress(lambda right, batch: replace(right, applied=0)),
        "llama",
        RESUME_TESTS,
        RESUMED,
    ),
}
