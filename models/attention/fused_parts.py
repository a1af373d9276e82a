"""Causal attention over keys that come in parts, by one call of a fused kernel for each part.

A rank of cp has the chunks r and 2 c - 1 - r of a sequence (`parallel.sequence_cut`). What its
queries see of the keys of another rank is therefore a rectangle without a mask, and of its own keys
a triangle:

    own keys             all queries, all keys, causal
    of an earlier rank   all queries, the first chunk of keys
    of a later rank      the second chunk of queries, all keys

Each call returns its output and the logs of sums of its scores' exponentials. Those of two parts
are merged in FP32 or wider:

    log_sum = log(exp(a) + exp(b))
    output = output_a + (output_b - output_a) * sigmoid(b - a)

The backward pass gives each call the output and the logs of sums over all parts, from which the
kernel makes the weights that its own keys have in the whole softmax. In half precision the output
and the gradients of each call are rounded before they are added; the error does not grow with the
parts, because the output is a weighted mean of theirs.

Unlike `partial.py`, which multiplies matrices, this knows neither windows, documents, dropout nor
soft caps.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.attention import fused_kernels


class VisiblePart(NamedTuple):
    """The queries and keys of a call."""

    rows: slice  # of the queries
    columns: slice  # of the keys
    causal: bool  # False: each query attends to each key


def visible_part(
    query_runs: tuple[range, range],
    key_runs: tuple[range, range],
) -> VisiblePart:
    """Return which queries of a rank attend to which keys of a rank, the same or another one.

    query_runs, key_runs: the positions of both chunks (`chunks_of_rank`).
    """
    everything = slice(None)
    first_chunk = slice(len(query_runs[0]))
    second_chunk = slice(len(query_runs[0]), None)
    # Both chunks lie in the order of their positions, so the mask of the two is causal too.
    if query_runs == key_runs:
        return VisiblePart(everything, everything, True)
    if key_runs[0].start < query_runs[0].start:
        return VisiblePart(everything, first_chunk, False)
    return VisiblePart(second_chunk, everything, False)


class FusedParts:
    """Attention of a rank's queries over the parts of keys given to `add` so far, this rank's own
    first.

    query: [b, n, s, d] whose rows are at the positions of `runs`, one chunk after the other.
    scale: the factor of scores.
    sinks: [n] (`sink_attention.py`); None: without.

    backward_inputs: an attribute, what `FusedPartsGradients` needs of the kernel's first call.
    """

    def __init__(
        self,
        query: Tensor,
        runs: tuple[range, range],
        scale: float,
        sinks: Tensor | None = None,
    ) -> None:
        self._query = query
        self._runs = runs
        self._scale = scale
        self._sinks = sinks
        self._merged: tuple[Tensor, Tensor] | None = None
        self.backward_inputs: tuple[Any, ...] = ()

    def add(
        self,
        key: Tensor,
        value: Tensor,
        runs: tuple[range, range],
    ) -> None:
        """Attend to a part of the keys, [b, n, t, d], at the positions of `runs`, and merge the
        result with that of the parts before."""
        rows, columns, causal = visible_part(self._runs, runs)
        part = fused_kernels.forward(
            self._query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            causal,
            scale=self._scale,
        )
        # Every query sees a key of its own rank, so this part has all rows.
        if self._merged is None:
            self._merged = part.output.to(part.log_sums.dtype), part.log_sums
            self.backward_inputs = part.backward_inputs
            return
        # views of what is merged so far, which is changed in place
        output, log_sum = (x[:, :, rows] for x in self._merged)
        # the weight of this part in the mean of both outputs
        share = torch.sigmoid(part.log_sums - log_sum)
        output.lerp_(part.output.to(output.dtype), share.unsqueeze(-1))
        torch.logaddexp(log_sum, part.log_sums, out=log_sum)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return attention [b, n, s, d] and `log_sum` [b, n, s], both in FP32 or wider."""
        assert self._merged is not None
        output, log_sum = self._merged
        if self._sinks is None:
            return output, log_sum
        # A sink is one more part, whose value is zero.
        with_sinks = torch.logaddexp(log_sum, self._sinks.to(log_sum.dtype)[:, None])
        output.mul_((log_sum - with_sinks).exp_().unsqueeze(-1))
        return output, with_sinks


class FusedPartsGradients:
    """The gradients of attention, as sums over the parts of keys given to `add` so far.

    query, runs, scale: as in `FusedParts`, whose `backward_inputs` these are.
    output: its result in the dtype of query, and grad its gradient, [b, n, s, d] both.
    log_sum: [b, n, s], whose dtype is that of sums.
    """

    def __init__(
        self,
        query: Tensor,
        runs: tuple[range, range],
        output: Tensor,
        log_sum: Tensor,
        grad: Tensor,
        scale: float,
        backward_inputs: tuple[Any, ...],
    ) -> None:
        self._query = query
        self._runs = runs
        self._output = output
        self._log_sum = log_sum
        self._grad = grad
        self._scale = scale
        self._backward_inputs = backward_inputs
        self._grad_query = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)

    def add(
        self,
        key: Tensor,
        value: Tensor,
        runs: tuple[range, range],
        grad_key: Tensor,
        grad_value: Tensor,
    ) -> None:
        """Add the gradients from this part of the keys: that of query to its sum, the others to
        `grad_key` and `grad_value`, in place."""
        rows, columns, causal = visible_part(self._runs, runs)
        inputs = (self._query[:, :, rows], key[:, :, columns], value[:, :, columns])
        from_query, from_key, from_value = fused_kernels.backward(
            self._grad[:, :, rows],
            inputs,
            self._output[:, :, rows],
            self._log_sum[:, :, rows],
            self._backward_inputs,
            causal,
            scale=self._scale,
        )
        self._grad_query[:, :, rows].add_(from_query)
        grad_key[:, :, columns].add_(from_key)
        grad_value[:, :, columns].add_(from_value)

    def grad_query(self) -> Tensor:
        """Return the gradient of query, [b, n, s, d]."""
        return self._grad_query

    def grad_sinks(self, sinks: Tensor) -> Tensor:
        """Return the part of the gradient of the sinks [n] that these queries have, in the dtype of
        sums."""
        log_sum = self._log_sum
        sink_weights = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp_()
        grad_dot_output = (self._grad.to(log_sum.dtype) * self._output).sum(-1)
        return sink_weights.mul_(grad_dot_output).sum((0, 2)).neg_()
