"""Repeating the updates of a layout on one process, from the layout's own gradients.

AdamW turns any gradient into an update of full size, also one that is only rounding error: a bias
of keys, which softmax cancels, moves at random, and differently in each layout. Weights and moments
are therefore not compared with those of another run, but with the result of one process for the
gradients of the layout itself. No chance is left then, and each element can be compared.
"""

from pathlib import Path

import torch
from torch import Tensor

from megaprec.comm.main_grad import begin_cleared
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tools.config.run_file import RunConfig
from tools.training.corpus import Corpus
from tools.training.trainer import Trainer
from tools.verify.parity.fragments import take_fragments
from tools.verify.parity.record import Record, Tensors, buffers_saving


def updates(
    config: RunConfig, corpus: Corpus, layout_record: Record, start: Path | None = None
) -> dict[str, Tensors]:
    """Return the state after each step that `layout_record` has recorded, by kind
    ("after/STEP/weight").

    config: the run on one process. layout_record: the record of any layout. The gradient of a
    skipped step is not recorded and is assumed to be infinite. start: the checkpoint that they
    began with. Empty if a gradient lacks a tensor or elements of the model.
    """
    # One process sums no gradients, so the mode that makes sums the same in all layouts has no use.
    train = config.train.model_copy(update={"numerics": "fast"})
    trainer = _RepeatingTrainer(config.model_copy(update={"train": train}), corpus, None, start)
    if not _is_complete(trainer.engine.optimizer, layout_record):
        return {}
    repeated_states: dict[str, Tensors] = {}
    for step, report in enumerate(layout_record.steps):
        trainer.apply(layout_record.tensors.get(f"gradient/{step}"), report["grad_norm"])
        # what the layout has recorded, and no more: a record of a large run leaves out most steps
        for state_kind in layout_record.tensors:
            if state_kind.startswith(f"after/{step}/"):
                saved_kind = state_kind.rpartition("/")[2]
                repeated_states[state_kind] = _saved_tensors(trainer.engine.optimizer, saved_kind)
    return repeated_states


class _FixedNormOptimizer(ParallelAMPOptimizer):
    """Optimizer that clips by a given norm: a norm summed in another order would move every
    element."""

    fixed_norm = 0.0

    def _clip_factor(self, norm: Tensor) -> Tensor:
        return super()._clip_factor(torch.full_like(norm, self.fixed_norm))


class _RepeatingTrainer(Trainer):
    """Trainer that takes steps with given gradients."""

    optimizer_class = _FixedNormOptimizer

    def apply(self, gradients: Tensors | None, norm: float) -> None:
        """Take one step with these gradients by name, of the given `norm`; skip it if there are
        none."""
        optimizer = self.engine.optimizer
        assert isinstance(optimizer, _FixedNormOptimizer)
        # the layout's own norm: one summed in another order would clip otherwise
        optimizer.fixed_norm = norm
        for buffer in optimizer.all_buffers():
            # a gradient that is infinite makes the optimizer skip the step
            for parameter in buffer.parameters:
                begin_cleared(parameter).fill_(torch.inf if gradients is None else 0)
            if not gradients:
                continue
            for buffer_piece in buffer.pieces:
                # the optimizer divides by the loss scale
                scaled = gradients[buffer_piece.part.name].flatten() * optimizer.scale.double()
                buffer.grads[buffer_piece.start : buffer_piece.stop] = scaled.to(buffer.grads.dtype)
        self._advance(optimizer.step(self._learning_rate()))


def _is_complete(optimizer: ParallelAMPOptimizer, layout_record: Record) -> bool:
    """Return True if each gradient and each state has all elements of the model."""
    for state_kind, tensors in layout_record.tensors.items():
        if not state_kind.startswith(("gradient/", "after/")):
            continue
        name = "weight" if state_kind.startswith("gradient/") else state_kind.rpartition("/")[2]
        shapes_by_name: dict[str, tuple[int, ...]] = {}
        for buffer in buffers_saving(optimizer, name):
            shapes_by_name |= {
                buffer_piece.part.name: buffer_piece.part.shape for buffer_piece in buffer.pieces
            }
        if shapes_by_name != {logical: tuple(tensor.shape) for logical, tensor in tensors.items()}:
            return False
    return True


def _saved_tensors(optimizer: ParallelAMPOptimizer, state_kind: str) -> Tensors:
    """Return tensors of a kind by logical name: masters ("weight"), one of the optimizer's moments
    such as "exp_avg", or the moving average of weights ("ema"). One process holds all of each."""
    buffers = buffers_saving(optimizer, state_kind)
    return {
        fragment.name: fragment.values.double().view(fragment.shape)
        for fragment in take_fragments(buffers, lambda buffer: buffer.saved()[state_kind])
    }
