"""What flows between the modules of a model, and its gradient on the way back, noted token by token.

Where two runs begin to differ says what is wrong: if all that a module was given agrees and what it made does not, the
fault is in it. So each module with parameters has two borders, "NAME>in" and "NAME>out", named by what its parameters'
logical names share ("layers.3.mlp"), which is the same in every layout and for models of the user's own.

Noted are tensors of the residual stream's kind, [s, b, hidden] or [s / tp, b, hidden]. A token is noted as one number:
the product of its features with a vector of random numbers that all layouts share. Two different activations have
different numbers, and the relative error of many numbers is that of the activations. Of large batches some positions
are noted. What a recomputation makes again is not noted: it is outside of a stage's forward.
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

TOKENS = 4096  # of a step that are noted at each border, at most
FORWARD, BACKWARD = "activation", "activation gradient"
TOKENS_IN = "tokens>in"  # the border at which the first stage is given ids [s, b]


@dataclass(frozen=True)
class Size:
    """Of a run: tokens of a sample, samples of a step, features, steps."""

    length: int
    batch: int
    hidden: int
    steps: int


@dataclass
class Notes:
    """What one rank saw at one border, float64. values: [steps, samples, positions], NaN where nothing was seen.

    rank: whose. samples: numbers within the global batch; positions: within the sample; of what it saw at all.
    """

    rank: int
    samples: list[int]
    positions: list[int]
    values: Tensor


@dataclass(frozen=True)
class _Call:
    """A forward pass of a stage that is under way."""

    step: int
    samples: list[int]
    times: dict[str, int] = field(default_factory=dict)  # each border was passed
    seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # by id; held, so that no other gets the id


class Borders:
    """Watches stages while they train. Engines call a stage as stage(x, place, packing).

    passed: borders in the order in which each was first passed, and for one at which a tensor comes by that was seen
    already, the border where it was; else "".
    """

    def __init__(self, stages: Sequence[nn.Module], size: Size, tp: Axis, rank: int) -> None:
        self.size, self.tp, self.rank = size, tp, rank
        self.direction = normal(key(0, "parity borders"), torch.arange(size.hidden))
        self.ones = torch.ones(1, dtype=torch.float64)
        self.stride = max(1, size.batch * size.length // TOKENS)
        self.passed: dict[str, str] = {}
        self._seen: dict[tuple[str, str], tuple[int, Tensor]] = {}  # first position; [steps, batch, positions]
        self._samples: set[int] = set()
        self._call: _Call | None = None
        for stage in stages:
            stage.register_forward_pre_hook(self._begin)
            stage.register_forward_hook(self._end)
            for module, name in named(stage).items():
                module.register_forward_pre_hook(partial(self._enter, f"{name}>in"))
                module.register_forward_hook(partial(self._leave, f"{name}>out"))

    def _begin(self, stage: nn.Module, args: Sequence[Any]) -> None:
        place = args[1] if len(args) > 1 else None
        self._call = None if place is None else _Call(place.step, place.samples.tolist())
        if self._call is not None:
            self._samples.update(self._call.samples)
            if args[0].dtype == torch.int64:
                self.passed.setdefault(TOKENS_IN, "")
                self._note((FORWARD, TOKENS_IN), self._call, args[0].unsqueeze(-1), self.ones)

    def _end(self, stage: nn.Module, args: object, made: object) -> None:
        if self._call is not None:
            self._call.seen.clear()  # hooks hold the call for as long as the graph lives
        self._call = None

    def _enter(self, border: str, module: nn.Module, args: Sequence[Any]) -> None:
        self._look(border, args[0] if args else None)

    def _leave(self, border: str, module: nn.Module, args: object, made: Any) -> None:
        self._look(border, made[0] if isinstance(made, tuple) else made)

    def _look(self, border: str, x: Any) -> None:
        call = self._call
        if call is None or not isinstance(x, Tensor) or not self._fits(x, len(call.samples)):
            return
        times = call.times[border] = call.times.get(border, 0) + 1
        border = border if times == 1 else f"{border} {times}"
        known = call.seen.get(id(x))
        self.passed.setdefault(border, known[1] if known else "")
        if known is None:
            call.seen[id(x)] = x, border
            self._note((FORWARD, border), call, x, self.direction)
            if x.requires_grad:
                x.register_hook(lambda grad: self._note((BACKWARD, border), call, grad, self.direction))

    def _fits(self, x: Tensor, samples: int) -> bool:
        s, b, hidden = x.shape if x.dim() == 3 else (0, 0, 0)
        lengths = (self.size.length, self.size.length // self.tp.size)
        return s in lengths and b == samples and hidden == self.size.hidden and x.is_floating_point()

    @torch.no_grad()
    def _note(self, where: tuple[str, str], call: _Call, x: Tensor, direction: Tensor) -> None:
        first = 0 if len(x) == self.size.length else self.tp.rank * len(x)
        skipped = -first % self.stride
        some = x.detach()[skipped :: self.stride].double() @ direction.to(x.device)
        if where not in self._seen:
            shape = (self.size.steps, self.size.batch, len(some))
            self._seen[where] = first + skipped, torch.full(shape, torch.nan, dtype=torch.float64)
        self._seen[where][1][call.step, call.samples] = some.t().cpu()

    def notes(self) -> Iterator[tuple[tuple[str, str], Notes]]:
        """What was seen at each border that is not another one's."""
        samples = sorted(self._samples)
        for where, (first, values) in self._seen.items():
            positions = [first + n * self.stride for n in range(values.shape[2])]
            yield where, Notes(self.rank, samples, positions, values[:, samples])


def named(stage: nn.Module) -> Mapping[nn.Module, str]:
    """The modules of a stage that have a name of their own, by what their parameters' logical names share."""
    names: dict[nn.Module, str] = {}
    for module in stage.modules():
        name = shared_name(module)
        inner = module is not stage and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if inner and name and name not in names.values():
            names[module] = name
    return names


def shared_name(module: nn.Module) -> str:
    """The dotted path of what all of a module's parameters belong to; "" if there is none."""
    parts = [part.name for p in module.parameters() if has_layout(p) for part in layout_of(p).parts]
    levels = zip(*(name.split(".")[:-1] for name in parts), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
