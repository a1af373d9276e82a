"""Upper bounds of what one layer, the loss, and FP8 casts cost a GPU besides arithmetic: kernels launched and
bytes moved.

They are counted on tensors without storage, where every operator that is no view stands for one
launch, and a compiled leaf or region for one launch in each direction (Inductor makes of most of
them one kernel, of the heads' region three). A change that adds a kernel
to each layer fails here, and one that saves kernels lowers the bound.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.fp8.quantize import amax_of, quantize_both
from megaprec.fp8.state import ROLES
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer
from models.decoder.stages import Cut, Stage
from models.estimate.storage import without_storage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.leaves import PLAIN, Leaves, call_of
from parallel.regions import compiled_region

TOKENS = 8192
LLAMA_8B: dict[str, Any] = {
    "family": "llama",
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "max_positions": TOKENS,
}
# no kernel: allocations, and views that torch does not declare as such
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "promote_types"}
# their bytes are those of weights, activations and gradients, which every implementation moves
PRODUCTS = {
    "mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
}
# overwrite their first argument without reading it
WRITES = {"copy_", "zero_", "fill_"}


@dataclass
class Cost:
    """Launches of all kernels, and bytes that kernels other than products and attention move."""

    launches: int = 0
    bytes: int = 0

    def add(self, name: str, tensors: list[Tensor]) -> None:
        self.launches += 1
        if name not in PRODUCTS:
            self.bytes += sum(map(bytes_of, tensors))

    def without(self, other: "Cost") -> "Cost":
        return Cost(self.launches - other.launches, self.bytes - other.bytes)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's own elements; a dim that is expanded is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


class Counting(TorchDispatchMode):
    """Adds the cost of every operator to `cost`, unless it is None."""

    def __init__(self) -> None:
        super().__init__()
        self.cost: Cost | None = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if self.cost is not None and not func.is_view and name not in NO_LAUNCH:
            read = args[1:] if name in WRITES else args
            self.cost.add(name, [*tensors_in((*read, *kwargs.values())), *tensors_in(result)])
        return result

    @contextmanager
    def as_one(self, *, inputs: Callable[[], Any]) -> Iterator[list[Tensor]]:
        """Count what runs inside as one launch, which reads the inputs and writes what is put into
        the list."""
        cost = self.cost
        results: list[Tensor] = []
        self.cost = None
        try:
            yield results
        finally:
            self.cost = cost
        assert cost is not None
        cost.add("fused", [*tensors_in(inputs()), *results])


class Fused(Leaves):
    """Leaves and regions as if they were compiled: each call is one launch."""

    def __init__(self, counting: Counting) -> None:
        super().__init__(by_region=True)
        object.__setattr__(self, "counting", counting)

    def __call__(
        self,
        leaf: Callable[..., Any],
        *arguments: Any,
        otherwise: Callable[..., Any] | None = None,
    ) -> Any:
        with self.counting.as_one(inputs=lambda: arguments) as results:  # type: ignore[attr-defined]
            returned = leaf(*arguments)
            results += tensors_in(returned)
        return returned

    def call_region(self, region: Callable[..., Any], *arguments: Any) -> Any:
        counting: Counting = self.counting  # type: ignore[attr-defined]

        def one_launch(graph: Callable[..., Any], _: list[Tensor]) -> Callable[..., Any]:
            def run(*tensors: Tensor) -> Any:
                with counting.as_one(inputs=lambda: tensors) as results:
                    returned = graph(*tensors)
                    results += tensors_in(returned)
                return returned

            return run

        cost = counting.cost
        counting.cost = Cost()  # of the trace, which is no part of a step
        passes = compiled_region(call_of(region, arguments, region=True), one_launch)
        counting.cost = cost
        return passes(*tensors_in(arguments))


@pytest.fixture(autouse=True)
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the product of a weight gradient adds to its FP32 total by itself."""

    def add_product_(total: Tensor, a: Tensor, b: Tensor, *_: Any, **options: Any) -> None:
        torch.mm(a, b)

    monkeypatch.setattr(gemm, "add_product_", add_product_)


PASSES = ("forward", "loss", "loss backward", "backward")


def costs(layers: int, fused: bool) -> dict[str, Cost]:
    """The costs of the passes of a stage with all of a model."""
    config = ModelConfig(**LLAMA_8B, layers=layers)
    counting = Counting()
    costs = {name: Cost() for name in PASSES}
    with without_storage("cuda"):
        context = Context(plan("bf16"), leaves=Fused(counting) if fused else PLAIN)
        stage = Stage(config.with_zero_weights, context, Cut(0, range(layers), True, True))
        for parameter in stage.parameters():
            parameter.data = parameter.data.bfloat16()  # as the optimizer does
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
        ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
        info = MicrobatchInfo(0, torch.arange(1), torch.ones(()))
        with counting:
            counting.cost = costs["forward"]
            logits = stage(ids, info)
            counting.cost = costs["loss"]
            loss = stage.losses(logits, ids).sum()
            counting.cost = costs["loss backward"]
            (gradient,) = torch.autograd.grad(loss, logits)
            counting.cost = costs["backward"]
            logits.backward(gradient)
    return costs


def cost_of_layer(fused: bool) -> dict[str, Cost]:
    """The cost of each further layer."""
    deeper = costs(2, fused)
    shallower = costs(1, fused)
    return {name: deeper[name].without(shallower[name]) for name in ("forward", "backward")}


# fused: (launches, gigabytes) of a layer and of the loss. The bf16 logits have 2.10 gigabytes:
# fused, the loss reads them once, and its backward pass reads and overwrites them once.
BOUNDS = {
    False: {
        "forward": (44, 4.45),
        "backward": (61, 9.63),
        "loss": (593, 33.7),
        "loss backward": (522, 46.3),
    },
    True: {
        "forward": (12, 1.65),
        "backward": (19, 2.12),
        "loss": (6, 2.11),
        "loss backward": (3, 4.21),
    },
}


@pytest.mark.parametrize("fused", BOUNDS, ids=["by operators", "by regions"])
def test_a_layer_and_the_loss_launch_no_more_kernels_and_move_no_more_bytes(fused: bool) -> None:
    of_one = costs(1, fused)
    of_loss = {name: of_one[name] for name in ("loss", "loss backward")}
    measured = cost_of_layer(fused) | of_loss
    for part, (launches, gigabytes) in BOUNDS[fused].items():
        assert measured[part].launches <= launches, part
        assert measured[part].bytes <= gigabytes * 1e9, part


def test_an_operator_more_in_each_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cost_of_layer(fused=True)
    forward = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", lambda *a, **o: forward(*a, **o).clone())
    after = cost_of_layer(fused=True)
    hidden = TOKENS * LLAMA_8B["hidden"] * 2
    assert after["forward"].launches == before["forward"].launches + 1
    assert after["forward"].bytes == before["forward"].bytes + 2 * hidden


# of one matrix: (launches, bytes an element) by operators, and as leaves. Two bytes are read by
# each leaf, and two are written: the codes of the matrix and of its transpose.
CAST_BOUNDS: dict[Kind, dict[bool, tuple[int, float]]] = {
    "delayed": {False: (13, 47.01), True: (2, 6.01)},
    "current": {False: (24, 47.01), True: (2, 6.01)},
    "rowwise": {False: (46, 106.1), True: (1, 4.01)},
    "blockwise": {False: (48, 123.3), True: (1, 4.07)},
}


@pytest.mark.parametrize("fused", [False, True], ids=["by operators", "by leaves"])
@pytest.mark.parametrize("kind", CAST_BOUNDS)
def test_fp8_casts_launch_no_more_kernels_and_move_no_more_bytes(kind: Kind, fused: bool) -> None:
    launches, bytes_per_element = CAST_BOUNDS[kind][fused]
    recipe = FP8Recipe(kind)
    for role in ROLES:
        counting = Counting()
        leaves = Fused(counting) if fused else PLAIN
        with without_storage("cuda"):
            x = torch.empty(TOKENS, LLAMA_8B["hidden"], dtype=torch.bfloat16)
            scale = torch.ones(()) if kind == "delayed" else None
            with counting:
                counting.cost = Cost()
                if kind == "delayed":
                    leaves(amax_of, x)  # for the scales of later steps
                quantize_both(x, recipe, role, scale, leaves=leaves)
        assert counting.cost.launches <= launches, role
        assert counting.cost.bytes <= bytes_per_element * x.numel(), role
