"""Regions: differentiable functions between two matrix products, whose passes torch compiles as two
whole graphs.

A leaf ends where a module does. A region goes on: it may add a branch to the residual stream and
normalize the sum, or cut a product into heads, turn them and lay them out for attention. Each of
its passes reads and writes memory once.

A region is written as ordinary functions of tensors, with their own autograd functions. Its forward
and its backward pass are traced together, on tensors without values, and cut where autograd keeps a
tensor: the compiled forward pass keeps the same tensors, and the backward pass computes from these
and from the gradients of the results. Tracing follows no Python code, so a graph has no breaks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.compiled_leaves import inductor, rounded_apart
from parallel.leaves import Call


@dataclass(frozen=True)
class Passes:
    """The two passes of a region.

    forward: inputs -> results and other tensors that the backward pass needs. backward: the needed
    tensors and the gradients of the results, which are contiguous -> the gradients of
    `differentiable` inputs.
    needed: positions of the needed tensors among the inputs followed by all outputs of `forward`.
    results: the number of results.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    needed: tuple[int, ...]
    results: int
    differentiable: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results, through which gradients flow to the inputs."""
        return _Run.apply(self, *inputs)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = passes.forward(*(x.detach() for x in inputs))
        pool = (*inputs, *made)
        ctx.passes = passes
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*(pool[n] for n in passes.needed))
        return tuple(made[: passes.results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        passes = ctx.passes
        of_inputs = [None] * ctx.inputs
        needed = (x.detach() for x in ctx.saved_tensors)
        for n, grad in zip(
            passes.differentiable,
            passes.backward(*needed, *(g.contiguous() for g in grads)),
            strict=True,
        ):
            of_inputs[n] = grad
        return None, *of_inputs


Compiler = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]
"""Makes a function of tensors from a graph and examples of its inputs."""


def compiled_region(call: Call, compiler: Compiler = inductor) -> Passes:
    """Return the compiled passes of a region, whose results are contiguous. Raises what the
    compiler raises."""
    inputs = [a for a in call.made() if isinstance(a, Tensor)]
    traced = _traced(lambda *tensors: call.bound(tensors), inputs)
    forward, backward = traced.graphs()
    run = compiler(forward, inputs)
    pool = (*inputs, *run(*inputs))
    results = pool[len(inputs) :][: len(traced.results)]
    rest = compiler(backward, [*(pool[n] for n in traced.needed), *map(torch.randn_like, results)])
    return Passes(run, rest, traced.needed, len(results), traced.differentiable)


@dataclass(frozen=True)
class _Traced:
    """Both passes of a region in one graph: its inputs and those of the backward pass, results,
    kept and gradients."""

    inputs: list[Node]
    tangents: list[Node]
    results: list[Node]
    kept: list[Node]
    grads: list[Node]
    differentiable: tuple[int, ...]

    @property
    def _needed(self) -> list[Node]:
        """Return what the backward pass reads: tensors that autograd kept, and inputs."""
        reached = _reached(self.grads, {*self.kept})
        return [node for node in dict.fromkeys((*self.kept, *self.inputs)) if node in reached]

    @property
    def _extra(self) -> list[Node]:
        return [node for node in self._needed if node not in (*self.inputs, *self.results)]

    @property
    def needed(self) -> tuple[int, ...]:
        """Return the positions of what the backward pass reads among inputs, results and what else
        is kept."""
        pool = [*self.inputs, *self.results, *self._extra]
        return tuple(pool.index(node) for node in self._needed)

    def graphs(self) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of the forward and the backward pass."""
        return (
            _part(self.inputs, [*self.results, *self._extra]),
            _part([*self._needed, *self.tangents], self.grads),
        )


def _traced(region: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> _Traced:
    """Trace a region with its gradients. Writes in place become new tensors, so that each node is
    one value."""
    counts: list[int] = []
    differentiable: list[int] = []

    def both(given: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.detach())
            return kept[-1]

        own = [x.detach().requires_grad_(x.dtype.is_floating_point) for x in given]
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            made = region(*own)
        wanted = [n for n, x in enumerate(own) if x.requires_grad]
        grads = torch.autograd.grad(made, [own[n] for n in wanted], tangents, allow_unused=True)
        found = {n: grad for n, grad in zip(wanted, grads, strict=True) if grad is not None}
        counts[:], differentiable[:] = [len(made), len(kept)], [*found]
        return [*made, *kept, *found.values()]

    with torch.no_grad():
        tangents = [torch.randn_like(y) for y in region(*inputs)]
        graph = make_fx(both, tracing_mode="fake")(list(inputs), tangents)
        pure = functionalize(
            lambda *tensors: graph(list(tensors[: len(inputs)]), list(tensors[len(inputs) :]))
        )
        graph = make_fx(pure, tracing_mode="fake")(*inputs, *tangents)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    (outputs,) = graph.graph.find_nodes(op="output")[0].args
    values = [_source(node) for node in outputs]
    results, kept = counts
    return _Traced(
        placeholders[: len(inputs)],
        placeholders[len(inputs) :],
        values[:results],
        values[results : results + kept],
        values[results + kept :],
        tuple(differentiable),
    )


def _source(node: Node) -> Node:
    """Return the node that has this node's value before it was detached."""
    while node.target is torch.ops.aten.detach.default:
        node = node.all_input_nodes[0]
    return node


def _reached(ends: Sequence[Node], stops: set[Node]) -> set[Node]:
    """Return the nodes that compute `ends`, back to inputs and to `stops`."""
    reached: set[Node] = set()
    todo = list(ends)
    while todo:
        node = _source(todo.pop())
        if node not in reached:
            reached.add(node)
            todo += [] if node in stops else node.all_input_nodes
    return reached


def _part(inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """Return the part of a graph that computes outputs from inputs."""
    part = Graph()
    values = dict[Node, Node]()
    reached = _reached(outputs, {*inputs})
    for node in inputs:
        values[node] = part.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in inputs[0].graph.nodes if inputs else ():
        if node in reached and node not in values:
            values[node] = part.node_copy(node, lambda given: values[_source(given)])
    part.output(tuple(values[node] for node in outputs))
    return GraphModule(torch.nn.Module(), part)


def hindrance_of_region(call: Call, passes: Callable[..., Any]) -> str:
    """Return how compiled passes differ from their region on trial, "" if neither results nor
    gradients do."""
    inputs = [a for a in call.made() if isinstance(a, Tensor)]
    tangents = [torch.randn_like(y) for y in call.bound(inputs)]
    made, wanted = (
        _with_gradients(function, inputs, tangents)
        for function in (passes, lambda *tensors: call.bound(tensors))
    )
    eps = max(torch.finfo(x.dtype).eps for x in (*inputs, *tangents) if x.dtype.is_floating_point)
    for result, expected in zip(made, wanted, strict=True):
        if (result.shape, result.dtype) != (expected.shape, expected.dtype) or not rounded_apart(
            result, expected, eps
        ):
            return "its compiled form computes other numbers"
    return ""


def _with_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor]:
    """Return the results of a function, and the gradients of its inputs, zero where none flows."""
    own = [x.detach().requires_grad_(x.dtype.is_floating_point) for x in inputs]
    with torch.enable_grad():
        made = function(*own)
    wanted = [x for x in own if x.requires_grad]
    grads = torch.autograd.grad(
        made, wanted, list(tangents), allow_unused=True, materialize_grads=True
    )
    return [*(y.detach() for y in made), *grads]
