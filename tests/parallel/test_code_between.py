"""Plain code around layers that `parallelize` cuts: two tensor-parallel ranks compute what one
process does, or refuse.

One start of the ranks tries all cases of a test.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from megaprec import SGD, Axis, ParallelAMPOptimizer, UserError, plan
from parallel import Context, copy, join, parallelize, split, unchecked
from parallel.cut_features import CutTensor, TensorCut, mark_cut
from parallel.plain_layers import CheckedPasses, Dropout
from tests.ranks import run_ranks
from tests.refusals import sentence

PLAN = plan("fp64")
WIDE = 8
X = torch.linspace(-1, 1, 3 * 2 * 4, dtype=torch.float64).view(3, 2, 4)
TP: dict[str, Axis] = {}  # of this rank, for models that call collectives


class MLP(nn.Module):
    """up, what stands between, down."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(4, WIDE)
        self.between = between
        self.down = nn.Linear(WIDE, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Summed(nn.Module):
    """A learned number for all features, whose gradient is summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * copy(self.number, TP.get("tp", Axis("tp"))).exp()


class MadeWhole(nn.Module):
    """A softmax of all features, between collectives."""

    def forward(self, x: Tensor) -> Tensor:
        tp = TP.get("tp", Axis("tp"))
        return split(join(x, tp, -1).softmax(-1), tp, -1)


class SplitNumbers(nn.Module):
    """Numbers of all features, of which each rank takes its own."""

    def forward(self, x: Tensor) -> Tensor:
        tp = TP.get("tp", Axis("tp"))
        return unchecked(x) * split(torch.arange(1.0, WIDE + 1, dtype=x.dtype), tp, -1)


class Unchecked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return unchecked(x).tanh()


class AfterNothing(nn.Module):
    """One head on each rank, behind a tensor without elements: so begins a cache of keys in
    transformers."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], -1, WIDE // 2).transpose(1, 2)
        kept = torch.cat([torch.tensor([], dtype=x.dtype), heads], dim=-2)
        return kept.transpose(1, 2).flatten(-2).tanh()


class HeadNorm(nn.Module):
    """A norm over the features of a head that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], -1, 2)
        root = heads.square().mean(-1, keepdim=True).add(1e-5).sqrt()
        return (self.weight * (heads / root)).flatten(-2)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, WIDE, dropout=0.25, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Twice(nn.Module):
    """A layer that is called twice in a pass, and whose weight another layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4, bias=False)
        self.down = nn.Linear(4, 4)
        self.other.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(torch.tanh(join_all(self.up(x)))) + self.other(x))


def join_all(x: Tensor) -> Tensor:
    return join(x, TP.get("tp", Axis("tp")), -1)


MLP_STYLES = {"up": "column", "down": "row"}
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "dropout": (lambda: MLP(nn.Dropout(0.5)), MLP_STYLES),
    "dropout in place": (lambda: MLP(nn.Dropout(0.5, inplace=True)), MLP_STYLES),
    "dropout of what is whole": (
        lambda: nn.Sequential(nn.Dropout(0.5), MLP(nn.ReLU())),
        {"*up": "column", "*down": "row"},
    ),
    "relu in place": (lambda: MLP(nn.ReLU(inplace=True)), MLP_STYLES),
    "layer norm": (lambda: MLP(nn.LayerNorm(WIDE)), MLP_STYLES),
    "layer norm without a bias": (lambda: MLP(nn.LayerNorm(WIDE, bias=False)), MLP_STYLES),
    "rms norm": (lambda: MLP(nn.RMSNorm(WIDE, eps=1e-5)), MLP_STYLES),
    "column after column": (
        lambda: MLP(nn.Linear(WIDE, WIDE)),
        {"up": "column", "between": "column", "down": "row"},
    ),
    "row after row": (
        lambda: MLP(nn.Linear(WIDE, WIDE)),
        {"up": "row", "between": "row", "down": "row"},
    ),
    "row first": (lambda: MLP(nn.ReLU()), {"up": "row", "down": "row"}),
    "whole": (lambda: MLP(nn.LayerNorm(WIDE)), {"up": "whole", "down": "row"}),
    "parallel.copy": (lambda: MLP(Summed()), MLP_STYLES),
    "join and split": (lambda: MLP(MadeWhole()), MLP_STYLES),
    "numbers of features": (lambda: MLP(SplitNumbers()), MLP_STYLES),
    "unchecked": (lambda: MLP(Unchecked()), MLP_STYLES),
    "after nothing": (lambda: MLP(AfterNothing()), MLP_STYLES),
    "encoder": (Encoder, {"*linear1": "column", "*linear2": "row"}),
    "called twice and tied": (Twice, {"up": "column", "other": "column", "down": "row"}),
}


def trained(model: nn.Module, step: Callable[[], object]) -> list[float]:
    """Losses of five steps, and of an evaluation without gradients."""
    losses = []
    torch.manual_seed(7)
    for _ in range(5):
        loss = (model(X) - 1).square().mean()
        loss.backward()
        step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        return [*losses, float((model(X) - 1).square().mean())]


def plain(name: str) -> nn.Module:
    torch.manual_seed(0)
    return RIGHT[name][0]().double()


def losses_of_one(name: str) -> list[float]:
    model = plain(name)
    alone = CheckedPasses(Context(PLAN))
    for path, old in list(model.named_modules()):
        if type(old) is nn.Dropout:
            model.set_submodule(path, Dropout(old, path, alone))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, step)


def losses_of_two(mesh: DeviceMesh) -> dict[str, list[float]]:
    TP["tp"] = Axis.of(mesh, "tp")
    losses = {}
    for name, (_, styles) in RIGHT.items():
        given: Any = styles
        model = parallelize(plain(name), Context(PLAN, TP["tp"]), given)
        options: dict[str, Any] = {
            "average": False,
            "rule": SGD(0.0),
            "weight_decay": 0.0,
            "clip": 0.0,
        }
        optimizer = ParallelAMPOptimizer([model], PLAN, mesh, lr=0.1, **options)
        losses[name] = trained(model, optimizer.step)
    return losses


@pytest.mark.slow
def test_what_can_be_cut_rightly_trains_and_evaluates_as_plain_torch_on_one_process() -> None:
    for losses in run_ranks(losses_of_two, {"tp": 2}):
        for name, values in losses.items():
            assert values == pytest.approx(losses_of_one(name), rel=1e-12), name


class Tied(nn.Module):
    """A head that is written as a function of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.embedding(x[..., 0].round().long().abs()), self.embedding.weight)


class OneDropout(nn.Module):
    """One nn.Dropout for slices and for what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(self.up(x))))


def with_own_samples(model: nn.Module) -> Tensor:
    return model(X + TP["tp"].rank)


def with_own_random_numbers(model: nn.Module) -> Tensor:
    torch.manual_seed(TP["tp"].rank)
    return model(X)


def cross_entropy(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X).flatten(0, 1), torch.zeros(6, dtype=torch.long))


WRONG: dict[
    str, tuple[Callable[[], nn.Module], dict[str, str], Callable[[nn.Module], object] | None, str]
] = {
    "batch norm": (
        lambda: MLP(nn.BatchNorm1d(2)),
        MLP_STYLES,
        None,
        sentence("parallel.whole_layer_gets_slice", path="between", kind="BatchNorm1d"),
    ),
    "prelu": (
        lambda: MLP(nn.PReLU()),
        MLP_STYLES,
        None,
        sentence("parallel.whole_layer_gets_slice", path="between", kind="PReLU"),
    ),
    "recurrent": (
        lambda: MLP(nn.LSTM(8, 8)),
        MLP_STYLES,
        None,
        sentence("parallel.whole_layer_gets_slice", path="between", kind="LSTM"),
    ),
    "attention": (
        lambda: MLP(nn.MultiheadAttention(8, 2)),
        MLP_STYLES,
        None,
        sentence("parallel.whole_layer_gets_slice", path="between", kind="MultiheadAttention"),
    ),
    "head norm": (
        lambda: MLP(HeadNorm()),
        MLP_STYLES,
        None,
        re.escape("mul takes between.weight [2] that all features share"),
    ),
    "softmax": (
        lambda: MLP(nn.Softmax(-1)),
        MLP_STYLES,
        None,
        "softmax in between combines the features",
    ),
    "glu": (lambda: MLP(nn.GLU()), MLP_STYLES, None, "glu in between multiplies one half"),
    "alpha dropout": (
        lambda: MLP(nn.AlphaDropout(0.5)),
        MLP_STYLES,
        None,
        "alpha_dropout in between is not known",
    ),
    "column head": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"0": "column"},
        cross_entropy,
        re.escape("vocab_parallel_loss(head)"),
    ),
    "tied by function": (
        Tied,
        {"embedding": "vocab"},
        None,
        "linear sums over the features that ranks share: tensor-",
    ),
    "one dropout": (OneDropout, MLP_STYLES, None, sentence("parallel.dropout_two_inputs")),
    "own samples": (
        lambda: MLP(nn.ReLU()),
        MLP_STYLES,
        with_own_samples,
        sentence("parallel.input_differs", path="up"),
    ),
    "own seeds": (
        lambda: MLP(nn.Dropout(0.5)),
        MLP_STYLES,
        with_own_random_numbers,
        sentence("parallel.input_differs", path="between"),
    ),
}


def refusals_of_two(mesh: DeviceMesh) -> dict[str, tuple[str, ...]]:
    TP["tp"] = Axis.of(mesh, "tp")
    lines: dict[str, tuple[str, ...]] = {}
    for name, (make, styles, call, _) in WRONG.items():
        torch.manual_seed(0)
        given: Any = styles
        model = parallelize(make().double(), Context(PLAN, TP["tp"]), given)
        try:
            (call or (lambda model: model(X)))(model)
        except UserError as error:
            lines[name] = error.problems
    return lines


def test_what_cannot_be_cut_rightly_is_refused_in_the_first_pass_in_one_line_on_each_rank() -> None:
    for lines in run_ranks(refusals_of_two, {"tp": 2}):
        for name, (*_, words) in WRONG.items():
            assert len(lines.get(name, ())) == 1, name
            assert re.search(words, lines[name][0]), name


def masks(mesh: DeviceMesh) -> tuple[list[Tensor], str]:
    """What a dropout between layers keeps, in a loop that calls the layers one by one; and what a
    plain mean says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    tp = Axis.of(mesh, "tp")
    parallelize(model, Context(PLAN, tp), {"0": "column", "2": "row"})
    torch.manual_seed(5)
    kept = []
    for _ in range(3):
        dropped = model[1](model[0](X))
        model[2](dropped)
        kept.append(unchecked(dropped) != 0)
    said = ""
    try:
        model[0](X).mean()
    except UserError as error:
        said = str(error)
    return kept, said


def test_ranks_drop_different_elements_of_different_features_and_layers_called_one_by_one_are_followed() -> (
    None
):
    (first, said), (second, _) = run_ranks(masks, {"tp": 2})
    for one, other in zip(first, second, strict=True):
        assert not torch.equal(one, other)
    assert not torch.equal(first[0], first[1])
    # in the fourth call of the first layer, which is checked
    assert "mean combines the features" in said


class Recomputed(nn.Module):
    """A block whose activations the backward pass computes again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = MLP(nn.GELU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=self.reentrant)
        assert isinstance(y, Tensor)
        return y


def checked_calls(mesh: DeviceMesh, reentrant: bool) -> list[list[bool]]:
    """For each of eight steps, whether each call of the first layer was checked."""
    context = Context(PLAN, Axis.of(mesh, "tp"))
    model = parallelize(Recomputed(reentrant).double(), context, {"*up": "column", "*down": "row"})
    seen: list[list[bool]] = []

    def note(layer: nn.Module, given: object, y: Tensor) -> None:
        seen[-1].append(isinstance(y, CutTensor))

    model.get_submodule("block.up").register_forward_hook(note)
    for _ in range(8):
        seen.append([])
        model(X.clone().requires_grad_()).sum().backward()
    return seen


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_computes_again_is_no_pass_of_its_own(reentrant: bool) -> None:
    for seen in run_ranks(checked_calls, {"tp": 2}, reentrant=reentrant):
        assert seen == [[number in (1, 2, 4, 8)] * 2 for number in range(1, 9)]


def test_a_dropout_draws_its_number_on_the_cpu_whatever_torchs_default_device_is() -> None:
    layer = Dropout(nn.Dropout(0.5), "drop", CheckedPasses(Context(PLAN)))
    torch.manual_seed(0)
    kept = layer(X)
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(layer(X), kept)


def test_what_a_frozen_layer_gives_can_be_dropped_in_place() -> None:
    layer = Dropout(nn.Dropout(0.5, inplace=True), "drop", CheckedPasses(Context(PLAN)))
    x = mark_cut(torch.ones(2, WIDE), TensorCut(1, "outputs of a frozen layer", 2))
    assert layer(x) is x
    assert set(unchecked(x).unique().tolist()) == {0.0, 2.0}
