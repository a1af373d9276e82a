"""Bits flipped in a rank while it takes a step: what silently wrong hardware does, at each place
that is checked."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.comm.main_grad import zero_missing_grads
from megaprec.optim.model_buffers import ModelBuffers
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.engine.sentinel import Sentinel, SilentFault
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import RECEIVES, Instruction, Message, MessageType
from parallel.pipeline.kinds import schedule
from parallel.pipeline.p2p import P2P

SAMPLES = 12
LENGTH = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODEL: dict[str, Any] = {
    "vocab": 40, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24, "dropout": 0.1, "max_positions": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How the small model is trained: changes to MODEL, options of the engine's parts, and the
    micro-batch."""

    model: tuple[tuple[str, Any], ...] = ()
    compute: str = "fp32"
    zero_size: int = 0
    overlap: bool = False
    canonical: bool = False
    kind: str = "1f1b"
    sequence: bool = False
    seed: int = 3
    micro_batch: int = 2
    fp8: FP8Recipe | None = None
    recompute: Recompute = KEEP
    scaling: LossScaling | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    expert: int = 1
    expert_tensor: int = 0
    masked: bool = False


@dataclass(frozen=True)
class Flip:
    """A flipped bit.

    rank: where. kind: "weight", "activation", "activation gradient", "parameter gradient",
    "gradient before its reduction", "reduced gradient", "sent" or "received". at: path of a module,
    or name of a parameter. steady: again in each computation of this rank, not in the step alone.
    bit: counted from the lowest. back: of a gradient message.
    """

    rank: int
    kind: str
    at: str = ""
    steady: bool = False
    bit: int = 3
    back: bool = False


def flipped(x: Tensor, bit: int) -> Tensor:
    """A copy with one bit of its middle element flipped."""
    y = x.detach().clone(memory_format=torch.contiguous_format)
    flip_(y, bit)
    return y


def flip_(x: Tensor, bit: int) -> None:
    with torch.no_grad():
        x.view(-1).view(INTEGERS[x.itemsize])[x.numel() // 2] ^= 1 << bit


def make_engine(mesh: DeviceMesh | None, setting: Setting) -> Engine:
    pp, dp = (1 if mesh is None else mesh[axis].size() for axis in ("pp", "dp"))
    options = {
        "zero_size": setting.zero_size,
        "overlap": setting.overlap,
        "clip": 0.5,
        "canonical": setting.canonical,
    }
    return Engine.build(
        ModelConfig(**{**MODEL, **dict(setting.model)}),
        plan(setting.compute, setting.scaling, fp8=setting.fp8, **dict(setting.changes)),
        mesh,
        schedule(setting.kind, pp, SAMPLES // setting.micro_batch // dp, 0),
        EngineOptions(
            micro_batch=setting.micro_batch,
            seq_length=LENGTH,
            sequence=setting.sequence,
            seed=setting.seed,
            recompute=setting.recompute,
            expert=setting.expert,
            expert_tensor=setting.expert_tensor,
        ),
        **options,
    )


def shares(
    mesh: DeviceMesh | None, number: int, seed: int, masked: bool = False
) -> Callable[[int], Share]:
    """The shares of all data-parallel ranks in a step. masked: they count other numbers of tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    ids = torch.randint(0, 40, (SAMPLES, LENGTH + 1), generator=generator)
    mask = torch.rand(SAMPLES, LENGTH, generator=generator).round().double() if masked else None
    own = SAMPLES // (1 if mesh is None else mesh["dp"].size())

    def of(replica: int) -> Share:
        samples = slice(replica * own, (replica + 1) * own)
        rows = ids[samples]
        return Share(
            rows[:, :-1].contiguous(),
            rows[:, 1:].contiguous(),
            None if mask is None else mask[samples],
            first=replica * own,
        )

    return of


def take(
    engine: Engine,
    mesh: DeviceMesh | None,
    number: int,
    sentinel: Sentinel | None,
    seed: int = 0,
    masked: bool = False,
) -> float:
    """Takes a step, checked if there is a sentinel; returns its loss."""
    of = shares(mesh, number, seed, masked)
    with ExitStack() as inside:
        if sentinel is not None:
            inside.enter_context(sentinel.checking(number, of))
        return engine.step(of(engine.dp.rank), 1e-2, number).loss


def state(engine: Engine) -> list[Tensor]:
    engine.optimizer.wait()
    buffers = engine.optimizer.all_buffers()
    return [x.clone() for b in buffers for x in (b.weights, *b.saved().values())] + [
        engine.optimizer.applied_steps.clone()
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def planted(engine: Engine, flip: Flip) -> Iterator[None]:
    """Flips the bit within the context, if this is the rank."""
    with ExitStack() as inside:
        if engine.optimizer.world.rank == flip.rank:
            _plant(engine, flip, inside)
        yield


def _plant(engine: Engine, flip: Flip, inside: ExitStack) -> None:
    turns = _Turns(engine, flip)
    parameters = [
        (p, part.name)
        for b in engine.optimizer.all_buffers()
        for p in b.parameters
        for part in layout_of(p).parts
    ]
    if flip.kind == "weight":
        flip_(next(p.data for p, name in parameters if name == flip.at), flip.bit)
    elif flip.kind in ("activation", "activation gradient"):
        for stage in engine.stages.values():
            for path, module in stage.named_modules():
                if path == flip.at:
                    hook = module.register_forward_hook(turns.output)
                    inside.callback(hook.remove)
    elif flip.kind == "parameter gradient":
        (main,) = (_main_grad(p) for p, name in parameters if name == flip.at)
        inside.enter_context(
            _after(Executor, "_backward", lambda i, _: turns.now(i) and flip_(main, flip.bit))
        )
    elif flip.kind == "gradient before its reduction":
        (one,) = (p for p, name in parameters if name == flip.at)
        inside.enter_context(
            patch("megaprec.optim.grad_sync.zero_missing_grads", _zero_and_flip(one, flip.bit))
        )
    elif flip.kind == "reduced gradient":
        (main,) = (_main_grad(p) for p, name in parameters if name == flip.at)
        inside.enter_context(
            _after(ModelBuffers, "sum_tied_and_virtual", lambda *_: flip_(main, flip.bit))
        )
    else:
        inside.enter_context(patch.object(P2P, *_transfer(flip, turns)))


def _zero_and_flip(one: nn.Parameter, bit: int) -> Callable[[Sequence[nn.Parameter]], None]:
    def both(parameters: Sequence[nn.Parameter]) -> None:
        zero_missing_grads(parameters)
        if any(parameter is one for parameter in parameters):
            flip_(_main_grad(one), bit)

    return both


def _main_grad(parameter: nn.Parameter) -> Tensor:
    return parameter.main_grad  # type: ignore[attr-defined]


class _Turns:
    """Knows whether the first micro-batch of the step itself is being computed: its second pass,
    after the check's."""

    def __init__(self, engine: Engine, flip: Flip) -> None:
        self.engine = engine
        self.flip = flip
        self.seen = 0

    def now(self, i: Instruction | None = None) -> bool:
        if i is not None and i.microbatch != 0:
            return False
        self.seen += 1
        return self.flip.steady or self.seen == 2

    def output(self, module: nn.Module, args: object, made: Any) -> Any:
        if not (isinstance(made, Tensor) and made.requires_grad and self.now()):
            return made
        if self.flip.kind == "activation":
            return _Changed.apply(made, self.flip.bit)
        made.register_hook(lambda grad: flipped(grad, self.flip.bit))
        return made


class _Changed(torch.autograd.Function):
    """The identity with one bit flipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bit: int) -> Tensor:
        return flipped(x, bit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@contextmanager
def _after(owner: type, name: str, then: Callable[..., object]) -> Iterator[None]:
    before = getattr(owner, name)

    def both(self: Any, *args: Any) -> Any:
        made = before(self, *args)
        then(*(args or (None,)), None)
        return made

    with patch.object(owner, name, both):
        yield


def _transfer(flip: Flip, turns: _Turns) -> tuple[str, Callable[..., Any]]:
    kind = MessageType.GRADIENT if flip.back else MessageType.ACTIVATION
    send = P2P.send
    receive = P2P.receive

    def hit(i: Instruction) -> bool:
        message = Message.of(i)
        return (
            message is not None and message.kind is kind and message.microbatch == 0 and turns.now()
        )

    def sending(self: P2P, i: Instruction, tensor: Tensor) -> None:
        send(self, i, flipped(tensor, flip.bit) if hit(i) else tensor)

    def receiving(self: P2P, i: Instruction) -> Tensor:
        tensor = receive(self, i)
        return flipped(tensor, flip.bit) if i.op in RECEIVES and hit(i) else tensor

    return ("send", sending) if flip.kind == "sent" else ("receive", receiving)


def found(mesh: DeviceMesh | None, setting: Setting, flip: Flip) -> dict[str, Any] | None:
    """The fault that a check finds with a flipped bit, as fields; None if it finds none. A clean
    step comes before.

    Asserts that a step with a fault changes nothing but what was flipped in the weights, and that
    the step taken again is the one of an undisturbed run.
    """
    engine = make_engine(mesh, setting)
    plain = make_engine(mesh, setting)
    sentinel = Sentinel(engine, exact=True)
    step = partial(take, masked=setting.masked)
    assert step(engine, mesh, 0, sentinel) == step(plain, mesh, 0, None)
    assert same(state(engine), state(plain))
    fields = None
    try:
        with planted(engine, flip):
            step(engine, mesh, 1, sentinel)
    except SilentFault as error:
        fields = {**error.fault.fields(), "line": str(error)}
    if fields is not None and flip.kind != "weight":
        assert same(state(engine), state(plain)), "a step that was taken back has left something"
        assert step(engine, mesh, 1, sentinel) == step(plain, mesh, 1, None)
        assert same(state(engine), state(plain)), "the step taken again is another one"
    return fields


def all_found(mesh: DeviceMesh, setting: Setting, flips: list[Flip]) -> list[dict[str, Any] | None]:
    """The body of ranks: `found` for each flip."""
    return [found(mesh, setting, flip) for flip in flips]


def clean(mesh: DeviceMesh, settings: list[Setting], steps: int) -> int:
    """The body of ranks: takes checked steps and the same unchecked; returns the number of checks,
    all of them clean.

    Asserts that losses, weights and state are equal to the last bit.
    """
    checks = 0
    for setting in settings:
        engine = make_engine(mesh, setting)
        plain = make_engine(mesh, setting)
        sentinel = Sentinel(engine, exact=True)
        step = partial(take, masked=setting.masked)
        for number in range(steps):
            assert step(engine, mesh, number, sentinel, setting.seed) == step(
                plain, mesh, number, None, setting.seed
            )
            checks += 1
        assert sentinel.recomputes
        assert same(state(engine), state(plain)), f"a checked run is another one: {setting}"
    return checks
