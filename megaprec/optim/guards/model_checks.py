"""Checks of the model that an optimizer is built over, and before each step that it is still that
model.

A parameter without a name of its own, without memory of its own, or of another shape than its
layout would be trained wrongly, and nothing else would tell.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import (
    Layout,
    has_layout,
    layout_of,
    parameters_of,
    trained_parameters,
)
from megaprec.errors import Problem, UserError
from megaprec.fp8.params import fp8_param_of
from megaprec.optim.torch_wrappers import is_dtensor
from megaprec.precision.patterns import require_used
from megaprec.precision.plan import PrecisionPlan
from megaprec.torch_private import parameters_everywhere

NamedParameter = tuple[str, nn.Parameter]  # path in the model, parameter

# settings of a plan that layers read, in which theirs must agree with the optimizer's
_LAYER_SETTINGS = (
    "compute",
    "residual",
    "pipeline",
    "attention",
    "parameters",
    "sensitive",
    "scores",
    "fp8",
    "tf32",
)
_REBUILD = (
    "build the model as it is to be trained and then a new ParallelAMPOptimizer over it; nothing "
    "was changed"
)


def require_identifiable(
    model_parts: Sequence[nn.Module],
    tp: int,
    experts: ExpertAxes | None = None,
) -> None:
    """Raise UserError, naming parameters, for parameters that no step could train right:

    - FSDP1's flat parameters;
    - complex ones, and those made in inference mode;
    - those without a layout, of another shape than their layout says, or laid out for another
      number of tensor-parallel ranks than `tp`;
    - those that share their name or their memory with another one;
    - experts on ranks of their own, if `experts` does not name these.
    """
    trained = list(trained_parameters(model_parts))
    _require_no_flat_parameters(trained)
    _require_real(trained)
    _require_layouts(trained)
    _require_shapes(trained)
    _require_distinct_names(trained)
    _require_own_memory(model_parts)
    for _, parameter in trained:
        _require_laid_out_for(layout_of(parameter), tp, experts)


def _require_no_flat_parameters(trained: Iterable[NamedParameter]) -> None:
    """Raise UserError for a parameter of FSDP1, which holds tensors without names and shapes."""
    for path, parameter in trained:
        # the flat parameter itself, and with use_orig_params the parameters that are views of it
        marks = ("_is_flat_param", "_fsdp_flattened")  # attributes that FSDP1 sets
        if any(getattr(parameter, mark, False) for mark in marks):
            raise UserError.of("optimizer.fsdp1", path=path)


def _require_real(trained: Iterable[NamedParameter]) -> None:
    """Raise UserError, naming all, for trained parameters that are complex, have no values, or were
    made in inference mode, where autograd computes no gradients."""
    problems: list[Problem] = []
    for path, parameter in trained:
        if parameter.device.type == "meta":
            problems.append(Problem.of("optimizer.on_meta_device", path=path))
        elif parameter.is_inference():
            problems.append(Problem.of("optimizer.made_in_inference_mode", path=path))
        # Of the dtypes that torch lets require gradients, complex ones and FP8 codes are left.
        elif not parameter.is_floating_point() and fp8_param_of(parameter) is None:
            dtype = str(parameter.dtype).removeprefix("torch.")
            problems.append(Problem.of("optimizer.not_real", path=path, dtype=dtype))
    if problems:
        raise UserError(*problems)


def _require_layouts(trained: Iterable[NamedParameter]) -> None:
    """Raise UserError if some parameters have no layout."""
    bare = [(path, parameter) for path, parameter in trained if not has_layout(parameter)]
    if not bare:
        return
    path, first = bare[0]
    others = f"; nor have {len(bare) - 1} more" if len(bare) > 1 else ""
    raise UserError.of(
        "optimizer.layout_missing", path=path, shape=tuple(first.shape), others=others
    )


def _require_laid_out_for(layout: Layout, tp: int, experts: ExpertAxes | None) -> None:
    """Raise UserError unless the layout is one for `tp` tensor-parallel ranks, or for those of its
    experts."""
    if layout.expert and experts is None:
        raise UserError.of("optimizer.experts_argument_missing", name=layout.parts[0].name)
    ranks = experts.tp.size if layout.expert and experts else tp
    for part in layout.parts:
        if part.shards * part.copies != ranks:
            raise UserError.of(
                "optimizer.layout_with_copies_of_other_ranks",
                name=part.name,
                shards=part.shards,
                copies=part.copies,
                ranks=ranks,
            )


def _require_shapes(trained: Iterable[NamedParameter]) -> None:
    """Raise UserError, naming all, for parameters that do not have the shapes of their layouts."""
    problems: list[Problem] = []
    for path, parameter in trained:
        parts = layout_of(parameter).parts
        expected: tuple[int, ...] = ()
        if parts[0].padded:  # parts are stacked along their first dim
            num_rows = sum(part.padded[0] for part in parts)
            expected = (num_rows, *parts[0].padded[1:])
        shape = tuple(parameter.shape)
        # a DTensor has the shape of the whole, its layout too
        if shape != expected and not is_dtensor(parameter):
            problems.append(
                Problem.of("optimizer.shape_changed", path=path, shape=shape, expected=expected)
            )
    if problems:
        raise UserError(*problems)


def _require_distinct_names(trained: Iterable[NamedParameter]) -> None:
    """Raise UserError unless each trained parameter has a name of its own."""
    paths: dict[tuple[str, int, bool], str] = {}
    for path, parameter in trained:
        layout = layout_of(parameter)
        for part in layout.parts:
            key = part.name, part.rank, layout.again
            if key in paths:
                raise UserError.of(
                    "optimizer.name_twice", name=part.name, paths=paths[key], path=path
                )
            paths[key] = path


@dataclass(frozen=True)
class _MemorySpan:
    """The memory of a tensor of the model: addresses [start, stop) of a device."""

    device: str
    start: int
    stop: int
    path: str
    trained: bool


def _memory_spans(model_parts: Sequence[nn.Module]) -> Iterator[_MemorySpan]:
    """Yield the memory of all trained parameters, then that of what is not trained: frozen
    parameters and buffers."""
    trained = dict.fromkeys(parameter for _, parameter in trained_parameters(model_parts))
    for path, parameter in trained_parameters(model_parts):
        yield from _memory_span(path, parameter, trained=True)
    for model_part in model_parts:
        for path, tensor in (*model_part.named_parameters(), *model_part.named_buffers()):
            if tensor not in trained:
                yield from _memory_span(path, tensor, trained=False)


def _memory_span(path: str, tensor: Tensor, trained: bool) -> Iterator[_MemorySpan]:
    """Yield the memory of a tensor, if it has an address."""
    is_special = is_dtensor(tensor) or tensor.is_nested
    is_plain = tensor.layout == torch.strided and not is_special
    # a tensor without elements has no memory, nor has one on the device meta
    if not is_plain or not tensor.numel() or not tensor.data_ptr():
        return
    # of the last element: strides may leave gaps, so the number of elements does not tell
    last_offset = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last_offset += (size - 1) * stride
    start = tensor.data_ptr()
    stop = start + (last_offset + 1) * tensor.itemsize
    yield _MemorySpan(str(tensor.device), start, stop, path, trained)


def _require_own_memory(model_parts: Sequence[nn.Module]) -> None:
    """Raise UserError unless each trained parameter has a memory that no other tensor of the model
    shares."""
    # by device, and by whether it is trained: the span so far that ends last
    furthest: dict[tuple[str, bool], _MemorySpan] = {}
    # in the order of addresses a span can overlap only those that end beyond its start
    spans = sorted(_memory_spans(model_parts), key=lambda span: (span.device, span.start))
    for span in spans:
        for trained in (True, False):
            before = furthest.get((span.device, trained))
            # two tensors that are not trained stay where they are, and may share memory
            is_one_trained = span.trained or trained
            if is_one_trained and before is not None and span.start < before.stop:
                raise UserError(_sharing(before, span))
        kind = (span.device, span.trained)
        furthest[kind] = max(furthest.get(kind, span), span, key=attrgetter("stop"))


def _sharing(first: _MemorySpan, second: _MemorySpan) -> Problem:
    """Return the problem of two tensors of which at least one is moved, into memory of its own."""
    if first.trained and second.trained:
        return Problem.of(
            "optimizer.memory_of_two_parameters", first=first.path, second=second.path
        )
    moved, stays = (first, second) if first.trained else (second, first)
    return Problem.of("optimizer.memory_of_untrained", moved=moved.path, stays=stays.path)


def require_same_plan(model_parts: Sequence[nn.Module], plan: PrecisionPlan) -> None:
    """Raise UserError, naming a module, if layers were built with a context of another plan.

    They would compute in dtypes of their own, from weights that the optimizer holds in others.
    Contexts of parts that are marked to stay in FP32 are left out.
    """
    for model_part in model_parts:
        for path, module in model_part.named_modules():
            layer_plan = getattr(getattr(module, "context", None), "plan", None)
            if not isinstance(layer_plan, PrecisionPlan):
                continue
            if layer_plan.keep_fp32 == ("*",):  # of a part that is marked to stay in FP32
                continue
            for name in _LAYER_SETTINGS:
                of_layer = getattr(layer_plan, name)
                of_optimizer = getattr(plan, name)
                if of_layer != of_optimizer:
                    raise UserError.of(
                        "optimizer.plans_differ",
                        path=path or type(module).__name__,
                        name=name,
                        of_layer=of_layer,
                        of_optimizer=of_optimizer,
                    )


def require_used_patterns(
    model_parts: Sequence[nn.Module],
    plan: PrecisionPlan,
    groups: Sequence[str],
    world: Axis,
    device: torch.device,
) -> None:
    """Raise UserError for a pattern of the plan or of `groups` that matches no parameter on any
    rank. Collective over the world."""
    names = set[str]()
    for module in model_parts:
        for parameter in filter(has_layout, module.parameters()):
            names.update(part.name for part in layout_of(parameter).parts)
    sorted_names = sorted(names)
    require_used("precision.keep_fp32", plan.keep_fp32, sorted_names, world, device)
    require_used("optimizer.groups", groups, sorted_names, world, device)


class TrainedModel:
    """The parts of a model, and the parameters that were to be trained when this was made."""

    def __init__(self, model_parts: Sequence[nn.Module]) -> None:
        self._model_parts = model_parts
        self._trained = dict.fromkeys(parameters_of(model_parts))
        self._ids = {id(parameter) for parameter in self._trained}

    def require_same(self) -> None:
        """Raise UserError, naming parameters, if others are to be trained now."""
        # compared without order: a part may be rebuilt around the same parameters
        if _ids_of_trained(self._model_parts) == self._ids:
            return
        current = dict.fromkeys(parameters_of(self._model_parts))
        paths: dict[nn.Parameter, str] = {}
        for model_part in self._model_parts:
            paths |= {parameter: path for path, parameter in model_part.named_parameters()}
        added = [
            path
            for parameter, path in paths.items()
            if parameter in current and parameter not in self._trained
        ]
        if added:
            raise UserError.of(
                "optimizer.unfrozen_later", names=_format_names(added), rebuild=_REBUILD
            )
        untrained = [parameter for parameter in self._trained if parameter not in current]
        frozen = [paths[parameter] for parameter in untrained if parameter in paths]
        if frozen:
            raise UserError.of(
                "optimizer.frozen_later", names=_format_names(frozen), rebuild=_REBUILD
            )
        removed = [layout_of(parameter).parts[0].name for parameter in untrained]
        raise UserError.of(
            "optimizer.removed_later", names=_format_names(removed), rebuild=_REBUILD
        )


def _ids_of_trained(model_parts: Sequence[nn.Module]) -> set[int]:
    """Return the `id` of each parameter that requires a gradient."""
    return {id(each) for each in parameters_everywhere(model_parts) if each.requires_grad}


def _format_names(names: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    others = len(names) - 1
    if not others:
        return names[0]
    return f"{names[0]} (and {others} more)"
