"""Modules of multi-token prediction have the losses and gradients of megatron-core's, on one CPU
rank."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models.attention.packing import UNPACKED
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.mtp import make_mtp_batch
from models.decoder.stages import Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.convert.test_megatron_fields import BASES, LENGTH, VOCAB, core
from tests.other_systems import MEGATRON, NEEDS_MEGATRON
from tests.ranks import run_ranks
from tools.convert.core.names import megatron
from tools.convert.core.rules import Match, head_sizes, matches
from tools.convert.megatron.args import model_of_args

# warnings of megatron-core
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    NEEDS_MEGATRON,
]
PRELOADED = MEGATRON
# their losses are in FP32
MODULES = 2
WEIGHT = 0.7
CLOSE = 2e-5
AROUND = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "final_layernorm": "final_norm",
}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_are_megatrons(tied: bool) -> None:
    (rank,) = run_ranks(both, {"dp": 1}, tied=tied)
    (ours, our_losses), (theirs, their_losses) = rank
    assert our_losses == pytest.approx(their_losses, rel=1e-6)
    assert (
        len(our_losses) == 1 + MODULES
        and len({round(loss, 4) for loss in our_losses}) == 1 + MODULES
    )
    assert ours.keys() == theirs.keys()
    apart = {
        name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
    }
    assert not {name: by for name, by in apart.items() if not by <= CLOSE}


def both(mesh: DeviceMesh, tied: bool) -> list[tuple[dict[str, Tensor], list[float]]]:
    """The gradients by logical name and the losses, the model's own first: of ours and of
    theirs."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]  # it asks without looking
    core("tensor_parallel.random").CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    core("parallel_state").initialize_model_parallel(1, 1)
    config, model = BASES["llama"]
    model = {**model, "share_embeddings_and_output_weights": tied}
    ours = model_of_args({**config, **model, "add_position_embedding": False}, None)
    ours = ModelConfig(**{**ours.model_dump(), "mtp_layers": MODULES, "mtp_loss_weight": WEIGHT})
    made = theirs(config, model)
    return [of_ours(ours, made.state_dict()), of_theirs(ours, made)]


def theirs(config: dict[str, Any], model: dict[str, Any]) -> Any:
    silu = {"activation_func": torch.nn.functional.silu}
    more = {"mtp_num_layers": MODULES, "mtp_loss_scaling_factor": WEIGHT}
    made = core("transformer.transformer_config").TransformerConfig(**config | silu | more)
    specs = core("models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(normalization=made.normalization)
    modules = specs.get_gpt_mtp_block_spec(made, layer, use_transformer_engine=False)
    torch.manual_seed(0)
    built = core("models.gpt").GPTModel(made, layer, **model, mtp_block_spec=modules).double()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(
                0.1 * torch.randn(parameter.shape)
                + float("norm" in name and name.endswith("weight"))
            )
    return built


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and the mask of the targets, [b, s]."""
    dice = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (2, LENGTH + 1), generator=dice)
    return ids[:, :-1], ids[:, 1:], (torch.rand(2, LENGTH, generator=dice) < 0.7).double()


def of_theirs(config: ModelConfig, built: Any) -> tuple[dict[str, Tensor], list[float]]:
    tokens, targets, mask = batch()
    positions = torch.arange(LENGTH)[None].expand(2, -1)
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    found = core("transformer.multi_token_prediction")
    found.MTPLossAutoScaler.set_loss_scale(torch.ones(()))
    each = built(tokens, positions, future, labels=targets, loss_mask=mask)
    loss = (each * mask).sum() / mask.sum()
    loss.backward()
    grads = {name: p.grad for name, p in built.named_parameters()}
    losses = [loss.item(), *found.MTPLossLoggingHelper.tracker["values"].tolist()]
    return {
        name: part for match in table(config) for name, part in split(config, match, grads)
    }, losses


def of_ours(config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    weights = {name: part for match in table(config) for name, part in split(config, match, state)}
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, LENGTH)[0])
    with torch.no_grad():
        for parameter in stage.parameters():
            for part, first, last in layout_of(parameter).spans():
                parameter.view(-1)[first:last] = weights[part.name].reshape(-1)
    tokens, targets, mask = batch()
    scale = torch.full((), config.mtp_loss_weight, dtype=torch.float64)
    mtp_batch = make_mtp_batch(
        tokens, targets, mask, None, MODULES, scale, Axis("cp"), Axis("dp"), divides=True
    )
    place = MicrobatchInfo(0, torch.arange(2), torch.ones(()))
    logits = stage(tokens.t(), place, UNPACKED, mtp_batch.of_samples(slice(None)))
    loss = (stage.losses(logits, targets.t()) * mask.t()).sum() / mask.sum()
    loss.backward()
    grads = {
        part.name: parameter.grad.view(-1)[first:last].view(part.shape)
        for parameter in stage.parameters()
        if parameter.grad is not None
        for part, first, last in layout_of(parameter).spans()
    }
    return grads, [loss.item(), *mtp_batch.losses.tolist()]


def split(
    config: ModelConfig, match: Match, values: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    yield from zip(
        match.logical, match.how.split(values[match.foreign], head_sizes(config)), strict=True
    )


def table(config: ModelConfig) -> Iterator[Match]:
    """The tensors of megatron-core's model, those of modules too."""
    last = config.layers - 1
    shape = (config.hidden,)
    found = matches(megatron(False, False, config.without_mtp), config.without_mtp)
    yield from found
    for k in range(config.mtp_layers):
        for match in found:
            if match.foreign.startswith(f"decoder.layers.{last}."):
                foreign = match.foreign.replace(
                    f"decoder.layers.{last}.", f"mtp.layers.{k}.transformer_layer."
                )
                names = tuple(
                    name.replace(f"layers.{last}.", f"mtp.{k}.") for name in match.logical
                )
                yield Match(foreign, names, match.how, match.cut, match.shape)
        for foreign, ours in AROUND.items():
            yield Match(
                f"mtp.layers.{k}.{foreign}.weight",
                (f"mtp.{k}.{ours}.weight",),
                found[0].how,
                "whole",
                shape,
            )
