"""The layers that `parallelize` puts in the place of plain ones, and what they check of the code
between them.

On several tensor-parallel ranks a layer knows the number of features that the plain one takes. An
input of that many features is whole, and the same on all ranks; a smaller one is a slice, of which
the layer makes what it needs: a row-parallel layer cuts a whole input, a column-parallel layer and
a norm make a slice whole. In passes number 1, 2, 4, 8 and so on they check more: outputs that are
cut are followed by `parallel.cut_features`, and inputs that are whole are compared between ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.random import key
from megaprec.errors import UserError
from parallel import collectives
from parallel.context import Context
from parallel.cut_features import Cut, CutTensor, mark_cut, unchecked
from parallel.dropout import drop
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.norms import LayerNorm, RMSNorm

ROUNDING = 1e-3
"""The largest difference between sums over an input on different ranks, as a share of its norm."""


class Watch:
    """The passes through the layers of one module, and if the present one is checked.

    A pass begins with a call of the module. If its layers are called without it, a pass begins with
    each call of the layer that was called first. What a backward pass computes again is no pass: it
    is checked if the last pass was.
    """

    def __init__(self, context: Context) -> None:
        self.tp: Axis = context.tp
        self.sequence = context.cut_sequence
        self.checks = False
        self._depth = 0
        self._passes = {True: 0, False: 0}  # of training, and of evaluation
        self._checked = {True: False, False: False}  # if the last of these passes was
        self._first: nn.Module | None = None

    def begin(self, module: nn.Module, *_: object) -> None:
        """Begin a call of the module: to be called before its forward."""
        if self._depth == 0:
            if _in_backward():
                self.checks = self._checked[module.training]
            else:
                self._count(module.training)
        self._depth += 1

    def end(self, *_: object) -> None:
        """End a call of the module, also one that has failed."""
        self._depth -= 1
        if self._depth == 0:
            self.checks = False

    @property
    def within(self) -> bool:
        """Return True during a call of the module."""
        return self._depth > 0

    def called(self, layer: nn.Module) -> bool:
        """Note the call of a layer, and return True if it is part of a pass that is checked."""
        if torch.compiler.is_compiling():
            return False
        if self._depth == 0 and _in_backward():
            return self._checked[layer.training]
        if self._depth == 0:
            self._first = self._first or layer
            if layer is self._first:
                self._count(layer.training)
        return self.checks

    def _count(self, training: bool) -> None:
        self._passes[training] += 1
        number = self._passes[training]
        self.checks = number & (number - 1) == 0
        self._checked[training] = self.checks

    def require_same(self, x: Tensor, path: str) -> None:
        """Raise UserError on all ranks if `x` [...] differs between tensor-parallel ranks.
        Collective over tp."""
        if self.tp.size == 1:
            return
        flat = x.detach().reshape(-1).double()
        places = torch.linspace(0.5, 1.5, len(flat), dtype=torch.float64, device=flat.device)
        sums = torch.stack((flat.sum(), (flat * places).sum(), flat.square().sum().sqrt()))
        largest = self.tp.max_(sums.clone())
        smallest = -self.tp.max_(-sums)
        rounding = ROUNDING if x.is_floating_point() else 0.0
        apart = (
            (largest - smallest > rounding * largest[2]) & largest.isfinite() & smallest.isfinite()
        )
        if apart.any():
            raise UserError(
                f"{path}: the input differs between tensor-parallel ranks, which compute one batch "
                "together: give all of them the same samples in the same order and the same random "
                "numbers, e.g. torch.manual_seed with one seed on all of them"
            )


class Watched(nn.Module):
    """The common part of layers that replace those of a plain module. `watch` and `path` are set by
    `parallelize`."""

    watch: Watch
    path: str
    _computes = False

    @contextmanager
    def computing(self) -> Iterator[bool]:
        """Enter the layer's own computation, and yield True if the pass is checked."""
        self._computes = True
        try:
            yield self.watch.called(self)
        finally:
            self._computes = False

    def __getattr__(self, name: str) -> Any:
        """Return parameters as tensors that are cut while others compute with them, so that they
        are refused.

        A tied head that is written as F.linear(x, embedding.weight) would compute a part of the
        logits.
        """
        value = super().__getattr__(name)
        if name != "weight" or self._computes or not isinstance(value, nn.Parameter):
            return value
        watch = self.__dict__.get("watch")
        if watch is None or not (watch.within and watch.checks) or torch.compiler.is_compiling():
            return value
        dim = getattr(self, "weight_dim", None)
        if dim is None:
            return value
        remedy = (
            f'give {self.path} the style "whole", or let an nn.Linear of style "column" have its '
            "weight"
        )
        rows = "rows" if dim == 0 else "columns"
        return mark_cut(
            value, Cut(dim, f"{rows} of {self.path}.weight", watch.tp.size, remedy=remedy)
        )


# What is mark_cut is a copy: the output of an autograd function of ours could not be modified in
# place as one of torch's.


class Column(Watched, ColumnParallelLinear):
    """`ColumnParallelLinear` in the place of a plain layer."""

    weight_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """x: as `ColumnParallelLinear`, or a slice of the features, which is gathered."""
        with self.computing() as checks:
            y = super().forward(self._whole(x, checks))
        if checks:
            return mark_cut(
                y.clone(), Cut(y.dim() - 1, f"outputs of {self.path}", self.watch.tp.size)
            )
        return y

    def _whole(self, x: Tensor, checks: bool) -> Tensor:
        tp = self.watch.tp
        if _is_slice(x, self.weight.shape[1], tp):
            _require_last(x, self.path)
            if self.watch.sequence:
                raise _under_sequence(self.path)
            x = collectives.join(unchecked(x), tp, x.dim() - 1)
        elif isinstance(x, CutTensor):
            _require_sequence(x, self.path, self.watch)
        x = unchecked(x)
        if checks and not self.watch.sequence:
            self.watch.require_same(x, self.path)
        return x


class Row(Watched, RowParallelLinear):
    """`RowParallelLinear` in the place of a plain layer."""

    weight_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """x: as `RowParallelLinear`, or all features, of which this rank takes its slice."""
        tp = self.watch.tp
        with self.computing() as checks:
            whole = tp.size * self.weight.shape[1]
            if x.shape[-1] == whole:
                if isinstance(x, CutTensor):
                    raise _cut_elsewhere(x, self.path)
                if self.watch.sequence:
                    raise _under_sequence(self.path)
                if checks:
                    self.watch.require_same(x, self.path)
                x = collectives.split(x, tp, x.dim() - 1)
            _require_last(x, self.path)
            y = super().forward(unchecked(x))
        if checks and self.watch.sequence:
            return mark_cut(y.clone(), Cut(0, f"positions after {self.path}", tp.size))
        return y


class Vocab(Watched, VocabParallelEmbedding):
    """`VocabParallelEmbedding` in the place of a plain embedding."""

    weight_dim = 0

    def forward(self, ids: Tensor) -> Tensor:
        """ids: as `VocabParallelEmbedding`, the same on all ranks."""
        if isinstance(ids, CutTensor):
            raise _cut_elsewhere(ids, self.path)
        tp = self.watch.tp
        with self.computing() as checks:
            if checks:
                self.watch.require_same(ids, self.path)
            y = super().forward(ids)
        if checks and self.watch.sequence:
            return mark_cut(y.clone(), Cut(0, f"positions after {self.path}", tp.size))
        return y


class _Norm(Watched):
    """A norm over all features: a slice is made whole before, and cut again after.

    `of_heads`, set by `parallelize`: the norm is one of each head, and heads are cut.
    """

    of_heads = False

    def around(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Return norm(x), of x [..., hidden] or a slice of it."""
        with self.computing() as checks:
            if _is_slice(x, self.weight.shape[0], self.watch.tp):
                y = self._of_slice(x, norm)
            else:
                self._require_understood(x, checks)
                y = norm(unchecked(x))
        return mark_cut(y, x.cut) if isinstance(x, CutTensor) else y

    def _of_slice(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        _require_last(x, self.path)
        if self.watch.sequence:
            raise _under_sequence(self.path)
        tp = self.watch.tp
        dim = x.dim() - 1
        whole = collectives.join(unchecked(x), tp, dim)
        return collectives.split(norm(whole), tp, dim)

    def _require_understood(self, x: Tensor, checks: bool) -> None:
        """Raise UserError if the gradient of the norm's weight would not be that of one process."""
        sequence = isinstance(x, CutTensor) and self.watch.sequence and x.cut.dim == 0
        heads = isinstance(x, CutTensor) and not sequence
        if isinstance(x, CutTensor) and heads and not self.of_heads:
            raise UserError(
                f"{self.path} is given heads that tensor-parallel ranks share, of the "
                f"{x.cut.source}, and each rank would compute its gradient from its own heads: "
                'give it the style "heads", which sums them'
            )
        if self.of_heads and checks and not heads:
            raise UserError(
                f'{self.path} has the style "heads", but its input is none that tensor-parallel '
                "ranks share: leave the style out"
            )


class WatchedRMSNorm(_Norm, RMSNorm):
    """`RMSNorm` in the place of a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        """x: as `RMSNorm`, or a slice of the features."""
        return self.around(x, super().forward)


class WatchedLayerNorm(_Norm, LayerNorm):
    """`LayerNorm` in the place of a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        """x: as `LayerNorm`, or a slice of the features."""
        return self.around(x, super().forward)


class Dropout(nn.Dropout):
    """nn.Dropout that drops the same elements for every number of tensor-parallel ranks.

    It draws one number from torch's generator on the CPU in each call in training. What is dropped
    follows from this number and from the place of each element in the whole tensor. The number must
    therefore be the same on all ranks of tp, which is checked in some passes.
    """

    def __init__(self, plain: nn.Dropout, path: str, watch: Watch) -> None:
        super().__init__(plain.p, plain.inplace)
        self.path = path
        self.watch = watch
        self.training = plain.training
        self._from_last: int | None = (
            None  # the cut dimension, from the last one; 0: x is whole; None: not known yet
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: any tensor; a slice in the same dimension in all calls, or whole in all calls."""
        self._note(x)
        if not self.training or self.p == 0:
            return x
        tp = self.watch.tp
        drawn = torch.randint(2**62, (), device="cpu")
        if self.watch.checks:
            self.watch.require_same(drawn.to(x.device), self.path)
            if not isinstance(x, CutTensor):
                self.watch.require_same(x, self.path)
        ranges = [range(n) for n in x.shape]
        if self._from_last:
            dim = x.dim() - self._from_last
            size = x.shape[dim]
            ranges[dim] = range(tp.rank * size, (tp.rank + 1) * size)
        y = drop(unchecked(x), self.p, key(int(drawn), self.path), ranges)
        if self.inplace:
            # After a frozen layer y has no gradient, and would be taken for numbers made elsewhere.
            with torch._C.DisableTorchFunctionSubclass():
                return x.copy_(y)
        return mark_cut(y, x.cut) if isinstance(x, CutTensor) else y

    def _note(self, x: Tensor) -> None:
        """Keep along which dimension inputs are cut, as a pass shows that is checked."""
        cut = x.cut if isinstance(x, CutTensor) else None
        if cut is None and not self.watch.checks:
            return
        if cut is not None and cut.outer != 1:
            raise UserError(
                f"{self.path} is given heads that are merged with samples: call it before they are "
                "merged, with [b, heads, ...]"
            )
        from_last = 0 if cut is None else x.dim() - cut.dim
        if self._from_last not in (None, from_last):
            raise UserError(
                f"{self.path} is called with features that tensor-parallel ranks share, and with "
                "whole ones or others: give each place an nn.Dropout of its own"
            )
        self._from_last = from_last


def _in_backward() -> bool:
    """Return True in a backward pass, which torch.utils.checkpoint lets compute activations
    again."""
    return torch._C._current_graph_task_id() != -1


def _is_slice(x: Tensor, features: int, tp: Axis) -> bool:
    return x.shape[-1] != features and x.shape[-1] * tp.size == features


def _require_last(x: Tensor, path: str) -> None:
    """Raise UserError if `x` is known to be cut, but not along the features."""
    if isinstance(x, CutTensor) and (x.cut.dim != x.dim() - 1 or x.cut.outer != 1):
        raise _cut_elsewhere(x, path)


def _require_sequence(x: CutTensor, path: str, watch: Watch) -> None:
    """Raise UserError unless `x` is cut along the sequence, as layers under sequence parallelism
    expect it."""
    if not (watch.sequence and x.cut.dim == 0 and x.cut.outer == 1):
        raise _cut_elsewhere(x, path)


def _cut_elsewhere(x: CutTensor, path: str) -> UserError:
    return UserError(
        f"{path} is given a tensor {list(x.shape)} whose dimension {x.cut.dim} is a slice of the "
        f"{x.cut.source}, not its features: make it whole by parallel.join(x, tp, dim), or bring "
        "the heads into the features first"
    )


def _under_sequence(path: str) -> UserError:
    return UserError(
        f"{path} is given features in another way than layers of style column and row follow each "
        "other, which sequence parallelism does not support: set Context(sequence=False)"
    )
