"""The sentinel: a check that a training step was computed rightly, made while the step is taken.

Wrong numbers that are finite train on unseen. Two things are checked. What several ranks hold must
be the same bits (`megaprec.diagnose.held_state`). And one micro-batch of the step is computed a
second time, before the step: by the next data-parallel replica, or by the same ranks if there is
one replica. Weights, samples and dropout are the same, so every activation, gradient and message
must be the same bits.

The comparison comes after the passes and before the update. If something differs, every replica
computes the micro-batch twice more, which tells who is to blame (`megaprec.diagnose.silent_fault`),
and `SilentFault` is raised on every rank: no weight, moment or scale has changed. Outside of
checked steps there are no hooks and no calls.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cache

import torch
from torch import Tensor

from megaprec.comm.everyones import everyones
from megaprec.comm.random import key
from megaprec.diagnose.bit_digest import digest, hexadecimal
from megaprec.diagnose.held_state import GRADIENT, Held, Holders, compare, held, strayed
from megaprec.diagnose.silent_fault import Fault, Testimony, judge, rows
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import begin_accumulation, has_gradient
from megaprec.optim.observer import StepObserver
from megaprec.optim.replicas import sharing_replicas
from models.context_limits import require_whole
from models.engine import Engine
from models.microbatch_trace import TRACED, MicrobatchTrace, message_name
from models.passes import Share, require_steady_scales
from parallel.pipeline.instructions import Op

ShareOf = Callable[[int], Share]


class SilentFault(Exception):
    """A step was computed wrongly, and was not applied. Raised on every rank, with the same
    fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Sentinel(StepObserver):
    """Checks single steps of `engine`.

    exact: True if the model and its device are known to compute the same bits each time. If they
    are not, and a micro-batch computed twice by the same ranks differs on all of them, no rank is
    accused: `recomputes` becomes False, and from then on only what the ranks hold is compared.
    """

    def __init__(self, engine: Engine, exact: bool) -> None:
        require_steady_scales(engine.fp8, "compute a micro-batch again")
        require_whole(engine.cp.size, "check steps for hardware that computes wrongly")
        self.engine = engine
        self.optimizer = engine.optimizer
        self.exact = exact
        self.recomputes = True
        dp = self.optimizer.dp
        # Where tokens travel to experts, replicas compute together, and each micro-batch on its own
        # ranks alone.
        self.together = engine.experts is not None
        self.neighbours = (
            dp.size > 1 and self._alike() and not engine.fp8.differs_over_dp and not self.together
        )
        self._lender = (dp.rank - 1) % dp.size if self.neighbours else dp.rank
        self._in_flight = self.optimizer.overlap and engine.schedule.microbatches == 1
        self._number = 0
        self._share_of = _no_share
        self._real = self._again = self._trace()

    @contextmanager
    def checking(self, number: int, share_of: ShareOf) -> Iterator[None]:
        """Check step `number`, which is taken inside. Raises SilentFault, on every rank, before the
        step's update.

        share_of: returns the share of a data-parallel rank in this step. The step before must be
            settled. Collective.
        """
        engine = self.engine
        passes = self.engine.passes
        self._number = number
        self._share_of = cache(share_of)
        engine.fp8.roll()  # as at the start of the step itself
        if self.recomputes:
            self._again = self._recompute(self._lender)
        self._real = self._trace()
        engine.passes = replace(passes, watch=self._real.watch)
        self.optimizer.observers.append(self)
        if self._in_flight:
            self.optimizer.watch_local_gradients(
                lambda buffer: self._real.look_at(buffer.parameters)
            )
        try:
            with self._real.recording():
                yield
        finally:
            engine.passes = passes
            self.optimizer.observers.remove(self)
            self.optimizer.watch_local_gradients(None)
            self._share_of = _no_share

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Compare, after the passes and before the update."""
        engine = self.engine
        optimizer = self.optimizer
        stages = engine.stages.values()
        all_held = held(buffers, stages)
        wrong = strayed(buffers, optimizer.steps)
        agreement = compare(all_held, engine.pp, *self._holders(), optimizer.device)
        strays = torch.stack(
            [*wrong.values(), torch.zeros((), dtype=torch.bool, device=optimizer.device)]
        ).any()
        holds = torch.stack(
            [agreement.weights | strays, agreement.gradients, self._messages_differ()]
        )
        flags = optimizer.world.max_(torch.cat([holds, self._suspects()]).float()).bool().tolist()
        if not any(flags):
            return
        suspects = [rank for rank, differs in enumerate(flags[3:]) if differs]
        if not suspects:
            suspect = None
        elif self.together:
            suspect = 0
        else:
            suspect = suspects[0]
        fault = self._judge(all_held, wrong, suspect)
        if fault is None:
            self.recomputes = False
            return
        optimizer.zero_grad()
        engine.fp8.forget()
        raise SilentFault(fault)

    def _holders(self) -> tuple[Holders, Holders | None]:
        """Return the ranks that hold the same weights, and those that hold the same experts if
        these lie apart."""
        engine = self.engine
        zero = self.optimizer.shards.size
        experts = self.engine.experts
        others = Holders(engine.dp, zero, engine.tp)
        if experts is None:
            return others, None
        shared = sharing_replicas(engine.tp.size, zero, experts.spread.size, experts.tp.size)
        among = experts.replicas.size if zero == engine.dp.size else shared
        return others, Holders(experts.replicas, among, experts.tp)

    def _place(self) -> tuple[int, int, int]:
        """Return this rank's pp, dp and tp; replicas that compute together count as one."""
        o = self.optimizer
        if self.together:
            return (o.pp.rank, 0, o.dp.rank * o.tp.size + o.tp.rank)
        return (o.pp.rank, o.dp.rank, o.tp.rank)

    def _suspects(self) -> Tensor:
        """Return bool [dp], True for replicas whose micro-batch was not computed again as it
        was."""
        dp = self.optimizer.dp
        if not self.recomputes:
            return torch.zeros(dp.size, dtype=torch.bool, device=self.optimizer.device)
        both = torch.cat([self._fold(self._real), self._fold(self._again)])
        real, again = dp.gather(both.unsqueeze(0)).view(dp.size, 2, 2).unbind(1)
        return (real != (again.roll(-1, 0) if self.neighbours else again)).any(1)

    def _fold(self, trace: MicrobatchTrace) -> Tensor:
        """Return one digest of a trace: int64 [2]."""
        return digest(torch.stack([entry.digest for entry in trace.entries]))

    def _messages_differ(self) -> Tensor:
        """Return bool [], True if a message of this pipeline was received with other bits than it
        was sent with."""
        table = torch.zeros(
            2 * self.engine.last, 2, 3, dtype=torch.int64, device=self.optimizer.device
        )
        for (number, side), bits in self._real.messages.items():
            table[number, side, :2], table[number, side, 2] = bits, 1
        sent, received = self.optimizer.pp.sum_(table).unbind(1)
        return (((sent != received).any(1)) & (sent[:, 2] + received[:, 2] == 2)).any()

    def _judge(
        self, all_held: Sequence[Held], wrong: Mapping[str, Tensor], suspect: int | None
    ) -> Fault | None:
        """Return the verdict, the same on every rank. Collective. suspect: a replica whose
        micro-batch is in doubt."""
        optimizer = self.optimizer
        world = optimizer.world
        traces = {"real": self._real, "again": self._again}
        if suspect is not None:
            lender = suspect if self.neighbours else optimizer.dp.rank
            with self._gradients_kept():
                traces |= {name: self._recompute(lender) for name in ("first", "second")}
        testimony = Testimony(
            rank=world.rank,
            host=socket.gethostname(),
            place=self._place(),
            weights={one.key: hexadecimal(one.digest) for one in all_held if one.kind != GRADIENT},
            gradients={
                one.key: hexadecimal(one.digest) for one in all_held if one.kind == GRADIENT
            },
            strayed=[name for name, strays in wrong.items() if strays],
            messages=_by_name(self._real),
            traces={name: rows(trace.entries) for name, trace in traces.items()},
        )
        said = everyones({str(world.rank): asdict(testimony)}, world, optimizer.device)
        everybody = [Testimony.read(said[str(rank)]) for rank in range(world.size)]
        return judge(everybody, suspect, self.neighbours, self.exact)

    def _recompute(self, lender: int) -> MicrobatchTrace:
        """Compute the traced micro-batch of data-parallel rank `lender` with the weights and scales
        of this step.

        No gradient is left, and torch's random numbers stand where they stood. Collective.
        """
        passes = self.engine.passes
        optimizer = self.optimizer
        number = self._number
        own = passes.begin(self._share_of(optimizer.dp.rank), number, optimizer.scale)
        lent = passes.begin(self._share_of(lender), number, optimizer.scale)
        lent.end()
        run = replace(lent, counted=own.counted)
        trace = self._trace(alone=True)
        program = [i for i in passes.program if i.microbatch == TRACED and i.op is not Op.REDUCE]
        devices = [optimizer.device] if optimizer.device.type == "cuda" else []
        with ExitStack() as inside:
            inside.enter_context(torch.enable_grad())
            inside.enter_context(torch.random.fork_rng(devices))
            inside.enter_context(passes.gradients_aside())
            inside.enter_context(passes.fp8.replayed())
            inside.enter_context(trace.recording())
            replace(passes, watch=trace.watch).executor(run, program).run()
        return trace

    def _trace(self, alone: bool = False) -> MicrobatchTrace:
        engine = self.engine
        in_flight = self._in_flight and not alone
        return MicrobatchTrace(
            engine.stages, engine.last, engine.passes.program, alone=alone, in_flight=in_flight
        )

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Restore the gradients of the step at the end. Needs as much memory as they do."""
        kept = [(buffer, buffer.grads.clone()) for buffer in self.optimizer.all_buffers()]
        given = [p for buffer, _ in kept for p in buffer.parameters if has_gradient(p)]
        yield
        for buffer, gradients in kept:
            buffer.grads.copy_(gradients)
        for parameter in given:
            begin_accumulation(parameter)

    def _alike(self) -> bool:
        """Return True if the replicas have the same kind of device and the same version of torch.
        Collective."""
        device = self.optimizer.device
        if device.type == "cuda":
            kind = torch.cuda.get_device_name(device)
        else:
            kind = torch.backends.cpu.get_cpu_capability()
        mine = torch.tensor(
            [key(0, torch.__version__, kind, torch.get_num_threads())], device=device
        )
        differs = (self.optimizer.dp.gather(mine) != mine).any()
        return not self.optimizer.world.max_(differs.float()).item()


def _by_name(trace: MicrobatchTrace) -> dict[str, dict[str, str]]:
    """Return the digests of messages by name and side."""
    found: dict[str, dict[str, str]] = {}
    for (number, side), bits in trace.messages.items():
        found.setdefault(message_name(number), {})[("sent", "received")[side]] = hexadecimal(bits)
    return found


def _no_share(replica: int) -> Share:
    raise RuntimeError("no step is being checked")
