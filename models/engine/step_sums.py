"""Numbers of a step that are reported beside its loss: of routers, the z-loss, the losses of
multi-token prediction, and those of the data sets of a blend.

One all-reduce over the world adds them, before the optimizer's step, with whose numbers they reach
the host: it waits once. They are no part of the optimizer's own all-reduce, whose sums may have
other last bits in a longer message. A step that has none of them sends nothing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.optim.decision.step_report import RouterReport, SourceReport, StepReport
from models.config import ModelConfig
from models.engine.passes import PassState
from models.feed_forward.router import Router
from models.feed_forward.router_tally import RouterSums

NUM_MEASURES = 6  # of a router, without corrections


class StepSums:
    """The numbers of one rank, which holds `stages`, and their sums over all ranks.

    world: all ranks.
    counts_corrections: this rank's corrections of routers are in the sums; True on one of the ranks
        that hold the same stages.
    counts_losses: this rank's losses are in the sums; True on the ranks whose losses add up to the
        loss of the batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: Iterable[nn.Module],
        world: Axis,
        counts_corrections: bool,
        counts_losses: bool,
        device: torch.device,
    ) -> None:
        self._config = config
        self._world = world
        self._device = device
        self._layers = _layers_with_experts(config)
        self._counts_corrections = counts_corrections
        self._counts_losses = counts_losses
        self._routers: dict[str, Router] = {}
        for stage in stages:
            for module in stage.modules():
                # of several virtual ranks on this process the first one counts
                if isinstance(module, Router) and module.context.tp.rank == 0:
                    self._routers[module.tally.layer] = module

    def clear(self) -> None:
        """Discard what other passes than those of a step have left."""
        for router in self._routers.values():
            router.tally.clear()

    def sum(self, state: PassState) -> Tensor | None:
        """Return the numbers of a step's passes, summed over all ranks, for the report of the
        optimizer's step: float64 [n]; None if there are none.

        Collective over the world, if there are numbers.
        """
        z_loss = state.z_loss.view(1) if self._config.z_loss else self._no_numbers
        mtp_losses = self._no_numbers
        if state.mtp_batch is not None:
            mtp_losses = state.mtp_batch.losses
        tallies = self._tallies()
        corrections = self._corrections()
        sources = self._sources(state)
        # all numbers as one message, in which a part may be empty
        parts = (tallies.view(-1), corrections.view(-1), z_loss, mtp_losses, sources)
        packed = torch.cat(parts)
        if not len(packed):
            return None
        lengths = [len(part) for part in parts]
        sums = self._world.sum_(packed).split(lengths)
        summed_tallies, summed_corrections, summed_z_loss, summed_mtp_losses, summed_sources = sums
        measures = _measures(summed_tallies.view_as(tallies), self._config.experts_per_token)
        by_layer = torch.cat((measures, summed_corrections.view_as(corrections)), 1)
        losses, tokens = summed_sources.view(2, -1)
        # `read` knows this order
        return torch.cat(
            (
                by_layer.view(-1),
                summed_z_loss,
                _mean_if_any(summed_mtp_losses),
                losses / tokens,
                tokens,
            )
        )

    def read(self, report: StepReport, state: PassState) -> StepReport:
        """Return the report of a step with the numbers that `sum` has computed in fields of their
        own.

        report: has these numbers in `further`, in the order of `sum`. state: of the step's passes.
        """
        numbers = [*report.further]
        if not numbers:
            return report
        # taken off from the end, so in the opposite order
        sources = self._pop_sources(numbers, state)
        mtp_loss = numbers.pop() if self._config.mtp_layers else None
        z_loss = numbers.pop() if self._config.z_loss else None
        return replace(
            report,
            mtp_loss=mtp_loss,
            z_loss=z_loss,
            routers=self._read_routers(numbers),
            sources=sources,
            further=(),
        )

    def _sources(self, state: PassState) -> Tensor:
        """Return the losses and the tokens of the data sets of a blend, [2 * sources]; zeros on a
        rank that does not count them, and nothing without a blend."""
        if state.source_sums is None:
            return self._no_numbers
        packed = state.source_sums.packed(state.share.mask, state.share.targets.shape[1])
        return packed if self._counts_losses else torch.zeros_like(packed)

    def _pop_sources(self, numbers: list[float], state: PassState) -> tuple[SourceReport, ...]:
        """Take the numbers of the data sets of a blend off the end of `numbers`: the mean loss of
        each set, then the tokens of each. Returns their reports; none without a blend."""
        if state.share.sources is None:
            return ()
        count = state.share.sources.count
        begin = len(numbers) - 2 * count
        mean_losses = numbers[begin : begin + count]
        tokens = numbers[begin + count :]
        del numbers[begin:]
        return tuple(map(SourceReport, mean_losses, tokens))

    @property
    def _no_numbers(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64, device=self._device)

    def _tallies(self) -> Tensor:
        """Return the packed sums (`RouterSums`) of all layers with experts, [layers, n]; zeros for
        the layers of other ranks."""
        width = RouterSums.num_packed(self._config.experts)
        table = torch.zeros(len(self._layers), width, dtype=torch.float64, device=self._device)
        for row, layer in zip(table, self._layers, strict=True):
            router = self._routers.get(layer)
            if router is not None and router.tally.sums is not None:
                row.copy_(router.tally.sums)
        return table

    def _corrections(self) -> Tensor:
        """Return the lowest and the highest correction of each layer, [layers, 2]: those of this
        rank's layers if it counts them, and zeros for the rest; [layers, 0] without corrections."""
        columns = 2 if self._config.router.correction else 0
        shape = (len(self._layers), columns)
        table = torch.zeros(shape, dtype=torch.float64, device=self._device)
        if not columns or not self._counts_corrections:
            return table
        for row, layer in zip(table, self._layers, strict=True):
            router = self._routers.get(layer)
            if router is not None and router.correction is not None:
                row.copy_(torch.stack(router.correction.detach().aminmax()))
        return table

    def _read_routers(self, numbers: Sequence[float]) -> tuple[RouterReport, ...]:
        """Return the reports of all layers with routers. numbers: those of all layers, one layer
        after the other."""
        config = self._config
        width = NUM_MEASURES + (2 if config.router.correction else 0)
        reports: list[RouterReport] = []
        for index, layer in enumerate(self._layers):
            of_layer = numbers[index * width : (index + 1) * width]
            max_load, min_load, used_experts, entropy, balance, z, *corrections = of_layer
            # A custom model may have no such layer, or none of our routers in it.
            if math.isnan(max_load):
                continue
            report = RouterReport(
                layer=layer_number(layer, config),
                max_load=max_load,
                min_load=min_load,
                used_experts=used_experts,
                entropy=entropy,
                balance_loss=balance if config.router_aux_loss else None,
                z_loss=z if config.router_z_loss else None,
                corrections=(corrections[0], corrections[1]) if corrections else None,
            )
            reports.append(report)
        return tuple(reports)


def _layers_with_experts(config: ModelConfig) -> list[str]:
    """Return the logical names of the layers that have routers, those of multi-token prediction
    last."""
    numbers = range(config.layers)
    names = [f"layers.{number}" for number in numbers if config.of_layer(number).experts]
    if config.of_layer(config.layers - 1).experts:
        names += [f"mtp.{number}" for number in range(config.mtp_layers)]
    return names


def layer_number(name: str, config: ModelConfig) -> int:
    """Return the number of a layer from its logical name or that of something in it; modules of
    multi-token prediction go on from the model's last layer."""
    kind, number, *_ = name.split(".")
    return int(number) if kind == "layers" else config.layers + int(number)


def _measures(packed: Tensor, per_token: int) -> Tensor:
    """Return the measures of each layer, [layers, NUM_MEASURES], from sums over all ranks: the
    numbers of `RouterReport` between layer and corrections. NaN for a layer without tokens.

    packed: [layers, n].
    """
    # a dense model has no experts to take a maximum over
    if not len(packed):
        return packed.new_zeros(0, NUM_MEASURES)
    sums = RouterSums.unpacked(packed)
    num_choices = sums.choices.sum(-1, keepdim=True)
    # A load is the share of tokens that an expert was given, and a token makes `per_token` choices.
    loads = sums.choices * per_token / num_choices
    shares = sums.choices / num_choices  # of all choices
    mean_probabilities = sums.probabilities / sums.probabilities.sum(-1, keepdim=True)
    experts = sums.choices.shape[-1]
    # of a single expert the entropy is 0, whatever it is divided by
    entropy_of_equal = math.log(max(experts, 2))
    measures = (
        loads.amax(-1),
        loads.amin(-1),
        _entropy(shares).exp(),
        _entropy(mean_probabilities) / entropy_of_equal,
        sums.balance / sums.samples,
        sums.z / sums.samples,
    )
    return torch.stack(measures, -1)


def _entropy(shares: Tensor) -> Tensor:
    """Return the entropy, in nats, of shares [layers, experts] that sum to 1."""
    return -torch.xlogy(shares, shares).sum(-1)


def _mean_if_any(numbers: Tensor) -> Tensor:
    """Return the mean of numbers [n] as [1]; if there are none, [0]."""
    return numbers.mean().view(1) if len(numbers) else numbers
