"""The laws of the parallel layers: together they are the plain layer that has the logical weights,
in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, layout_of
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from parallel import loss
from parallel.context import Context
from parallel.gradient_scale import scale_gradient
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows, VocabParallelEmbedding
from parallel.linear import InputLayout, Linear
from tests.ranks import run_ranks
from tests.refusals import raises

CLOSE = 1e-12
# every one divides by 2, 3 and 4
SEQUENCE = 12
BATCH = 2
IN = 24
OUT = 36
F64 = torch.float64


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def require_close(what: str, ours: Tensor | None, plain: Tensor) -> None:
    assert ours is not None, f"{what} is missing"
    atol = CLOSE * plain.abs().max().item() if plain.numel() else 0.0
    torch.testing.assert_close(ours, plain, rtol=CLOSE, atol=atol, msg=lambda m: f"{what}: {m}")


def context_of(mesh: DeviceMesh, *, sequence: bool, fused: bool = False) -> Context:
    return Context(plan("fp64"), Axis.of(mesh, "tp"), sequence, seed=1, async_tensor=fused)


def give_bias(layer: ColumnParallelLinear | RowParallelLinear) -> None:
    """Biases begin at zero, where a bias that is added twice is not seen."""
    if layer.bias is not None:
        with torch.no_grad():
            parts = [part.take(random(9, *part.shape)) for part in layout_of(layer.bias).parts]
            layer.bias.copy_(torch.cat(parts))


def shares_of(whole: Tensor | None, parameter: nn.Parameter) -> Tensor:
    assert whole is not None
    return torch.cat([part.take(whole) for part in layout_of(parameter).parts])


@dataclass(frozen=True)
class Plain:
    """A plain linear layer, run forward and backward: input, output, gradient of the output."""

    x: Tensor
    y: Tensor
    layer: nn.Linear
    seed: Tensor

    @staticmethod
    def run(layer: ColumnParallelLinear | RowParallelLinear) -> "Plain":
        """With the weights of `layer`, which must be of one rank."""
        plain = nn.Linear(IN, OUT, bias=layer.bias is not None, dtype=F64)
        plain.weight.data.copy_(layer.weight.data)
        if layer.bias is not None:
            plain.bias.data.copy_(layer.bias.data)
        x = random(2, SEQUENCE, BATCH, IN).requires_grad_()
        seed = random(3, SEQUENCE, BATCH, OUT)
        y = plain(x)
        y.backward(seed)
        return Plain(x, y.detach(), plain, seed)

    def input(self, axis: Axis, dim: int | None) -> Tensor:
        x = self.x.detach()
        return (x if dim is None else axis.chunk(x, dim)).clone().requires_grad_()


Make = Callable[[Context], ColumnParallelLinear | RowParallelLinear]


def check_linear(
    mesh: DeviceMesh,
    what: str,
    make: Make,
    sequence: bool,
    cut_in: int | None,
    cut_out: int | None,
    fused: bool = False,
) -> None:
    """cut_in, cut_out: the dim along which a rank's input and output are cut; None if every rank
    has all of it. fused: products are fused with their transfers."""
    context = context_of(mesh, sequence=sequence, fused=fused)
    axis = context.tp
    alone = make(replace(context, tp=Axis("tp")))
    give_bias(alone)
    plain = Plain.run(alone)
    layer = make(context)
    give_bias(layer)
    assert torch.equal(layer.weight, shares_of(alone.weight, layer.weight)), (
        f"{what}: starts differently"
    )
    x = plain.input(axis, cut_in)
    y = layer(x)
    cut: Callable[[Tensor], Tensor] = lambda t: t if cut_out is None else axis.chunk(t, cut_out)  # noqa: E731
    require_close(f"{what}: output", y, cut(plain.y).detach())
    y.backward(cut(plain.seed))
    assert plain.x.grad is not None
    require_close(
        f"{what}: input gradient",
        x.grad,
        plain.x.grad if cut_in is None else axis.chunk(plain.x.grad, cut_in),
    )
    require_close(
        f"{what}: weight gradient",
        layer.weight.grad,
        shares_of(plain.layer.weight.grad, layer.weight),
    )
    if layer.bias is not None:
        assert layer.bias.grad is not None
        layout = layout_of(layer.bias)
        shares = layout.partial and layout.parts[0].copies > 1
        whole = axis.sum_(layer.bias.grad) if shares else layer.bias.grad
        require_close(f"{what}: bias gradient", whole, shares_of(plain.layer.bias.grad, layer.bias))


def options(**names: tuple[bool, ...]) -> Iterator[dict[str, Any]]:
    for values in product(*names.values()):
        yield dict(zip(names, values, strict=True))


BOTH = (False, True)


def check_linears(mesh: DeviceMesh) -> None:
    for o in options(sequence=BOTH, bias=BOTH, gather_output=BOTH):
        sequence = o.pop("sequence")
        if not (sequence and o["gather_output"]):
            column: Make = partial(ColumnParallelLinear, input_size=IN, output=OUT, name="a", **o)
            cut_in = 0 if sequence else None
            cut_out = None if o["gather_output"] else 2
            check_linear(mesh, f"column {sequence=} {o}", column, sequence, cut_in, cut_out)
    for o in options(sequence=BOTH, bias=BOTH, input_is_parallel=BOTH):
        sequence = o.pop("sequence")
        if not (sequence and not o["input_is_parallel"]):
            row: Make = partial(RowParallelLinear, input_size=IN, output_size=OUT, name="a", **o)
            cut_in = 2 if o["input_is_parallel"] else None
            cut_out = 0 if sequence else None
            check_linear(mesh, f"row {sequence=} {o}", row, sequence, cut_in, cut_out)
    for bias in BOTH:
        fused_column: Make = partial(
            ColumnParallelLinear, input_size=IN, output=OUT, name="a", bias=bias
        )
        check_linear(mesh, f"fused column {bias=}", fused_column, True, 0, 2, fused=True)
        fused_row: Make = partial(
            RowParallelLinear, input_size=IN, output_size=OUT, name="a", bias=bias
        )
        check_linear(mesh, f"fused row {bias=}", fused_row, True, 2, 0, fused=True)


def check_stacked(mesh: DeviceMesh) -> None:
    """Three matrices in one weight, the last two with two slices that neighbours share."""
    context = context_of(mesh, sequence=False)
    axis = context.tp
    x = random(2, SEQUENCE, BATCH, IN)
    stack = [Rows("q", 8), Rows("k", 4, shards=2), Rows("v", 4, shards=2)]
    y = ColumnParallelLinear(context, IN, stack)(x)
    for n, (ours, rows) in enumerate(zip(y.split([8 // axis.size, 2, 2], -1), stack, strict=True)):
        whole = ColumnParallelLinear(
            replace(context, tp=Axis("tp")), IN, rows.rows, name=rows.name
        )(x)
        shards = rows.shards or axis.size
        require_close(
            f"matrix {n}", ours, whole.chunk(shards, -1)[axis.rank * shards // axis.size].detach()
        )


def check_embeddings(mesh: DeviceMesh, vocab: int) -> None:
    for sequence in BOTH:
        context = context_of(mesh, sequence=sequence)
        axis = context.tp
        whole = VocabParallelEmbedding(replace(context, tp=Axis("tp")), vocab, IN, name="e").weight
        layer = VocabParallelEmbedding(context, vocab, IN, name="e")
        ids = torch.randint(vocab, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(4))
        expected = F.embedding(ids, whole)
        seed = random(3, SEQUENCE, BATCH, IN)
        expected.backward(seed)
        y = layer(ids)
        cut: Callable[[Tensor], Tensor] = axis.chunk if sequence else torch.clone
        assert torch.equal(y, cut(expected))
        y.backward(cut(seed))
        own = layer.part.local[0]
        assert layer.weight.grad is not None
        require_close(
            "embedding gradient", layer.weight.grad[:own], shares_of(whole.grad, layer.weight)
        )
        assert not layer.weight[own:].any() and not layer.weight.grad[own:].any(), (
            "padding is not zero"
        )


def check_losses(mesh: DeviceMesh, vocab: int) -> None:
    axis = Axis.of(mesh, "tp")
    part = Part.cut("head", (vocab, IN), 0, axis)
    targets = torch.randint(vocab, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(5))
    targets.view(-1)[:vocab] = torch.arange(vocab)[: SEQUENCE * BATCH]  # ids of every rank occur
    seed = random(6, SEQUENCE, BATCH)
    for dtype, block in product((F64, torch.bfloat16, torch.float16), (7, 1 << 20)):
        loss._BLOCK = block
        rounded = (10 * random(7, SEQUENCE, BATCH, vocab)).to(dtype)
        rounded[0, 0, 0] = 60000  # exp of it, or of the difference to it, is no number of any dtype
        plain = rounded.double().clone().requires_grad_()
        expected = F.cross_entropy(
            plain.flatten(0, 1), targets.flatten(), reduction="none"
        ).view_as(targets)
        expected.backward(seed)
        # padding must not be seen
        logits = torch.full((SEQUENCE, BATCH, part.padded[0]), 65504.0).to(dtype)
        logits[..., : part.local[0]] = rounded[..., part.start : part.start + part.local[0]]
        given = logits.clone().requires_grad_()
        sensitive = F64 if dtype == F64 else torch.float32
        ours = loss.cross_entropy(given, targets, part, axis, sensitive)
        assert ours.dtype == sensitive
        # of FP32, far below what a half can say
        rtol, atol = (CLOSE, CLOSE) if dtype == F64 else (1e-6, 1e-5)
        torch.testing.assert_close(ours.double(), expected.detach(), rtol=rtol, atol=atol)
        ours.backward(seed.to(sensitive))
        assert torch.equal(given.detach(), logits), "the logits were changed"
        assert given.grad is not None and given.grad.dtype == dtype
        assert plain.grad is not None
        own = plain.grad[..., part.start : part.start + part.local[0]]
        rtol = CLOSE if dtype == F64 else 0.51 * torch.finfo(dtype).eps  # rounded once
        torch.testing.assert_close(
            given.grad[..., : part.local[0]].double(), own, rtol=rtol, atol=atol
        )
        assert not given.grad[..., part.local[0] :].any(), "padding has a gradient"


class Echo(nn.Module):
    """Embeds a token and says which it was: a tied table with padding that is looked up and
    multiplied by."""

    def __init__(self, context: Context, vocab: int) -> None:
        super().__init__()
        self.context = context
        self.table = VocabParallelEmbedding(context, vocab, IN, name="e", std=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        logits = Linear.apply(
            self.table(ids), self.table.weight, None, InputLayout.COPIED, self.context.tp
        )
        return loss.cross_entropy(logits, ids, self.table.part, self.context.tp, F64).mean()


def check_padding(mesh: DeviceMesh, vocab: int) -> None:
    context = context_of(mesh, sequence=False)
    model = Echo(context, vocab)
    optimizer = ParallelAMPOptimizer([model], context.plan, mesh)
    ids = torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) % vocab
    for _ in range(2):
        model(ids).backward()
        optimizer.reduce()
        assert optimizer.step(0.1).num_zeros == 0
    own = model.table.part.local[0]
    assert model.table.weight[:own].all()
    assert not model.table.weight[own:].any(), "training moved the padding"
    assert optimizer.num_elements == vocab * IN


def check_all(mesh: DeviceMesh, vocabularies: tuple[int, ...]) -> None:
    check_linears(mesh)
    if mesh.size() in (2, 4):
        check_stacked(mesh)
    for vocab in vocabularies:
        check_embeddings(mesh, vocab)
        check_losses(mesh, vocab)
        check_padding(mesh, vocab)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("tp", "vocabularies"), [(1, (7,)), (2, (7, 8)), (3, (7, 2)), (4, (7, 5))])
def test_parallel_layers_are_the_plain_layers_with_the_logical_weights(
    tp: int, vocabularies: tuple[int, ...]
) -> None:
    """Vocabularies with and without padding, 2 on three ranks and 5 on four with a rank of nothing
    but padding."""
    run_ranks(check_all, {"tp": tp}, vocabularies=vocabularies)


REFUSED: dict[str, tuple[Callable[[Context], Any], bool]] = {
    "a: 5 output features do not divide by tensor = 2": (
        lambda c: ColumnParallelLinear(c, 4, 5, name="a"),
        False,
    ),
    "b: 3 output features": (
        lambda c: ColumnParallelLinear(c, 4, [Rows("a", 4), Rows("b", 3)]),
        False,
    ),
    "a: 5 input features do not divide by tensor = 2": (
        lambda c: RowParallelLinear(c, 5, 4, name="a"),
        False,
    ),
    "a: gather_output would undo": (
        lambda c: ColumnParallelLinear(c, 4, 4, name="a", gather_output=True),
        True,
    ),
    "a: sequence parallelism needs input_is_parallel": (
        lambda c: RowParallelLinear(c, 4, 4, name="a", input_is_parallel=False),
        True,
    ),
    "k.weight: 3 slices cannot be shared out evenly among 2": (
        lambda c: ColumnParallelLinear(c, 4, [Rows("k", 6, shards=3)]),
        False,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_sizes_and_options_that_do_not_fit_are_refused(message: str) -> None:
    make, sequence = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        make(Context(plan("fp32"), Axis("tp", 0, 2), sequence))


def test_without_tensor_parallelism_sequence_changes_nothing() -> None:
    context = Context(plan("fp32"), sequence=True)
    assert not context.cut_sequence
    layer = RowParallelLinear(context, 4, 4, name="a", input_is_parallel=False)
    assert layer.bias is not None
    assert layout_of(layer.bias) == Layout((Part("a.bias", (4,)),), partial=False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_ids_that_torch_would_read_as_a_mask_of_rows_are_refused(dtype: torch.dtype) -> None:
    table = VocabParallelEmbedding(Context(plan("fp32")), 4, 2, name="table")
    with raises("parallel.ids_dtype", name="table.weight"):
        table(torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_scaled_gradient_is_that_of_the_same_values(scale: float) -> None:
    x = random(0, 3).requires_grad_()
    y = scale_gradient(x, scale)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [scale] * 3
