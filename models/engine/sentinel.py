"""The sentinel: a check, made while a training step is taken, that it was computed rightly.

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
from torch import Tensor, nn

from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.main_grad import begin_accumulation, has_gradient
from megaprec.comm.random import key
from megaprec.comm.tensor_digests import digest, hexadecimal
from megaprec.diagnose.held_state import (
    GRADIENT,
    HeldDigest,
    compare,
    digest_held_state,
    find_strayed,
)
from megaprec.diagnose.silent_fault import Fault, RankEvidence, judge, read_trace
from megaprec.optim.decision.step_report import StepObserver
from megaprec.optim.state.flat_buffer import Buffer
from models.attention.context_limits import require_uncut_sequences
from models.engine.copies import holders
from models.engine.engine import Engine
from models.engine.microbatch_trace import (
    SIDES,
    TRACED_MICROBATCH,
    MicrobatchTrace,
    message_name,
)
from models.engine.passes import Share, require_steady_scales, require_whole_gradients
from parallel.pipeline.instructions import Op

ShareOf = Callable[[int], Share]


class SilentFault(Exception):
    """A step was computed wrongly, and was not applied. Raised on every rank, with the same
    fault."""

    microbatch = TRACED_MICROBATCH

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Sentinel(StepObserver):
    """Checks that single steps of `engine` were computed rightly: what several ranks hold, and what
    two computations of one micro-batch give, must have the same bits.

    exact: True if the model and its device are known to compute the same bits each time. If they
    are not, and a micro-batch computed twice by the same ranks differs on all of them, no rank is
    accused: `recomputes` becomes False, and from then on only what the ranks hold is compared.
    """

    def __init__(self, engine: Engine, exact: bool) -> None:
        require_steady_scales(engine.fp8, "compute a micro-batch again")
        require_whole_gradients(engine.optimizer, "compute a micro-batch again")
        require_uncut_sequences(engine.cp.size, "check steps for hardware that computes wrongly")
        self.engine = engine
        self.optimizer = engine.optimizer
        self.exact = exact
        self.recomputes = True
        dp = self.optimizer.dp
        # Where tokens travel to experts, replicas compute a micro-batch together.
        self.replicas_together = engine.experts is not None
        # True if a replica computes the micro-batch of the replica before it again, False if its
        # own
        self.recomputes_neighbour = (
            dp.size > 1
            and self._replicas_compute_alike()
            and not engine.fp8.differs_over_dp
            and not self.replicas_together
        )
        # The dp rank whose micro-batch this rank computes again.
        self._lender = (dp.rank - 1) % dp.size if self.recomputes_neighbour else dp.rank
        self._number = 0
        self._share_of = _no_share
        self._passes = engine.passes  # of the step that is checked
        # the traces of the micro-batch in the step itself, and of its second computation
        self._real = self._make_trace()
        self._again = self._real

    @contextmanager
    def checking(self, number: int, share_of: ShareOf) -> Iterator[None]:
        """Check step `number`, which is taken inside. Raises SilentFault, on every rank, before the
        step's update.

        share_of: returns the share of a data-parallel rank in this step.
        `Engine.step` of the step before must have returned. Collective.
        """
        engine = self.engine
        self._number = number
        self._share_of = cache(share_of)
        self._passes = engine.passes_for(self._share_of(self.optimizer.dp.rank))
        # the scales of FP8 as at the start of the step itself
        engine.fp8.roll()
        if self.recomputes:
            self._again = self._recompute(self._lender)
        self._real = self._make_trace()
        # The step's own executor is traced, and the optimizer's step calls `gradients_ready`.
        engine.pass_observers.append(self._real)
        self.optimizer.observers.append(self)
        if self._reduces_in_backward:
            self.optimizer.watch_local_gradients(
                lambda buffer: self._real.look_at(buffer.parameters)
            )
        try:
            with self._real.recording():
                yield
        finally:
            engine.pass_observers.remove(self._real)
            self.optimizer.observers.remove(self)
            self.optimizer.watch_local_gradients(None)
            self._share_of = _no_share

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Compare what ranks hold and what they have computed, after the passes and before the
        update. Raises SilentFault, on every rank, if a rank is to blame for a difference.

        Called by the optimizer's step. buffers: the gradients, weights and state of this rank.
        """
        engine = self.engine
        optimizer = self.optimizer
        stages = engine.stages.values()
        all_held = digest_held_state(buffers, stages)
        strays = find_strayed(buffers, optimizer.applied_steps)
        agreement = compare(all_held, engine.pp, *holders(engine), optimizer.device)
        # one that is false, as `torch.stack` takes no empty list
        no_stray = torch.zeros((), dtype=torch.bool, device=optimizer.device)
        any_strays = torch.stack([*strays.values(), no_stray]).any()
        state_flags = torch.stack(
            [agreement.weights | any_strays, agreement.gradients, self._messages_differ()]
        )
        # one maximum over all ranks, and the only wait of the host
        flags = torch.cat([state_flags, self._suspects()]).float()
        flags_of_all = optimizer.world.max_(flags).bool().tolist()
        if not any(flags_of_all):
            return
        # the flags of replicas come after those of the state
        replica_flags = flags_of_all[len(state_flags) :]
        suspect = replica_flags.index(True) if any(replica_flags) else None
        # replicas that compute together count as one
        if suspect is not None and self.replicas_together:
            suspect = 0
        fault = self._find_fault(all_held, strays, suspect)
        if fault is None:
            # A micro-batch differs each time it is computed, and so says nothing about hardware.
            self.recomputes = False
            return
        # The step leaves neither gradients nor amaxes behind.
        optimizer.zero_grad()
        engine.fp8.forget()
        raise SilentFault(fault)

    @property
    def _reduces_in_backward(self) -> bool:
        """True if the backward pass of the step's only micro-batch already reduces its
        gradients."""
        return self.optimizer.overlap and self._passes.schedule.microbatches == 1

    def _coordinates(self) -> tuple[int, int, int]:
        """Return this rank's index along pp, dp and tp. Replicas that compute together count as
        one, whose ranks are all along tp."""
        pp = self.optimizer.pp
        dp = self.optimizer.dp
        tp = self.optimizer.tp
        if self.replicas_together:
            return (pp.rank, 0, dp.rank * tp.size + tp.rank)
        return (pp.rank, dp.rank, tp.rank)

    def _suspects(self) -> Tensor:
        """Return bool [dp], True for replicas whose micro-batch was other bits when it was computed
        a second time; all False if none was. Collective over dp."""
        dp = self.optimizer.dp
        if not self.recomputes:
            return torch.zeros(dp.size, dtype=torch.bool, device=self.optimizer.device)
        # one message for both digests, of two numbers each
        both = torch.cat([_digest_trace(self._real), _digest_trace(self._again)])
        of_replicas = dp.gather(both.unsqueeze(0)).view(dp.size, 2, 2)
        real, again = of_replicas.unbind(1)
        if self.recomputes_neighbour:
            again = again.roll(-1, 0)  # that of each replica was computed again by the next one
        return (real != again).any(1)

    def _messages_differ(self) -> Tensor:
        """Return bool [], True if a message of the traced micro-batch in this pipeline was received
        with other bits than it was sent with. Collective over pp."""
        # an activation and a gradient at each border of two stages
        num_messages = 2 * self.engine.last_stage
        # by message and side: the two numbers of the digest, and 1 if this rank has noted it
        table = torch.zeros(num_messages, 2, 3, dtype=torch.int64, device=self.optimizer.device)
        for (number, side), bits in self._real.messages.items():
            table[number, side, :2] = bits
            table[number, side, 2] = 1
        sent, received = self.optimizer.pp.sum_(table).unbind(1)
        # a message between stages of one rank is noted once only, and cannot differ
        noted_twice = sent[:, 2] + received[:, 2] == 2
        return ((sent != received).any(1) & noted_twice).any()

    def _find_fault(
        self,
        all_held: Sequence[HeldDigest],
        strays: Mapping[str, Tensor],
        suspect: int | None,
    ) -> Fault | None:
        """Return who is to blame, the same on every rank; None if no rank is. Collective over the
        world.

        all_held: the digests of what this rank holds. strays: bool [] by parameter, whether this
        rank's weights are not its masters, rounded.
        suspect: a replica whose micro-batch was other bits the second time; all replicas compute it
            twice more. None: there is none.
        """
        optimizer = self.optimizer
        world = optimizer.world
        traces = {"real": self._real, "again": self._again}
        if suspect is not None:
            lender = suspect if self.recomputes_neighbour else optimizer.dp.rank
            with self._restored_gradients():
                traces |= {name: self._recompute(lender) for name in ("first", "second")}
        weights: dict[str, str] = {}
        gradients: dict[str, str] = {}
        for held_values in all_held:
            digests = gradients if held_values.kind == GRADIENT else weights
            digests[held_values.key] = hexadecimal(held_values.digest)
        local_evidence = RankEvidence(
            rank=world.rank,
            host=socket.gethostname(),
            coordinates=self._coordinates(),
            weights=weights,
            gradients=gradients,
            strayed=[name for name, strayed_here in strays.items() if strayed_here],
            messages=_digests_of_messages(self._real),
            traces={name: read_trace(trace.entries) for name, trace in traces.items()},
        )
        local_record = {str(world.rank): asdict(local_evidence)}
        records = gather_entries(local_record, world, optimizer.device)
        evidence = [RankEvidence.read(records[str(rank)]) for rank in range(world.size)]
        return judge(evidence, suspect, self.recomputes_neighbour, self.exact)

    def _recompute(self, lender: int) -> MicrobatchTrace:
        """Return the trace of the first micro-batch of data-parallel rank `lender`, computed here
        with the weights and scales of this step.

        No gradient is left, and torch's random numbers go on as if nothing had been drawn.
        Collective.
        """
        passes = self._passes
        optimizer = self.optimizer
        number = self._number
        # `local` is begun for its token counts alone, which are those of the step. With lent shares
        # the ranks may sum the masks of other samples, or those of one share several times.
        local = passes.begin(self._share_of(optimizer.dp.rank), number, optimizer.scale)
        lent = passes.begin(self._share_of(lender), number, optimizer.scale)
        lent.await_sums()
        state = replace(lent, token_count=local.token_count)
        if lent.mtp_batch is not None and local.mtp_batch is not None:
            mtp_batch = replace(lent.mtp_batch, token_counts=local.mtp_batch.token_counts)
            state = replace(state, mtp_batch=mtp_batch)
        trace = self._make_trace(alone=True)
        # Nothing is reduced: that would add this gradient to those of other replicas.
        program = [
            instruction
            for instruction in passes.program
            if instruction.microbatch == TRACED_MICROBATCH and instruction.op is not Op.REDUCE
        ]
        # so that what draws from torch's generators draws the same numbers in the step itself
        devices = [optimizer.device] if optimizer.device.type == "cuda" else []
        with ExitStack() as inside:
            inside.enter_context(torch.enable_grad())
            inside.enter_context(torch.random.fork_rng(devices))
            inside.enter_context(passes.scratch_gradients())
            inside.enter_context(passes.fp8.replayed())
            inside.enter_context(trace.recording())
            passes.make_executor(state, program, [trace]).run()
        return trace

    def _make_trace(self, alone: bool = False) -> MicrobatchTrace:
        """Return an empty trace. alone: the micro-batch runs alone."""
        engine = self.engine
        return MicrobatchTrace(
            engine.stages,
            engine.last_stage,
            self._passes.program,
            alone=alone,
            reduces_in_backward=self._reduces_in_backward and not alone,
        )

    @contextmanager
    def _restored_gradients(self) -> Iterator[None]:
        """At the end of the context, put the gradients of the step back. Needs as much memory as
        they do."""
        buffers = self.optimizer.all_buffers()
        saved_gradients = [buffer.grads.clone() for buffer in buffers]
        with_gradient: list[nn.Parameter] = []
        for buffer in buffers:
            with_gradient += filter(has_gradient, buffer.parameters)
        yield
        for buffer, gradients in zip(buffers, saved_gradients, strict=True):
            buffer.grads.copy_(gradients)
        for parameter in with_gradient:
            begin_accumulation(parameter)

    def _replicas_compute_alike(self) -> bool:
        """Return True if the replicas have the same kind of device and the same version of torch.
        Collective."""
        device = self.optimizer.device
        if device.type == "cuda":
            device_kind = torch.cuda.get_device_name(device)
        else:
            device_kind = torch.backends.cpu.get_cpu_capability()
        # a hash, because tensors carry numbers only; threads cut sums in other places
        fingerprint = key(0, torch.__version__, device_kind, torch.get_num_threads())
        local = torch.tensor([fingerprint], device=device)
        differs = (self.optimizer.dp.gather(local) != local).any()
        return not self.optimizer.world.max_(differs.float()).item()


def _digest_trace(trace: MicrobatchTrace) -> Tensor:
    """Return one digest of a trace: int64 [2]."""
    return digest(torch.stack([entry.digest for entry in trace.entries]))


def _digests_of_messages(trace: MicrobatchTrace) -> dict[str, dict[str, str]]:
    """Return the hexadecimal digests of messages, by name and side ("sent", "received")."""
    digests: dict[str, dict[str, str]] = {}
    for (number, side), message_digest in trace.messages.items():
        of_message = digests.setdefault(message_name(number), {})
        of_message[SIDES[side]] = hexadecimal(message_digest)
    return digests


def _no_share(replica: int) -> Share:
    raise RuntimeError("no step is being checked")
