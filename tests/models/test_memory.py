"""Memory of activations known beforehand is what torch's allocator really gives out, to five per
cent."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle, product
from math import prod
from typing import Any, get_args

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from megaprec.comm.axis import Axis
from megaprec.fp8.state import FP8State
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import plan
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Cut, Stage
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.estimate import memory
from models.estimate.elementwise import LayerShare
from models.estimate.least_activations import least_bytes_of_layer
from models.estimate.memory import ActivationBytes, StageMemory, message_bytes
from models.estimate.storage import Device, without_storage
from parallel.activation_checkpoint import KEEP, MODULES, Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.instructions import Instruction
from parallel.pipeline.kinds import schedule
from parallel.pipeline.simulation import peak
from tests.activation_bytes import kept_bytes
from tests.families import CASES, config_of
from tests.other_systems import usually
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "ffn": 352,
    "vocab": 301,
    "max_positions": 128,
}
LENGTH = 128
BATCH = 4
MICRO_BATCHES = 4
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2, **SIZES},
    "gpt2": {"family": "gpt2", **SIZES},
    "gpt_neox": {"family": "gpt_neox", **SIZES},
    "olmo3": {"family": "olmo3", **SIZES},
    "gemma2": {"family": "gemma2", **SIZES},
    "gemma3": {"family": "gemma3", **SIZES},
    "gemma4": {
        "family": "gemma4",
        **SIZES,
        "kv_heads": 2,
        "global_head_dim": 48,
        "global_kv_heads": 1,
        "global_key_as_value": True,
        "window": 32,
        "window_layers": (0,),
        "window_rope_base": 50.0,
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "latent": {
            "query_rank": 96,
            "kv_rank": 64,
            "rope_dim": 16,
            "nope_dim": 32,
            "value_dim": 32,
        },
        **SIZES,
    },
    "gpt_oss": {"family": "gpt_oss", **SIZES, "experts": 4, "experts_per_token": 2},
    "qwen3_next": {
        "family": "qwen3_next",
        **SIZES,
        "kv_heads": 2,
        "head_dim": 32,
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 32, "value_dim": 24},
    },
    "kimi_linear": {
        "family": "kimi_linear",
        **SIZES,
        "latent": {"kv_rank": 64, "rope_dim": 16, "nope_dim": 32, "value_dim": 32},
        "delta_net": {
            "key_heads": 4,
            "value_heads": 4,
            "key_dim": 32,
            "value_dim": 24,
            "gate_rank": 16,
        },
    },
    # whose second of three stages has layers of each kind
    "nemotron_h": {
        "family": "nemotron_h",
        **SIZES,
        "layers": 12,
        "hybrid_pattern": 3 * "M*E-",
        "kv_heads": 2,
        "mamba": {"heads": 8, "head_dim": 16, "state_dim": 24, "groups": 2},
        "experts": 4,
        "experts_per_token": 2,
        "shared_experts": 128,
    },
}
WAYS = [
    KEEP,
    *(Recompute((module,)) for module in MODULES),
    Recompute(MODULES),
    Recompute(fraction=0.5),
]


@dataclass(frozen=True)
class Case:
    model: dict[str, Any] = field(hash=False)
    recompute: Recompute
    sequence: bool = False
    kind: str = "1f1b"
    residual: str = "bf16"

    @property
    def plan(self) -> Any:
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        return plan("bf16", residual=dtypes[self.residual], pipeline=dtypes[self.residual])


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Sizes in the order in which the allocator gave them out, negative when it took them back."""
    sizes: list[int] = []
    with warnings.catch_warnings():
        # torch 2.11 says so at each start
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
            yield sizes
    assert events.profiler is not None and events.profiler.kineto_results is not None
    sizes += [e.nbytes() for e in events.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[attr-defined]


def foretold(case: Case, cut: Sequence[Cut], tp: int) -> list[ActivationBytes]:
    config = ModelConfig(**case.model)
    return kept_bytes(config, case.plan, cut, options_of(case), tp)


def options_of(case: Case) -> EngineOptions:
    return EngineOptions(BATCH, LENGTH, case.sequence, recompute=case.recompute)


def foretold_activations(case: Case, tp: int) -> int:
    """Of a stage in the middle, without the passes that only tell peaks."""
    config = ModelConfig(**case.model)
    cut = middle(case.model)
    memory = StageMemory(config, case.plan, options_of(case), tp, halves=False)
    return memory.activation_bytes(cut).activations


def middle(model: dict[str, Any]) -> Cut:
    """The second of three stages."""
    return cuts(ModelConfig(**model), 3, LENGTH)[1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True)])
def test_the_lower_bound_of_a_layer_is_below_what_it_keeps_and_not_far_below(
    family: str, tp: int, sequence: bool
) -> None:
    model = FAMILIES[family]
    share = LayerShare(tp, sequence)
    for recompute in (KEEP, Recompute(("activation",)), Recompute(("norm",)), Recompute(MODULES)):
        case = Case(model, recompute, sequence)
        layers = len(middle(model).layers)
        least = least_bytes_of_layer(ModelConfig(**model), case.plan, share, recompute)
        bound = least * layers * LENGTH * BATCH
        assert 0.4 < bound / foretold_activations(case, tp) < 1, recompute


def kept_by_a_stage(mesh: DeviceMesh, cases: Sequence[Case]) -> list[int]:
    """Bytes in use after the forward pass of a stage in the middle."""
    return [_kept(Axis.of(mesh, "tp"), case) for case in cases]


def _kept(tp: Axis, case: Case, packing: Packing = UNPACKED) -> int:
    config = ModelConfig(**case.model)
    context = Context(case.plan, tp, case.sequence, recompute=case.recompute)
    stage = Stage(config, context, middle(case.model)).to(torch.bfloat16)
    shape = LENGTH // (tp.size if context.cut_sequence else 1), BATCH, config.hidden
    with torch.no_grad():
        stage(torch.zeros(shape, dtype=case.plan.residual))  # makes what is made once for all
    with allocations() as sizes:
        x = torch.zeros(shape, dtype=case.plan.pipeline, requires_grad=True)
        edge = get_gradient_edge(stage(x.to(case.plan.residual), None, packing))
    assert edge
    return sum(sizes)


@pytest.mark.parametrize("packed", [False, True])
def test_a_stage_keeps_rotary_tables_for_each_sample_where_documents_have_positions(
    packed: bool,
) -> None:
    case = Case(FAMILIES["llama"], KEEP)
    packing = UNPACKED
    if packed:
        positions = torch.arange(LENGTH) % 50
        packing = Packing(positions=positions.expand(BATCH, LENGTH))
    memory = StageMemory(ModelConfig(**case.model), case.plan, options_of(case), packed=packed)
    said = memory.activation_bytes(middle(case.model)).activations
    tables = BATCH * LENGTH * 32 * 2 * 2  # a cosine and a sine for each feature of a head, in bf16
    real = _kept(Axis("tp"), case, packing)
    assert real == pytest.approx(said, abs=tables / 4)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["", "every way"]
)
@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True)])
def test_a_stage_keeps_what_is_foretold(tp: int, sequence: bool, every: bool) -> None:
    """Every way of one family, of the others each way that several modules take part in, in turn if
    tensor ranks share them; or every way of each."""
    several = [
        WAYS[-2:] if tp == 1 else WAYS[-2:][number % 2 :][:1] for number in range(len(FAMILIES))
    ]
    ways = dict(zip(FAMILIES, several, strict=True))
    ways |= {name: WAYS for name in FAMILIES if every or (tp == 1 and name == "llama")}
    cases = [Case(model, way, sequence) for name, model in FAMILIES.items() for way in ways[name]]
    cases += [
        Case(FAMILIES["llama"], KEEP, sequence, residual="fp32"),
        Case(FAMILIES["gpt2"], KEEP, sequence),
    ]
    expected = [foretold_activations(case, tp) for case in cases]
    for found in run_ranks(kept_by_a_stage, {"tp": tp}, cases=cases):
        for case, real, said in zip(cases, found, expected, strict=True):
            assert real == pytest.approx(said, rel=0.05), case


def peaks(mesh: DeviceMesh, cases: Sequence[Case]) -> list[int]:
    """The most that a rank really has in use during all passes of a step."""
    return [_peak(mesh, case) for case in cases]


def _peak(mesh: DeviceMesh, case: Case) -> int:
    config = ModelConfig(**case.model)
    engine = Engine.build(
        config,
        case.plan,
        mesh,
        schedule(case.kind, mesh["pp"].size(), MICRO_BATCHES),
        options_of(case),
    )
    ids = torch.arange(MICRO_BATCHES * BATCH * LENGTH).view(-1, LENGTH) % config.vocab
    share = Share(ids, ids)
    engine.step(share, 0.0, 0)
    with allocations() as sizes:
        engine.accumulate(share, 1)
    return max(accumulate(sizes))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["", "every schedule"]
)
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_a_step_takes_what_is_foretold(axes: dict[str, int], every: bool) -> None:
    """Each way and each schedule once, or every schedule in each way.

    With tp the sequence is cut: messages, and scratch memory of the CPU's products, come on top.
    They are as large for any number of layers: more layers outweigh them, but not where whole
    layers are made again."""
    ways = [KEEP, Recompute(MODULES), *([] if "tp" in axes else [Recompute(fraction=1.0)])]
    kinds = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
    more: dict[str, Any] = {"layers": 12} if "tp" in axes else {}
    model = FAMILIES["llama"] | more
    pairs = product(ways, kinds) if every else zip(cycle(ways), kinds, strict=False)
    cases = [Case(model, way, "tp" in axes, kind) for way, kind in pairs]
    config = ModelConfig(**model)
    known = dict[tuple[Recompute, int], list[ActivationBytes]]()
    expected = []
    for case in cases:
        planned = schedule(case.kind, 2, MICRO_BATCHES)
        stages = len(planned.rank_of_stage)
        if (case.recompute, stages) not in known:
            known[case.recompute, stages] = foretold(
                case, cuts(config, stages, LENGTH), axes.get("tp", 1)
            )
        kept = known[case.recompute, stages]
        message = message_bytes(config, case.plan, options_of(case), axes.get("tp", 1))
        expected.append(peak(planned, partial(_growth, kept), partial(_within, kept), message))
    for rank, found in enumerate(run_ranks(peaks, axes, cases=cases)):
        for case, real, said in zip(cases, found, expected, strict=True):
            assert real == pytest.approx(said[rank // axes.get("tp", 1)], rel=0.05), case


def _growth(kept: Sequence[ActivationBytes], i: Instruction) -> int:
    return kept[i.stage].growth_after(i)


def _within(kept: Sequence[ActivationBytes], i: Instruction) -> int:
    return kept[i.stage].peak_of(i)


MIXTRAL: dict[str, Any] = {"family": "mixtral", "experts": 4, **SIZES}
OFTEN = {
    "none": KEEP,
    "full": Recompute(fraction=1.0),
    "all modules": Recompute(MODULES),
    "two": Recompute(layers=2),
}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("recompute", OFTEN)
@pytest.mark.parametrize(
    "model",
    [FAMILIES["llama"], MIXTRAL, {**MIXTRAL, "dense_layers": (0, 1)}],
    ids=["llama", "mixtral", "first layers without experts"],
)
def test_deep_stages_keep_what_few_layers_foretell(
    model: dict[str, Any], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, middle and last stages of six layers, counted from few layers and by running all of
    them."""
    deep: dict[str, Any] = {**model, "layers": 18, "vocab": 3001}
    config = ModelConfig(**deep)
    cut = cuts(config, 3, LENGTH, (6, 6, 6))
    options = EngineOptions(1, LENGTH, sequence=True, recompute=OFTEN[recompute])
    shortly = kept_bytes(config, plan("bf16"), cut, options, 2, "cuda")
    monkeypatch.setattr(memory, "SAMPLED_DEPTHS", ())
    assert shortly == kept_bytes(config, plan("bf16"), cut, options, 2, "cuda")


IN_TURN: list[dict[str, Any]] = [
    {**FAMILIES["nemotron_h"], "hybrid_pattern": 3 * "MEMEM*"},
    {**FAMILIES["nemotron_h"], "hybrid_pattern": 3 * "-M*EEM"},
    {**FAMILIES["qwen3_next"], "delta_layers": (0, 1, 2, 4, 5, 6, 9, 10, 12, 13, 15, 17)},
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("recompute", OFTEN)
@pytest.mark.parametrize("model", IN_TURN, ids=["experts in turn", "letters", "delta nets"])
def test_layers_of_several_kinds_keep_what_the_last_ones_foretell(
    model: dict[str, Any], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a ten-thousandth, with whole backward passes: first, middle and last stages of six
    layers, counted from the last of each kind and by running all of them."""
    deep: dict[str, Any] = {**model, "layers": 18, "vocab": 3001}
    config = ModelConfig(**deep)
    options = EngineOptions(1, LENGTH, sequence=True, recompute=OFTEN[recompute])

    def counted() -> list[ActivationBytes]:
        of_stages = StageMemory(config, plan("bf16"), options, tp=2, device="cuda", halves=False)
        return [of_stages.activation_bytes(cut) for cut in cuts(config, 3, LENGTH, (6, 6, 6))]

    monkeypatch.setattr(memory, "SAMPLED_DEPTHS", ())
    monkeypatch.setattr(memory, "FEWEST_EARLIER", 1)
    shortly = counted()
    monkeypatch.setattr(memory, "FEWEST_EARLIER", config.layers)
    for few, whole in zip(shortly, counted(), strict=True):
        assert vars(few) == pytest.approx(vars(whole), rel=1e-4)


def test_the_peak_of_experts_counts_though_layers_of_another_kind_come_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted from the last layer of each kind, and by running all of them."""
    keys = {"hybrid_pattern": "MMMMEM", "layers": 6, "ffn": 4096}
    config = ModelConfig(**{**FAMILIES["nemotron_h"], **keys})
    cut = Cut(1, range(6), first=False, last=False)
    counted: list[dict[str, int]] = []
    for fewest in (4, 6):
        monkeypatch.setattr(memory, "FEWEST_EARLIER", fewest)
        of_stages = StageMemory(config, plan("bf16"), EngineOptions(1, 16), halves=False)
        counted.append(vars(of_stages.activation_bytes(cut)))
    assert counted[0] == pytest.approx(counted[1], rel=1e-4)


def test_layers_with_and_without_a_window_are_counted_as_they_are() -> None:
    """Masks of a window are kept; stages with as many layers but other windows keep as much as they
    have of them."""
    model: dict[str, Any] = {**FAMILIES["llama"], "window": 16, "window_layers": (0, 1, 2, 3)}
    config = ModelConfig(**model)
    alone, other = kept_bytes(
        config,
        plan("fp32"),
        [Cut(0, range(1, 4), False, False), Cut(1, range(4, 7), False, False)],
        EngineOptions(1, LENGTH),
    )
    assert alone.activations != other.activations


@pytest.mark.slow
def test_a_gpu_keeps_what_a_cpu_with_a_fused_kernel_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """To two per cent: both kernels keep query, key, value, result and a logarithm. The one of a
    GPU reads a key/value head for several query heads itself, so here each has its own.
    """
    model = ModelConfig(**{**FAMILIES["llama"], "kv_heads": FAMILIES["llama"]["heads"]})
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    cut = [middle(FAMILIES["llama"])]
    (cpu,), (gpu,) = (
        kept_bytes(model, plan("bf16"), cut, EngineOptions(BATCH, LENGTH), device=device)
        for device in ("cpu", "cuda")
    )
    assert gpu.activations == pytest.approx(cpu.activations, rel=0.02)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", usually(("gemma3", "deepseek_v3 yarn"), CASES))
def test_every_family_with_embedding_and_head_is_counted_on_each_device(name: str) -> None:
    """Cut sequences and positions of documents included: nothing that a stage runs may ask for a
    tensor's value."""
    config = config_of(CASES[name])
    whole = Cut(0, range(config.layers), first=True, last=True)
    devices: tuple[tuple[Device, int, bool], ...] = (
        ("cpu", 1, False),
        ("cuda", 1, False),
        ("cuda", 1, True),
        ("cuda", 2, False),
    )
    for device, cp, packed in devices:
        of_family = StageMemory(
            config,
            plan("bf16"),
            EngineOptions(BATCH, 16),
            device=device,
            cp=cp,
            packed=packed,
        ).activation_bytes(whole)
        assert of_family.activations > 0 and of_family.backward > 0


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_stage_in_fp8_is_counted_on_a_gpu_which_keeps_what_a_cpu_does(kind: Kind) -> None:
    """To a hundredth, with attention that keeps as much on either. Peaks differ: a CPU's products
    are emulated."""
    model = ModelConfig(**{**FAMILIES["llama"], "kv_heads": FAMILIES["llama"]["heads"]})
    fp8 = plan("bf16", fp8=FP8Recipe(kind=kind))
    cut = middle(FAMILIES["llama"])
    recompute = Recompute(("attention",))
    options = EngineOptions(BATCH, LENGTH, recompute=recompute)
    cpu = StageMemory(model, fp8, options).activation_bytes(cut)
    gpu = StageMemory(model, fp8, options, device="cuda").activation_bytes(cut)
    assert gpu.activations == pytest.approx(cpu.activations, rel=0.01)
    assert gpu.backward <= cpu.backward


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_gpu_keeps_both_sets_of_codes_of_every_weight_over_the_micro_batches(kind: Kind) -> None:
    model = ModelConfig(**FAMILIES["llama"])
    recipe = FP8Recipe(kind, history_length=1) if kind == "delayed" else FP8Recipe(kind)
    fp8 = plan("bf16", fp8=recipe)
    cut = middle(FAMILIES["llama"])
    options = EngineOptions(BATCH, LENGTH)
    kept = [
        StageMemory(model, each, options, device="cuda").activation_bytes(cut).buffers
        for each in (fp8, plan("bf16"))
    ]
    state = FP8State(fp8.fp8, model.layers, device="meta")
    with without_storage("cuda"):
        Stage(model.with_zero_weights, Context(fp8, fp8=state), cut)
    elements = sum(prod(weight.shape) for weight in state.registered if not weight.fallback_reason)
    # and scales, of 32 numbers each at least
    assert 2 * elements < kept[0] - kept[1] < 2 * elements * (1 + 4 / 32)


def test_experts_keep_what_is_foretold_whatever_the_router_does() -> None:
    """No token is dropped, so all experts together get as many; the router here has random
    weights."""
    case = Case(MIXTRAL, KEEP)
    (said,) = foretold(case, [middle(MIXTRAL)], 1)
    stage = Stage(ModelConfig(**MIXTRAL), Context(case.plan, Axis("tp")), middle(MIXTRAL)).to(
        torch.bfloat16
    )
    place = MicrobatchInfo(0, torch.arange(BATCH), torch.ones(()))
    with torch.no_grad():
        stage(torch.zeros(LENGTH, BATCH, stage.config.hidden, dtype=torch.bfloat16))
    with allocations() as sizes:
        x = torch.randn(LENGTH, BATCH, stage.config.hidden).bfloat16().requires_grad_()
        edge = get_gradient_edge(stage(x, place))
    assert edge
    assert sum(sizes) == pytest.approx(said.activations, rel=0.05)


def test_without_halves_nothing_is_put_off_from_a_backward_pass_and_all_else_is_as_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of any processor: one without products of bf16 multiplies in FP32, by tensors of its own
    monkeypatch.setattr(gemm, "slow_bf16", lambda tensor: False)
    config = ModelConfig(**FAMILIES["llama"])
    cut = cuts(config, 4, LENGTH)[1]
    options = EngineOptions(BATCH, LENGTH)
    whole, in_halves = (
        StageMemory(config, plan("bf16"), options, halves=halves).activation_bytes(cut)
        for halves in (False, True)
    )
    assert min(in_halves.deferred_bytes, in_halves.input) > 0
    # a product at a time, of a feed-forward's weight, before it is added to the gradient in FP32
    assert in_halves.weight == config.ffn * config.hidden * 2
    assert whole == replace(in_halves, deferred_bytes=0, input=0, weight=0)


def test_the_last_layers_of_one_kind_are_counted_from_the_end() -> None:
    for kinds, count in (("a", 1), ("ab", 1), ("abb", 2), ("bab", 1), ("bbb", 3)):
        assert memory._count_equal_last(kinds) == count
