"""The largest attention logit of each head in a step, and what follows from it: QK-clip.

QK-clip (Kimi K2, arXiv 2507.20534, section 2.1) makes the projections to queries and keys smaller
after a step in which a head's largest logit S was above a threshold t. With g = t / S

    query rows of the head   times g ** alpha
    key rows of the head     times g ** (1 - alpha)

so that their logits would have been at most t. Heads of queries that share one of keys have the
largest S of all of them, as in Megatron-core (`clip_qk` of attention.py). Biases are rows too. In
latent attention the rotary part of keys is one for all heads and stays; that of queries is
multiplied by g, and the rule above holds for the parts without positions. Weights are clipped after
the update of the step, and not at all in a step that is skipped; moments are left as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.optim.decision.step_report import AttentionReport, StepReport
from megaprec.optim.rules.row_factors import RowFactors
from models.attention.attention import Attention
from models.attention.largest_logits import LargestLogits
from models.config import ModelConfig
from models.engine.options import QKClip
from models.engine.step_sums import layer_number


class AttentionLogits:
    """The largest logits of a rank that holds `stages`, and of all ranks together.

    world: all ranks.
    clip: None: weights are not clipped.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: Iterable[nn.Module],
        world: Axis,
        device: torch.device,
        clip: QKClip | None,
    ) -> None:
        self._config = config
        self._world = world
        self._device = device
        self._clip = clip
        self._names = _names_of_attentions(config)
        self._attentions: dict[str, Attention] = {}
        for stage in stages:
            attentions = [module for module in stage.modules() if isinstance(module, Attention)]
            for attention in attentions:
                local_heads = config.heads // attention.context.tp.size
                attention.largest_logits = LargestLogits(local_heads, device)
                self._attentions[attention.name] = attention

    def clear(self) -> None:
        """Begin a new step."""
        for attention in self._attentions.values():
            assert attention.largest_logits is not None
            attention.largest_logits.clear()

    def largest(self) -> Tensor:
        """Return the largest logit of each head in the passes of a step, over all ranks: float64
        [layers with attention, heads]. Collective over the world."""
        shape = (len(self._names), self._config.heads)
        table = torch.full(shape, -torch.inf, dtype=torch.float64, device=self._device)
        for row, name in zip(table, self._names, strict=True):
            attention = self._attentions.get(name)
            if attention is not None:
                assert attention.largest_logits is not None
                values = attention.largest_logits.values
                first = attention.context.tp.rank * len(values)
                row[first : first + len(values)] = values
        return self._world.max_(table)

    def row_factors(self, largest: Tensor) -> RowFactors | None:
        """Return the factors by which QK-clip multiplies rows of weights; None without it.

        largest: the result of `largest`.
        """
        if self._clip is None:
            return None
        factors: dict[str, Tensor] = {}
        for name, largest_of_heads in zip(self._names, largest, strict=True):
            layer = self._layer_of(name)
            config_of_layer = self._config.kind_of_layer(layer)
            factors |= clip_factors(config_of_layer, self._clip, name, largest_of_heads)
        return RowFactors(factors)

    def _layer_of(self, name: str) -> int:
        """Return the number of the layer of an attention; for a module of multi-token prediction
        that of the model's last layer, which its own layer is like."""
        last_layer = self._config.layers - 1
        # modules of multi-token prediction are numbered after all layers
        number = layer_number(name, self._config)
        return min(number, last_layer)

    def read(self, report: StepReport) -> StepReport:
        """Return the report of a step with the numbers of `largest`, which are the last ones of its
        `further`, in a field of their own."""
        heads = self._config.heads
        begin = len(report.further) - len(self._names) * heads
        numbers = report.further[begin:]
        attentions: list[AttentionReport] = []
        for index, name in enumerate(self._names):
            begin_of_layer = index * heads
            logits_of_layer = numbers[begin_of_layer : begin_of_layer + heads]
            number = layer_number(name, self._config)
            attentions.append(AttentionReport(number, logits_of_layer))
        others = report.further[:begin]
        return replace(report, attentions=tuple(attentions), further=others)


def clip_factors(
    config: ModelConfig, clip: QKClip, name: str, largest: Tensor
) -> dict[str, Tensor]:
    """Return the factors of the rows of one attention's weights, by logical name.

    config: of its layer (`ModelConfig.kind_of_layer`).
    name: the logical name of the attention.
    largest: the largest logit of each head, [heads].
    """
    # Heads of queries that share one of keys have the largest logit of all of them.
    largest_of_keys = largest.view(config.kv_heads, -1).amax(1)
    shrink_of_keys = _shrink_factors(largest_of_keys, clip.threshold)  # g, [key heads]
    queries_of_key = config.heads // config.kv_heads
    shrink_of_queries = shrink_of_keys.repeat_interleave(queries_of_key)  # g, [heads]
    query_factors = shrink_of_queries**clip.alpha
    key_factors = shrink_of_keys ** (1 - clip.alpha)
    latent = config.latent
    if latent:
        query = "query_up" if latent.query_rank else "query"
        # of each head first the features with rotary positions, then those without
        rotary_factors = shrink_of_queries[:, None].expand(-1, latent.rope_dim)
        other_factors = query_factors[:, None].expand(-1, latent.nope_dim)
        factors_by_head = torch.cat((rotary_factors, other_factors), 1)
        query_rows = factors_by_head.flatten()
        # the up-projection makes the part of keys without positions alone
        key_rows = key_factors.repeat_interleave(latent.nope_dim)
        return {f"{name}.{query}.weight": query_rows, f"{name}.key_up.weight": key_rows}
    query_rows = query_factors.repeat_interleave(config.head_dim)
    key_rows = key_factors.repeat_interleave(config.head_dim)
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    factors: dict[str, Tensor] = {}
    for kind in kinds:
        factors[f"{name}.query.{kind}"] = query_rows
        factors[f"{name}.key.{kind}"] = key_rows
    return factors


def _shrink_factors(largest: Tensor, threshold: float) -> Tensor:
    """Return g of the module's docstring for each logit: threshold / largest where that is below 1,
    otherwise 1. Logits that are not finite clip nothing: their step is skipped."""
    is_above = (largest > threshold) & largest.isfinite()
    return torch.where(is_above, threshold / largest, 1.0)


def _names_of_attentions(config: ModelConfig) -> Sequence[str]:
    """Return the logical names of the attentions of all layers, those of multi-token prediction
    last."""
    numbers = config.attention_layers
    names = [f"layers.{number}.attention" for number in numbers]
    if config.layers - 1 in numbers:
        names += [f"mtp.{number}.attention" for number in range(config.mtp_layers)]
    return names
