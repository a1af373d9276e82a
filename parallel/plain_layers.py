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
from megaprec.torch_private import is_backward_running, without_torch_function
from parallel import collectives
from parallel.context import Context
from parallel.cut_features import CutTensor, TensorCut, mark_cut, unchecked
from parallel.dropout import drop
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.norms import LayerNorm, RMSNorm

# the largest difference between sums over an input on different ranks, as a fraction of its norm:
# ranks may add in another order, and other samples differ by far more
ROUNDING = 1e-3


class CheckedPasses:
    """Counts the passes through the layers of one module, and says if the present one is checked.

    A pass begins with a call of the module. If its layers are called without it, a pass begins with
    each call of the layer that was called first. What a backward pass computes again (activation
    recomputation) is no pass: it is checked if the last pass was.

    sequence: activations are sharded along the sequence.
    checks: the present pass of the module is checked.
    """

    def __init__(self, context: Context) -> None:
        self.tp: Axis = context.tp
        self.sequence = context.cut_sequence
        self.checks = False
        self._depth = 0
        # by whether the module is in training, as what its code does may depend on it
        self._pass_counts = {True: 0, False: 0}
        self._last_was_checked = {True: False, False: False}
        self._first_layer: nn.Module | None = None

    def begin(self, module: nn.Module, *_: object) -> None:
        """Begin a call of the module: to be called before its forward."""
        if self._depth == 0:
            if is_backward_running():
                self.checks = self._last_was_checked[module.training]
            else:
                self._count_pass(module.training)
        # the module may call itself
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

    def note_call(self, layer: nn.Module) -> bool:
        """Note the call of a layer, and return True if it is part of a pass that is checked."""
        if torch.compiler.is_compiling():
            return False
        if self.within:
            return self.checks
        # a recomputation
        if is_backward_running():
            return self._last_was_checked[layer.training]
        # called without the module
        self._first_layer = self._first_layer or layer
        if layer is self._first_layer:
            self._count_pass(layer.training)
        return self.checks

    def _count_pass(self, training: bool) -> None:
        """Begin a pass, and check it if its number is a power of two."""
        self._pass_counts[training] += 1
        number = self._pass_counts[training]
        self.checks = number & (number - 1) == 0
        self._last_was_checked[training] = self.checks

    def require_same(self, x: Tensor, path: str) -> None:
        """Raise UserError on all ranks if `x`, of any shape, differs between tensor-parallel ranks.

        path: that of the layer whose input it is, for the message. Collective over tp.
        """
        if self.tp.size == 1:
            return
        # Three numbers stand for all elements: their sum, a sum weighted by position, which sees if
        # they are in another order, and the norm.
        flat = x.detach().reshape(-1).double()
        position_weights = torch.linspace(
            0.5,
            1.5,
            len(flat),
            dtype=torch.float64,
            device=flat.device,
        )
        weighted_sum = (flat * position_weights).sum()
        norm = flat.square().sum().sqrt()
        sums = torch.stack((flat.sum(), weighted_sum, norm))
        largest = self.tp.max_(sums.clone())
        smallest = -self.tp.max_(-sums)
        rounding = ROUNDING if x.is_floating_point() else 0.0
        # inputs that are not finite are not compared: the gradients of the step will show them
        comparable = largest.isfinite() & smallest.isfinite()
        largest_norm = largest[2]
        differs = (largest - smallest > rounding * largest_norm) & comparable
        if differs.any():
            raise UserError.of("parallel.input_differs", path=path)


class Watched(nn.Module):
    """The common part of layers that replace those of a plain module.

    watch, path: the passes through the module, and the path in it; both set by `parallelize`.
    """

    watch: CheckedPasses
    path: str
    _computes = False  # while the layer itself reads its weight

    @contextmanager
    def computing(self) -> Iterator[bool]:
        """Enter the layer's own computation, and yield True if the pass is checked."""
        self._computes = True
        try:
            yield self.watch.note_call(self)
        finally:
            self._computes = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; of the weight, if code outside of the layer reads it in a checked
        pass, a tensor that is marked as cut.

        What that code computes is then followed, and refused where it would be wrong: a tied head
        that is written as F.linear(x, embedding.weight) would compute a part of the logits.
        """
        value = super().__getattr__(name)
        if name != "weight" or self._computes or not isinstance(value, nn.Parameter):
            return value
        watch = self.__dict__.get("watch")  # not set yet while the layer is built
        dim = getattr(self, "weight_dim", None)
        if watch is None or dim is None or torch.compiler.is_compiling():
            return value
        if not (watch.within and watch.checks):
            return value
        rows = "rows" if dim == 0 else "columns"
        remedy = (
            f'give {self.path} the style "whole", or let an nn.Linear of style "column" have its '
            "weight"
        )
        cut = TensorCut(dim, f"{rows} of {self.path}.weight", watch.tp.size, remedy=remedy)
        return mark_cut(value, cut)


# The layers mark a copy of their output: code after them may modify in place what an operator of
# torch returns, but not what an autograd function of ours returns.


class Column(Watched, ColumnParallelLinear):
    """`ColumnParallelLinear` in the place of a plain layer."""

    weight_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """x: as `ColumnParallelLinear`, or a slice of the features, which is gathered."""
        with self.computing() as is_checked:
            y = super().forward(self._full_input(x, is_checked))
        if not is_checked:
            return y
        cut = TensorCut(y.dim() - 1, f"outputs of {self.path}", self.watch.tp.size)
        return mark_cut(y.clone(), cut)

    def _full_input(self, x: Tensor, is_checked: bool) -> Tensor:
        """Return x [..., all features]; under sequence parallelism the positions of this rank
        [s / tp, b, all features].

        is_checked: the pass is one of those in which ranks compare their inputs. In all passes an
        input that is cut along another dim is refused.
        """
        tp = self.watch.tp
        if _is_slice(x, self.weight.shape[1], tp):
            _require_cut_by_features(x, self.path)
            if self.watch.sequence:
                raise _sequence_error(self.path)
            x = collectives.join(unchecked(x), tp, x.dim() - 1)
        elif isinstance(x, CutTensor):
            _require_sequence(x, self.path, self.watch)
        x = unchecked(x)
        if is_checked and not self.watch.sequence:
            self.watch.require_same(x, self.path)
        return x


class Row(Watched, RowParallelLinear):
    """`RowParallelLinear` in the place of a plain layer."""

    weight_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """x: as `RowParallelLinear`, or all features, of which this rank takes its slice."""
        tp = self.watch.tp
        with self.computing() as is_checked:
            if x.shape[-1] == tp.size * self.weight.shape[1]:  # all features
                if isinstance(x, CutTensor):
                    raise _other_cut_error(x, self.path)
                if self.watch.sequence:
                    raise _sequence_error(self.path)
                if is_checked:
                    self.watch.require_same(x, self.path)
                x = collectives.split(x, tp, x.dim() - 1)
            _require_cut_by_features(x, self.path)
            y = super().forward(unchecked(x))
        if is_checked and self.watch.sequence:
            return mark_cut(y.clone(), TensorCut(0, f"positions after {self.path}", tp.size))
        return y


class Vocab(Watched, VocabParallelEmbedding):
    """`VocabParallelEmbedding` in the place of a plain embedding."""

    weight_dim = 0

    def forward(self, ids: Tensor) -> Tensor:
        """ids: as `VocabParallelEmbedding`, the same on all ranks."""
        if isinstance(ids, CutTensor):
            raise _other_cut_error(ids, self.path)
        tp = self.watch.tp
        with self.computing() as is_checked:
            if is_checked:
                self.watch.require_same(ids, self.path)
            y = super().forward(ids)
        if is_checked and self.watch.sequence:
            return mark_cut(y.clone(), TensorCut(0, f"positions after {self.path}", tp.size))
        return y


class _Norm(Watched):
    """A norm over all features: a slice is gathered before, and cut again after.

    of_heads: the norm is over the features of one head, and heads are cut; set by `parallelize`.
    """

    of_heads = False

    def apply_norm(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Return norm(x), of x [..., hidden] or a slice of it."""
        with self.computing() as is_checked:
            if _is_slice(x, self.weight.shape[0], self.watch.tp):
                y = self._normalize_slice(x, norm)
            else:
                self._require_right_gradient(x, is_checked)
                y = norm(unchecked(x))
        return mark_cut(y, x.cut) if isinstance(x, CutTensor) else y

    def _normalize_slice(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's slice of the norm over the features of all ranks, of the slice x [...,
        hidden / tp]. Collective over tp."""
        _require_cut_by_features(x, self.path)
        if self.watch.sequence:
            raise _sequence_error(self.path)
        tp = self.watch.tp
        dim = x.dim() - 1
        full = collectives.join(unchecked(x), tp, dim)
        return collectives.split(norm(full), tp, dim)

    def _require_right_gradient(self, x: Tensor, is_checked: bool) -> None:
        """Raise UserError if the gradient of the norm's weight would not be that of one process: if
        heads are cut but the norm has not the style "heads", or the other way round.

        x: [..., hidden], which may be cut along another dimension.
        """
        cut = x.cut if isinstance(x, CutTensor) else None
        # Under sequence parallelism the norm's weight has partial gradients, summed over tp.
        is_sequence_shard = cut is not None and self.watch.sequence and cut.dim == 0
        has_cut_heads = cut is not None and not is_sequence_shard
        if cut is not None and has_cut_heads and not self.of_heads:
            raise UserError.of("parallel.heads_shared", path=self.path, source=cut.source)
        # Only a checked pass marks what is cut: in others a missing mark says nothing.
        if self.of_heads and is_checked and not has_cut_heads:
            raise UserError.of("parallel.heads_not_shared", path=self.path)


class WatchedRMSNorm(_Norm, RMSNorm):
    """`RMSNorm` in the place of a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        """x: as `RMSNorm`, or a slice of the features."""
        return self.apply_norm(x, super().forward)


class WatchedLayerNorm(_Norm, LayerNorm):
    """`LayerNorm` in the place of a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        """x: as `LayerNorm`, or a slice of the features."""
        return self.apply_norm(x, super().forward)


class Dropout(nn.Dropout):
    """nn.Dropout that drops the same elements for every number of tensor-parallel ranks.

    It draws one number from torch's generator on the CPU in each call in training. What is dropped
    follows from this number and from the place of each element in the whole tensor. The number must
    therefore be the same on all ranks of tp, which is checked in some passes.
    """

    def __init__(
        self,
        plain: nn.Dropout,
        path: str,
        watch: CheckedPasses,
    ) -> None:
        super().__init__(plain.p, plain.inplace)
        self.path = path
        self.watch = watch
        self.training = plain.training
        # the cut dimension of inputs, from the last one; 0: they are not cut; None: not known yet
        self._from_last: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return x after dropout; x itself, changed in place, if the plain module is in place.

        x: any tensor; a slice in the same dimension in all calls, or whole in all calls.
        """
        self._note_cut(x)
        if not self.training or self.p == 0:
            return x
        # on the CPU: the host reads the number at once, and would have to wait for a GPU
        seed = torch.randint(2**62, (), device="cpu")
        if self.watch.checks:
            self.watch.require_same(seed.to(x.device), self.path)
            if not isinstance(x, CutTensor):
                self.watch.require_same(x, self.path)
        # the places of x's elements in the whole tensor, along each dimension
        coordinates = [range(size) for size in x.shape]
        if self._from_last:
            dim = x.dim() - self._from_last
            first = self.watch.tp.rank * x.shape[dim]
            coordinates[dim] = range(first, first + x.shape[dim])
        y = drop(unchecked(x), self.p, key(int(seed), self.path), coordinates)
        if self.inplace:
            # After a frozen layer y has no gradient, and would be taken for numbers made elsewhere.
            with without_torch_function():
                return x.copy_(y)
        return mark_cut(y, x.cut) if isinstance(x, CutTensor) else y

    def _note_cut(self, x: Tensor) -> None:
        """Keep along which dimension inputs are cut, as far as x tells: in a checked pass it is
        marked if it is cut. Raises UserError if it is cut otherwise than earlier inputs."""
        cut = x.cut if isinstance(x, CutTensor) else None
        if cut is None and not self.watch.checks:
            return
        if cut is not None and cut.outer != 1:
            raise UserError.of("parallel.heads_merged", path=self.path)
        from_last = 0 if cut is None else x.dim() - cut.dim
        if self._from_last not in (None, from_last):
            raise UserError.of("parallel.dropout_two_inputs", path=self.path)
        self._from_last = from_last


def _is_slice(
    x: Tensor,
    features: int,
    tp: Axis,
) -> bool:
    """Return True if x has the number of features of a slice over tp."""
    return x.shape[-1] != features and x.shape[-1] * tp.size == features


def _require_cut_by_features(x: Tensor, path: str) -> None:
    """Raise UserError if `x` is known to be cut, but not along the features."""
    if isinstance(x, CutTensor) and (x.cut.dim != x.dim() - 1 or x.cut.outer != 1):
        raise _other_cut_error(x, path)


def _require_sequence(
    x: CutTensor,
    path: str,
    watch: CheckedPasses,
) -> None:
    """Raise UserError unless `x` is cut along the sequence, as layers under sequence parallelism
    expect it."""
    if not (watch.sequence and x.cut.dim == 0 and x.cut.outer == 1):
        raise _other_cut_error(x, path)


def _other_cut_error(x: CutTensor, path: str) -> UserError:
    """Return the error that the layer at `path` was given a tensor that is cut along a dimension
    which it does not expect."""
    return UserError.of(
        "parallel.cut_dimension",
        path=path,
        shape=list(x.shape),
        dim=x.cut.dim,
        source=x.cut.source,
    )


def _sequence_error(path: str) -> UserError:
    return UserError.of("parallel.sequence_cut_features", path=path)
