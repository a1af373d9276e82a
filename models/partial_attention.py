"""Causal attention over keys that come in parts: exact, whatever the parts and their order.

The softmax over all keys is merged from those over parts. For each query three things are kept, in
FP32 or wider: the largest score so far, the sum of the exponentials of all scores less that, and
the same sum of values. A further part raises the largest score and scales both sums down to it
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). In the end the
logarithm of the sum and the largest score are one number, `log_sum`; the backward pass makes the
weights of each part again from it, so no weight is kept.

A sink (`models.sink_attention`) is one more term of the sum over keys, whose value is zero: the
merge begins with it.

Queries and keys are runs of positions of one sequence. A run of keys that no query attends to costs
nothing, and one that each query attends to needs no mask. Scores are computed for so many queries
at a time that they stay small.

Query is [b, n, s, d], key [b, m, t, d] and value [b, m, t, e]; a head of key and value serves n / m
neighbouring heads of query.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

# bytes at a time: 4 MB stay in a CPU's cache, and 34 MB occupy a GPU
_SCORES = {
    "cpu": 1 << 22,
    "cuda": 1 << 25,
}

Drop = Callable[[Tensor, range, range], Tensor]
"""Dropout of weights [b, n, queries, keys] at the positions of these. It must be linear and always drop the same."""


@dataclass(frozen=True)
class Rule:
    """The keys that a query attends to, and the scores' factor.

    window: number of last tokens, its own included; 0: all earlier ones.
    documents: int64 [b, s], the number of each token's document; None: a sequence is one document.
    drop: dropout of attention weights; None: without.
    softcap: the cap of scores (`models.softcap`); 0: without.
    """

    scale: float
    window: int = 0
    documents: Tensor | None = None
    drop: Drop | None = None
    softcap: float = 0.0

    def reached(self, queries: range, keys: range) -> range:
        """Return the keys to which some query may attend."""
        first = max(keys.start, queries.start - self.window + 1) if self.window else keys.start
        return range(first, max(first, min(keys.stop, queries.stop)))

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """Return bool [queries, keys] or [b, 1, 1, queries, keys], True where a query attends to a
        key.

        None: every query attends to every key.
        """
        inside = not self.window or keys[0] > queries[-1] - self.window
        attends = None
        if keys[-1] > queries[0] or not inside:
            ago = torch.arange(queries.start, queries.stop, device=device)[:, None]
            ago = ago - torch.arange(keys.start, keys.stop, device=device)
            attends = (ago >= 0) & (ago < self.window) if self.window else ago >= 0
        if self.documents is None:
            return attends
        asking, asked = (self.documents[:, some.start : some.stop] for some in (queries, keys))
        same = (asking[:, :, None] == asked[:, None, :])[:, None, None]
        return same if attends is None else same & attends


class Merged:
    """Attention of runs of queries over the parts of keys given to `add` so far.

    query: [b, n, s, d] whose rows are at the positions of `runs`, one run after the other. heads:
    those of key and value, which have `width` features. wide: the dtype of scores and sums. sinks:
    [n], or None.
    """

    def __init__(
        self,
        query: Tensor,
        runs: tuple[range, ...],
        heads: int,
        width: int,
        rule: Rule,
        wide: torch.dtype,
        sinks: Tensor | None = None,
    ) -> None:
        self._query = query.unflatten(1, (heads, -1))
        self._runs = runs
        self._rule = rule
        self._wide = wide
        shape = self._query.shape[:-1]
        if sinks is None:
            self._largest = query.new_full((*shape, 1), torch.finfo(wide).min, dtype=wide)
            self._sum = torch.zeros_like(self._largest)
        else:
            self._largest = by_head(sinks.to(wide), self._query).expand(*shape, 1).clone()
            self._sum = torch.ones_like(self._largest)
        self._values = query.new_zeros((*shape, width), dtype=wide)

    def add(self, key: Tensor, value: Tensor, runs: tuple[range, ...]) -> None:
        """Attend to the keys at the positions of `runs`, one run after the other."""
        key = key.to(self._wide)
        value = value.to(self._wide)
        for rows, queries, columns, keys in pairs(
            self._runs, runs, self._rule, self._query, self._wide
        ):
            own_key = key[:, :, columns]
            own_value = value[:, :, columns]
            scores = capped_scores(self._query[:, :, :, rows].to(self._wide), own_key, self._rule)
            scores = masked(scores, self._rule, queries, keys)
            largest, total, values = (
                x[:, :, :, rows] for x in (self._largest, self._sum, self._values)
            )
            higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrunk = (largest - higher).exp_()
            weights = scores.sub_(higher).exp_()
            total.mul_(shrunk).add_(weights.sum(-1, keepdim=True))
            dropped = dropped_of(weights, self._rule, queries, keys)
            values.mul_(shrunk).add_(product(dropped, own_value))
            largest.copy_(higher)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return attention [b, n, s, width], and `log_sum` [b, m, n / m, s, 1]."""
        return self._values.div_(self._sum).flatten(1, 2), self._largest + self._sum.log()


class Gradients:
    """The gradients of attention, as sums over the parts of keys given to `of` so far.

    mixed: the result of attention, and grad its gradient, [b, n, s, width] both. log_sum: as
    `Merged.result` returns it. query, runs, rule and wide: as in `Merged`.
    """

    def __init__(
        self,
        query: Tensor,
        runs: tuple[range, ...],
        mixed: Tensor,
        log_sum: Tensor,
        grad: Tensor,
        rule: Rule,
        wide: torch.dtype,
    ) -> None:
        grouped = partial(Tensor.unflatten, dim=1, sizes=log_sum.shape[1:3])
        self._query = grouped(query)
        self._grad = grouped(grad)
        self._runs = runs
        self._rule = rule
        self._log_sum = log_sum
        self._wide = wide
        self._along = (self._grad.to(wide) * grouped(mixed)).sum(-1, keepdim=True)
        self._of_query = torch.zeros(self._query.shape, dtype=wide, device=query.device)

    def add(
        self, key: Tensor, value: Tensor, runs: tuple[range, ...], into: tuple[Tensor, Tensor]
    ) -> None:
        """Add this part's gradients of query, key and value to the sums; `into` are those of key
        and value."""
        key = key.to(self._wide)
        value = value.to(self._wide)
        for rows, queries, columns, keys in pairs(
            self._runs, runs, self._rule, self._query, self._wide
        ):
            own_key = key[:, :, columns]
            own_value = value[:, :, columns]
            query, grad = (x[:, :, :, rows].to(self._wide) for x in (self._query, self._grad))
            capped = capped_scores(query, own_key, self._rule)
            slope = (capped / cap).square_().neg_().add_(1) if (cap := self._rule.softcap) else None
            weights = (
                masked(capped, self._rule, queries, keys).sub_(self._log_sum[:, :, :, rows]).exp_()
            )
            dropped = dropped_of(weights, self._rule, queries, keys)
            into[1][:, :, columns] += product_over_queries(dropped, grad)
            wanted = dropped_of(product(grad, own_value.mT), self._rule, queries, keys)
            of_scores = wanted.sub_(self._along[:, :, :, rows]).mul_(weights).mul_(self._rule.scale)
            if slope is not None:
                of_scores.mul_(slope)
            self._of_query[:, :, :, rows] += product(of_scores, own_key)
            into[0][:, :, columns] += product_over_queries(of_scores, query)

    def of_query(self) -> Tensor:
        """Return the gradient of query, [b, n, s, d]."""
        return self._of_query.flatten(1, 2)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of the sinks [n], as far as it is from these queries; in `wide`."""
        weights = (by_head(sinks.to(self._wide), self._query) - self._log_sum).exp_()
        return weights.mul_(self._along).sum((0, 3, 4)).neg_().flatten()


def pairs(
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    rule: Rule,
    query: Tensor,
    wide: torch.dtype,
) -> Iterator[tuple[slice, range, slice, range]]:
    """Yield runs of query rows, their positions, runs of key columns and theirs, for all pairs that
    may attend.

    query: [b, m, n / m, s, d]. The pairs are so small that the scores of one have a limited number
        of elements.
    """
    # A tensor without storage has no values: the last, largest block takes as much memory as all of
    # them.
    blocks = slice(-1, None) if type(query) is not Tensor or query.is_meta else slice(None)
    bytes_of_column = query.shape[:3].numel() * wide.itemsize
    elements = _SCORES["cpu" if query.device.type == "cpu" else "cuda"] // bytes_of_column
    for rows, asking in located(queries):
        for columns, asked in located(keys):
            few = max(16, elements // len(asked))
            for first in range(0, len(asking), few)[blocks]:
                some = asking[first : first + few]
                if near := rule.reached(some, asked):
                    place = columns + near.start - asked.start
                    own = slice(rows + first, rows + first + len(some))
                    yield own, some, slice(place, place + len(near)), near


def located(runs: tuple[range, ...]) -> Iterator[tuple[int, range]]:
    """Yield each run with the place of its first position among those of all runs."""
    first = 0
    for run in runs:
        yield first, run
        first += len(run)


def capped_scores(query: Tensor, key: Tensor, rule: Rule) -> Tensor:
    """Return the scores [b, m, n / m, queries, keys] of all pairs, with the soft cap if there is
    one."""
    scores = product(query, key.mT).mul_(rule.scale)
    if rule.softcap:
        return scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return scores


def masked(scores: Tensor, rule: Rule, queries: range, keys: range) -> Tensor:
    """Return the scores with minus infinity where a query does not attend, in place."""
    attends = rule.mask(queries, keys, scores.device)
    if attends is None:
        return scores
    return scores.masked_fill_(~attends, float("-inf"))


def by_head(sinks: Tensor, query: Tensor) -> Tensor:
    """Return sinks [n] as a view that broadcasts over query [b, m, n / m, s, d]."""
    return sinks.view(query.shape[1], query.shape[2], 1, 1)


def dropped_of(weights: Tensor, rule: Rule, queries: range, keys: range) -> Tensor:
    """Return the weights [b, m, n / m, queries, keys] after dropout."""
    if rule.drop is None:
        return weights
    return rule.drop(weights.flatten(1, 2), queries, keys).view_as(weights)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x [b, m, groups, s, k] @ y [b, m, k, n]; the groups share one product, without a copy
    of y for each."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def product_over_queries(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over groups and queries of weights [b, m, groups, s, t] times rows [b, m,
    groups, s, n]."""
    return weights.flatten(2, 3).mT @ rows.flatten(2, 3)
