"""Tensors of which each tensor-parallel rank has a slice, followed through the operations of plain
torch code.

The output of a column-parallel layer is such a slice. What a plain module computes with it is right
only if it does the same to each slice that it would do to that slice of the whole: an activation
does, a softmax over the features does not, and a dropout would drop the same elements of different
features. A `CutTensor` remembers along which dimension it is cut; each function of torch that it is
given to either keeps this property, by a rule of this module, or is refused by name. What no rule
is known of is refused too.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.precision.nested import mapped, tensors

JOIN_AND_SPLIT = (
    "make whole what needs all features, y = parallel.join(y, tp, dim), and cut it again by "
    'parallel.split, or give the layer before it the style "whole"'
)
MOVED_STRIDE = 1 << 40
"""The stride of the cut dimension of a tensor that is used to see where an operation puts that dimension."""


@dataclass(frozen=True)
class Cut:
    """Along which dimension a tensor is cut over tensor-parallel ranks, and where the slices come
    from.

    dim: the number of the dimension, from 0.
    source: what is cut, such as the outputs of a layer, for messages.
    ranks: the number of slices.
    outer: the dimension consists of this many runs, each of which is a slice. It is 1 unless heads
        were merged with the samples before them.
    remedy: what to do instead of computing with the slice; empty if this depends on the function.
    """

    dim: int
    source: str
    ranks: int
    outer: int = 1
    remedy: str = ""


class CutSize(int):
    """The size of a cut dimension, and what is computed from it: another number on one process.

    It may be a size again, as of heads. A number that is computed with, as the root that divides
    scores, may not be it.
    """

    refusal: UserError

    def __floordiv__(self, other: int) -> "CutSize":
        return cut_size(int(self) // other, self.refusal)

    def __mul__(self, other: int) -> "CutSize":  # pyright: ignore[reportIncompatibleMethodOverride]
        return cut_size(int(self) * other, self.refusal)

    __rmul__ = __mul__

    def refuse(self, *_: object) -> Any:
        raise self.refusal

    __float__ = __pow__ = __rpow__ = __rtruediv__ = refuse


def cut_size(size: int, refusal: UserError) -> CutSize:
    """Return the size of a cut dimension; `refusal` is raised where it is computed with."""
    result = CutSize(size)
    result.refusal = refusal
    return result


class CutTensor(Tensor):
    """A tensor with a `cut`. Functions of torch return one, or raise UserError."""

    cut: Cut

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _followed(Call(func, tuple(args), dict(kwargs or {})))


def marked(x: Tensor, cut: Cut) -> CutTensor:
    """Return `x` as a tensor that is cut; it shares memory and autograd history with `x`."""
    y = x.as_subclass(CutTensor)
    y.cut = cut
    return y


def unchecked(x: Tensor) -> Tensor:
    """Return `x` without what is known of its cut: what follows is computed on this rank's slice,
    unseen.

    For code that works on slices knowingly, such as a kernel of your own. `x` may be any tensor.
    """
    if not isinstance(x, CutTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


@dataclass(frozen=True)
class Call:
    """A call of a function of torch with a tensor that is cut."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the function, or of the attribute of a tensor that is read."""
        name = getattr(self.func, "__name__", str(self.func))
        if name == "__get__":
            return self.func.__self__.__name__  # type: ignore[attr-defined]
        return name

    def argument(self, position: int, name: str, otherwise: Any = None) -> Any:
        """Return the argument at a position or of a name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else otherwise

    def operands(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        return list(tensors((self.args, self.kwargs)))

    def first_cut(self) -> CutTensor:
        """Return the first tensor that is cut."""
        return next(x for x in self.operands() if isinstance(x, CutTensor))

    def refuse(self, why: str, remedy: str = "") -> UserError:
        """Return the error that says why the function does not keep the cut, and what to do."""
        x = self.first_cut()
        cut = x.cut
        where = getattr(x, "given_to", "")
        function = f"{self.name} in {where}" if where else self.name
        size = x.shape[cut.dim] // cut.outer
        slices = f"tensor-parallel ranks have {size} each of the {size * cut.ranks} {cut.source}"
        return UserError(f"{function} {why}: {slices}; {cut.remedy or remedy or JOIN_AND_SPLIT}")


def _followed(call: Call) -> Any:
    """Return the result of a call, with its cut."""
    name = call.name
    rule = RULES.get(name)
    if rule is None and _is_elementwise(name):
        rule = _elementwise
    if name in ("shape", "size"):
        return _with_cut_size(call)
    if name in COMPARISONS:
        return _result(call)
    place = rule(call) if rule is not None else None
    result = _result(call)
    if not any(True for _ in tensors(result)):
        return result  # a number, a dtype, a text
    if name in UNTOUCHED:
        return result
    if place is None:
        raise call.refuse("is not known to compute each feature from this feature alone")
    return mapped(result, lambda y: marked(y, place(y)))


def _result(call: Call) -> Any:
    """Return the result of the call, or raise UserError if sizes do not fit, as sizes of all
    features would not."""
    try:
        return call.func(*call.args, **call.kwargs)
    except UserError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = f"does not fit a slice of the features ({first_line})"
        raise call.refuse(
            why, "leave the number of heads or features open, e.g. view(..., -1, head_dim)"
        ) from error


Placed = Callable[[Tensor], Cut]
"""The cut of each tensor that a call returns."""


def _with_cut_size(call: Call) -> Any:
    """Return sizes in which that of the cut dimension is a CutSize."""
    x = call.first_cut()
    result = _result(call)
    refusal = call.refuse(
        "is a number to compute with, which is another one on one process",
        "write the number of all features, as the model's configuration has it",
    )
    if isinstance(result, int):
        if call.argument(1, "dim") % x.dim() == x.cut.dim:
            return cut_size(result, refusal)
        return result
    sizes = list(result)
    sizes[x.cut.dim] = cut_size(sizes[x.cut.dim], refusal)
    return torch.Size(sizes)


# The rules. Each returns the cut of what the call returns, or raises UserError.


def _same(call: Call) -> Placed:
    """A function that returns a tensor of the shape of its first argument, element by element."""
    cut = call.first_cut().cut
    return lambda _: cut


@cache
def _pointwise() -> frozenset[str]:
    """Return the names of torch's operators that compute element by element, by torch's own
    tags."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    overloads = ((p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads())
    return frozenset(p.__name__ for p, o in overloads if torch.Tag.pointwise in getattr(p, o).tags)


PYTHON_OPERATORS = (
    "add sub mul truediv floordiv pow mod and or xor invert neg pos abs eq ne lt le gt ge"
)
MORE_ELEMENTWISE = (
    "hardswish logsigmoid softsign tanhshrink multiply divide subtract negative absolute "
    "floor_divide fill_ zero_ greater less less_equal greater_equal not_equal zeros_like ones_like "
    "full_like empty_like copy_ isclose"
)


def _is_elementwise(name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        base = name.strip("_")
        operators = PYTHON_OPERATORS.split()
        return base in operators or base[1:] in operators  # __radd__, __iadd__
    return (
        name in _pointwise() or name.rstrip("_") in _pointwise() or name in MORE_ELEMENTWISE.split()
    )


def _elementwise(call: Call) -> Placed:
    """Operands are aligned from the last dimension: all are cut along one of them, or have no size
    there."""
    for number in (*call.args, *call.kwargs.values()):
        if isinstance(number, CutSize):
            number.refuse()
    operands = call.operands()
    cuts = [x for x in operands if isinstance(x, CutTensor)]
    first = cuts[0]
    from_last = first.dim() - first.cut.dim
    if any(x.dim() - x.cut.dim != from_last or x.cut.outer != first.cut.outer for x in cuts):
        raise call.refuse("takes tensors that are cut along different dimensions")
    size = first.shape[first.cut.dim]
    for x in operands:
        if not isinstance(x, CutTensor):
            _require_beside(call, x, from_last, size)

    def place(y: Tensor) -> Cut:
        if y.dim() < from_last or y.shape[-from_last] != size:
            raise call.refuse("takes a tensor of all features beside a slice of them")
        return replace(first.cut, dim=y.dim() - from_last)

    return place


def _require_beside(call: Call, x: Tensor, from_last: int, size: int) -> None:
    """Raise UserError unless `x`, of which nothing is known, may be combined with a slice.

    It is the same for all features, or a slice itself. What is the same for all has a gradient that
    each rank would compute from its own features only. A slice was computed from weights and has a
    gradient; numbers that code has made for the size of the slice, such as random ones, would be
    the same for different features.
    """
    length = x.shape[-from_last] if x.dim() >= from_last else 1
    if length == size and size > 1:
        if torch.is_grad_enabled() and not x.requires_grad:
            raise call.refuse(
                (
                    f"takes numbers {list(x.shape)} of the size of a slice, not known to be those "
                    "of its features"
                ),
                (
                    "make them for all features and cut them by parallel.split, and compute with "
                    "parallel.unchecked(y)"
                ),
            )
        return
    if length != 1:
        raise call.refuse(
            f"takes a tensor with {length} features beside a slice of {size}",
            'cut the other tensor too, by a layer of style "column" or parallel.split(x, tp, dim), '
            "or make this one whole by parallel.join(y, tp, dim)",
        )
    require_shared_gradient(call, x)


def require_shared_gradient(call: Call, x: Tensor) -> None:
    """Raise UserError if `x`, which all features share, has a gradient that is not summed over
    ranks."""
    if not (x.requires_grad and torch.is_grad_enabled()) or _is_copied(x):
        return
    raise call.refuse(
        f"takes a tensor {list(x.shape)} that all features share, and each rank would compute its "
        "gradient from its own features only",
        "give it as parallel.copy(x, tp), which sums the gradients",
    )


def _is_copied(x: Tensor) -> bool:
    """Return True if `x` was computed from the result of `parallel.copy` alone."""
    node: Any = x.grad_fn
    while node is not None and node.name() != "_CopyBackward":
        before = [n for n, _ in node.next_functions if n is not None]
        node = before[0] if len(before) == 1 else None
    return node is not None


def _view(call: Call) -> Placed:
    """A view that is not told sizes: a transposition, a selection. Strides show where the cut
    dimension goes."""
    x = call.first_cut()
    cut = x.cut
    if x is not call.args[0]:
        raise call.refuse("is indexed by features that are cut")
    if any(True for _ in tensors((call.args[1:], call.kwargs))):
        raise call.refuse("selects by a tensor")
    strides = [0] * x.dim()
    strides[cut.dim] = MOVED_STRIDE
    probe = torch.empty_strided(tuple(x.shape), strides, device="meta")
    views = list(tensors(call.func(probe, *call.args[1:], **call.kwargs)))
    dims = []
    for view in views:
        at = [d for d, stride in enumerate(view.stride()) if stride == MOVED_STRIDE]
        whole = bool(at) and view.shape[at[-1]] == x.shape[cut.dim] and not view.storage_offset()
        if not whole:
            raise call.refuse("takes a part of the features, which is another part on one process")
        dims.append(at[-1])
    if len(set(dims)) > 1:
        raise call.refuse("puts the features into different dimensions")
    return lambda _: replace(cut, dim=dims[0])


def _reshaped(call: Call) -> Placed:
    """A reshape. The slices must stay slices: what is cut is the outermost of the dimensions it is
    merged with."""
    x = call.first_cut()
    cut = x.cut
    before = prod(x.shape[: cut.dim]) * cut.outer
    size = x.shape[cut.dim] // cut.outer
    wanted = _sizes_asked_for(call)

    def place(y: Tensor) -> Cut:
        products = [prod(y.shape[:d]) for d in range(y.dim() + 1)]
        starts = [d for d in range(y.dim()) if products[d] == before]
        if not starts:
            return _merged(call, y, products, before, size)
        derived = {d % y.dim() for d in wanted}
        ones = [d for d in starts if y.shape[d] == 1]
        others = [d for d in starts if y.shape[d] != 1]
        chosen = [d for d in ones if d in derived] or (ones if y.shape[starts[-1]] != size else [])
        dim = (chosen or others or starts)[0]
        # dimensions of size 1 after the features were split from them too
        last = x.dim() - 1 == cut.dim
        reach = before * size + last
        end = next((d for d in range(dim + 1, y.dim() + 1) if products[d] >= reach), y.dim())
        if any(d in derived for d in range(dim + 1, end)) and y.shape[dim] > 1:
            raise call.refuse(
                f"splits the features into {list(y.shape[dim:end])}, of which the number was not "
                "left open that tensor-parallel ranks share",
                (
                    "leave the number of heads open and give the size of a head, e.g. view(..., "
                    "-1, head_dim)"
                ),
            )
        return replace(cut, dim=dim, outer=1)

    return place


def _merged(call: Call, y: Tensor, products: Sequence[int], before: int, size: int) -> Cut:
    """Return the cut of `y`, in which the cut dimension was merged with those before it, as heads
    with samples.

    Raises UserError if it was merged with dimensions after it too.
    """
    dim = max(d for d in range(y.dim()) if products[d] < before)
    outer, rest = divmod(before, products[dim])
    if rest or y.shape[dim] != outer * size:
        raise call.refuse("merges dimensions such that the slices are no slices of the whole")
    return replace(call.first_cut().cut, dim=dim, outer=outer)


def _sizes_asked_for(call: Call) -> list[int]:
    """Return the dimensions whose size was left open or computed from that of the cut dimension.

    For `flatten` and `reshape_as` there are none; for `unflatten` they are counted in the result.
    """
    sizes = call.argument(1, "shape", call.argument(1, "size"))
    first = 0
    if call.name == "unflatten":
        sizes = call.argument(2, "sizes")
        first = call.argument(1, "dim") % call.first_cut().dim()
    elif call.name not in ("view", "reshape"):
        return []
    elif isinstance(sizes, int):
        sizes = call.args[1:]
    if not isinstance(sizes, Sequence):
        return []  # a dtype
    return [first + d for d, size in enumerate(sizes) if isinstance(size, CutSize) or size == -1]


def _dims(call: Call, position: int, otherwise: Any = None) -> list[int] | None:
    """Return the dimensions that an argument names, from 0; None if it names none."""
    named = call.argument(position, "dim", call.kwargs.get("axis", otherwise))
    if named is None:
        return None
    dims = [named] if isinstance(named, int) else list(named)
    return [d % call.first_cut().dim() for d in dims] or None


def _along(position: int, otherwise: Any = None) -> Callable[[Call], Placed]:
    """A function that combines the elements along a dimension, and keeps the shape but for this
    dimension."""

    def rule(call: Call) -> Placed:
        x = call.first_cut()
        dims = _dims(call, position, otherwise)
        if dims is None or x.cut.dim in dims or x is not call.args[0]:
            raise call.refuse("combines the features that ranks share with each other")
        return lambda _: x.cut

    return rule


def _reduction(position: int = 1) -> Callable[[Call], Placed]:
    """A function that removes dimensions, or keeps them with the size 1."""

    def rule(call: Call) -> Placed:
        x = call.first_cut()
        dims = _dims(call, position)
        if isinstance(call.argument(1, "other"), Tensor):
            return _elementwise(call)  # the larger of two tensors
        if dims is None or x.cut.dim in dims:
            raise call.refuse("combines the features that ranks share with each other")
        before = sum(d < x.cut.dim for d in dims)
        return lambda y: replace(x.cut, dim=x.cut.dim - (before if y.dim() < x.dim() else 0))

    return rule


def _dropout(call: Call) -> Placed:
    if call.argument(1, "p", 0.5) == 0 or not call.argument(2, "training", True):
        return _same(call)
    raise call.refuse(
        "would drop the same elements of different features on each rank",
        (
            "call an nn.Dropout of the model, which parallelize replaces by one that drops what "
            "one process drops"
        ),
    )


def _product(call: Call) -> Placed:
    """A product of matrices: rows, columns and batches may be cut, the dimension that is summed
    over may not."""
    a, b = call.args[:2]
    if call.name == "__rmatmul__":
        a, b = b, a
    if a.dim() < 2 or b.dim() < 2:
        raise call.refuse("multiplies by a vector")
    places = [x.dim() - x.cut.dim if isinstance(x, CutTensor) else 0 for x in (a, b)]
    if places[0] == 1 or places[1] == 2:
        raise call.refuse("sums over the features that ranks share")
    cut = call.first_cut().cut
    from_last = max(places)
    if max(places) > 2 and min(places) > 0:
        if places[0] != places[1] or a.cut.outer != b.cut.outer:
            raise call.refuse("takes tensors that are cut along different dimensions")
    elif min(places) > 0:
        raise call.refuse("takes tensors that are cut along different dimensions")
    else:
        other = b if isinstance(a, CutTensor) else a
        if from_last > 2:
            _require_beside(call, other, from_last, call.first_cut().shape[cut.dim])
        else:
            require_shared_gradient(call, other)
    return lambda y: replace(cut, dim=y.dim() - from_last)


def _linear(call: Call) -> Placed:
    """F.linear with a weight that each rank has whole."""
    x = call.args[0]
    if not isinstance(x, CutTensor) or x.cut.dim == x.dim() - 1:
        raise call.refuse("sums over the features that ranks share")
    for other in call.operands():
        if other is not x:
            require_shared_gradient(call, other)
    return lambda _: x.cut


def _einsum(call: Call) -> Placed:
    equation, *operands = call.args
    operands = list(tensors(operands))
    terms = re.split(",|->", str(equation).replace(" ", ""))
    if "..." in equation or "->" not in equation:
        raise call.refuse(
            "is followed only with an equation that names all dimensions and the result's"
        )
    first = call.first_cut()
    letter = next(
        term[first.cut.dim] for term, x in zip(terms, operands, strict=False) if x is first
    )
    for term, x in zip(terms, operands, strict=False):
        if isinstance(x, CutTensor):
            if term[x.cut.dim] != letter or x.cut.outer != first.cut.outer:
                raise call.refuse("takes tensors that are cut along different dimensions")
        elif letter in term:
            _require_beside(call, x, x.dim() - term.index(letter), first.shape[first.cut.dim])
        else:
            require_shared_gradient(call, x)
    if letter not in terms[-1]:
        raise call.refuse("sums over the features that ranks share")
    return lambda _: replace(first.cut, dim=terms[-1].index(letter))


def _attention(call: Call) -> Placed:
    """F.scaled_dot_product_attention over heads that are cut."""
    query, key, value = (call.argument(n, name) for n, name in enumerate(("query", "key", "value")))
    mask = call.argument(3, "attn_mask")
    if call.argument(4, "dropout_p", 0.0):
        raise call.refuse(
            "would drop the same elements of different heads on each rank",
            "give it dropout_p=0.0, or compute the weights and call an nn.Dropout of the model",
        )
    first = call.first_cut()
    from_last = first.dim() - first.cut.dim
    if from_last < 3:
        raise call.refuse("sums over the features that ranks share")
    for x in (query, key, value):
        if isinstance(x, CutTensor):
            if x.dim() - x.cut.dim != from_last:
                raise call.refuse("takes tensors that are cut along different dimensions")
        else:
            _require_beside(call, x, from_last, first.shape[first.cut.dim])
    if isinstance(mask, Tensor) and not isinstance(mask, CutTensor):
        _require_beside(call, mask, from_last, first.shape[first.cut.dim])
    return lambda y: replace(first.cut, dim=y.dim() - from_last)


def _joined(call: Call) -> Placed:
    """torch.cat along another dimension than the cut one."""
    parts = list(call.args[0])
    first = call.first_cut()
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0)) % first.dim()
    size = first.shape[first.cut.dim]
    if dim == first.cut.dim:
        raise call.refuse(
            "puts slices of different features one after the other, as one process does not"
        )
    for x in parts:
        if isinstance(x, CutTensor):
            if x.cut.dim != first.cut.dim or x.cut.outer != first.cut.outer:
                raise call.refuse("takes tensors that are cut along different dimensions")
        elif size == 1:
            raise call.refuse("takes a tensor of all features beside a slice of them")
    return lambda _: first.cut


def _stacked(call: Call) -> Placed:
    first = call.first_cut()
    dim = call.argument(1, "dim", 0) % (first.dim() + 1)
    for x in call.args[0]:
        if isinstance(x, CutTensor):
            if x.cut.dim != first.cut.dim or x.cut.outer != first.cut.outer:
                raise call.refuse("takes tensors that are cut along different dimensions")
        elif first.shape[first.cut.dim] == 1:
            raise call.refuse("takes a tensor of all features beside a slice of them")
    return lambda _: replace(first.cut, dim=first.cut.dim + (dim <= first.cut.dim))


def _repeated(call: Call) -> Placed:
    """Tensor.repeat_interleave by one number: a head that is repeated stays on its rank."""
    x = call.first_cut()
    dims = _dims(call, 2)
    if dims is None or not isinstance(call.argument(1, "repeats"), int) or x.cut.outer != 1:
        raise call.refuse("repeats elements by a rule that is not followed")
    return lambda _: x.cut


def _padded(call: Call) -> Placed:
    x = call.first_cut()
    before = 2 * (x.dim() - 1 - x.cut.dim)
    if any(call.argument(1, "pad")[before : before + 2]):
        raise call.refuse("pads the features of each slice")
    return lambda _: x.cut


def _stays(call: Call) -> Placed:
    """torch.view_as_complex and view_as_real, which take or add a last dimension of size 2."""
    x = call.first_cut()
    if call.name == "view_as_complex" and x.cut.dim == x.dim() - 1:
        raise call.refuse("combines the features that ranks share with each other")
    return lambda _: x.cut


def _triangle(call: Call) -> Placed:
    x = call.first_cut()
    if x.cut.dim >= x.dim() - 2:
        raise call.refuse("depends on the numbers of the features, which differ between ranks")
    return lambda _: x.cut


def _loss(call: Call) -> Placed:
    raise call.refuse(
        "compares a slice of the outputs with targets of all of them",
        "for a cross entropy use loss_fn = parallel.vocab_parallel_loss(head), for another loss "
        "make the outputs whole by parallel.join(y, tp, -1)",
    )


def _normalized(call: Call) -> Placed:
    """F.layer_norm and F.rms_norm over the last dimensions."""
    x = call.first_cut()
    if x is not call.args[0] or x.cut.dim >= x.dim() - len(call.argument(1, "normalized_shape")):
        raise call.refuse("combines the features that ranks share with each other")
    for other in call.operands():
        if other is not x:
            require_shared_gradient(call, other)
    return lambda _: x.cut


def _of_channels(call: Call) -> Placed:
    raise call.refuse("combines features with each other, or with numbers of all features")


def _halves(call: Call) -> Placed:
    raise call.refuse(
        "multiplies one half of each slice by the other, which is another half on one process",
        'give each half a layer of style "column" of its own, as gate and up',
    )


def _set(call: Call) -> Placed:
    """x[index] = value: the index selects no features, and the value is one number."""
    x, index, value = call.args
    if not isinstance(x, CutTensor) or isinstance(value, Tensor):
        raise call.refuse(
            "writes tensors into each other that are cut differently, or is not followed"
        )
    return _view(Call(torch.Tensor.__getitem__, (x, index), {}))


def _named(
    names: str, rule: Callable[[Call], Placed]
) -> Iterator[tuple[str, Callable[[Call], Placed]]]:
    return ((name, rule) for name in names.split())


CASTS = (
    "to float half double bfloat16 type type_as int long bool cuda cpu contiguous clone detach "
    "requires_grad_ data"
)
VIEWS = (
    "transpose swapaxes swapdims permute movedim moveaxis t T mT unsqueeze squeeze select narrow "
    "__getitem__ expand chunk split tensor_split unbind"
)
LOSSES = (
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits cosine_similarity cosine_embedding_loss gaussian_nll_loss "
    "poisson_nll_loss soft_margin_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss ctc_loss"
)
RULES: dict[str, Callable[[Call], Placed]] = dict(
    [
        *_named(CASTS, _same),
        *_named(VIEWS, _view),
        *_named("view reshape flatten unflatten", _reshaped),
        *_named("softmax log_softmax softmin cumsum cumprod logcumsumexp flip argsort", _along(1)),
        *_named("normalize", _along(2, 1)),
        *_named(
            "sum mean amax amin prod logsumexp var std nansum argmax argmin max min", _reduction()
        ),
        *_named("any all median count_nonzero", _reduction()),
        *_named("norm", _reduction(2)),
        *_named("dropout", _dropout),
        *_named("matmul __matmul__ __rmatmul__ bmm mm", _product),
        *_named("linear", _linear),
        *_named("einsum", _einsum),
        *_named("scaled_dot_product_attention", _attention),
        *_named("cat concat concatenate", _joined),
        *_named("stack", _stacked),
        *_named("repeat_interleave", _repeated),
        *_named("pad", _padded),
        *_named("view_as_complex view_as_real", _stays),
        *_named("tril triu", _triangle),
        *_named(LOSSES, _loss),
        *_named("layer_norm rms_norm", _normalized),
        *_named("batch_norm instance_norm group_norm local_response_norm", _of_channels),
        *_named("glu", _halves),
        *_named("__setitem__", _set),
    ]
)
COMPARISONS = {"equal", "allclose"}
"""Functions that compare slices and return a bool, which nothing is computed from."""
UNTOUCHED = {
    "grad",
    "_grad",
    "grad_fn",
    "backward",
    "register_hook",
    "retain_grad",
    "_backward_hooks",
    "__deepcopy__",
}
"""What returns tensors that are not computed from the slice, or nothing."""
