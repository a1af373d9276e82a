"""Kernels of other packages compute what plain torch does, are taken where they can be, and are
named."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.virtual import VirtualAxis
from megaprec.precision.plan import plan
from models.attention.flash_windows import Documents
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from models.engine import engine as engine_module
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.estimate.storage import SimulatedAxis
from models.recurrent import (
    delta_rule,
    kernel_calls,
    kernel_choice,
    kernel_trials,
    mixer_parts,
    state_space,
)
from models.recurrent.gated_delta_net import GatedDeltaNet
from models.recurrent.kernel_choice import (
    CONVOLUTION,
    DELTA_RULE,
    FEWER_TOKENS_THAN_HEADS,
    ROW_DECAY_RULE,
    STATE_SPACE,
    KernelSetting,
    Package,
    choose,
    describe,
    refused_kernels,
    uses,
)
from models.recurrent.kimi_delta_attention import KimiDeltaAttention
from models.recurrent.mamba_mixer import MambaMixer
from models.recurrent.short_convolution import short_convolution
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.lockstep import Lockstep
from parallel.pipeline.kinds import schedule
from tests.ranks import run_ranks
from tests.recurrent.recurrences import (
    ODD_BY_ROW,
    ODD_DELTA,
    ODD_STATE_SPACE,
    assert_alike,
)
from tests.recurrent.stand_ins import FUNCTIONS, install
from tools.analysis.planning.device import DeviceTarget
from tools.analysis.planning.report import run_lines
from tools.config.run_file import load_run
from tools.verify.doctor import kernels

WIDE = torch.float64
ON_GPU = KernelSetting("cuda", torch.bfloat16, canonical=False, deterministic=False)
SIZES: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 16, "vocab": 32}
SIZES_OF_HEADS = "{key_heads=2, value_heads=4, key_dim=4, value_dim=2}"
DELTA_NET_KEYS: dict[str, Any] = {
    "family": "qwen3",
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 2},
    "delta_layers": (0,),
    "max_positions": 64,
}
KIMI_DELTA_KEYS: dict[str, Any] = {
    "family": "qwen3",
    "delta_net": {
        "key_heads": 4,
        "value_heads": 4,
        "key_dim": 4,
        "value_dim": 2,
        "gate_rank": 3,
    },
    "delta_layers": (0,),
    "max_positions": 64,
}
MAMBA_KEYS: dict[str, Any] = {
    "family": "nemotron_h",
    "hybrid_pattern": "M*",
    "mamba": {"heads": 4, "head_dim": 2, "state_dim": 4, "groups": 2},
}
DELTA_NET = ModelConfig(**SIZES, **DELTA_NET_KEYS)
KIMI_DELTA = ModelConfig(**SIZES, **KIMI_DELTA_KEYS)
MAMBA = ModelConfig(**SIZES, **MAMBA_KEYS)


@pytest.fixture(autouse=True)
def no_package_is_remembered() -> Iterator[None]:
    kernel_choice.find.cache_clear()
    yield
    kernel_choice.find.cache_clear()


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tried on the CPU, where stand-ins compute token by token."""
    monkeypatch.setattr(kernel_trials, "DEVICE", "cpu")


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch, tried_here: None) -> None:
    """All packages are there, and taken for tensors of a CPU in any dtype."""
    for package, function in FUNCTIONS.items():
        install(monkeypatch, package, function=function)

    def setting(**facts: Any) -> KernelSetting:
        return KernelSetting(**facts)._replace(device="cuda", products=torch.bfloat16)

    monkeypatch.setattr(mixer_parts, "KernelSetting", setting)
    monkeypatch.setattr(engine_module, "KernelSetting", setting)


def made_and_gradients(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """What a function makes of tensors, and their gradients of a lively loss."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    made = function(*leaves)
    dice = torch.Generator().manual_seed(3)
    loss = torch.zeros((), dtype=WIDE)
    for result in made:
        weights = torch.randn(result.shape, generator=dice, dtype=WIDE)
        loss = loss + (result * weights).sum()
    return [*(x.detach() for x in made), *torch.autograd.grad(loss, leaves)]


def test_a_kernel_that_was_found_warns_of_no_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DELTA_RULE, function=FUNCTIONS[DELTA_RULE])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_choice.find(DELTA_RULE)
        warnings.warn(f"{FEWER_TOKENS_THAN_HEADS}: seq_len (1) < num_heads (3).", stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)


@pytest.mark.filterwarnings(f"ignore:{FEWER_TOKENS_THAN_HEADS}")
@pytest.mark.parametrize("documents", [0.0, 0.1])
@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("package", [DELTA_RULE, ROW_DECAY_RULE])
def test_the_delta_rule_is_that_of_the_chunks(
    package: Package, length: int, documents: float
) -> None:
    odd = ODD_DELTA if package == DELTA_RULE else ODD_BY_ROW
    inputs, state = replace(odd, length=length, documents=documents).inputs()
    keys = ("query", "key", "value", "log_decay", "strength")
    tensors = [getattr(inputs, key) for key in keys]

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        made = delta_rule.chunked(replace(inputs, **dict(zip(keys, leaves, strict=False))))
        return made[:1] if documents else made

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        here = replace(inputs, **dict(zip(keys, leaves, strict=False)))
        outputs, last = kernel_calls.delta_rule(FUNCTIONS[package], here, None, WIDE)
        assert (last is None) == bool(documents)
        return [outputs] if last is None else [outputs, last]

    found = made_and_gradients(theirs, tensors)
    assert_alike(found, made_and_gradients(ours, tensors))
    if not documents:
        outputs, last = kernel_calls.delta_rule(FUNCTIONS[package], inputs, state, WIDE)
        assert last is not None
        assert_alike([outputs, last], delta_rule.chunked(inputs, state))


def test_documents_that_the_host_has_counted_are_those_that_the_gpu_counts() -> None:
    inputs, _ = replace(ODD_DELTA, documents=0.2).inputs()
    assert inputs.begins is not None
    begins = inputs.begins.clone()
    begins[:, 0] = True
    documents = Documents(begins.long().cumsum(1), int(begins.sum()))
    starts = kernel_calls.document_starts(inputs)
    assert starts is not None and starts.dtype == torch.int32
    assert starts.tolist() == documents.starts.tolist()
    counted = replace(inputs, starts=documents.starts)
    assert kernel_calls.document_starts(counted) is documents.starts


@pytest.mark.parametrize("documents", [0.0, 0.1])
@pytest.mark.parametrize("length", [1, 37])
def test_the_state_space_is_that_of_the_chunks(length: int, documents: float) -> None:
    inputs, state = replace(ODD_STATE_SPACE, length=length, documents=documents).inputs()
    keys = ("query", "key", "value", "step", "rate")
    tensors = [*(getattr(inputs, key) for key in keys), state]

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        here = replace(inputs, **dict(zip(keys, leaves, strict=False)))
        return state_space.chunked(here, leaves[-1])

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        here = replace(inputs, **dict(zip(keys, leaves, strict=False)))
        kernel = FUNCTIONS[STATE_SPACE]
        return kernel_calls.state_space(kernel, here, leaves[-1], WIDE)

    assert_alike(made_and_gradients(theirs, tensors), made_and_gradients(ours, tensors))


@pytest.mark.parametrize("given", ["nothing", "documents", "before", "bias"])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_the_convolution_is_that_of_plain_torch(kernel: int, given: str) -> None:
    dice = torch.Generator().manual_seed(kernel)
    x = torch.randn(13, 2, 8, generator=dice, dtype=WIDE)
    weight = torch.randn(8, kernel, generator=dice, dtype=WIDE)
    bias = torch.randn(8, generator=dice, dtype=WIDE) if given == "bias" else None
    before = None
    if given == "before":
        before = torch.randn(kernel - 1, 2, 8, generator=dice, dtype=WIDE)
    begins = torch.rand(2, 13, generator=dice) < 0.3 if given == "documents" else None

    def ours(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        summed = short_convolution(x, weight, before, begins, bias)
        return [torch.nn.functional.silu(summed)]

    def theirs(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        function = FUNCTIONS[CONVOLUTION]
        return [kernel_calls.convolution(function, x, weight, bias, before, begins)]

    found = made_and_gradients(theirs, [x, weight])
    assert_alike(found, made_and_gradients(ours, [x, weight]))


def test_kernels_take_products_dtype_and_leave_decays_and_states_wide() -> None:
    """The stand-ins assert the dtypes that they are given."""
    inputs, state = replace(ODD_DELTA, documents=0.0).inputs()
    keys = ("query", "key", "value", "log_decay", "strength")
    narrow = replace(inputs, **{key: getattr(inputs, key).float() for key in keys})
    function = FUNCTIONS[DELTA_RULE]
    found, last = kernel_calls.delta_rule(function, narrow, state.float(), torch.bfloat16)
    expected, _ = delta_rule.chunked(inputs, state)
    assert last is not None and found.dtype == last.dtype == torch.float32
    assert (found - expected).norm() < 0.01 * expected.norm()


EACH_LAYER = pytest.mark.parametrize(
    "config", [DELTA_NET, KIMI_DELTA, MAMBA], ids=["delta net", "Kimi delta", "Mamba-2"]
)


def layer_of(config: ModelConfig, recompute: Recompute = KEEP) -> GatedDeltaNet | MambaMixer:
    kind: type[GatedDeltaNet | MambaMixer] = MambaMixer
    if config.delta_net:
        kind = KimiDeltaAttention if config.delta_net.gate_rank else GatedDeltaNet
    return kind(config, Context(plan("fp64"), recompute=recompute), "layers.0.attention")


def step(layer: GatedDeltaNet | MambaMixer, documents: Tensor | Documents | None) -> list[Tensor]:
    """The output of a layer, and the gradients of its input and of all weights."""
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(19, 2, 16, dtype=WIDE, generator=dice).requires_grad_()
    weights = torch.randn(x.shape, generator=dice, dtype=WIDE)
    y = layer(x, None, None, documents)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


@EACH_LAYER
@pytest.mark.parametrize("given", ["nothing", "numbers", "documents"])
def test_a_layer_computes_the_same_by_kernels(
    config: ModelConfig, given: str, request: pytest.FixtureRequest
) -> None:
    numbers = torch.tensor([[0] * 7 + [1] * 12, [0] * 2 + [1] * 1 + [2] * 16])
    choices = {"nothing": None, "numbers": numbers, "documents": Documents(numbers, 5)}
    plain = step(layer_of(config), choices[given])
    request.getfixturevalue("as_on_gpu")
    assert_alike(step(layer_of(config), choices[given]), plain)
    recomputed = layer_of(config, Recompute(("attention",)))
    assert_alike(step(recomputed, choices[given]), plain)


@EACH_LAYER
def test_generation_goes_on_from_the_state_of_kernels(
    config: ModelConfig, request: pytest.FixtureRequest
) -> None:
    tokens = torch.randint(0, 32, (12, 1), generator=torch.Generator().manual_seed(2))

    def logits() -> list[Tensor]:
        stage = CachedStage(config, Context(plan("fp64")), cuts(config, 1, 12)[0])
        stage.start(12)
        return [stage.extend(part) for part in tokens.split([5, 1, 4, 1, 1])]

    plain = logits()
    request.getfixturevalue("as_on_gpu")
    assert_alike(logits(), plain)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (ON_GPU._replace(device="cpu"), "not on a GPU"),
        (ON_GPU._replace(products=torch.float32), "products are not in 16 bits"),
        (ON_GPU._replace(canonical=True), "canonical numerics"),
        (ON_GPU._replace(deterministic=True), "train.deterministic"),
    ],
    ids=str,
)
@pytest.mark.parametrize("package", FUNCTIONS, ids=lambda package: package.name)
def test_a_kernel_is_taken_on_a_gpu_unless_the_run_asks_for_what_it_cannot_do(
    package: Package, setting: KernelSetting, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, package, function=FUNCTIONS[package])
    assert choose(package, ON_GPU) == (FUNCTIONS[package], f"{package.name} 9.8.7")
    assert choose(package, setting) == (None, f"plain torch ({reason})")
    assert choose(package, ON_GPU, "too wide") == (None, "plain torch (too wide)")
    elsewhere = choose(package, ON_GPU._replace(device="meta"))
    assert elsewhere == (None, f"{package.name} where it is installed, else plain torch")


# heads, key and value; groups, heads, key and value; features and taps
TRIED_SIZES = {
    DELTA_RULE: (2, 8, 4),
    ROW_DECAY_RULE: (2, 8, 4),
    STATE_SPACE: (1, 2, 8, 4),
    CONVOLUTION: (8, 4),
}
TOKENS = 20
MODELS = {
    DELTA_RULE: DELTA_NET,
    ROW_DECAY_RULE: KIMI_DELTA,
    STATE_SPACE: MAMBA,
    CONVOLUTION: MAMBA,
}
CPU = torch.device("cpu")


def try_in(model: ModelConfig) -> dict[str, str]:
    """Try the kernels of a model's layers on one rank."""
    return refused_kernels(model, 1, ON_GPU, TOKENS, Axis.world(None), CPU)


@pytest.mark.filterwarnings(f"ignore:{FEWER_TOKENS_THAN_HEADS}")
@pytest.mark.parametrize("model", [DELTA_NET, KIMI_DELTA, MAMBA])
def test_kernels_that_compute_what_plain_torch_does_are_not_refused(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, tried_here: None
) -> None:
    for package, function in FUNCTIONS.items():
        install(monkeypatch, package, function=function)
    assert try_in(model) == {}


@pytest.mark.parametrize(
    ("package", "sizes"),
    [
        (DELTA_RULE, (1, 128, 64)),
        (ROW_DECAY_RULE, (1, 128, 64)),
        (STATE_SPACE, (1, 2, 128, 64)),
        (STATE_SPACE, (2, 2, 128, 64)),
        (CONVOLUTION, (64, 4)),
    ],
)
def test_what_rounds_as_bf16_does_is_right(
    package: Package, sizes: tuple[int, ...], tried_here: None
) -> None:
    """Gradients of rates are sums over all tokens, of which little is left."""
    assert package.trial(FUNCTIONS[package], sizes, 200, torch.bfloat16) == ""


def with_half_the_gradient(x: Tensor) -> Tensor:
    """The same numbers, of which half a gradient is seen."""
    return x + (x.detach() - x) / 2


def without_a_gradient_that_is_a_number(x: Tensor) -> Tensor:
    infinity_times_nothing = (x - x.detach()) * torch.inf
    return x + infinity_times_nothing.nan_to_num(0)


@pytest.mark.filterwarnings(f"ignore:{FEWER_TOKENS_THAN_HEADS}")
@pytest.mark.parametrize("package", FUNCTIONS, ids=lambda package: package.name)
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (with_half_the_gradient, "is wrong by 50.0% in the gradient of "),
        (without_a_gradient_that_is_a_number, "is wrong by nan% in the gradient of "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_kernel_with_wrong_gradients_is_refused_wherever_its_engine_is_built(
    package: Package,
    planted: Callable[[Tensor], Tensor],
    words: str,
    mode: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    tried_here: None,
) -> None:
    def faulty(first: Tensor, *others: Any, **named: Any) -> Any:
        return FUNCTIONS[package](planted(first), *others, **named)

    for other, function in FUNCTIONS.items():
        install(monkeypatch, other, function=function)
    install(monkeypatch, package, function=faulty)
    with mode():
        refused = try_in(MODELS[package])
    assert [*refused] == [package.name]
    assert refused[package.name].startswith(f"{package.name} 9.8.7 {words}")
    assert refused[package.name].endswith(" on the GPU of rank 0")


@pytest.mark.filterwarnings(f"ignore:{FEWER_TOKENS_THAN_HEADS}")
@pytest.mark.parametrize(("larger_by", "is_right"), [(1.02, True), (1.04, False)])
def test_outputs_may_differ_by_three_per_cent(
    larger_by: float, is_right: bool, tried_here: None
) -> None:
    def scaled(*arguments: Any, **named: Any) -> Any:
        outputs, last = FUNCTIONS[DELTA_RULE](*arguments, **named)
        return outputs * larger_by, last

    fault = DELTA_RULE.trial(scaled, TRIED_SIZES[DELTA_RULE], TOKENS, torch.float32)
    assert (fault == "") == is_right


@pytest.mark.parametrize("package", [DELTA_RULE, ROW_DECAY_RULE, STATE_SPACE])
def test_a_kernel_that_forgets_a_state_after_a_chunk_is_seen(
    package: Package, tried_here: None
) -> None:
    """Each piece of 64 tokens knows of the piece before it, and of none before that."""
    size = 64

    def forgetful(*arguments: Any, **named: Any) -> Any:
        length = arguments[0].shape[1]
        pieces: list[Tensor] = []
        last: Any = None
        for first in range(0, length, size):
            begin = max(0, first - size)
            seen: list[Any] = []
            for value in arguments:
                has_tokens = isinstance(value, Tensor) and value.dim() > 1
                seen.append(value[:, begin : first + size] if has_tokens else value)
            outputs, last = FUNCTIONS[package](*seen, **named)
            pieces.append(outputs[:, first - begin :])
        return torch.cat(pieces, 1), last

    sizes = (1, 2, 16, 8) if package == STATE_SPACE else (2, 16, 8)
    assert package.trial(FUNCTIONS[package], sizes, 200, torch.bfloat16) == ""
    assert "is wrong by" in package.trial(forgetful, sizes, 200, torch.bfloat16)


def test_a_kernel_that_fails_here_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tried_here: None
) -> None:
    def failing(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("wrong on Hopper GPUs; upgrade Triton\nmore lines")

    install(monkeypatch, DELTA_RULE, function=failing)
    reason = "fails (wrong on Hopper GPUs; upgrade Triton) on the GPU of rank 0"
    refused = try_in(DELTA_NET)
    assert refused["flash-linear-attention"] == f"flash-linear-attention 9.8.7 {reason}"
    # and one that is not there
    assert refused["causal-conv1d"] == "causal-conv1d is not installed"
    assert describe(DELTA_NET, 1, ON_GPU, refused)[0].endswith(f" 9.8.7 {reason})")


def refused_on_a_rank(mesh: DeviceMesh) -> dict[str, str]:
    """Both ranks have the packages, and those of rank 1 are wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_trials, "DEVICE", "cpu")

        def faulty(first: Tensor, *others: Any, **named: Any) -> Any:
            seen = with_half_the_gradient(first) if mesh.get_rank() == 1 else first
            return FUNCTIONS[STATE_SPACE](seen, *others, **named)

        for package, function in FUNCTIONS.items():
            install(patch, package, function=function)
        install(patch, STATE_SPACE, function=faulty)
        return refused_kernels(MAMBA, 1, ON_GPU, TOKENS, Axis.world(mesh), CPU)


def test_what_one_rank_refuses_no_rank_takes() -> None:
    one, other = run_ranks(refused_on_a_rank, {"dp": 2})
    assert one == other
    assert [*one] == [STATE_SPACE.name]
    assert one[STATE_SPACE.name].endswith("on the GPU of rank 1")


@pytest.mark.filterwarnings(f"ignore:{FEWER_TOKENS_THAN_HEADS}")
@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_engine_tries_kernels_and_its_layers_do_without_those_that_are_wrong(
    is_faulty: bool, monkeypatch: pytest.MonkeyPatch, as_on_gpu: None
) -> None:
    calls: list[Any] = []

    def kernel(first: Tensor, *others: Any, **named: Any) -> Any:
        calls.append(first)
        seen = with_half_the_gradient(first) if is_faulty else first
        return FUNCTIONS[DELTA_RULE](seen, *others, **named)

    install(monkeypatch, DELTA_RULE, function=kernel)
    options = EngineOptions(micro_batch=1, seq_length=9, recompute=Recompute(("attention",)))
    engine = Engine.build(DELTA_NET, plan("fp32"), None, schedule("1f1b", 1, 1), options)
    calls.clear()
    ids = torch.randint(32, (1, 10), generator=torch.Generator().manual_seed(0))
    engine.step(Share(ids[:, :-1], ids[:, 1:]), 1e-3, 0)
    assert bool(calls) == (not is_faulty)
    assert (DELTA_RULE.name in engine.refused_kernels) == is_faulty


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [DELTA_NET, KIMI_DELTA, MAMBA])
def test_a_kernel_is_tried_with_the_sizes_of_a_ranks_layer(model: ModelConfig, tp: int) -> None:
    sizes = {package: of_layer for package, _, of_layer in uses(model, tp)}
    context = Context(plan("bf16"), SimulatedAxis("tp", 0, tp))
    layer: Any
    if model.delta_net:
        by_row = model.delta_net.gate_rank > 0
        kind = KimiDeltaAttention if by_row else GatedDeltaNet
        layer = kind(model, context, "attention")
        heads = layer.log_rate.numel()
        expected = (heads, model.delta_net.key_dim, model.delta_net.value_dim)
        assert sizes[ROW_DECAY_RULE if by_row else DELTA_RULE] == expected
    else:
        layer = MambaMixer(model, context, "attention")
        heads = layer.log_rate.numel()
        groups = model.mamba.groups // tp
        assert sizes[STATE_SPACE] == (groups, heads, model.mamba.state_dim, model.mamba.head_dim)
    assert sizes[CONVOLUTION] == tuple(layer.convolution.shape)


@pytest.mark.filterwarnings(f"ignore:{FEWER_TOKENS_THAN_HEADS}")
@pytest.mark.parametrize("package", FUNCTIONS, ids=lambda package: package.name)
def test_the_doctor_finds_a_kernel_with_wrong_gradients(
    package: Package, monkeypatch: pytest.MonkeyPatch, tried_here: None
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(kernels, "TOKENS", TOKENS)

    def faulty(first: Tensor, *others: Any, **named: Any) -> Any:
        return FUNCTIONS[package](with_half_the_gradient(first), *others, **named)

    install(monkeypatch, package, function=FUNCTIONS[package])
    assert kernels._try_package(package, TRIED_SIZES[package], gpu).state == kernels.HERE
    install(monkeypatch, package, function=faulty)
    trial = kernels._try_package(package, TRIED_SIZES[package], gpu)
    assert trial.state == kernels.FAULTY
    assert f"{package.name} 9.8.7 is wrong by 50.0% in the gradient of " in trial.reason


@pytest.mark.parametrize("package", FUNCTIONS, ids=lambda package: package.name)
def test_a_package_that_cannot_be_used_is_named_with_the_reason(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where it is not installed
    monkeypatch.setitem(sys.modules, package.module.partition(".")[0], None)
    assert choose(package, ON_GPU).name == f"plain torch ({package.name} is not installed)"
    install(monkeypatch, package)
    kernel, name = choose(package, ON_GPU)
    assert kernel is None and package.function in name
    assert name.startswith(f"plain torch ({package.name} cannot be imported: ")
    install(monkeypatch, package, "0.1.2.post3", FUNCTIONS[package])
    first = ".".join(map(str, package.release))
    old = f"plain torch ({package.name} 0.1.2.post3 is older than {first})"
    assert choose(package, ON_GPU) == (None, old)


@pytest.mark.parametrize("package", FUNCTIONS, ids=lambda package: package.part)
def test_a_package_is_taken_from_the_release_on_that_the_page_names(package: Package) -> None:
    page = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()
    release = ".".join(map(str, package.release))
    function = re.escape(f"{package.module}.{package.function}")
    row = rf"^\| `{package.name}` \| {release} \| .*{package.part}.* \| `{function}` \|$"
    assert re.search(row, page, re.M)


def test_the_parts_of_a_model_are_named_with_what_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in (DELTA_RULE, STATE_SPACE):
        install(monkeypatch, package, function=FUNCTIONS[package])
    missing = "convolution by plain torch (causal-conv1d is not installed)"
    by_fla = "gated delta rule by flash-linear-attention 9.8.7"
    assert describe(DELTA_NET, 1, ON_GPU, {}) == [by_fla, missing]
    assert describe(MAMBA, 1, ON_GPU, {}) == ["state space by mamba-ssm 9.8.7", missing]
    # 24 features are 12 on each of two ranks
    uneven = "convolution by plain torch (causal-conv1d takes features in multiples of 8)"
    assert describe(MAMBA, 2, ON_GPU, {})[1] == uneven
    wide = {"key_heads": 1, "value_heads": 1, "key_dim": 257, "value_dim": 2, "kernel": 5}
    keys = dict(DELTA_NET_KEYS, delta_net=wide)
    config = ModelConfig(**SIZES, **keys)
    assert describe(config, 1, ON_GPU, {}) == [
        "gated delta rule by plain torch (flash-linear-attention has keys of at most 256 features)",
        "convolution by plain torch (causal-conv1d sees 2 to 4 tokens)",
    ]
    assert describe(ModelConfig(family="llama", **SIZES), 1, ON_GPU, {}) == []


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "plain torch (not on a GPU)"),
        ("cuda", "flash-linear-attention where it is installed, else plain torch"),
    ],
)
def test_a_plan_names_what_computes_recurrent_layers(device: Any, expected: str) -> None:
    keys = ["train.steps=1", "train.seq_length=16", "train.global_batch=1", "train.micro_batch=1"]
    keys.append("precision.compute=bf16")
    words = [f"model.{key}={value}" for key, value in SIZES.items() if key != "vocab"]
    model = ["model.family=qwen3", "model.delta_layers=[0]", f"model.delta_net={SIZES_OF_HEADS}"]
    config = load_run(None, [*model, *words, *keys]).on_device(device)
    target = DeviceTarget(device, "a device", 10**9)
    (line,) = [one for one in run_lines(config, target) if one.startswith("recurrent")]
    assert line.startswith(f"recurrent  gated delta rule by {expected}; convolution by ")


def test_the_process_decides_where_bits_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, function in FUNCTIONS.items():
        install(monkeypatch, package, function=function)
    monkeypatch.setattr(
        mixer_parts, "KernelSetting", lambda **facts: KernelSetting(**facts)._replace(device="cuda")
    )
    x = torch.zeros(1)
    layer = GatedDeltaNet(DELTA_NET, Context(plan("bf16")), "attention")
    assert layer._choose(DELTA_RULE, x).kernel is not None
    with monkeypatch.context() as deterministic:
        deterministic.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert layer._choose(DELTA_RULE, x).name == "plain torch (train.deterministic)"
    (lane,) = Lockstep(VirtualAxis(Axis("tp"), 1)).axes
    layer = GatedDeltaNet(DELTA_NET, Context(plan("bf16"), tp=lane), "attention")
    assert layer._choose(DELTA_RULE, x).name == "plain torch (canonical numerics)"
