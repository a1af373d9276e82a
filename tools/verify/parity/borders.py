"""Recording the activations between modules, and their gradients, token by token.

The place where two runs begin to differ shows the fault: if the input of a module agrees and its
output does not, the fault is in the module. Each module with parameters has two borders, "NAME>in"
and "NAME>out", named by the common part of its parameters' logical names ("layers.3.mlp"), which is
the same in every layout and for custom models.

Recorded are tensors shaped like the residual stream, [s, b, hidden] or a rank's part of the
sequence. Each token is recorded as one number: the product of its features with a random vector
that all layouts share. Different activations have different numbers, and the relative error of many
numbers is that of the activations. Of large batches only some positions are recorded. Recomputed
activations are not recorded: they are outside of a stage's forward pass. Virtual ranks
(`models.decoder.virtual_stage`) are recorded one by one, and their values are those of their
process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import has_layout, layout_of
from megaprec.comm.random import key, normal
from megaprec.diagnose.module_trace import trace_modules
from models.decoder.virtual_stage import VirtualStage
from models.feed_forward.router import Router
from parallel.sequence_cut import positions

Border = tuple[str, str]  # kind and name: ("activation", "layers.3.mlp>out")
TOKENS = 4096  # tokens of a step that are recorded at each border, at most
FORWARD = "activation"
BACKWARD = "activation gradient"
EMBEDDED = "embedding>out"
TOKENS_IN = "tokens>in"  # the border at which the first stage is given ids [s, b]


@dataclass(frozen=True)
class StepSize:
    """The size of a step: its sequences, and the tokens of each."""

    batch: int
    length: int


@dataclass(frozen=True)
class RunSize:
    """Sizes of a run: its steps, and features. first: number of the first step."""

    steps: Sequence[StepSize]
    hidden: int
    first: int = 0


@dataclass
class BorderValues:
    """The values that one rank saw at one border in one step, float64 [samples, positions], NaN
    where it saw nothing.

    rank: the rank. step: counted from the first that was recorded, from 0. samples: numbers within
        the global batch; positions: within the sample; of all that it saw.
    """

    rank: int
    step: int
    samples: list[int]
    positions: list[int]
    values: Tensor


class _Recorded(NamedTuple):
    """The values of one tp rank at one border in one step, float64 [batch, positions].

    positions: within the sample.
    """

    positions: list[int]
    values: Tensor


class _SeenTensor(NamedTuple):
    """A tensor and the border at which it was seen first.

    The tensor is kept alive, so that no other one gets its id.
    """

    tensor: Tensor
    border: str


@dataclass(frozen=True)
class _StageCall:
    """A forward pass of a stage in progress.

    step: number of the step, from the first that is recorded. samples: numbers within the global
        batch.
    counts: by tp rank and border, how often the border was passed.
    seen_tensors: by id of a tensor, where it was seen first.
    embedded: how often the embedding was called before.
    """

    step: int
    samples: list[int]
    counts: dict[tuple[int, str], int] = field(default_factory=dict)
    seen_tensors: dict[int, _SeenTensor] = field(default_factory=dict)
    embedded: int = 0


class BorderRecorder:
    """Recorder of stages while they train. Engines call a stage as stage(x, microbatch, packing).

    passed: borders in the order of their first pass, each with the border where the same tensor was
        seen before, or "".
    active_modules: the modules whose forward pass is under way, innermost last.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        size: RunSize,
        tp_axis: Axis,
        cp: Axis,
        rank: int,
        active_modules: list[str] | None = None,
    ) -> None:
        self.active_modules = [] if active_modules is None else active_modules
        self.size = size
        self.tp = tp_axis
        self.cp = cp
        self.rank = rank
        features = torch.arange(size.hidden)
        direction = normal(key(0, "parity borders"), features)
        self.direction = direction.double()
        self.ones = torch.ones(1, dtype=torch.float64)
        # all layouts record the positions that it divides, wherever these lie
        most_tokens = max(step.batch * step.length for step in size.steps)
        self.stride = max(1, most_tokens // TOKENS)
        self.passed: dict[str, str] = {}
        # by kind, border, step and tp rank
        self._recorded: dict[tuple[str, str, int, int], _Recorded] = {}
        self._samples: dict[int, set[int]] = {}  # by step
        self._stage_call: _StageCall | None = None
        for stage in stages:
            trace_modules({"": stage}, self._end_stage, self._begin_stage)
            for axis, shard in _tp_shards(stage, tp_axis):
                name_of_module = name_modules(shard)
                modules = {name: module for module, name in name_of_module.items()}
                enter = partial(self._enter_module, axis)
                leave = partial(self._leave_module, axis)
                trace_modules(modules, leave, enter, self.active_modules)

    def _begin_stage(self, _: str, args: Sequence[Any], kwargs: object) -> None:
        """Note which samples a call of a stage computes; record the tokens that the first is
        given."""
        microbatch = args[1] if len(args) > 1 else None
        self._stage_call = None
        self.active_modules.clear()
        if microbatch is None:
            return
        stage_input = args[0]
        # the first stage is given ids, later ones the residual stream
        is_first_stage = stage_input.dtype == torch.int64
        # A later stage embeds tokens only for multi-token prediction, where one process calls the
        # embedding for the second time.
        embedded = 0 if is_first_stage else 1
        step = microbatch.step - self.size.first
        samples = microbatch.samples.tolist()
        stage_call = _StageCall(step, samples, embedded=embedded)
        self._stage_call = stage_call
        samples_of_step = self._samples.setdefault(step, set())
        samples_of_step.update(samples)
        if is_first_stage:
            self.passed.setdefault(TOKENS_IN, "")
            token_ids = stage_input.unsqueeze(-1)
            self._record((FORWARD, TOKENS_IN), self.tp, stage_call, token_ids, self.ones)

    def _end_stage(self, _: str, output: object) -> None:
        if self._stage_call is not None:
            # hooks hold the call for as long as the graph lives
            self._stage_call.seen_tensors.clear()
        self._stage_call = None

    def _enter_module(self, tp_axis: Axis, name: str, args: Sequence[Any], kwargs: object) -> None:
        activation = args[0] if args else None
        self._pass_border(tp_axis, f"{name}>in", activation)

    def _leave_module(self, tp_axis: Axis, name: str, output: Any) -> None:
        # a layer may return more than its activation
        activation = output[0] if isinstance(output, tuple) else output
        self._pass_border(tp_axis, f"{name}>out", activation)

    def _pass_border(self, tp_axis: Axis, border: str, activation: Any) -> None:
        """Record an activation and later its gradient, unless the same tensor was seen before."""
        stage_call = self._stage_call
        if stage_call is None or not isinstance(activation, Tensor):
            return
        if not self._is_residual(activation, tp_axis, stage_call):
            return
        earlier_calls = stage_call.embedded if border == EMBEDDED else 0
        border_of_rank = (tp_axis.rank, border)
        count = 1 + stage_call.counts.get(border_of_rank, earlier_calls)
        stage_call.counts[border_of_rank] = count
        label = border if count == 1 else f"{border} {count}"
        # one tensor is often the output of a module and the input of the next: recorded once
        seen = stage_call.seen_tensors.get(id(activation))
        if seen is not None:
            self.passed.setdefault(label, seen.border)
            return
        self.passed.setdefault(label, "")
        stage_call.seen_tensors[id(activation)] = _SeenTensor(activation, label)
        self._record((FORWARD, label), tp_axis, stage_call, activation, self.direction)
        if activation.requires_grad:
            record_gradient = partial(self._record_gradient, tp_axis, stage_call, label)
            activation.register_hook(record_gradient)

    def _record_gradient(
        self, tp_axis: Axis, stage_call: _StageCall, label: str, gradient: Tensor
    ) -> None:
        self._record((BACKWARD, label), tp_axis, stage_call, gradient, self.direction)

    def _is_residual(self, activation: Tensor, tp_axis: Axis, stage_call: _StageCall) -> bool:
        """Return True if a tensor is shaped like the residual stream, or tp's part of its
        sequence."""
        if activation.dim() != 3 or not activation.is_floating_point():
            return False
        length, batch, hidden = activation.shape
        local_length = self._local_length(stage_call)
        if length not in (local_length, local_length // tp_axis.size):
            return False
        return batch == len(stage_call.samples) and hidden == self.size.hidden

    def _local_length(self, stage_call: _StageCall) -> int:
        """Return the tokens of a sequence that this rank of cp has."""
        step_size = self.size.steps[stage_call.step]
        return step_size.length // self.cp.size

    @torch.no_grad()
    def _record(
        self,
        border: Border,
        tp_axis: Axis,
        stage_call: _StageCall,
        activation: Tensor,
        direction: Tensor,
    ) -> None:
        """Record a number for each token: its features, of `activation` [s, b, features], times
        `direction`."""
        local_length = self._local_length(stage_call)
        token_positions = positions(self.cp, local_length)
        if len(activation) != local_length:
            token_positions = tp_axis.chunk(token_positions)  # the sequence is cut over tp
        is_recorded = token_positions % self.stride == 0
        on_device = is_recorded.to(activation.device)
        features = activation.detach()[on_device].double()
        products = features @ direction.to(activation.device)  # [positions, b]
        recorded_key = (*border, stage_call.step, tp_axis.rank)
        if recorded_key not in self._recorded:
            step_size = self.size.steps[stage_call.step]
            shape = (step_size.batch, len(products))
            values = torch.full(shape, torch.nan, dtype=torch.float64)
            recorded_positions = token_positions[is_recorded].tolist()
            self._recorded[recorded_key] = _Recorded(recorded_positions, values)
        recorded = self._recorded[recorded_key]
        recorded.values[stage_call.samples] = products.t().cpu()

    def border_values(self) -> Iterator[tuple[Border, BorderValues]]:
        """Return the values of each border that has a tensor of its own, step by step. If each
        virtual rank has a part of the sequence, the parts are joined; else the first one counts."""
        by_step: dict[tuple[Border, int], list[_Recorded]] = {}
        for (kind, name, step, _), recorded in self._recorded.items():
            border = (kind, name)
            by_step.setdefault((border, step), []).append(recorded)
        for (border, step), of_virtual_ranks in by_step.items():
            first, *others = of_virtual_ranks
            # Each virtual rank saw the full sequence. Otherwise it was cut over them, and their
            # parts follow each other.
            if all(recorded.positions == first.positions for recorded in others):
                of_virtual_ranks = [first]
            token_positions: list[int] = []
            parts: list[Tensor] = []
            for recorded in of_virtual_ranks:
                token_positions += recorded.positions
                parts.append(recorded.values)
            values = torch.cat(parts, dim=1)
            samples = sorted(self._samples[step])
            of_samples = values[samples]
            yield border, BorderValues(self.rank, step, samples, token_positions, of_samples)


def _tp_shards(stage: nn.Module, tp_axis: Axis) -> list[tuple[Axis, nn.Module]]:
    """Return the tensor-parallel ranks of a stage on this process, each with its part: the virtual
    ones, if any."""
    if isinstance(stage, VirtualStage):
        shards = zip(stage.lockstep.axes, stage.shards, strict=True)
        return [*shards]
    return [(tp_axis, stage)]


def name_modules(stage: nn.Module) -> Mapping[nn.Module, str]:
    """Return the modules of a stage by the common part of their parameters' logical names.

    Of modules with one name the outermost counts. A router is left out: the gradient of its input
    is a part of the sum that its layer reduces.
    """
    names: dict[nn.Module, str] = {}
    for module in stage.modules():
        if module is stage or isinstance(module, (nn.ModuleList, nn.ModuleDict, Router)):
            continue
        name = shared_name(module)
        if name and name not in names.values():
            names[module] = name
    return names


def shared_name(module: nn.Module) -> str:
    """Return the dotted path that all parameters of a module share; "" if there is none."""
    parameter_paths: list[list[str]] = []
    for parameter in module.parameters():
        if not has_layout(parameter):
            continue
        for part in layout_of(parameter).parts:
            *path, _ = part.name.split(".")  # without "weight" or "bias"
            parameter_paths.append(path)
    shared_path: list[str] = []
    # as deep as the shortest path
    for level_names in zip(*parameter_paths, strict=False):
        if len(set(level_names)) > 1:
            break
        shared_path.append(level_names[0])
    return ".".join(shared_path)
