"""The parallel AMP optimizer: AdamW whose every step either happened on all ranks or on none.

One step, after the backward pass has summed gradients into the buffers:

    1. reduce      gradients that are shares are summed over tp, then over dp, tied ones over their pipeline ranks
    2. statistics  one read of the own slices; one all-reduce of five numbers over the whole mesh, so that every
                   rank holds the same loss, norm and zero count and takes the same decision, in every precision
    3. update      one fused AdamW pass over the own slices. Unscaling and clipping are one division inside it, and
                   where something was not finite it leaves weights, moments and step count alone
    4. scaler      is told; the factor divided out in 3 is the one the loss was multiplied by
    5. publish     masters are rounded into the weights, slices collected over dp
    6. locate      only after a skipped step: which parameters held what was not finite

The loss must already be a mean over the tokens of all dp ranks, so gradients are summed and never averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.buffer import Buffer
from megaprec.comm import Axis, device_of
from megaprec.events import NonFiniteStep, StepReport
from megaprec.layout import layout_of, parameters_of
from megaprec.locate import locate
from megaprec.partial import sum_partial
from megaprec.plan import PrecisionPlan
from megaprec.scaler import make_scaler
from megaprec.stats import statistics
from megaprec.tied import tied_axes


@dataclass
class _Slices:
    """Slices of one buffer that share their hyper-parameters: flat tensors of equal lengths."""

    weights: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    weight_decay: float


class ParallelAMPOptimizer:
    """AdamW with FP32 masters, loss scaling and clipping over a (pp, dp, tp) mesh.

    parts: the model chunks that this rank holds, in order. Their parameters carry layouts; their memory is taken
        over by flat buffers on the mesh's device.
    mesh: with axes pp, dp and tp; None for a plain process.
    weight_decay: of parameters of two or more dims; biases and norms are not decayed.
    clip: the largest global L2 norm of the gradients; 0 to leave them as they are.
    zero: ZeRO-1, each dp rank keeps 1/dp of masters and moments.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: PrecisionPlan,
        mesh: DeviceMesh | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float = 1.0,
        zero: bool = True,
    ) -> None:
        self.plan, self.betas, self.eps, self.clip = plan, betas, eps, clip
        self.pp, self.dp, self.tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
        self.world, self.device = Axis.world(mesh), device_of(mesh)
        self.scaler = make_scaler(plan.scaling, self.device)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)  # applied so far
        axes = tied_axes(mesh, (layout_of(p).tied for p in parameters_of(parts)))
        _require_fitting(parts, self.tp.size)
        self.buffers: list[list[Buffer]] = []  # by model chunk
        self._reduced: set[int] = set()  # chunks whose gradients of this step are final
        self._tied: list[tuple[Buffer, Axis]] = []
        self._slices: list[_Slices] = []
        taken: set[nn.Parameter] = set()
        for part in parts:
            mine = [p for p in parameters_of([part]) if p not in taken]
            taken.update(mine)
            self.buffers.append([self._adopt(group, axes, zero, weight_decay) for group in _kinds(mine)])
            for frozen in (p for p in part.parameters() if not p.requires_grad):
                frozen.data = frozen.data.to(self.device, plan.parameters)
        self._counted = [buffer.own(buffer.grads)[a:b] for buffer in self.all_buffers() for a, b in buffer.counted()]
        self._copies = [buffer.own(buffer.grads)[a:b] for buffer in self.all_buffers() for a, b in buffer.copies()]
        count = torch.tensor(sum(len(values) for values in self._counted), dtype=torch.float64, device=self.device)
        self.num_elements = int(self.world.sum_(count).item())

    def _adopt(
        self, parameters: list[nn.Parameter], tied: dict[tuple[int, ...], Axis], zero: bool, decay: float
    ) -> Buffer:
        parameters = sorted(parameters, key=lambda p: p.dim() < 2)  # stable: first those with weight decay
        buffer = Buffer(parameters, self.plan, self.dp, self.pp.rank, zero, self.device)
        if pipeline_ranks := layout_of(parameters[0]).tied:
            self._tied.append((buffer, tied[pipeline_ranks]))
        for decayed in (True, False):
            if chosen := [p for p in parameters if (p.dim() >= 2) == decayed]:
                a, b = buffer.range_of(chosen)
                values = [
                    [t[a:b]] for t in (buffer.masters, buffer.own(buffer.grads), buffer.exp_avg, buffer.exp_avg_sq)
                ]
                self._slices.append(_Slices(*values, weight_decay=decay if decayed else 0.0))
        return buffer

    def all_buffers(self) -> list[Buffer]:
        """Every buffer of this rank, in an order that all dp ranks share."""
        return [buffer for chunk in self.buffers for buffer in chunk]

    @property
    def scale(self) -> Tensor:
        """What the loss of this step is to be multiplied by: float32 of shape [], the same on every rank."""
        return self.scaler.scale

    def state_dict(self) -> dict[str, Any]:
        """What is not a tensor of the model: plain numbers, the same on every rank. Tensors: megaprec.checkpoint."""
        return {"steps": int(self.steps.item()), "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved step count and scaler, and makes the weights from the masters as they now are."""
        self.steps.fill_(state["steps"])
        self.scaler.load_state_dict(state["scaler"])
        for buffer in self.all_buffers():
            buffer.publish()

    @torch.no_grad()
    def reduce(self, chunk: int = 0) -> None:
        """Once per step, when the gradients of model chunk `chunk` are complete: sums them over tp and dp."""
        if chunk in self._reduced:
            raise RuntimeError(
                f"model chunk {chunk} was reduced twice in one step: its gradients would be summed twice"
            )
        self._reduced.add(chunk)
        for buffer in self.buffers[chunk]:
            sum_partial(buffer.parameters, self.tp)
            buffer.reduce()

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor | None = None) -> StepReport:
        """Applies or skips the step and clears the gradients, after reducing those that `reduce` was not called for.

        loss: this rank's share of the global mean loss (unscaled), so that the sum over all ranks is that loss;
            None for no share.
        """
        for chunk in range(len(self.buffers)):
            if chunk not in self._reduced:
                self.reduce(chunk)
        self._reduced.clear()
        for buffer, axis in self._tied:
            axis.sum_(buffer.own(buffer.grads))
        shared = self._agree(loss)
        scale = self.scale.clone()
        norm = shared[0].sqrt() / scale
        found = shared[[0, 2]].isfinite().logical_not().any().float()
        self._update(lr, scale.double() / self._clip_factor(norm), found)
        self.scaler.update(found)
        for buffer in self.all_buffers():
            buffer.publish()
        report = self._report(torch.cat((shared, torch.stack((norm, scale.double(), found.double())))), lr)
        for buffer in self.all_buffers():
            buffer.grads.zero_()
        if report.outcome != "applied" and self.plan.on_nonfinite == "raise":
            raise NonFiniteStep(report)
        return report

    def _agree(self, loss: Tensor | None) -> Tensor:
        """float64 [5], summed over the whole mesh: sum of squares of the scaled gradients, zeros, loss, and what tells
        whether all ranks come to this step with the same scaler: a digest of its state, and the digest's square."""
        own = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.double().reshape(())
        digest = self._digest()
        counted = statistics(self._counted, self._copies, self.device)
        return self.world.sum_(torch.cat((counted, torch.stack((own, digest, digest.square())))))

    def _digest(self) -> Tensor:
        """12 bits of scale, trackers and step count, so few that sums of squares over thousands of ranks are exact."""
        bits = torch.zeros((), dtype=torch.int64, device=self.device)
        for number in (*self.scaler.tensors(), self.steps):
            bits = (bits ^ number.float().view(torch.int32)) * 0x9E3779B1
            bits = bits ^ (bits >> 15)
        return (bits & 0xFFF).double()

    def _clip_factor(self, norm: Tensor) -> Tensor:
        """At most 1. A norm that is not finite gives a factor that is never used: such a step is skipped."""
        return (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip > 0 else torch.ones_like(norm)

    def _update(self, lr: float, divisor: Tensor, found: Tensor) -> None:
        """AdamW on gradient / divisor, or nothing at all where `found` is 1."""
        folded: Tensor | None = divisor.float()
        if self.plan.masters == torch.float64:  # the fused kernel reads its divisor in FP32, too coarse for a proof
            for slices in self._slices:
                torch._foreach_div_(slices.grads, torch.where(found == 0, divisor, 1.0))
            folded = None
        self.steps += 1 - found
        for s in self._slices:
            torch._fused_adamw_(
                s.weights, s.grads, s.exp_avg, s.exp_avg_sq, [], [self.steps.clamp(min=1)] * len(s.weights),
                lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=s.weight_decay, eps=self.eps,
                amsgrad=False, maximize=False, grad_scale=folded, found_inf=found,
            )  # fmt: skip

    def _report(self, numbers: Tensor, lr: float) -> StepReport:
        """The only place where the host waits for the device. A skipped step's gradients are looked into."""
        _, zeros, loss, digests, squares, norm, scale, found = numbers.tolist()
        if digests**2 != self.world.size * squares:  # the mean of squares is the square of the mean if all are equal
            here = self.scaler.state_dict()
            raise RuntimeError(f"ranks disagree about the loss scaler; on this one it is {here} after this step")
        offenders = locate(self.all_buffers(), self.pp, self.tp, self.world, self.device) if found else ()
        outcome = "skipped_overflow" if found else "applied"
        return StepReport(outcome, loss, norm, int(zeros), zeros / self.num_elements, scale, lr, offenders)


def _require_fitting(parts: Sequence[nn.Module], tp: int) -> None:
    """Raises ValueError if a layout was made for another number of tensor-parallel ranks: it would be miscounted."""
    for part in (part for p in parameters_of(parts) for part in layout_of(p).parts):
        if part.shards * part.copies != tp:
            made = f"{part.shards} slices x {part.copies} copies"
            raise ValueError(f"{part.name} is laid out for {made}, but there are {tp} tensor-parallel ranks")


def _kinds(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that can share a buffer. Tied ones lie apart, so that every holder cuts them into the same slices."""
    kinds: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(layout_of(parameter).tied, []).append(parameter)
    return list(kinds.values())
