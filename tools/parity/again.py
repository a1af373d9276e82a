"""Repeating the updates of a layout on one process, from the layout's own gradients.

AdamW turns any gradient into an update of full size, also one that is only rounding error: a bias
of keys, which softmax cancels, moves at random, and differently in each layout. Weights and moments
are therefore not compared with those of another run, but with the result of one process for the
gradients of the layout itself. No chance is left then, and each element can be compared.
"""

from pathlib import Path

import torch
from torch import Tensor

from megaprec.optim.main_grad import cleared_main_grad
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tools.config.run_file import RunConfig
from tools.parity.gather import Record, Tensors
from tools.parity.record import fragments
from tools.training.corpus import Corpus
from tools.training.trainer import Trainer


def updates(
    config: RunConfig, corpus: Corpus, ours: Record, start: Path | None = None
) -> dict[str, Tensors]:
    """Return the state after each step that `ours` has recorded, by kind ("after/STEP/weight").

    config: the run on one process. ours: the record of any layout. The gradient of a skipped step
    is not recorded and is assumed to be infinite. start: the checkpoint that they began with. Empty
    if a gradient lacks a tensor or elements of the model.
    """
    # the gradients are whole, and nothing is summed
    train = config.train.model_copy(update={"numerics": "fast"})
    trainer = _Again(config.model_copy(update={"train": train}), corpus, None, start)
    if not _whole(trainer.engine.optimizer, ours):
        return {}
    made: dict[str, Tensors] = {}
    for number in range(len(ours.steps)):
        trainer.apply(ours.tensors.get(f"gradient/{number}"), ours.steps[number]["grad_norm"])
        for kind in (kind for kind in ours.tensors if kind.startswith(f"after/{number}/")):
            made[kind] = _state(trainer.engine.optimizer, kind)
    return made


class _Told(ParallelAMPOptimizer):
    """Optimizer that clips by a given norm: a norm summed in another order would move every
    element."""

    told = 0.0

    def _clip_factor(self, norm: Tensor) -> Tensor:
        return super()._clip_factor(torch.full_like(norm, self.told))


class _Again(Trainer):
    """Trainer that takes steps with given gradients."""

    @staticmethod
    def _optimizer_class(config: RunConfig) -> type[ParallelAMPOptimizer]:
        return _Told

    def apply(self, grads: Tensors | None, norm: float) -> None:
        """Take one step with these gradients by name, of the given `norm`; skip it if there are
        none."""
        optimizer = self.engine.optimizer
        assert isinstance(optimizer, _Told)
        optimizer.told = norm
        for buffer in optimizer.all_buffers():
            for parameter in buffer.parameters:
                cleared_main_grad(parameter).fill_(torch.inf if grads is None else 0)
            for piece, values in [(p, grads[p.part.name]) for p in buffer.pieces] if grads else ():
                scaled = values.flatten() * optimizer.scale.double()
                buffer.grads[piece.start : piece.stop] = scaled.to(buffer.grads.dtype)
        self._advance(optimizer.step(self._lr()))


def _whole(optimizer: ParallelAMPOptimizer, ours: Record) -> bool:
    """Return True if each gradient and each state has all elements of the model."""
    for kind, some in ours.tensors.items():
        if kind.startswith(("gradient/", "after/")):
            name = "weight" if kind.startswith("gradient/") else kind.rpartition("/")[2]
            having = [buffer for buffer in optimizer.all_buffers() if name in buffer.saved_names]
            shapes = {
                piece.part.name: piece.part.shape for buffer in having for piece in buffer.pieces
            }
            if shapes != {n: tuple(values.shape) for n, values in some.items()}:
                return False
    return True


def _state(optimizer: ParallelAMPOptimizer, kind: str) -> Tensors:
    name = kind.rpartition("/")[2]
    having = [buffer for buffer in optimizer.all_buffers() if name in buffer.saved_names]
    found = fragments(having, kind, lambda buffer: buffer.saved()[name])
    return {fragment.name: values.double().view(fragment.shape) for fragment, values in found}
