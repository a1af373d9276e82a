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
(`models.virtual_stage`) are recorded one by one, and their values are those of their process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import has_layout, layout_of
from megaprec.comm.random import key, normal
from models.routing import Router
from models.virtual_stage import VirtualStage
from parallel.sequence_cut import positions

TOKENS = 4096  # tokens of a step that are recorded at each border, at most
FORWARD = "activation"
BACKWARD = "activation gradient"
EMBEDDED = "embedding>out"
TOKENS_IN = "tokens>in"  # the border at which the first stage is given ids [s, b]


@dataclass(frozen=True)
class Size:
    """Sizes of a run: tokens of a sample, samples of a step, features, steps. first: number of the
    first step."""

    length: int
    batch: int
    hidden: int
    steps: int
    first: int = 0


@dataclass
class Notes:
    """The values that one rank saw at one border, float64 [steps, samples, positions], NaN where it
    saw nothing.

    rank: the rank. samples: numbers within the global batch; positions: within the sample; of all
        that it saw.
    """

    rank: int
    samples: list[int]
    positions: list[int]
    values: Tensor


@dataclass(frozen=True)
class _Call:
    """A forward pass of a stage in progress."""

    step: int
    samples: list[int]
    # each tp rank has passed each border
    times: dict[tuple[int, str], int] = field(default_factory=dict)
    # by id; kept alive, so that no other tensor gets the id
    seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    embedded: int = 0  # how often the embedding was called before


class Borders:
    """Recorder of stages while they train. Engines call a stage as stage(x, place, packing).

    passed: borders in the order of their first pass, each with the border where the same tensor was
        seen before, or "".
    within: the modules whose forward pass is under way, innermost last.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        size: Size,
        tp: Axis,
        cp: Axis,
        rank: int,
        within: list[str] | None = None,
    ) -> None:
        self.within = [] if within is None else within
        self.size = size
        self.tp = tp
        self.cp = cp
        self.rank = rank
        self.direction = normal(key(0, "parity borders"), torch.arange(size.hidden)).double()
        self.ones = torch.ones(1, dtype=torch.float64)
        self.stride = max(1, size.batch * size.length // TOKENS)
        self.passed: dict[str, str] = {}
        # by kind, border and tp rank: positions; [steps, batch, positions]
        self._seen: dict[tuple[str, str, int], tuple[list[int], Tensor]] = {}
        self._samples: set[int] = set()
        self._call: _Call | None = None
        for stage in stages:
            stage.register_forward_pre_hook(self._begin)
            stage.register_forward_hook(self._end)
            for own, part in _ranks_of(stage, tp):
                for module, name in named(part).items():
                    module.register_forward_pre_hook(partial(self._enter, own, name))
                    module.register_forward_hook(partial(self._leave, own, name))

    def _begin(self, stage: nn.Module, args: Sequence[Any]) -> None:
        place = args[1] if len(args) > 1 else None
        self._call = None
        self.within.clear()
        if place is None:
            return
        inner = args[0].dtype != torch.int64
        # the first stage calls it first
        self._call = _Call(place.step, place.samples.tolist(), embedded=int(inner))
        self._samples.update(self._call.samples)
        if not inner:
            self.passed.setdefault(TOKENS_IN, "")
            self._note((FORWARD, TOKENS_IN), self.tp, self._call, args[0].unsqueeze(-1), self.ones)

    def _end(self, stage: nn.Module, args: object, made: object) -> None:
        if self._call is not None:
            self._call.seen.clear()  # hooks hold the call for as long as the graph lives
        self._call = None

    def _enter(self, tp: Axis, name: str, module: nn.Module, args: Sequence[Any]) -> None:
        self.within.append(name)
        self._look(tp, f"{name}>in", args[0] if args else None)

    def _leave(self, tp: Axis, name: str, module: nn.Module, args: object, made: Any) -> None:
        if self.within:  # empty in a recomputation, where a stage begins in the midst of itself
            self.within.pop()
        self._look(tp, f"{name}>out", made[0] if isinstance(made, tuple) else made)

    def _look(self, tp: Axis, border: str, x: Any) -> None:
        call = self._call
        if call is None or not isinstance(x, Tensor) or not self._fits(x, tp, len(call.samples)):
            return
        before = call.embedded if border == EMBEDDED else 0
        times = call.times[tp.rank, border] = call.times.get((tp.rank, border), before) + 1
        border = border if times == 1 else f"{border} {times}"
        known = call.seen.get(id(x))
        self.passed.setdefault(border, known[1] if known else "")
        if known is None:
            call.seen[id(x)] = x, border
            self._note((FORWARD, border), tp, call, x, self.direction)
            if x.requires_grad:
                x.register_hook(
                    lambda grad: self._note((BACKWARD, border), tp, call, grad, self.direction)
                )

    def _fits(self, x: Tensor, tp: Axis, samples: int) -> bool:
        s, b, hidden = x.shape if x.dim() == 3 else (0, 0, 0)
        own = self.size.length // self.cp.size
        return (
            s in (own, own // tp.size)
            and b == samples
            and hidden == self.size.hidden
            and x.is_floating_point()
        )

    @torch.no_grad()
    def _note(
        self, where: tuple[str, str], tp: Axis, call: _Call, x: Tensor, direction: Tensor
    ) -> None:
        own = self.size.length // self.cp.size
        places = positions(self.cp, own)
        places = places if len(x) == own else tp.chunk(places)
        chosen = places % self.stride == 0
        some = x.detach()[chosen.to(x.device)].double() @ direction.to(x.device)
        key = (*where, tp.rank)
        if key not in self._seen:
            shape = (self.size.steps, self.size.batch, len(some))
            self._seen[key] = (
                places[chosen].tolist(),
                torch.full(shape, torch.nan, dtype=torch.float64),
            )
        self._seen[key][1][call.step - self.size.first, call.samples] = some.t().cpu()

    def notes(self) -> Iterator[tuple[tuple[str, str], Notes]]:
        """Return the values of each border that has a tensor of its own; of one seen by virtual
        ranks, of all."""
        samples = sorted(self._samples)
        for where in dict.fromkeys((kind, border) for kind, border, _ in self._seen):
            parts = [some for key, some in self._seen.items() if key[:2] == where]
            if all(places == parts[0][0] for places, _ in parts):
                parts = parts[:1]  # each saw the whole
            places = [place for some, _ in parts for place in some]
            values = torch.cat([some for _, some in parts], dim=2)
            yield where, Notes(self.rank, samples, places, values[:, samples])


def _ranks_of(stage: nn.Module, tp: Axis) -> list[tuple[Axis, nn.Module]]:
    """Return the tensor-parallel ranks of a stage on this process, each with its part: the virtual
    ones, if any."""
    if isinstance(stage, VirtualStage):
        return [*zip(stage.lockstep.axes, stage.shards, strict=True)]
    return [(tp, stage)]


def named(stage: nn.Module) -> Mapping[nn.Module, str]:
    """Yield the named modules of a stage, by the common part of their parameters' logical names.

    A router is left out: the gradient of its input is a part of the sum that its layer reduces.
    """
    names: dict[nn.Module, str] = {}
    for module in stage.modules():
        name = shared_name(module)
        inner = module is not stage and not isinstance(
            module, (nn.ModuleList, nn.ModuleDict, Router)
        )
        if inner and name and name not in names.values():
            names[module] = name
    return names


def shared_name(module: nn.Module) -> str:
    """Return the dotted path that all parameters of a module share; "" if there is none."""
    parts = [part.name for p in module.parameters() if has_layout(p) for part in layout_of(p).parts]
    levels = zip(*(name.split(".")[:-1] for name in parts), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
