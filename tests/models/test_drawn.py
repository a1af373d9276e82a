"""What is said of a model beforehand holds for models of any keys: tensors, sizes, FLOPs, bytes,
kept keys, any layout.

Tables of [model] are drawn at random, each key with some probability, so that switches of several
families meet.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models.attention.packing import UNPACKED
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from models.decoder.mtp import MTPBatch, make_mtp_batch
from models.decoder.stages import Stage
from models.engine.options import EngineOptions
from models.equivalence import TRAINING_ONLY_KEYS, with_idle_keys_reset
from models.estimate.flops import stage_costs
from models.estimate.memory import StageMemory
from models.logical_shapes import logical_shapes
from models.parameter_counts import expert_parameters, num_parameters
from parallel.activation_checkpoint import KEEP, MODULES, Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests import oracle
from tests.families import Job, put, step_all
from tests.models.drawn import CHOICES, LENGTH, OF_THEIR_OWN, UNDRAWN, drawn, fits
from tests.models.test_families import differing
from tests.models.test_memory import allocations

SIZES_OF_HEADS = {"kv_heads", "head_dim", "attention_scalar", "positions"}
BATCH = 2
PIECES = (5, 1, 3, 1, 1, 1)
CASES = pytest.mark.cases(3, sample=9)
SEEDS = pytest.mark.parametrize("seed", range(400))


def model_of(seed: int) -> ModelConfig:
    return ModelConfig(**drawn(seed))


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Lively ones: each tensor matters."""
    made = torch.Generator().manual_seed(1)
    drawn_ones = {
        n: torch.randn(s, generator=made, dtype=torch.float64)
        for n, s in logical_shapes(config).items()
    }
    return {name: 0.3 * values + ("norm" in name) for name, values in drawn_ones.items()}


def stage_of(config: ModelConfig, weights: dict[str, Tensor], kind: type[Stage] = Stage) -> Stage:
    """The whole model in one stage, in float64."""
    stage = kind(config, Context(plan("fp64")), cuts(config, 1, LENGTH)[0])
    put(stage, weights)
    return stage


def ids_of(config: ModelConfig, batch: int = BATCH) -> Tensor:
    return torch.randint(config.vocab, (LENGTH, batch), generator=torch.Generator().manual_seed(2))


def test_every_key_that_changes_logits_is_drawn() -> None:
    """So that a new key is asked here for its tensors, its formula in the plain oracle, its bytes and its
    layouts."""
    drawn_keys = {*CHOICES, *OF_THEIR_OWN.split()}
    assert drawn_keys | {*UNDRAWN.split()} == ModelConfig.model_fields.keys()
    assert not drawn_keys & {*UNDRAWN.split()}


@pytest.mark.parametrize("key", sorted(CHOICES.keys() - SIZES_OF_HEADS))
@torch.no_grad()
def test_a_key_that_changes_nothing_without_attention_is_refused_there(key: str) -> None:
    """But for sizes of heads, which have no value that is none."""
    mamba = {"heads": 4, "head_dim": 3, "state_dim": 4, "groups": 2}
    table = {"layers": 3, "hidden": 24, "heads": 4, "ffn": 24, "vocab": 53, "positions": "none"}
    table |= {"hybrid_pattern": "M-M", "mamba": mamba}
    plain = ModelConfig.model_validate(table)
    weights = weights_of(plain)
    ids = ids_of(plain).t()
    for value in CHOICES[key]:
        if not fits(table | {key: value}):
            continue
        model = ModelConfig.model_validate(table | {key: value})
        training = {name: getattr(model, name) for name in TRAINING_ONLY_KEYS}
        same = with_idle_keys_reset(model) == with_idle_keys_reset(plain).model_copy(
            update=training
        )
        assert (
            same
            or logical_shapes(model) != logical_shapes(plain)
            or not torch.equal(
                oracle.logits(model, weights, ids), oracle.logits(plain, weights, ids)
            )
        ), value


@pytest.mark.cases(None, sample=3)
@CASES
@SEEDS
def test_tensors_and_parameters_are_those_that_are_foretold(seed: int) -> None:
    config = model_of(seed)
    for count in (1, 3):
        cut = cuts(config, count, LENGTH)
        stages = [Stage(config, Context(plan("fp32")), one) for one in cut]
        parts = [
            part for stage in stages for p in stage.parameters() for part in layout_of(p).parts
        ]
        assert {part.name: part.shape for part in parts} == logical_shapes(config)
        held = [sum(p.numel() for p in stage.parameters()) for stage in stages]
        if count > 1 and config.mtp_layers and not config.tied:
            held[-1] -= config.vocab * config.hidden  # the copy of the embedding that modules read
        assert [cost.parameters for cost in stage_costs(config, cut, LENGTH, BATCH)] == held
    sizes = {name: torch.Size(shape).numel() for name, shape in logical_shapes(config).items()}
    assert num_parameters(config) == sum(sizes.values())
    assert expert_parameters(config) == sum(
        size for name, size in sizes.items() if ".experts." in name
    )


@pytest.mark.cases(None, sample=3)
@CASES
@SEEDS
@torch.no_grad()
def test_logits_are_those_of_the_plain_model_and_of_kept_keys(seed: int) -> None:
    config = model_of(seed)
    weights = weights_of(config)
    ids = ids_of(config)
    stage = stage_of(config, weights)
    found = stage(ids).transpose(0, 1)
    torch.testing.assert_close(oracle.logits(config, weights, ids.t()), found, rtol=0, atol=1e-10)
    assert torch.equal(stage_of(with_idle_keys_reset(config), weights)(ids).transpose(0, 1), found)
    cached = stage_of(config.without_mtp, weights, CachedStage)
    assert isinstance(cached, CachedStage)
    cached.start(LENGTH, BATCH)
    end = 0
    for piece in ids.split(PIECES):
        end += len(piece)
        torch.testing.assert_close(cached.extend(piece), stage(ids[:end])[-1], rtol=0, atol=1e-11)


@pytest.mark.cases(None, sample=3)
@CASES
@SEEDS
def test_flops_are_those_that_torch_counts(seed: int) -> None:
    require_flops_as_torch_counts_them(model_of(seed))


def test_a_layer_with_a_scalar_is_recomputed_to_its_last_product() -> None:
    config = model_of(9)
    assert config.layer_scalar and config.norm_at == "before"
    require_flops_as_torch_counts_them(config)


def require_flops_as_torch_counts_them(config: ModelConfig) -> None:
    """Of models whose attention torch counts whole: not of windows, sinks and values of another
    width than keys, and not of gated delta nets and Mamba-2 mixers, whose recurrence is counted."""
    config = config.without_mtp.attending
    config = config.model_copy(update={"window": 0, "window_layers": (), "attention_sinks": False})
    attending = config.hybrid_pattern.replace("M", "*")
    config = config.model_copy(update={"hybrid_pattern": attending})
    if config.latent and config.latent.value_dim != config.latent.head_dim:
        config = config.model_copy(
            update={"latent": config.latent.model_copy(update={"value_dim": 10})}
        )
    for recompute in (KEEP, Recompute(fraction=1.0), Recompute(("attention",))):
        (cut,) = cuts(config, 1, LENGTH)
        (cost,) = stage_costs(config, [cut], LENGTH, BATCH, recompute)
        stage = Stage(config, Context(plan("fp32"), recompute=recompute), cut)
        ids = ids_of(config)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                losses = stage.losses(stage(ids), ids)
            with FlopCounterMode(display=False) as backward:
                losses.sum().backward()
        lookup = LENGTH * BATCH * config.embedding_flops()
        assert forward.get_total_flops() == cost.forward
        assert backward.get_total_flops() == cost.input + cost.weight - lookup, recompute


@pytest.mark.cases(0, 1)
@SEEDS
def test_stages_keep_the_bytes_that_are_foretold(seed: int) -> None:
    """To one per cent: single numbers, which real tensors are made of now and then, are not
    counted."""
    config = model_of(seed)
    precision = plan(("bf16", "fp32")[seed % 2])
    recompute = (KEEP, Recompute(MODULES), Recompute(fraction=0.5), Recompute(("attention",)))[
        seed // 2 % 4
    ]
    foretold = StageMemory(
        config, precision, EngineOptions(BATCH, LENGTH, recompute=recompute), halves=False
    )
    for cut in cuts(config, 2, LENGTH):
        found = bytes_kept(
            Stage(config, Context(precision, recompute=recompute), cut).to(precision.parameters)
        )
        assert found == pytest.approx(foretold.activation_bytes(cut).activations, rel=0.01)


def bytes_kept(stage: Stage) -> int:
    """From a training forward pass of a micro-batch, its input included, until the backward
    pass."""
    forward(stage)  # makes what is made once for all
    with allocations() as sizes:
        held = forward(stage)
    assert held
    return sum(sizes)


def forward(stage: Stage) -> object:
    """Return the input, which is held until the backward pass, and all that this needs."""
    config = stage.config
    plan = stage.context.plan
    place = MicrobatchInfo(0, torch.arange(BATCH), torch.ones(()))
    ids = torch.zeros(LENGTH, BATCH, dtype=torch.int64)
    if stage.cut.first:
        x = ids
    else:
        x = torch.zeros(LENGTH, BATCH, config.hidden, dtype=plan.pipeline, requires_grad=True)
    y = stage(x if stage.cut.first else x.to(plan.residual), place, UNPACKED, mtp_batch_of(stage))
    return x, get_gradient_edge(
        stage.losses(y, ids).sum() if stage.cut.last else y.to(plan.pipeline)
    )


def mtp_batch_of(stage: Stage) -> MTPBatch | None:
    """What modules of multi-token prediction read and predict."""
    if not (stage.cut.last and (modules := stage.config.mtp_layers)):
        return None
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    made = make_mtp_batch(
        ids, ids, None, None, modules, torch.ones(()), Axis("cp"), Axis("dp"), divides=True
    )
    return made.of_samples(slice(None))


def job(seed: int, recompute: Recompute = KEEP) -> Job:
    config = model_of(seed)
    ids = torch.randint(config.vocab, (4, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return Job(
        config, weights_of(config), ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), recompute
    )


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "seeds", [range(first, first + 10) for first in range(0, 400, 10)], ids=str
)
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ((2, 2, True), KEEP),
        ((1, 1, False), Recompute(fraction=1.0)),
        ((2, 2, False), Recompute(("attention", "activation", "norm"), fraction=0.5)),
    ],
    ids=str,
)
def test_a_step_is_the_same_in_every_layout(
    seeds: range, layout: tuple[int, int, bool], recompute: Recompute
) -> None:
    alone = step_all([job(seed) for seed in seeds])
    tp, pp, sequence = layout
    found = step_all([job(seed, recompute) for seed in seeds], tp, pp, sequence)
    for seed, (loss, tensors), (expected, theirs) in zip(seeds, found, alone, strict=True):
        assert loss == pytest.approx(expected, rel=1e-11), seed
        largest = max(values.abs().max().item() for values in theirs.values())
        # rounding alone
        noise = {name for name, values in theirs.items() if values.abs().max() < 1e-6 * largest}
        ours, plain = (
            {n: v for n, v in some.items() if n not in noise} for some in (tensors, theirs)
        )
        assert not (far := differing(ours, plain, 1e-8)), (seed, far)
