"""Causal attention over keys that come in parts: exact, whatever the parts and their order.

The softmax over all keys is merged from those over parts. For each query three things are kept, in
FP32 or wider: the largest score so far, the sum of the exponentials of all scores less that, and
the same sum of values. A further part raises the largest score and scales both sums down to it
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). In the end the
logarithm of the sum and the largest score are one number, `log_sum`; the backward pass makes the
weights of each part again from it, so no weight is kept.

A sink (`sink_attention.py`) is one more term of the sum over keys, whose value is zero: the merge
begins with it.

Queries and keys are runs of positions of one sequence. A run of keys that no query attends to costs
nothing, and one that each query attends to needs no mask. Scores are computed for so many queries
at a time that they stay small.

Query is [b, n, s, d], key [b, m, t, d] and value [b, m, t, e]; a head of key and value serves n / m
neighbouring heads of query.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of the scores of a block, by the type of device.
_SCORES_BYTES = {
    "cpu": 1 << 22,  # 4 MB stay in a CPU's cache
    "cuda": 1 << 25,  # 34 MB occupy a GPU
}
# Queries of a block, at least: its products stay products of matrices.
_LEAST_QUERIES = 16

Drop = Callable[[Tensor, range, range], Tensor]
"""Dropout of weights [b, n, queries, keys] at the positions of these.

It must be linear, and drop the same whenever it is called: the backward pass calls it again.
"""


@dataclass(frozen=True)
class AttentionRule:
    """The keys that a query attends to, and the scores' factor.

    scale: the factor of scores.
    window: number of last tokens, its own included; 0: all earlier ones.
    documents: int64 [b, s], the number of each token's document; None: a sequence is one document.
    drop: dropout of attention weights; None: without.
    softcap: the cap of scores (`models.attention.kernels`); 0: without.
    """

    scale: float
    window: int = 0
    documents: Tensor | None = None
    drop: Drop | None = None
    softcap: float = 0.0

    def reachable_keys(self, queries: range, keys: range) -> range:
        """Return the run of `keys` to which some of `queries` may attend, causally and within the
        window; documents are not looked at. Both are runs of positions in the sequence."""
        first = keys.start
        if self.window:
            first = max(first, queries.start - self.window + 1)
        # No query attends to a later key.
        stop = min(keys.stop, queries.stop)
        return range(first, max(first, stop))

    def mask(
        self,
        queries: range,
        keys: range,
        device: torch.device,
    ) -> Tensor | None:
        """Return bool [queries, keys] or [b, 1, 1, queries, keys], True where a query attends to a
        key.

        None: every query attends to every key.
        """
        attends = self._causal_mask(queries, keys, device)
        if self.documents is None:
            return attends
        query_documents = self.documents[:, queries.start : queries.stop]
        key_documents = self.documents[:, keys.start : keys.stop]
        same_document = query_documents[:, :, None] == key_documents[:, None, :]
        same_document = same_document[:, None, None]  # the same for all heads
        return same_document if attends is None else same_document & attends

    def _causal_mask(
        self,
        queries: range,
        keys: range,
        device: torch.device,
    ) -> Tensor | None:
        """Return bool [queries, keys], True for earlier keys within the window; None: for all."""
        all_earlier = keys[-1] <= queries[0]
        all_in_window = not self.window or keys[0] > queries[-1] - self.window
        if all_earlier and all_in_window:
            return None
        query_positions = torch.arange(queries.start, queries.stop, device=device)
        key_positions = torch.arange(keys.start, keys.stop, device=device)
        distance = query_positions[:, None] - key_positions
        if self.window:
            return (distance >= 0) & (distance < self.window)
        return distance >= 0


class MergedAttention:
    """Attention of runs of queries over the parts of keys given to `add` so far.

    query: [b, n, s, d] whose rows are at the positions of `runs`, one run after the other.
    heads: the number of heads of key and value. width: the features of a head's value.
    rule: which keys a query attends to.
    wide_dtype: the dtype of scores and sums.
    sinks: [n], or None.
    """

    def __init__(
        self,
        query: Tensor,
        runs: tuple[range, ...],
        heads: int,
        width: int,
        rule: AttentionRule,
        wide_dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> None:
        self._query = query.unflatten(1, (heads, -1))
        self._runs = runs
        self._rule = rule
        self._wide_dtype = wide_dtype
        leading_shape = self._query.shape[:-1]  # [b, m, n / m, s]
        # A sink is a score of its own, so it begins the largest score and, as exp(0), the sum.
        if sinks is None:
            # not minus infinity: for queries whose keys are all masked, inf - inf would be NaN
            smallest = torch.finfo(wide_dtype).min
            self._largest = query.new_full((*leading_shape, 1), smallest, dtype=wide_dtype)
            self._sum = torch.zeros_like(self._largest)
        else:
            sink_scores = sinks_by_head(sinks.to(wide_dtype), self._query)
            self._largest = sink_scores.expand(*leading_shape, 1).clone()
            self._sum = torch.ones_like(self._largest)
        self._values = query.new_zeros((*leading_shape, width), dtype=wide_dtype)

    def add(
        self,
        key: Tensor,
        value: Tensor,
        runs: tuple[range, ...],
    ) -> None:
        """Attend to a part of the keys: take its scores and values into the sums of each query.

        key [b, m, t, d], value [b, m, t, width]: at the positions of `runs`, one run after the
            other.
        """
        rule = self._rule
        key = key.to(self._wide_dtype)
        value = value.to(self._wide_dtype)
        for block in visible_blocks(self._runs, runs, rule, self._query, self._wide_dtype):
            block_key = block.of_keys(key)
            block_value = block.of_keys(value)
            query = block.of_queries(self._query)
            scores = capped_scores(query.to(self._wide_dtype), block_key, rule)
            scores = mask_scores_(scores, rule, block)
            # views of the state of the merge, which is changed in place below
            largest = block.of_queries(self._largest)
            total = block.of_queries(self._sum)
            values = block.of_queries(self._values)
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrinkage = (largest - new_largest).exp_()
            weights = scores.sub_(new_largest).exp_()
            # Dropout comes after the sum: a dropped weight stays in the denominator.
            total.mul_(shrinkage).add_(weights.sum(-1, keepdim=True))
            dropped = drop_weights(weights, rule, block)
            values.mul_(shrinkage).add_(product(dropped, block_value))
            # last: the shrinkage is computed from the one before
            largest.copy_(new_largest)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return attention [b, n, s, width], and `log_sum` [b, m, n / m, s, 1]: the logarithm of
        the sum of the exponentials of each query's scores. To be called once."""
        attention = self._values.div_(self._sum).flatten(1, 2)
        log_sum = self._largest + self._sum.log()
        return attention, log_sum


class AttentionGradients:
    """The gradients of attention, as sums over the parts of keys given to `add` so far.

    output: the result of attention, and grad its gradient, [b, n, s, width] both.
    log_sum: as `MergedAttention.result` returns it.
    query, runs, rule, wide_dtype: as in `MergedAttention`.
    """

    def __init__(
        self,
        query: Tensor,
        runs: tuple[range, ...],
        output: Tensor,
        log_sum: Tensor,
        grad: Tensor,
        rule: AttentionRule,
        wide_dtype: torch.dtype,
    ) -> None:
        by_key_head = log_sum.shape[1:3]
        self._query = query.unflatten(1, by_key_head)
        self._grad = grad.unflatten(1, by_key_head)
        self._runs = runs
        self._rule = rule
        self._log_sum = log_sum
        self._wide_dtype = wide_dtype
        # The gradient of a softmax needs sum over keys of weight * its gradient, which is the
        # product of the output with its gradient.
        weighted_grad = self._grad.to(wide_dtype) * output.unflatten(1, by_key_head)
        self._grad_dot_output = weighted_grad.sum(-1, keepdim=True)
        self._grad_query = torch.zeros(self._query.shape, dtype=wide_dtype, device=query.device)

    def add(
        self,
        key: Tensor,
        value: Tensor,
        runs: tuple[range, ...],
        grad_key: Tensor,
        grad_value: Tensor,
    ) -> None:
        """Add the gradients from this part of the keys: that of query to its sum, the others to
        `grad_key` and `grad_value`, in place.

        key, value, grad_key, grad_value: [b, m, t, features].
        runs: the positions of these keys; those of the queries were given before.
        """
        rule = self._rule
        key = key.to(self._wide_dtype)
        value = value.to(self._wide_dtype)
        for block in visible_blocks(self._runs, runs, rule, self._query, self._wide_dtype):
            block_key = block.of_keys(key)
            block_value = block.of_keys(value)
            query = block.of_queries(self._query).to(self._wide_dtype)
            grad = block.of_queries(self._grad).to(self._wide_dtype)
            scores = capped_scores(query, block_key, rule)
            slope = None  # of the soft cap: 1 - tanh^2
            # before the mask: the slope of minus infinity is not a number
            if rule.softcap:
                slope = (scores / rule.softcap).square_().neg_().add_(1)
            scores = mask_scores_(scores, rule, block)
            weights = scores.sub_(block.of_queries(self._log_sum)).exp_()
            dropped = drop_weights(weights, rule, block)
            block.of_keys(grad_value).add_(product_over_queries(dropped, grad))
            # Dropout is linear, so the gradient of its input is the dropout of that of its result.
            grad_weights = drop_weights(product(grad, block_value.mT), rule, block)
            grad_scores = grad_weights.sub_(block.of_queries(self._grad_dot_output))
            grad_scores.mul_(weights).mul_(rule.scale)
            if slope is not None:
                grad_scores.mul_(slope)
            block.of_queries(self._grad_query).add_(product(grad_scores, block_key))
            block.of_keys(grad_key).add_(product_over_queries(grad_scores, query))

    def grad_query(self) -> Tensor:
        """Return the gradient of query, [b, n, s, d]."""
        return self._grad_query.flatten(1, 2)

    def grad_sinks(self, sinks: Tensor) -> Tensor:
        """Return the part of the gradient of the sinks [n] that these queries have, in the dtype of
        sums."""
        sink_scores = sinks_by_head(sinks.to(self._wide_dtype), self._query)
        sink_weights = (sink_scores - self._log_sum).exp_()
        weighted = sink_weights.mul_(self._grad_dot_output)
        # over samples, queries and the last dimension, of size 1: one number for each head
        return weighted.sum((0, 3, 4)).neg_().flatten()


class ScoreBlock(NamedTuple):
    """Queries and keys whose scores are computed at a time."""

    rows: slice  # of the tensor of queries
    queries: range  # their positions
    columns: slice  # of the tensor of keys
    keys: range  # their positions

    def of_queries(self, x: Tensor) -> Tensor:
        """Return a view of these rows of x [b, m, n / m, s, ...]."""
        return x[:, :, :, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return a view of these columns of x [b, m, t, ...]."""
        return x[:, :, self.columns]


def visible_blocks(
    query_runs: tuple[range, ...],
    key_runs: tuple[range, ...],
    rule: AttentionRule,
    query: Tensor,
    wide_dtype: torch.dtype,
) -> Iterator[ScoreBlock]:
    """Yield blocks that together have all pairs of queries and keys that may attend.

    query_runs, key_runs: the positions of the rows of query and of key.
    query: [b, m, n / m, s, d]. wide_dtype: of scores, by which a block is so small that they take a
    limited memory.
    """
    # Where memory is counted on tensors without storage, the last block, the largest, will do: the
    # blocks before it take no more.
    only_last = type(query) is not Tensor or query.is_meta
    device = "cpu" if query.device.type == "cpu" else "cuda"
    heads_and_samples = query.shape[:3].numel()
    bytes_of_pair = heads_and_samples * wide_dtype.itemsize  # of a query and a key, in all heads
    pairs_of_block = _SCORES_BYTES[device] // bytes_of_pair
    for first_row, queries in with_offsets(query_runs):
        for first_column, keys in with_offsets(key_runs):
            queries_of_block = max(_LEAST_QUERIES, pairs_of_block // len(keys))
            starts = range(0, len(queries), queries_of_block)
            if only_last:
                starts = starts[-1:]
            for start in starts:
                block_queries = queries[start : start + queries_of_block]
                block_keys = rule.reachable_keys(block_queries, keys)
                if not block_keys:
                    continue
                row = first_row + start
                column = first_column + block_keys.start - keys.start
                yield ScoreBlock(
                    rows=slice(row, row + len(block_queries)),
                    queries=block_queries,
                    columns=slice(column, column + len(block_keys)),
                    keys=block_keys,
                )


def with_offsets(runs: tuple[range, ...]) -> Iterator[tuple[int, range]]:
    """Yield each run with the number of positions in the runs before it."""
    offset = 0
    for run in runs:
        yield offset, run
        offset += len(run)


def capped_scores(
    query: Tensor,
    key: Tensor,
    rule: AttentionRule,
) -> Tensor:
    """Return the scores [b, m, n / m, queries, keys] of all pairs, with the soft cap if there is
    one."""
    scores = product(query, key.mT).mul_(rule.scale)
    if rule.softcap:
        return scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return scores


def mask_scores_(
    scores: Tensor,
    rule: AttentionRule,
    block: ScoreBlock,
) -> Tensor:
    """Return the scores with minus infinity where a query does not attend, in place."""
    attends = rule.mask(block.queries, block.keys, scores.device)
    if attends is None:
        return scores
    return scores.masked_fill_(~attends, float("-inf"))


def sinks_by_head(sinks: Tensor, query: Tensor) -> Tensor:
    """Return sinks [n] as a view that broadcasts over query [b, m, n / m, s, d]."""
    return sinks.view(query.shape[1], query.shape[2], 1, 1)


def drop_weights(
    weights: Tensor,
    rule: AttentionRule,
    block: ScoreBlock,
) -> Tensor:
    """Return the weights [b, m, n / m, queries, keys] after dropout."""
    if rule.drop is None:
        return weights
    return rule.drop(weights.flatten(1, 2), block.queries, block.keys).view_as(weights)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x [b, m, groups, s, k] @ y [b, m, k, n].

    The groups share one product, without a copy of y for each.
    """
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def product_over_queries(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over groups and queries of weights [b, m, groups, s, t] times rows [b, m,
    groups, s, n]."""
    return weights.flatten(2, 3).mT @ rows.flatten(2, 3)
