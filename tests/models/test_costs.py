"""What stages cost and keep, known beforehand, is what they really have, do and keep."""

from collections.abc import Iterator
from types import FunctionType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megaprec.comm.waiting import Pending
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.cutting import cuts, mtp_cost
from models.decoder.stages import Stage
from models.delta_net import DeltaNet
from models.engine.options import EngineOptions
from models.estimate.elementwise import loss_bytes
from models.estimate.flops import stage_costs, training_flops
from models.mamba import Mamba
from models.parameter_counts import expert_parameters, num_parameters
from models.recurrent import delta_rule, state_space
from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.gated_delta_net import GatedDeltaNet
from models.recurrent.mamba_mixer import MambaMixer
from models.recurrent.state_space import StateSpaceInputs
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.activation_bytes import kept_bytes

SIZES: dict[str, Any] = {
    "layers": 5,
    "hidden": 32,
    "heads": 4,
    "ffn": 48,
    "vocab": 101,
    "max_positions": 24,
}
MODELS = [
    {"family": "llama", "kv_heads": 2, **SIZES},
    {"family": "gpt2", **SIZES},
    {"family": "gpt2", "tied": False, **SIZES},
    {"family": "llama", "tied": True, "bias": True, **SIZES},
]
# of one width: zeros would be counted too
LATENT = {
    "kv_rank": 12,
    "rope_dim": 4,
    "nope_dim": 6,
    "value_dim": 10,
}
MODELS += [
    {"family": "deepseek_v3", "latent": {**LATENT, "query_rank": 14}, **SIZES},
    {"family": "deepseek_v2", "latent": LATENT, "bias": True, **SIZES},
]
HYBRID = {
    "family": "nemotron_h",
    "kv_heads": 2,
    "mlp_bias": True,
    "hybrid_pattern": "M*-M",
    "mamba": {"heads": 6, "head_dim": 5, "state_dim": 7, "groups": 2},
    **SIZES,
    "layers": 4,
}
HYBRID_EXPERTS = {
    **HYBRID,
    "mlp_bias": False,
    "hybrid_pattern": "ME*-",
    "experts": 4,
    "shared_experts": 20,
    "dense_ffn": 40,
}
DELTA_NET = {
    "family": "qwen3_next",
    "kv_heads": 2,
    "rotary_fraction": 0.5,
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 5},
    **SIZES,
    "layers": 4,
}
KIMI_DELTA = {
    "family": "kimi_linear",
    # values as wide as keys: none are padded
    "latent": {"kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 7},
    "delta_net": {"key_heads": 4, "value_heads": 4, "key_dim": 6, "value_dim": 5, "gate_rank": 3},
    **SIZES,
    "layers": 4,
}
EXPERTS = {
    "family": "mixtral",
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 20,
    "expert_bias": True,
}
LENGTH = 24
BATCH = 2


def stages(
    config: ModelConfig, count: int, precision: str = "fp32", recompute: Recompute = KEEP
) -> list[Stage]:
    context = Context(plan(precision), recompute=recompute)
    return [
        Stage(config, context, cut).to(context.plan.parameters)
        for cut in cuts(config, count, LENGTH)
    ]


def inputs(stage: Stage) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(LENGTH, BATCH, dtype=torch.int64)
    if stage.cut.first:
        return ids, ids
    shape = (LENGTH, BATCH, stage.config.hidden)
    return torch.zeros(shape, dtype=stage.context.plan.compute, requires_grad=True), ids


@pytest.mark.parametrize(
    "model",
    [
        *MODELS,
        HYBRID,
        HYBRID_EXPERTS,
        DELTA_NET,
        {**EXPERTS, **SIZES},
        {**EXPERTS, "mlp": "gelu", **SIZES},
    ],
)
def test_parameters_of_the_stages_are_those_of_the_model(model: dict[str, Any]) -> None:
    config = ModelConfig(**model)
    for count in (1, 3):
        costs = stage_costs(config, cuts(config, count, LENGTH), LENGTH, BATCH)
        held = [sum(p.numel() for p in stage.parameters()) for stage in stages(config, count)]
        assert [cost.parameters for cost in costs] == held
        twice = config.vocab * config.hidden if config.tied and count > 1 else 0
        assert sum(held) == num_parameters(config) + twice


def test_experts_parameters_are_known_with_their_biases() -> None:
    config = ModelConfig(**{**EXPERTS, **SIZES})
    (stage,) = stages(config, 1)
    assert expert_parameters(config) == sum(
        p.numel() for name, p in stage.named_parameters() if ".experts." in name
    )


@pytest.mark.cases(5, sample=1)
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        *((model, KEEP) for model in MODELS),
        (MODELS[0], Recompute(("attention", "activation", "norm"))),
        (MODELS[1], Recompute(fraction=1.0)),
        (MODELS[3], Recompute(fraction=0.5)),
        (MODELS[0], Recompute(layers=1)),
        (MODELS[4], Recompute(("attention",))),
        ({**MODELS[0], "norm_at": "after"}, Recompute(fraction=1.0)),
        ({**MODELS[0], "norm_at": "around"}, Recompute(fraction=1.0)),
        ({**EXPERTS, **SIZES}, Recompute(fraction=1.0)),
        ({**EXPERTS, **SIZES, "shared_gate": True}, Recompute(fraction=1.0)),
        ({**EXPERTS, **SIZES, "shared_experts": 0}, Recompute(fraction=1.0)),
    ],
)
def test_flops_are_those_that_torch_counts(model: dict[str, Any], recompute: Recompute) -> None:
    """With attention written out, for of the fused kernel torch counts nothing on a CPU."""
    config = ModelConfig(**model)
    for stage in stages(config, 3, recompute=recompute):
        (cost,) = stage_costs(config, [stage.cut], LENGTH, BATCH, recompute)
        x, ids = inputs(stage)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                y = stage(x)
            y = stage.losses(y, ids) if stage.cut.last else y
            with FlopCounterMode(display=False) as backward:
                y.sum().backward()
        lookup = LENGTH * BATCH * config.embedding_flops() * stage.cut.first
        assert forward.get_total_flops() == cost.forward
        assert backward.get_total_flops() == cost.input + cost.weight - lookup


@pytest.mark.parametrize("model", [HYBRID, HYBRID_EXPERTS, DELTA_NET, KIMI_DELTA])
@pytest.mark.parametrize("recompute", [KEEP, Recompute(fraction=1.0), Recompute(("attention",))])
def test_flops_beside_recurrences_are_those_that_torch_counts(
    model: dict[str, Any], recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the recurrences, of which the ones counted are those token by token."""

    def pass_by(self: MambaMixer, inputs: StateSpaceInputs) -> Tensor:
        of_group = (inputs.query * inputs.key).sum(-1, keepdim=True)
        return inputs.value * inputs.log_decay.unsqueeze(-1) * of_group.mean(1, keepdim=True)

    def pass_by_rule(self: GatedDeltaNet, inputs: DeltaInputs) -> Tensor:
        by_row = inputs.log_decay.dim() == inputs.key.dim()
        log_decays = inputs.log_decay if by_row else inputs.log_decay.unsqueeze(-1)
        factors = (inputs.query * inputs.key * log_decays).sum(-1) * inputs.strength
        return inputs.value * factors.unsqueeze(-1)

    monkeypatch.setattr(MambaMixer, "_apply_rule", pass_by)
    monkeypatch.setattr(GatedDeltaNet, "_apply_rule", pass_by_rule)
    config = ModelConfig(**model)
    recurrent_layers = {*config.delta_layers, *config.layers_of("M")}
    of_token = config.mamba.recurrent_flops + config.delta_net.recurrent_flops
    for stage in stages(config, 4, recompute=recompute):
        (cost,) = stage_costs(config, [stage.cut], LENGTH, BATCH, recompute)
        x, ids = inputs(stage)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                y = stage(x)
            y = stage.losses(y, ids) if stage.cut.last else y
            with FlopCounterMode(display=False) as backward:
                y.sum().backward()
        mixers = sum(layer in recurrent_layers for layer in stage.cut.layers)
        recurrence = LENGTH * BATCH * of_token * mixers
        lookup = LENGTH * BATCH * config.embedding_flops() * stage.cut.first
        again = 0 if recompute == KEEP else recurrence
        assert forward.get_total_flops() == cost.forward - recurrence
        assert (
            backward.get_total_flops() == cost.input + cost.weight - lookup - 2 * recurrence - again
        )


def test_flops_of_a_recurrence_are_those_of_its_products_token_by_token() -> None:
    """Of both rules without decays, written as products of matrices, which torch counts."""
    made = torch.Generator().manual_seed(1)
    sizes = Mamba(heads=6, head_dim=5, state_dim=7, groups=6)
    rule = DeltaNet(key_heads=6, value_heads=6, key_dim=7, value_dim=5)
    # [b, n, s, features]
    query, key = torch.rand(2, BATCH, 6, LENGTH, 7, generator=made, dtype=torch.float64) / 7
    value = torch.rand(BATCH, 6, LENGTH, 5, generator=made, dtype=torch.float64)
    still = torch.zeros(BATCH, 6, LENGTH, dtype=torch.float64)
    tokens = [[x.unsqueeze(-1) for x in each.unbind(2)] for each in (query, key, value)]
    state = torch.zeros(BATCH, 6, 7, 5, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        read = []
        for q, k, v in zip(*tokens, strict=True):
            state = state + k @ v.mT
            read.append(state.mT @ q)
    assert counter.get_total_flops() == LENGTH * BATCH * sizes.recurrent_flops
    without_decay = torch.zeros(6, dtype=torch.float64)
    inputs = StateSpaceInputs(query, key, value, still + 1, without_decay)
    found, _ = state_space.recurrent(inputs)
    torch.testing.assert_close(torch.cat(read, -1).mT, found)

    state = torch.zeros_like(state)
    with FlopCounterMode(display=False) as counter:
        read = []
        for q, k, v in zip(*tokens, strict=True):
            state = state + k @ (v - state.mT @ k).mT
            read.append(state.mT @ q)
    assert counter.get_total_flops() == LENGTH * BATCH * rule.recurrent_flops
    found, _ = delta_rule.recurrent(DeltaInputs(query, key, value, still, still + 1))
    torch.testing.assert_close(torch.cat(read, -1).mT, found)


EVERY: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "gpt2": {"family": "gpt2"},
    "gpt_neox": {"family": "gpt_neox"},
    "mistral": {"family": "mistral", "kv_heads": 2},
    "qwen2": {"family": "qwen2", "kv_heads": 2},
    "qwen3": {"family": "qwen3", "kv_heads": 2},
    "mixtral": {"family": "mixtral", "experts": 4, "experts_per_token": 2},
}


def counted(config: ModelConfig) -> int:
    """FLOPs that torch counts in both passes of a micro-batch, with attention written out."""
    (stage,) = stages(config, 1)
    ids = torch.zeros(LENGTH, BATCH, dtype=torch.int64)
    place = MicrobatchInfo(0, torch.arange(BATCH), torch.ones(()))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stage.losses(stage(ids, place), ids).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", EVERY)
def test_flops_of_training_are_those_that_torch_counts(family: str) -> None:
    """Every family, experts by those that a token is sent to; recomputation is not counted."""
    sizes: dict[str, Any] = {**SIZES, **EVERY[family]}
    config = ModelConfig(**sizes)
    assert training_flops(config, LENGTH) * LENGTH * BATCH == counted(config)


def test_a_loss_moves_each_logit_in_fp32_three_times_forward_and_twice_backward() -> None:
    """Copied, read for the maximum and for the sum of exponentials; then read, and its gradient
    written. The head of a module has logits of its own, and tensor ranks share the vocabulary."""
    config = ModelConfig(layers=1, hidden=8, heads=2, vocab=96, mtp_layers=1)
    bytes_of_a_token = 2 * 96 / 3 * 4
    assert loss_bytes(config, tensor=3) == (3 * bytes_of_a_token, 2 * bytes_of_a_token)


def test_of_a_sliding_window_only_the_tokens_in_it_count() -> None:
    """Torch counts the whole square of scores, of which a window leaves a part."""
    sizes: dict[str, Any] = {**SIZES, **EVERY["mistral"], "window": 6}
    windowed = ModelConfig(**sizes)
    whole = ModelConfig(**{**sizes, "window": 0})
    assert counted(windowed) == counted(whole) == training_flops(whole, LENGTH) * LENGTH * BATCH
    # both products with one token
    one_less = 4 * windowed.heads * windowed.head_dim * windowed.layers
    assert training_flops(whole, LENGTH) - training_flops(windowed, LENGTH) == 3 * one_less * (
        LENGTH - 6
    )


def held_by(work: Any) -> Iterator[Tensor]:
    """The factors that a piece of work, and what it is going to call, has been left."""
    for content in (cell.cell_contents for cell in work.__closure__ or ()):
        if isinstance(content, Pending):
            content = content.result
        if isinstance(content, tuple):
            yield from content
        elif isinstance(content, FunctionType):
            yield from held_by(content)


class Saved:
    """What autograd keeps of a tensor, as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        # A result that its own node saves would hold that node, and with it what nothing needs.
        self.tensor = tensor.detach()


def products_of_layer(kind: ModelConfig) -> int:
    """The products of a layer whose weight gradients are put off: all but the router's."""
    of_mixer = 4 if kind.latent else 2
    # from x to two vectors, and from these to gate and decays
    if kind.delta_net.gate_rank:
        of_mixer += 3
    feed_forwards = kind.experts + (kind.shared_experts > 0) if kind.experts else 1
    return kind.has_mixer * of_mixer + kind.has_feed_forward * 2 * feed_forwards


@pytest.mark.cases(2, sample=3)
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        *zip(MODELS, ["fp32", "bf16", "fp16", "bf16", "bf16", "fp32"], strict=True),
        (HYBRID, "bf16"),
        (HYBRID, "fp32"),
        (HYBRID_EXPERTS, "bf16"),
        (DELTA_NET, "bf16"),
        (DELTA_NET, "fp32"),
        (KIMI_DELTA, "bf16"),
    ],
)
def test_kept_bytes_are_those_that_autograd_saves_and_layers_put_off(
    model: dict[str, Any], precision: str
) -> None:
    config = ModelConfig(**model)
    made = stages(config, 3, precision)
    for stage, kept in zip(
        made,
        kept_bytes(config, plan(precision), [s.cut for s in made], EngineOptions(BATCH, LENGTH)),
        strict=True,
    ):
        x, ids = inputs(stage)
        with torch.no_grad():
            stage(x)  # makes rotary tables, which all micro-batches share
        own = {
            p.untyped_storage().data_ptr()
            for p in [
                *stage.parameters(),
                *(t for made in stage._rotary_tables.values() for t in made),
            ]
        }
        saved: list[ref[Saved]] = []

        def save(tensor: Tensor, saved: list[ref[Saved]] = saved) -> Saved:
            kept_one = Saved(tensor)
            saved.append(ref(kept_one))
            return kept_one

        for p in stage.parameters():
            p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
        with saved_tensors_hooks(save, lambda kept_one: kept_one.tensor):
            # as in training: logits are not widened
            y = stage(x, MicrobatchInfo(0, torch.arange(BATCH), torch.ones(())))
            result = stage.losses(y, ids).sum() if stage.cut.last else y
        # What was saved of a result that nothing needs is free again. Whether or not a layer needs
        # the input, the executor does, for its gradient.
        still_there = [kept_one.tensor for one in saved if (kept_one := one()) is not None]
        storages = [tensor.untyped_storage() for tensor in (x, *still_there)]
        nbytes = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in own}
        assert sum(nbytes.values()) == pytest.approx(kept.activations, rel=0.01)
        # the gradient of each element has memory of its own, as one that was received
        with stage.context.deferred.collect() as work:
            result.backward(torch.ones_like(result))
        tensors = [t for job in work for t in held_by(job)]
        products = config.over_layers(products_of_layer, stage.cut.layers)
        assert len(work) == products + stage.cut.last
        # a view keeps the whole of what it shows, and several keep it once
        shown = [tensor.untyped_storage() for tensor in tensors]
        assert (
            sum({each.data_ptr(): each.nbytes() for each in shown}.values()) == kept.deferred_bytes
        )


@pytest.mark.parametrize("modules", [1, 2])
def test_modules_of_several_tokens_ahead_cost_three_forwards_and_one_more_if_recomputed(
    modules: int,
) -> None:
    fields = {"vocab": 64, "hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "max_positions": 8}
    config = ModelConfig.model_validate({**fields, "mtp_layers": modules})
    forward = config.mtp_flops(8)
    assert mtp_cost(config, 8, Recompute()) == 3 * forward
    whole = mtp_cost(config, 8, Recompute(fraction=1.0))
    # the last product of a layer is not: nothing in the backward pass reads its result
    again = config.layer_flops(8) - 2 * config.ffn * config.hidden
    assert whole == 3 * forward + modules * again
    # only some layers of the model are, and none of the modules
    assert mtp_cost(config, 8, Recompute(fraction=0.5)) == 3 * forward
