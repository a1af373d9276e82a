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

from parallel.compiled_leaves import copied, difference, inductor
from parallel.leaves import LeafCall


@dataclass(frozen=True)
class RegionPasses:
    """The two passes of a region.

    forward: inputs -> results and other tensors that the backward pass needs.
    backward: the needed tensors and the gradients of the results, which are contiguous -> the
        gradients of `differentiable` inputs.
    needed: positions of the needed tensors among the inputs followed by all outputs of `forward`.
    results: the number of results.
    differentiable: positions of the inputs that have a gradient.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    needed: tuple[int, ...]
    results: int
    differentiable: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results, through which gradients flow to the inputs."""
        return _RunPasses.apply(self, *inputs)


class _RunPasses(torch.autograd.Function):
    """The compiled passes as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: RegionPasses,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        # detached: the compiled graph has a backward pass of its own
        detached = [x.detach() for x in inputs]
        outputs = passes.forward(*detached)
        inputs_and_outputs = (*inputs, *outputs)
        needed = [inputs_and_outputs[position] for position in passes.needed]
        ctx.passes = passes
        ctx.input_count = len(inputs)
        ctx.save_for_backward(*needed)
        return tuple(outputs[: passes.results])

    @staticmethod
    def backward(
        ctx: Any,
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        passes = ctx.passes
        needed = [tensor.detach() for tensor in ctx.saved_tensors]
        # the compiled graph takes tensors with the strides of its examples
        contiguous = [grad.contiguous() for grad in grads]
        input_grads: list[Tensor | None] = [None] * ctx.input_count
        computed_grads = passes.backward(*needed, *contiguous)
        for position, grad in zip(passes.differentiable, computed_grads, strict=True):
            input_grads[position] = grad
        return None, *input_grads


Compiler = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]
"""Makes a function of tensors from a graph and examples of its inputs."""


def compiled_region(call: LeafCall, compiler: Compiler = inductor) -> RegionPasses:
    """Return the compiled passes of a call of a region.

    The results of the region must be contiguous. compiler: makes a function of each graph. Raises
    what the compiler raises.
    """
    inputs = call.example_tensors()
    traced = _trace(lambda *tensors: call.run(tensors), inputs)
    forward_graph, backward_graph = traced.graphs()
    forward = compiler(forward_graph, inputs)
    # the compiled forward pass makes the examples of the backward pass, with its own strides
    outputs = forward(*inputs)
    inputs_and_outputs = (*inputs, *outputs)
    needed = [inputs_and_outputs[position] for position in traced.needed]
    result_count = len(traced.results)
    tangents = [torch.randn_like(y) for y in outputs[:result_count]]
    backward = compiler(backward_graph, [*needed, *tangents])
    return RegionPasses(
        forward,
        backward,
        traced.needed,
        result_count,
        traced.differentiable,
    )


@dataclass(frozen=True)
class _Traced:
    """Both passes of a region in one graph, by the nodes of the graph.

    inputs, results: of the forward pass.
    tangents: the gradients of the results, which the backward pass is given.
    saved: the tensors that autograd keeps for the backward pass.
    grads: the results of the backward pass, the gradients of the inputs at the positions
        `differentiable`.
    """

    inputs: list[Node]
    tangents: list[Node]
    results: list[Node]
    saved: list[Node]
    grads: list[Node]
    differentiable: tuple[int, ...]

    @property
    def _needed_nodes(self) -> list[Node]:
        """Return the nodes of the forward pass that the backward pass reads: tensors that autograd
        keeps, and inputs."""
        # from the gradients back to what autograd keeps: nothing before that is computed again
        read_backward = _nodes_before(self.grads, {*self.saved})
        candidates = dict.fromkeys((*self.saved, *self.inputs))  # each once, in order
        return [node for node in candidates if node in read_backward]

    @property
    def _extra_nodes(self) -> list[Node]:
        """Return what the forward pass must return besides the results, because the backward pass
        reads it."""
        return [node for node in self._needed_nodes if node not in (*self.inputs, *self.results)]

    @property
    def needed(self) -> tuple[int, ...]:
        """Return `RegionPasses.needed`: the positions of what the backward pass reads among inputs,
        results and extra nodes, in this order."""
        inputs_and_outputs = [*self.inputs, *self.results, *self._extra_nodes]
        return tuple(inputs_and_outputs.index(node) for node in self._needed_nodes)

    def graphs(self) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of the forward and the backward pass."""
        forward = _cut_graph(self.inputs, [*self.results, *self._extra_nodes])
        backward = _cut_graph([*self._needed_nodes, *self.tangents], self.grads)
        return forward, backward


def _trace(
    region: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
) -> _Traced:
    """Return both passes of a region as one graph, traced on tensors without values.

    inputs: examples, of which only shapes, strides and dtypes count. In the graph writes in place
    are new tensors, so that each node is one value.
    """
    # `run_both_passes` sets these three while it is traced
    result_count = 0
    saved_count = 0
    differentiable: tuple[int, ...] = ()

    def run_both_passes(
        arguments: list[Tensor],
        tangents: list[Tensor],
    ) -> list[Tensor]:
        """Return the results, the tensors that autograd keeps and the gradients, one after the
        other, and note how many there are of each."""
        nonlocal result_count, saved_count, differentiable
        saved: list[Tensor] = []

        def save(tensor: Tensor) -> Tensor:
            kept = tensor.detach()
            saved.append(kept)
            return kept

        graph_inputs = _as_graph_inputs(arguments)
        with torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor):
            results = region(*graph_inputs)
        with_grad = [position for position, x in enumerate(graph_inputs) if x.requires_grad]
        differentiable_inputs = [graph_inputs[position] for position in with_grad]
        # unused: tables of a rotation are of floating point, but have no gradient
        grads = torch.autograd.grad(results, differentiable_inputs, tangents, allow_unused=True)
        grad_by_position: dict[int, Tensor] = {}
        for position, grad in zip(with_grad, grads, strict=True):
            if grad is not None:
                grad_by_position[position] = grad
        result_count = len(results)
        saved_count = len(saved)
        differentiable = tuple(grad_by_position)
        return [*results, *saved, *grad_by_position.values()]

    input_count = len(inputs)
    # the forward pass enables gradients itself, and the backward pass needs none of its own
    with torch.no_grad():
        # examples of the gradients of the results, of which only shape and dtype count
        tangents = [torch.randn_like(y) for y in region(*inputs)]
        first_graph = make_fx(run_both_passes, tracing_mode="fake")(list(inputs), tangents)

        def run_first_graph(*tensors: Tensor) -> Any:
            return first_graph(list(tensors[:input_count]), list(tensors[input_count:]))

        # traced again, with a new tensor in place of each write in place
        trace_without_writes = make_fx(functionalize(run_first_graph), tracing_mode="fake")
        graph = trace_without_writes(*inputs, *tangents).graph
    placeholders = graph.find_nodes(op="placeholder")
    (outputs,) = graph.find_nodes(op="output")[0].args
    # by the nodes that computed them: a detached tensor is the same value
    values = [_source(node) for node in outputs]
    first_grad = result_count + saved_count
    return _Traced(
        inputs=placeholders[:input_count],
        tangents=placeholders[input_count:],
        results=values[:result_count],
        saved=values[result_count:first_grad],
        grads=values[first_grad:],
        differentiable=differentiable,
    )


def _as_graph_inputs(arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as inputs of a new graph; those of floating point require gradients."""
    return [x.detach().requires_grad_(x.dtype.is_floating_point) for x in arguments]


def _source(node: Node) -> Node:
    """Return the node that has this node's value before it was detached."""
    # torch 2.14 traces a detached tensor as an alias
    while node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.all_input_nodes[0]
    return node


def _nodes_before(ends: Sequence[Node], stops: set[Node]) -> set[Node]:
    """Return `ends` and all nodes that they are computed from, back to inputs of the graph; of
    `stops` those that are reached, but nothing before them. In place of a node that detaches a
    tensor it is the node that computed the tensor (`_source`)."""
    reached: set[Node] = set()
    pending = list(ends)
    while pending:
        node = _source(pending.pop())
        if node in reached:
            continue
        reached.add(node)
        if node not in stops:
            pending += node.all_input_nodes
    return reached


def _cut_graph(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
) -> GraphModule:
    """Return a copy of the part of a graph that computes `outputs` from `inputs`, nodes of it."""
    part = Graph()
    copies = dict[Node, Node]()  # by the node of the whole graph

    def copy_of_argument(argument: Node) -> Node:
        return copies[_source(argument)]

    for node in inputs:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    whole_graph = inputs[0].graph
    reached = _nodes_before(outputs, {*inputs})
    # in the order of the whole graph, so that arguments come first
    for node in whole_graph.nodes:
        if node in reached and node not in copies:
            copies[node] = part.node_copy(node, copy_of_argument)
    part.output(tuple(copies[node] for node in outputs))
    return GraphModule(torch.nn.Module(), part)


def trial_difference_of_region(call: LeafCall, passes: Callable[..., Any]) -> str:
    """Return in words how the results or gradients of compiled passes differ from those of their
    region on random numbers, "" if by rounding only."""
    inputs = call.example_tensors()
    tangents = [torch.randn_like(y) for y in call.run(inputs)]
    exact_call = call.in_float64()
    computed = _run_with_gradients(passes, inputs, tangents)
    plain = _run_with_gradients(lambda *tensors: call.run(tensors), inputs, tangents)
    exact = _run_with_gradients(
        lambda *tensors: exact_call.run(tensors),
        [copied(x, in_float64=True) for x in inputs],
        [copied(tangent, in_float64=True) for tangent in tangents],
    )
    return difference(computed, plain, exact)


def _run_with_gradients(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor],
) -> list[Tensor]:
    """Return the results of a function, and then the gradients of its inputs, zero where none
    flows.

    tangents: the gradients of the results.
    """
    graph_inputs = _as_graph_inputs(inputs)
    with torch.enable_grad():
        results = function(*graph_inputs)
    differentiable = [x for x in graph_inputs if x.requires_grad]
    grads = torch.autograd.grad(
        results,
        differentiable,
        list(tangents),
        allow_unused=True,
        materialize_grads=True,
    )
    return [*(y.detach() for y in results), *grads]
