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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError
from megaprec.precision.nested import map_tensors, tensors
from megaprec.torch_private import without_torch_function

JOIN_AND_SPLIT = (
    "make whole what needs all features, y = parallel.join(y, tp, dim), and cut it again by "
    'parallel.split, or give the layer before it the style "whole"'
)
# the stride of the cut dimension of a probe, by which it is found again after an operation
MOVED_STRIDE = 1 << 40

FIRST_ARGUMENTS = ("input", "tensors")  # names of the first one of most functions of torch

# The reasons that several rules have for a refusal. Ranks "share" features of which each has some.
COMBINES = "combines the features that ranks share with each other"
SUMS = "sums over the features that ranks share"
DIFFERENT_CUTS = "takes tensors that are cut along different dimensions"
ALL_BESIDE_SLICE = "takes a tensor of all features beside a slice of them"


@dataclass(frozen=True)
class TensorCut:
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
    """The size of a cut dimension, or a number computed from it: another number on one process.

    It may be used as a size, such as the number of heads, so products and whole quotients are
    sizes too. Other arithmetic, such as the root that divides scores, raises `refusal`.
    """

    refusal: UserError

    def __floordiv__(self, other: int) -> "CutSize":
        return cut_size(int(self) // other, self.refusal)

    def __mul__(self, other: int) -> "CutSize":  # pyright: ignore[reportIncompatibleMethodOverride]
        return cut_size(int(self) * other, self.refusal)

    __rmul__ = __mul__

    def refuse(self, *_: object) -> Any:
        raise self.refusal

    # what math.sqrt(size), size ** 0.5 and 1 / size call
    __float__ = __pow__ = __rpow__ = __rtruediv__ = refuse


def cut_size(size: int, refusal: UserError) -> CutSize:
    """Return the size of a cut dimension; `refusal` is raised where it is computed with."""
    result = CutSize(size)
    result.refusal = refusal
    return result


class CutTensor(Tensor):
    """A tensor with a `cut`. Functions of torch return one, or raise UserError."""

    cut: TensorCut

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with without_torch_function():
            return _follow(CutCall.of(func, args, kwargs or {}))


def mark_cut(x: Tensor, cut: TensorCut) -> CutTensor:
    """Return `x` as a tensor that is cut; it shares memory and autograd history with `x`."""
    y = x.as_subclass(CutTensor)
    y.cut = cut
    return y


def unchecked(x: Tensor) -> Tensor:
    """Return `x` as a plain tensor: operations on this rank's slice are then no longer followed.

    For code that works on slices knowingly, such as a kernel of your own. `x` may be any tensor.
    """
    if not isinstance(x, CutTensor):
        return x
    with without_torch_function():
        return x.as_subclass(Tensor)


@dataclass(frozen=True)
class CutCall:
    """A call of a function of torch with a tensor that is cut."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "CutCall":
        """Return the call of a function, with its first argument by position: the rules look for it
        there."""
        named = dict(kwargs)
        for name in FIRST_ARGUMENTS:
            if not args and name in named:
                args = (named.pop(name),)
        return cls(func, tuple(args), named)

    @property
    def name(self) -> str:
        """Return the name of the function, or of the attribute of a tensor that is read."""
        name = getattr(self.func, "__name__", str(self.func))
        if name == "__get__":
            return self.func.__self__.__name__  # type: ignore[attr-defined]
        return name

    def argument(
        self,
        position: int,
        name: str,
        default: Any = None,
    ) -> Any:
        """Return the argument at a position or of a name; `default` if there is none."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def operands(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        return list(tensors((self.args, self.kwargs)))

    def first_cut(self) -> CutTensor:
        """Return the first tensor that is cut."""
        return next(x for x in self.operands() if isinstance(x, CutTensor))

    def refuse(self, reason: str, remedy: str = "") -> UserError:
        """Return the error that says why the function does not keep the cut, and what to do."""
        x = self.first_cut()
        cut = x.cut
        module_path = getattr(x, "given_to", "")
        function = f"{self.name} in {module_path}" if module_path else self.name
        size = x.shape[cut.dim] // cut.outer
        slices = f"tensor-parallel ranks have {size} each of the {size * cut.ranks} {cut.source}"
        advice = cut.remedy or remedy or JOIN_AND_SPLIT
        return UserError.of(
            "parallel.module_refused",
            function=function,
            reason=reason,
            slices=slices,
            advice=advice,
        )


TensorCutOf = Callable[[Tensor], TensorCut]
"""The cut of each tensor that a call returns."""
Rule = Callable[[CutCall], TensorCutOf]
"""What a function does to a cut: it returns the cut of what a call returns, or raises UserError."""


def _follow(call: CutCall) -> Any:
    """Run a call with a tensor that is cut, and return its result; tensors in it are marked as cut.

    Raises UserError, before the function has run, if a rule refuses the call.
    """
    name = call.name
    if name in ("shape", "size"):
        return _sizes_with_cut(call)
    # a bool, from which nothing is computed
    if name in COMPARISONS:
        return _run(call)
    rule = RULES.get(name)
    if rule is None and _is_elementwise(name):
        rule = _elementwise_rule
    # before the function runs: one that writes in place has then changed nothing if it is refused
    cut_of = rule(call) if rule is not None else None
    result = _run(call)
    # a number, a dtype, a text
    if not _has_tensors(result):
        return result
    if name in UNTOUCHED:
        return result
    if cut_of is None:
        raise call.refuse("is not known to compute each feature from this feature alone")
    return map_tensors(result, lambda y: mark_cut(y, cut_of(y)))


def _has_tensors(values: Any) -> bool:
    return next(iter(tensors(values)), None) is not None


def _run(call: CutCall) -> Any:
    """Run the function of a call, and return its result.

    An error of torch becomes a UserError that says what a slice has to do with it: sizes that the
    code names may fit all features, and not a slice of them.
    """
    try:
        return call.func(*call.args, **call.kwargs)
    except UserError:
        raise  # of a rule within
    except (RuntimeError, ValueError, IndexError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise call.refuse(
            f"does not fit a slice of the features ({first_line})",
            "leave the number of heads or features open, e.g. view(..., -1, head_dim)",
        ) from error


def _sizes_with_cut(call: CutCall) -> Any:
    """Return sizes in which that of the cut dimension is a CutSize."""
    x = call.first_cut()
    result = _run(call)
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


# The rules.


def _same_shape_rule(call: CutCall) -> TensorCutOf:
    """A function that returns a tensor of the shape of its first argument, element by element."""
    cut = call.first_cut().cut
    return lambda _: cut


@cache
def _pointwise_names() -> frozenset[str]:
    """Return the names of torch's operators that compute element by element, by torch's own
    tags."""
    names: set[str] = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads"):
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(torch.Tag.pointwise in overload.tags for overload in overloads):
            names.add(packet.__name__)
    return frozenset(names)


PYTHON_OPERATORS = (
    "add sub mul truediv floordiv pow mod and or xor invert neg pos abs eq ne lt le gt ge"
)
MORE_ELEMENTWISE = (
    "hardswish logsigmoid softsign tanhshrink multiply divide subtract negative absolute "
    "floor_divide fill_ zero_ greater less less_equal greater_equal not_equal zeros_like ones_like "
    "full_like empty_like copy_ isclose"
)


def _is_elementwise(name: str) -> bool:
    """Return True if the function of this name computes element by element, as far as it is
    known."""
    if name.startswith("__") and name.endswith("__"):
        operator = name.strip("_")
        without_prefix = operator[1:]  # "add" of __radd__ and __iadd__
        operators = PYTHON_OPERATORS.split()
        return operator in operators or without_prefix in operators
    if name in MORE_ELEMENTWISE.split():
        return True
    pointwise = _pointwise_names()
    return name in pointwise or name.rstrip("_") in pointwise  # add_ as add


def _elementwise_rule(call: CutCall) -> TensorCutOf:
    """The rule of functions of several tensors, element by element.

    Operands are aligned from the last dimension: all are cut along the same one, or are the same
    for all features there.
    """
    # the number of this rank's features is not that of one process
    for number in (*call.args, *call.kwargs.values()):
        if isinstance(number, CutSize):
            number.refuse()
    operands = call.operands()
    first = call.first_cut()
    from_last = first.dim() - first.cut.dim
    for x in operands:
        if isinstance(x, CutTensor) and not _is_cut_alike(x, first):
            raise call.refuse(DIFFERENT_CUTS)
    size = first.shape[first.cut.dim]
    for x in operands:
        if not isinstance(x, CutTensor):
            _require_shared_or_slice(call, x, from_last, size)

    def cut_of(y: Tensor) -> TensorCut:
        # broadcast against a tensor of all features
        if y.dim() < from_last or y.shape[-from_last] != size:
            raise call.refuse(ALL_BESIDE_SLICE)
        return replace(first.cut, dim=y.dim() - from_last)

    return cut_of


def _is_cut_alike(x: CutTensor, other: CutTensor) -> bool:
    """Return True if both are cut along the same dimension, counted from the last one."""
    same_dim = x.dim() - x.cut.dim == other.dim() - other.cut.dim
    return same_dim and x.cut.outer == other.cut.outer


def _require_shared_or_slice(
    call: CutCall,
    x: Tensor,
    from_last: int,
    size: int,
) -> None:
    """Raise UserError unless `x`, of which nothing is known, may be combined with a slice.

    from_last: the cut dimension, counted from the last one, which is 1.
    size: that of the slice.

    `x` is the same for all features, or a slice itself. What is the same for all has a gradient
    that each rank would compute from its own features only. A slice was computed from weights and
    has a gradient; numbers that code has made for the size of the slice, such as random ones, would
    be the same for different features.
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
    require_summed_gradient(call, x)


def require_summed_gradient(call: CutCall, x: Tensor) -> None:
    """Raise UserError unless `x` is the same for all features, with a gradient that is summed over
    ranks, if it has one."""
    if isinstance(x, CutTensor):
        raise call.refuse(DIFFERENT_CUTS)
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    if not has_gradient or _is_copied(x):
        return
    raise call.refuse(
        f"takes {_name_of(x)} {list(x.shape)} that all features share, and each rank would "
        "compute its gradient from its own features only",
        "give it as parallel.copy(x, tp), which sums the gradients; where a norm over the features "
        "of a head takes it, put an nn.RMSNorm or nn.LayerNorm with its weight in the place of "
        'that norm, of the style "heads"',
    )


def _name_of(x: Tensor) -> str:
    """Return the name of a parameter that `parallelize` has named, or "a tensor"."""
    if not isinstance(x, nn.Parameter) or not has_layout(x):
        return "a tensor"
    return layout_of(x).parts[0].name


def _is_copied(x: Tensor) -> bool:
    """Return True if `x` was computed from the result of `parallel.copy` alone."""
    node: Any = x.grad_fn
    # Up the graph as long as a result has one input with a gradient only: of several, one may not
    # be a copy.
    while node is not None and node.name() != "_CopyBackward":
        inputs = [function for function, _ in node.next_functions if function is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return node is not None


def _view_rule(call: CutCall) -> TensorCutOf:
    """The rule of views that are not told sizes, such as a transposition or a selection.

    The function is called with a probe: a tensor of the same shape without memory, in which the cut
    dimension alone has a stride. The strides of the result show where that dimension is.
    """
    x = call.first_cut()
    cut = x.cut
    if x is not call.args[0]:
        raise call.refuse("is indexed by features that are cut")
    if _has_tensors((call.args[1:], call.kwargs)):
        raise call.refuse("selects by a tensor")
    strides = [0] * x.dim()
    strides[cut.dim] = MOVED_STRIDE
    probe = torch.empty_strided(tuple(x.shape), strides, device="meta")
    dims_of_views: list[int] = []  # the cut dimension in each tensor that is returned
    for view in tensors(call.func(probe, *call.args[1:], **call.kwargs)):
        with_stride = [dim for dim, stride in enumerate(view.stride()) if stride == MOVED_STRIDE]
        has_all = bool(with_stride) and view.shape[with_stride[-1]] == x.shape[cut.dim]
        # only the cut dimension has a stride: an offset is a part of it that begins later
        if not has_all or view.storage_offset() != 0:
            raise call.refuse("takes a part of the features, which is another part on one process")
        dims_of_views.append(with_stride[-1])
    if len(set(dims_of_views)) > 1:
        raise call.refuse("puts the features into different dimensions")
    return lambda _: replace(cut, dim=dims_of_views[0])


def _reshape_rule(call: CutCall) -> TensorCutOf:
    """The rule of reshapes, in which the slices must stay slices.

    Of [s, b, features of this rank] each index (s, b) has one slice. In the result [s, b, heads,
    width] the slices begin at the dimension `heads`, which is then the cut one. In the result
    [s, b * features] they begin within a dimension (`_merged_cut`).
    """
    x = call.first_cut()
    cut = x.cut
    slice_count = prod(x.shape[: cut.dim]) * cut.outer  # one slice for each index before the cut
    size = x.shape[cut.dim] // cut.outer  # of a slice along the cut dimension
    open_dims = _open_dims(call)

    def cut_of(y: Tensor) -> TensorCut:
        # Elements keep their order. So a slice begins at a dimension of y before which there are as
        # many indices as there are slices: at one, or at several if those between have the size 1.
        counts_before = [prod(y.shape[:dim]) for dim in range(y.dim() + 1)]
        starts = [dim for dim in range(y.dim()) if counts_before[dim] == slice_count]
        if not starts:
            return _merged_cut(call, y, counts_before, slice_count, size)
        open_in_result = {dim % y.dim() for dim in open_dims}  # a negative one counts from the end
        dim = _start_of_slices(y, starts, open_in_result, size)
        # The cut dimension of x became the dimensions `dim` to `end` of y. If it was the last one
        # of x, dimensions of size 1 at the end of y were split from it too.
        end = y.dim()
        if cut.dim < x.dim() - 1:
            end = dim + 1
            while end < y.dim() and counts_before[end] < slice_count * size:
                end += 1
        if y.shape[dim] > 1 and not open_in_result.isdisjoint(range(dim + 1, end)):
            raise call.refuse(
                f"splits the features into {list(y.shape[dim:end])}, of which the number was not "
                "left open that tensor-parallel ranks share",
                "leave the number of heads open and give the size of a head, e.g. view(..., -1, "
                "head_dim)",
            )
        return replace(cut, dim=dim, outer=1)

    return cut_of


def _start_of_slices(
    y: Tensor,
    starts: Sequence[int],
    open_dims: set[int],
    size: int,
) -> int:
    """Return the cut dimension of the result `y` of a reshape.

    starts: the dimensions at which a slice can begin; all but the last have the size 1. One of size
        1 may be the number of heads of this rank: if it was left open, or if the last one has not
        the size of the slice.
    open_dims: the dimensions of y whose size was left open.
    size: that of a slice along the cut dimension before.
    """
    dims_of_size_1 = [dim for dim in starts if y.shape[dim] == 1]
    for dim in dims_of_size_1:
        if dim in open_dims:
            return dim
    last = starts[-1]
    if dims_of_size_1 and y.shape[last] != size:
        return dims_of_size_1[0]
    for dim in starts:
        if y.shape[dim] != 1:
            return dim
    return starts[0]


def _merged_cut(
    call: CutCall,
    y: Tensor,
    counts_before: Sequence[int],
    slice_count: int,
    size: int,
) -> TensorCut:
    """Return the cut of `y`, the result of a reshape that has merged the cut dimension with those
    before it, as heads with samples.

    counts_before: the number of indices before each dimension of y.
    slice_count: the number of slices. size: of a slice along the cut dimension.
    Raises UserError if it was merged with dimensions after it too.
    """
    dim = max(dim for dim in range(y.dim()) if counts_before[dim] < slice_count)
    outer, remainder = divmod(slice_count, counts_before[dim])
    if remainder or y.shape[dim] != outer * size:
        raise call.refuse("merges dimensions such that the slices are no slices of the whole")
    return replace(call.first_cut().cut, dim=dim, outer=outer)


def _open_dims(call: CutCall) -> list[int]:
    """Return the dimensions of a reshape's result whose size the call leaves open (-1), or has
    computed from that of the cut dimension.

    Numbers may be negative, counted from the end. `flatten` and `reshape_as` leave none open.
    """
    sizes = call.argument(1, "shape", call.argument(1, "size"))
    first_dim = 0
    if call.name == "unflatten":
        sizes = call.argument(2, "sizes")
        first_dim = call.argument(1, "dim") % call.first_cut().dim()
    elif call.name not in ("view", "reshape"):
        return []
    elif isinstance(sizes, int):
        sizes = call.args[1:]
    if not isinstance(sizes, Sequence):
        return []  # a dtype, which `view` takes too
    return [
        first_dim + dim for dim, size in enumerate(sizes) if isinstance(size, CutSize) or size == -1
    ]


def _dims_argument(
    call: CutCall,
    position: int,
    default: Any = None,
) -> list[int] | None:
    """Return the dimensions that an argument names, from 0; None if it names none."""
    named = call.argument(position, "dim", call.kwargs.get("axis", default))
    if named is None:
        return None
    dims = [named] if isinstance(named, int) else list(named)
    return [dim % call.first_cut().dim() for dim in dims] or None


def _along_dim_rule(position: int, default: Any = None) -> Rule:
    """Return the rule of functions that combine the elements along a dimension, such as softmax,
    and keep the shape but for this dimension.

    position: of the argument `dim`. default: its value if the call has none.
    """

    def rule(call: CutCall) -> TensorCutOf:
        x = call.first_cut()
        dims = _dims_argument(call, position, default)
        if dims is None or x.cut.dim in dims or x is not call.args[0]:
            raise call.refuse(COMBINES)
        return lambda _: x.cut

    return rule


def _reduction_rule(position: int = 1) -> Rule:
    """Return the rule of functions that remove dimensions, such as sum, or keep them with the size
    1. position: of the argument `dim`."""

    def rule(call: CutCall) -> TensorCutOf:
        x = call.first_cut()
        if isinstance(call.argument(1, "other"), Tensor):
            return _elementwise_rule(call)  # torch.max(x, other), element by element
        dims = _dims_argument(call, position)
        if dims is None or x.cut.dim in dims:
            raise call.refuse(COMBINES)
        removed_before = sum(dim < x.cut.dim for dim in dims)

        def cut_of(y: Tensor) -> TensorCut:
            if y.dim() == x.dim():  # keepdim
                return x.cut
            return replace(x.cut, dim=x.cut.dim - removed_before)

        return cut_of

    return rule


def _dropout_rule(call: CutCall) -> TensorCutOf:
    """Dropout that drops nothing keeps the cut; any other is refused."""
    if call.argument(1, "p", 0.5) == 0 or not call.argument(2, "training", True):
        return _same_shape_rule(call)
    raise call.refuse(
        "would drop the same elements of different features on each rank",
        "call an nn.Dropout of the model, which parallelize replaces by one that drops what one "
        "process drops",
    )


def _matmul_rule(call: CutCall) -> TensorCutOf:
    """A product of matrices: rows, columns and batches may be cut, the dimension that is summed
    over may not."""
    left, right = call.args[:2]
    # Python calls it with the right operand first
    if call.name == "__rmatmul__":
        left, right = right, left
    if left.dim() < 2 or right.dim() < 2:
        raise call.refuse("multiplies by a vector")
    # Counted from the last dimension: 1 are columns, 2 are rows, more are batches; 0: not cut.
    left_cut = _cut_from_last(left)
    right_cut = _cut_from_last(right)
    if left_cut == 1 or right_cut == 2:
        raise call.refuse(SUMS)
    first = call.first_cut()
    from_last = max(left_cut, right_cut)
    if left_cut and right_cut:
        if from_last <= 2 or not _is_cut_alike(left, right):  # only batches fit each other
            raise call.refuse(DIFFERENT_CUTS)
    else:
        uncut = right if left_cut else left
        if from_last > 2:
            _require_shared_or_slice(call, uncut, from_last, first.shape[first.cut.dim])
        else:
            require_summed_gradient(call, uncut)
    return lambda y: replace(first.cut, dim=y.dim() - from_last)


def _cut_from_last(x: Tensor) -> int:
    """Return the cut dimension of `x`, counted from the last one as 1; 0 if it is not cut."""
    return x.dim() - x.cut.dim if isinstance(x, CutTensor) else 0


def _linear_rule(call: CutCall) -> TensorCutOf:
    """F.linear with a weight that each rank has whole keeps a cut along any dimension but the last,
    which it sums over; with an input that is not cut it is refused."""
    x = call.args[0]
    if not isinstance(x, CutTensor) or x.cut.dim == x.dim() - 1:
        raise call.refuse(SUMS)
    for operand in call.operands():
        if operand is not x:
            require_summed_gradient(call, operand)
    return lambda _: x.cut


def _einsum_rule(call: CutCall) -> TensorCutOf:
    """torch.einsum: the letter of the cut dimension is the same in all operands, and is kept."""
    equation, *arguments = call.args
    operands = list(tensors(arguments))
    if "..." in equation or "->" not in equation:
        raise call.refuse(
            "is followed only with an equation that names all dimensions and the result's"
        )
    *terms, result_term = re.split(",|->", str(equation).replace(" ", ""))
    first = call.first_cut()
    # the letter of the cut dimension, by the first operand that is cut
    letter = ""
    for term, x in zip(terms, operands, strict=False):
        if x is first:
            letter = term[first.cut.dim]
            break
    for term, x in zip(terms, operands, strict=False):
        if isinstance(x, CutTensor):
            if term[x.cut.dim] != letter or x.cut.outer != first.cut.outer:
                raise call.refuse(DIFFERENT_CUTS)
        elif letter in term:
            from_last = x.dim() - term.index(letter)
            _require_shared_or_slice(call, x, from_last, first.shape[first.cut.dim])
        else:
            require_summed_gradient(call, x)
    if letter not in result_term:
        raise call.refuse(SUMS)
    return lambda _: replace(first.cut, dim=result_term.index(letter))


def _attention_rule(call: CutCall) -> TensorCutOf:
    """F.scaled_dot_product_attention over heads that are cut."""
    query = call.argument(0, "query")
    key = call.argument(1, "key")
    value = call.argument(2, "value")
    mask = call.argument(3, "attn_mask")
    if call.argument(4, "dropout_p", 0.0):
        raise call.refuse(
            "would drop the same elements of different heads on each rank",
            "give it dropout_p=0.0, or compute the weights and call an nn.Dropout of the model",
        )
    first = call.first_cut()
    from_last = first.dim() - first.cut.dim
    # scores are sums over the features of a head, and probabilities over the keys
    if from_last < 3:
        raise call.refuse(SUMS)
    size = first.shape[first.cut.dim]
    masks = [mask] if isinstance(mask, Tensor) else []
    for x in (query, key, value, *masks):
        if not isinstance(x, CutTensor):
            _require_shared_or_slice(call, x, from_last, size)
        elif not _is_cut_alike(x, first):
            raise call.refuse(DIFFERENT_CUTS)
    return lambda y: replace(first.cut, dim=y.dim() - from_last)


def _concatenation_rule(call: CutCall) -> TensorCutOf:
    """torch.cat along another dimension than the cut one."""
    first = call.first_cut()
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0)) % first.dim()
    if dim == first.cut.dim:
        raise call.refuse(
            "puts slices of different features one after the other, as one process does not"
        )
    _require_cut_alike(call, call.args[0])
    return lambda _: first.cut


def _stack_rule(call: CutCall) -> TensorCutOf:
    """torch.stack, whose new dimension may come before the cut one."""
    first = call.first_cut()
    new_dim = call.argument(1, "dim", 0) % (first.dim() + 1)
    _require_cut_alike(call, call.args[0])
    dim = first.cut.dim
    if new_dim <= dim:
        dim += 1
    return lambda _: replace(first.cut, dim=dim)


def _require_cut_alike(call: CutCall, operands: Iterable[Tensor]) -> None:
    """Raise UserError unless the tensors, all of as many dimensions, are cut along the same one."""
    first = call.first_cut()
    for x in operands:
        if isinstance(x, CutTensor):
            if x.cut.dim != first.cut.dim or x.cut.outer != first.cut.outer:
                raise call.refuse(DIFFERENT_CUTS)
        # torch.cat leaves out a tensor without elements, as a cache begins with; of others the size
        # says that it is a slice, unless a slice has the size 1
        elif x.numel() and first.shape[first.cut.dim] == 1:
            raise call.refuse(ALL_BESIDE_SLICE)


def _repeat_rule(call: CutCall) -> TensorCutOf:
    """Tensor.repeat_interleave by one number: a head that is repeated stays on its rank."""
    x = call.first_cut()
    dims = _dims_argument(call, 2)
    if dims is None or not isinstance(call.argument(1, "repeats"), int) or x.cut.outer != 1:
        raise call.refuse("repeats elements by a rule that is not followed")
    return lambda _: x.cut


def _pad_rule(call: CutCall) -> TensorCutOf:
    """F.pad of other dimensions."""
    x = call.first_cut()
    position = 2 * (x.dim() - 1 - x.cut.dim)  # two numbers a dimension, from the last one
    if any(call.argument(1, "pad")[position : position + 2]):
        raise call.refuse("pads the features of each slice")
    return lambda _: x.cut


def _complex_rule(call: CutCall) -> TensorCutOf:
    """torch.view_as_complex and view_as_real, which take or add a last dimension of size 2."""
    x = call.first_cut()
    if call.name == "view_as_complex" and x.cut.dim == x.dim() - 1:
        raise call.refuse(COMBINES)
    return lambda _: x.cut


def _triangle_rule(call: CutCall) -> TensorCutOf:
    """torch.tril and triu of matrices that are not cut."""
    x = call.first_cut()
    if x.cut.dim >= x.dim() - 2:
        raise call.refuse("depends on the numbers of the features, which differ between ranks")
    return lambda _: x.cut


def _refuse_loss(call: CutCall) -> TensorCutOf:
    raise call.refuse(
        "compares a slice of the outputs with targets of all of them",
        "for a cross entropy use loss_fn = parallel.vocab_parallel_loss(head), for another loss "
        "make the outputs whole by parallel.join(y, tp, -1)",
    )


def _norm_rule(call: CutCall) -> TensorCutOf:
    """F.layer_norm and F.rms_norm over the last dimensions."""
    x = call.first_cut()
    first_normalized = x.dim() - len(call.argument(1, "normalized_shape"))
    if x is not call.args[0] or x.cut.dim >= first_normalized:
        raise call.refuse(COMBINES)
    for operand in call.operands():
        if operand is not x:
            require_summed_gradient(call, operand)
    return lambda _: x.cut


def _refuse_channels(call: CutCall) -> TensorCutOf:
    raise call.refuse("combines features with each other, or with numbers of all features")


def _refuse_halves(call: CutCall) -> TensorCutOf:
    raise call.refuse(
        "multiplies one half of each slice by the other, which is another half on one process",
        'give each half a layer of style "column" of its own, as gate and up',
    )


def _assignment_rule(call: CutCall) -> TensorCutOf:
    """x[index] = value: the index selects no features, and the value is one number."""
    x, index, value = call.args
    if not isinstance(x, CutTensor) or isinstance(value, Tensor):
        raise call.refuse(
            "writes tensors into each other that are cut differently, or is not followed"
        )
    return _view_rule(CutCall(torch.Tensor.__getitem__, (x, index), {}))


_RULES_OF_NAMES: tuple[tuple[str, Rule], ...] = (
    (
        "to float half double bfloat16 type type_as int long bool cuda cpu contiguous clone detach "
        "requires_grad_ data",
        _same_shape_rule,
    ),
    (
        "transpose swapaxes swapdims permute movedim moveaxis t T mT unsqueeze squeeze select "
        "narrow __getitem__ expand chunk split tensor_split unbind",
        _view_rule,
    ),
    ("view reshape flatten unflatten", _reshape_rule),
    (
        "softmax log_softmax softmin cumsum cumprod logcumsumexp flip argsort",
        _along_dim_rule(position=1),
    ),
    ("normalize", _along_dim_rule(position=2, default=1)),
    (
        "sum mean amax amin prod logsumexp var std nansum argmax argmin max min any all median "
        "count_nonzero",
        _reduction_rule(),
    ),
    ("norm", _reduction_rule(position=2)),
    ("dropout", _dropout_rule),
    ("matmul __matmul__ __rmatmul__ bmm mm", _matmul_rule),
    ("linear", _linear_rule),
    ("einsum", _einsum_rule),
    ("scaled_dot_product_attention", _attention_rule),
    ("cat concat concatenate", _concatenation_rule),
    ("stack", _stack_rule),
    ("repeat_interleave", _repeat_rule),
    ("pad", _pad_rule),
    ("view_as_complex view_as_real", _complex_rule),
    ("tril triu", _triangle_rule),
    (
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity "
        "cosine_embedding_loss gaussian_nll_loss poisson_nll_loss soft_margin_loss "
        "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss ctc_loss",
        _refuse_loss,
    ),
    ("layer_norm rms_norm", _norm_rule),
    ("batch_norm instance_norm group_norm local_response_norm", _refuse_channels),
    ("glu", _refuse_halves),
    ("__setitem__", _assignment_rule),
)
RULES: dict[str, Rule] = {}
"""The rule of each function of torch, by its name."""
for _names, _rule in _RULES_OF_NAMES:
    RULES.update(dict.fromkeys(_names.split(), _rule))
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
