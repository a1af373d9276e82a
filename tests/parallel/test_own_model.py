"""A plain torch module, made parallel and trained by `Pipeline`, takes the steps that torch takes
on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import megaprec
from megaprec import Axis, ParallelAMPOptimizer, UserError, plan, set_fp32_attr_to_module
from parallel import Context, Pipeline, parallelize, vocab_parallel_loss
from parallel.pipeline import KINDS
from parallel.plain_modules import Style
from tests.ranks import run_ranks
from tests.refusals import raises, shows

VOCAB = 24
HIDDEN = 8
LENGTH = 6
SAMPLES = 8
STEPS = 4
IGNORED = -100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def whole_model() -> list[nn.Sequential]:
    """Four stages, in plain torch."""
    torch.manual_seed(3)
    embedding = nn.Embedding(VOCAB, HIDDEN)
    norm = nn.RMSNorm(HIDDEN, eps=1e-5)
    head = nn.Linear(HIDDEN, VOCAB)
    layers = [nn.Sequential() for _ in range(4)]
    layers[0].add_module("embedding", embedding)
    for stage in layers:
        stage.add_module("layer", Layer())
    layers[3].add_module("norm", norm)
    layers[3].add_module("head", head)
    return [stage.double() for stage in layers]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [sequence, samples]; the first samples have far fewer targets than the
    last."""
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (LENGTH + 1, SAMPLES), generator=drawn)
    targets = tokens[1:].clone()
    targets[2:, : SAMPLES // 2] = IGNORED
    return tokens[:-1], targets


def plain_losses() -> list[float]:
    """torch's own training of the whole model."""
    model = nn.Sequential(*whole_model())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-8
    )
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train(
    mesh: DeviceMesh, kind: str, average: bool, sequence: bool = False, fused: bool = False
) -> tuple[list[float], float]:
    """Losses of the steps, and that of the first batch before them."""
    pp, dp, tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
    precision = plan("fp64")
    chunks = 4 // pp.size
    context = Context(precision, tp, sequence=sequence, async_tensor=fused)
    stages = whole_model()
    order = megaprec_stages(kind, pp.rank, pp.size, chunks)
    parts = [
        stages[n] if len(part) == 1 else nn.Sequential(*(stages[m] for m in part))
        for part in order
        for n in part[:1]
    ]
    styles = {"*embedding": "vocab", "*up": "column", "*down": "row", "*head": "column"}
    for part, numbers in zip(parts, order, strict=True):
        paths = [path for path, _ in part.named_modules()]
        fitting: dict[str, Any] = {
            key: style
            for key, style in styles.items()
            if any(path.endswith(key[1:]) for path in paths)
        }
        parallelize(part, context, fitting, prefix=f"{numbers[0]}.")
    optimizer = ParallelAMPOptimizer(
        parts,
        precision,
        mesh,
        average=average,
        rule=megaprec.AdamW((0.9, 0.95)),
        weight_decay=0.0,
        clip=0.0,
    )
    head = next(
        (m for part in parts for path, m in part.named_modules() if path.endswith("head")), None
    )
    loss_fn = vocab_parallel_loss(head) if head is not None else nn.functional.cross_entropy  # type: ignore[arg-type]
    shape = (LENGTH // (tp.size if context.cut_sequence else 1), SAMPLES // dp.size // 4, HIDDEN)
    pipeline = Pipeline(parts, optimizer, loss_fn, microbatches=4, activation=shape, schedule=kind)

    def mine(step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(step)
        return inputs.chunk(dp.size, 1)[dp.rank], targets.chunk(dp.size, 1)[dp.rank]

    before = pipeline.evaluate(*mine(0))
    return [pipeline.step(*mine(step), lr=0.01).loss for step in range(STEPS)], before


def megaprec_stages(kind: str, rank: int, ranks: int, chunks: int) -> list[list[int]]:
    """Which of the four stages of the plain model each stage of this rank consists of."""
    if kind in ("interleaved", "zb-v"):
        of_rank = {"interleaved": [rank, rank + ranks], "zb-v": [rank, 2 * ranks - 1 - rank]}[kind]
        return [[number] for number in of_rank]
    return [list(range(rank * chunks, (rank + 1) * chunks))]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("axes", "kind", "average", "sequence", "fused"),
    [
        ({"pp": 1, "dp": 1, "tp": 1}, "1f1b", False, False, False),
        ({"pp": 1, "dp": 2, "tp": 2}, "1f1b", False, False, False),
        ({"pp": 2, "dp": 2, "tp": 1}, "1f1b", True, False, False),
        ({"pp": 2, "dp": 1, "tp": 2}, "interleaved", False, True, False),
        ({"pp": 2, "dp": 1, "tp": 2}, "interleaved", False, True, True),
        ({"pp": 2, "dp": 1, "tp": 1}, "zb-v", False, False, False),
        ({"pp": 4, "dp": 1, "tp": 1}, "zb-h1", False, False, False),
    ],
    ids=str,
)
def test_every_layout_trains_what_torch_trains_on_one_process(
    axes: dict[str, int], kind: str, average: bool, sequence: bool, fused: bool
) -> None:
    assert kind in KINDS
    told = plain_losses()
    how = {"kind": kind, "average": average, "sequence": sequence, "fused": fused}
    for losses, before in run_ranks(train, axes, **how):
        torch.testing.assert_close(losses, told, rtol=1e-9, atol=1e-9)
        assert before == pytest.approx(told[0], rel=1e-9)


def refusals(mesh: DeviceMesh) -> str:
    torch.manual_seed(Axis.of(mesh, "dp").rank)
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize(model, Context(plan("fp32")), {"0": "column"})
    try:
        ParallelAMPOptimizer([model], plan("fp32"), mesh, average=False)
    except UserError as error:
        return str(error)
    return ""


def test_replicas_that_begin_with_other_weights_are_refused_on_every_rank() -> None:
    for said in run_ranks(refusals, {"dp": 2}):
        assert shows(said, "optimizer.weights_differ")


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda attention: attention])
def test_layers_within_attention_of_torch_need_no_style_wherever_it_stands(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = wrap(nn.MultiheadAttention(8, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    parallelize(model, Context(plan("fp32"), Axis("tp")), {})
    assert all(map(torch.equal, before, model.parameters()))


def test_a_layer_without_a_style_and_a_pattern_that_matches_nothing_are_named() -> None:
    with pytest.raises(UserError) as refused:
        parallelize(whole_model()[0], Context(plan("fp32")), {"embeding": "vocab", "*.up": "row"})
    lines = refused.value.problems
    assert any(line.startswith("embedding: no style is given to Embedding") for line in lines)
    assert any(line.startswith("layer.down: no style is given to Linear") for line in lines)
    assert any('"embeding" matches no layer; did you mean embedding?' in line for line in lines)


def test_a_model_that_is_parallel_already_is_refused_as_that() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    styles: dict[str, Style] = {"0": "vocab", "1": "column", "2": "row"}
    parallelize(model, Context(plan("fp32")), styles)
    with pytest.raises(UserError) as caught:
        parallelize(model, Context(plan("fp32")), styles)
    for path, line in zip(styles, caught.value.problems, strict=True):
        assert line.startswith(
            f'styles: "{path}" matches {path}, which is a parallel layer already: call '
            "parallelize once"
        )


def test_a_style_of_another_kind_of_layer_is_named() -> None:
    with pytest.raises(UserError, match="0: 'column' is not a style of Embedding: give it 'vocab'"):
        parallelize(nn.Sequential(nn.Embedding(4, 2)), Context(plan("fp32")), {"0": "column"})


def test_a_loss_that_is_already_a_mean_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize(model, Context(plan("fp32")), {"0": "column"})
    optimizer = ParallelAMPOptimizer([model], plan("fp32"))
    pipeline = Pipeline([model], optimizer, lambda y, t: y.mean(), microbatches=1)
    with pytest.raises((UserError, RuntimeError), match='reduction="none"'):
        pipeline.step(torch.zeros(3, 1, 4), torch.zeros(3, 1, dtype=torch.long), lr=0.1)


def test_samples_that_do_not_make_whole_micro_batches_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize(model, Context(plan("fp32")), {"0": "column"})
    pipeline = Pipeline(
        [model], ParallelAMPOptimizer([model], plan("fp32")), lambda y, t: y[..., 0], microbatches=2
    )
    with raises("pipeline.batch_sizes", num_inputs=3, num_targets=3):
        pipeline.step(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long), lr=0.1)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


def hooked_weight() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    return layer


def marked() -> nn.Module:
    layer = nn.LayerNorm(4)
    set_fp32_attr_to_module(layer)
    return layer


@pytest.mark.parametrize(
    ("make", "style", "line"),
    [
        (lambda: Doubled(4, 4), "column", "0: Doubled is a subclass"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "row",
            "0: ParametrizedLinear is a subclass",
        ),
        (lambda: nn.Embedding(4, 4, sparse=True), "vocab", "0: sparse of an embedding"),
        (lambda: nn.Embedding(4, 4, padding_idx=1), "vocab", "0: padding_idx of an embedding"),
        (
            lambda: nn.Embedding(4, 4, scale_grad_by_freq=True),
            "vocab",
            "0: scale_grad_by_freq of an embedding",
        ),
        (hooked, "column", "0: hooks of a layer"),
        (hooked_weight, "column", "0: hooks of its parameters"),
        (marked, None, "0: the FP32 mark"),
    ],
)
def test_what_a_parallel_layer_would_lose_is_refused_by_path(
    make: Callable[[], nn.Module], style: Any, line: str
) -> None:
    with pytest.raises(UserError) as refused:
        parallelize(nn.Sequential(make()), Context(plan("fp32")), {"0": style} if style else {})
    assert refused.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    "whole", [True, False], ids=["one module twice", "one weight in two modules"]
)
def test_parameters_that_are_cut_alike_stay_tied(whole: bool) -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, first if whole else second)
    parallelize(model, Context(plan("fp32")), {"*": "column"})
    assert model[0].weight is model[1].weight
    assert (model[0] is model[1]) == whole


def test_tied_parameters_that_would_be_cut_in_different_ways_are_refused_by_both_paths() -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    with pytest.raises(UserError, match=r"0\.weight and 1\.weight are one parameter.*whole"):
        parallelize(
            nn.Sequential(first, second), Context(plan("fp32")), {"0": "column", "1": "row"}
        )


def test_a_frozen_parameter_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    parallelize(model, Context(plan("fp32")), {"*": "column"})
    assert [
        name for name, parameter in model.named_parameters() if not parameter.requires_grad
    ] == ["0.weight"]


class KeepsAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.order = [self.second, self.first]  # torch does not know of it

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


def test_a_layer_that_was_replaced_but_is_still_called_is_refused_by_path() -> None:
    """It would be trained by nobody, and the layer in its place would never be used."""
    model = parallelize(KeepsAList(), Context(plan("fp32")), {"first": "row", "second": "column"})
    with raises("parallel.old_layer_called", path="second"):
        model(torch.ones(2, 1, 4))
    model.order = [model.second, model.first]  # type: ignore[assignment]
    assert model(torch.ones(2, 1, 4)).shape == (2, 1, 4)
