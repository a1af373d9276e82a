"""Plain torch models and styles for `parallelize`, drawn by a number: right ones, and such as
cannot be cut."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 4
SAMPLES = 2
HIDDEN = 8

Styles = dict[str, str]


@dataclass(frozen=True)
class Drawn:
    """A model, its styles, its loss, and words that say what it consists of."""

    model: nn.Module
    styles: Styles
    vocab: int
    parallel_loss: bool  # by vocab_parallel_loss of the head
    words: tuple[str, ...]
    lr: float = 0.01
    adam: bool = True


@dataclass
class Draw:
    """The random choices of one model, and what they amount to so far."""

    drawn: random.Random
    styles: Styles = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def one_of(self, *choices: str) -> str:
        choice = self.drawn.choice(choices)
        self.words.append(choice)
        return choice

    def happens(self, probability: float) -> bool:
        return self.drawn.random() < probability


class Scale(nn.Module):
    """Multiplies by one learned number, or by one for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Computed(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class OverTokens(nn.Module):
    """A module of torch that takes [tokens, features], for [s, b, features]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.flatten(0, 1)).view(*x.shape[:2], -1)


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, self.training)


def rolled_product(x: Tensor) -> Tensor:
    return x * x.roll(1, -1)


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * second, second), -1)


ELEMENTWISE: dict[str, Callable[[int], nn.Module]] = {
    "gelu": lambda n: nn.GELU(),
    "relu": lambda n: nn.ReLU(),
    "relu in place": lambda n: nn.Sequential(Computed(lambda x: x * 1), nn.ReLU(inplace=True)),
    "silu": lambda n: nn.SiLU(),
    "tanh": lambda n: nn.Tanh(),
    "leaky": lambda n: nn.LeakyReLU(),
    "hardswish": lambda n: nn.Hardswish(),
    "softplus": lambda n: nn.Softplus(),
    "mish": lambda n: nn.Mish(),
    "elu": lambda n: nn.ELU(),
    "identity": lambda n: nn.Identity(),
    "square": lambda n: Computed(lambda x: F.relu(x) ** 2),
    "swish": lambda n: Computed(lambda x: x * torch.sigmoid(1.7 * x)),
    "clamp": lambda n: Computed(lambda x: x.clamp(-1, 1)),
    "there and back": lambda n: Computed(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "flat tokens": lambda n: Computed(lambda x: x.reshape(-1, x.shape[-1]).view(x.shape)),
    "over tokens": lambda n: Computed(lambda x: x - x.mean(0, keepdim=True)),
    "softmax over tokens": lambda n: nn.Softmax(0),
    "where": lambda n: Computed(lambda x: torch.where(x > 0, x, 0.1 * x)),
    "add in place": lambda n: Computed(lambda x: x.mul(2).add_(1)),
    "doubled": lambda n: Computed(lambda x: torch.stack((x, x.tanh()), 0).sum(0)),
}
MIXING: dict[str, Callable[[int], nn.Module]] = {
    "dropout": lambda n: nn.Dropout(0.25),
    "dropout in place": lambda n: nn.Sequential(
        Computed(lambda x: x * 1), nn.Dropout(0.25, inplace=True)
    ),
    "functional dropout": lambda n: FunctionalDropout(),
    "alpha dropout": lambda n: nn.AlphaDropout(0.25),
    "layer norm": lambda n: nn.LayerNorm(n),
    "layer norm without weights": lambda n: nn.LayerNorm(n, elementwise_affine=False),
    "rms norm": lambda n: nn.RMSNorm(n, eps=1e-5),
    "batch norm": lambda n: OverTokens(nn.BatchNorm1d(n)),
    "group norm": lambda n: OverTokens(nn.GroupNorm(2, n)),
    "instance norm": lambda n: nn.InstanceNorm1d(n),
    "softmax": lambda n: nn.Softmax(-1),
    "log softmax": lambda n: Computed(lambda x: F.log_softmax(x, -1)),
    "normalize": lambda n: Computed(lambda x: F.normalize(x, dim=-1)),
    "centred": lambda n: Computed(lambda x: x - x.mean(-1, keepdim=True)),
    "largest": lambda n: Computed(lambda x: x / (1 + x.abs().amax())),
    "cumulative": lambda n: Computed(lambda x: x.cumsum(-1)),
    "roll": lambda n: Computed(rolled_product),
    "flip": lambda n: Computed(lambda x: x.flip(-1)),
    "chunk": lambda n: Computed(halves),
    "first": lambda n: Computed(lambda x: x * x[..., :1]),
    "prelu": lambda n: nn.PReLU(),
    "prelu of each": lambda n: OverTokens(nn.PReLU(n)),
    "one number": lambda n: Scale(1),
    "a number each": lambda n: Scale(n),
    "shuffle": lambda n: Computed(
        lambda x: x.reshape(*x.shape[:2], 2, -1).transpose(-1, -2).flatten(2)
    ),
    "pool": lambda n: Computed(lambda x: F.avg_pool1d(x, 3, 1, 1)),
    "numbered": lambda n: Computed(lambda x: x * torch.arange(x.shape[-1], dtype=x.dtype)),
}


def between(draw: Draw, features: int) -> nn.Module:
    """What stands between two linear layers: activations, and sometimes something else."""
    chain = []
    for _ in range(draw.drawn.randint(1, 3)):
        table = MIXING if draw.happens(0.07) else ELEMENTWISE
        chain.append(table[draw.one_of(*table)](features))
    return nn.Sequential(*chain)


class MLP(nn.Module):
    def __init__(self, draw: Draw, path: str) -> None:
        super().__init__()
        features = draw.drawn.choice([16, 16, 12, 4, 2])
        self.kind = draw.one_of(
            *["plain"] * 14, "gated", "gated", "gated", "glu", "gate of all", "three"
        )
        wide = 2 * features if self.kind == "glu" else features
        self.up = nn.Linear(HIDDEN, wide, bias=draw.happens(0.7))
        self.middle = between(draw, features)
        self.down = nn.Linear(features, HIDDEN, bias=draw.happens(0.7))
        if self.kind in ("gated", "three"):
            self.gate = nn.Linear(features if self.kind == "three" else HIDDEN, features)
        if self.kind == "gate of all":
            self.gate = nn.Linear(HIDDEN, 1)
        styles = {f"{path}.up": "column", f"{path}.down": "row"}
        if hasattr(self, "gate"):
            if self.kind == "gate of all":
                styles[f"{path}.gate"] = "whole"
            else:
                styles[f"{path}.gate"] = draw.one_of("column", "column", "row")
        if draw.happens(0.08):
            styles[f"{path}.down"] = draw.one_of("column", "whole")
        if draw.happens(0.1):
            styles[f"{path}.up"] = draw.one_of("row", "whole")
        draw.styles |= styles

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "glu":
            h = F.glu(h)
        h = self.middle(h)
        if self.kind == "gated":
            h = F.silu(self.gate(x)) * h
        if self.kind == "gate of all":
            h = torch.sigmoid(self.gate(x)) * h
        if self.kind == "three":
            h = F.relu(self.gate(h))
        return self.down(h)


class Attention(nn.Module):
    """Causal attention, its heads cut out of the features in many ways. Input [s, b, hidden]."""

    def __init__(self, draw: Draw, path: str) -> None:
        super().__init__()
        self.heads = draw.drawn.choice([4, 4, 2])
        self.size = HIDDEN // self.heads
        self.cuts = draw.one_of(
            *["open"] * 16, "both numbers", "open size", "size from shape", "unflatten"
        )
        self.computes = draw.one_of("sdpa", "by hand", "by hand", "einsum", "bmm")
        self.fused = draw.happens(0.05)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        if self.fused:
            draw.words.append("fused")
            self.q = nn.Linear(HIDDEN, 3 * HIDDEN)
            del self.k, self.v
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(draw.drawn.choice([0.0, 0.0, 0.25]))
        self.norm = nn.Identity()
        styles = {f"{path}.{name}": "column" for name in ("q", "k", "v") if hasattr(self, name)}
        draw.styles |= styles | {f"{path}.out": "row"}
        if draw.happens(0.25):
            kind = draw.one_of(
                "norm of heads", "norm of heads without a style", "norm of all heads"
            )
            self.norm = nn.RMSNorm(HIDDEN if "all" in kind else self.size, eps=1e-5)
            self.norms_all = "all" in kind
            if kind == "norm of heads":
                draw.styles[f"{path}.norm"] = "heads"

    def split(self, x: Tensor) -> Tensor:
        """[s, b, features] -> [b, heads, s, size]."""
        s, b = x.shape[:2]
        match self.cuts:
            case "open":
                x = x.view(s, b, -1, self.size)
            case "both numbers":
                x = x.view(s, b, self.heads, self.size)
            case "open size":
                x = x.view(s, b, self.heads, -1)
            case "size from shape":
                x = x.reshape(s, b, self.heads, x.shape[-1] // self.heads)
            case _:
                x = x.unflatten(-1, (-1, self.size))
        return x.permute(1, 2, 0, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.q(x).chunk(3, -1)
        else:
            q = self.q(x)
            k = self.k(x)
            v = self.v(x)
        if getattr(self, "norms_all", False):
            q = self.norm(q)
        q = self.split(q)
        k = self.split(k)
        v = self.split(v)
        if not getattr(self, "norms_all", False):
            q = self.norm(q)
            k = self.norm(k)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        y = self.attend(q, k, v, mask)
        return self.out(y.permute(2, 0, 1, 3).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.computes == "sdpa":
            p = self.dropout.p if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        if self.computes == "bmm":
            b, heads, s, size = q.shape
            flat = [part.reshape(b * heads, s, size) for part in (q, k, v)]
            scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(b, heads, s, s)
            weights = self.dropout(scores.masked_fill(~mask, -1e9).softmax(-1))
            return torch.bmm(weights.view(b * heads, s, s), flat[2]).view(b, heads, s, size)
        if self.computes == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.size**0.5
        else:
            scores = q @ k.transpose(-1, -2) / self.size**0.5
        weights = self.dropout(scores.masked_fill(~mask, float("-inf")).softmax(dim=-1))
        if self.computes == "einsum":
            return torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return torch.matmul(weights, v)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, dropout=0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Conv1D(nn.Module):
    """transformers' transposed linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(x.shape)


def block_of(draw: Draw, path: str) -> nn.Module:
    kind = draw.one_of(*["mlp"] * 5, *["attention"] * 4, "whole", "encoder layer")
    if kind == "mlp":
        return MLP(draw, path)
    if kind == "attention":
        return Attention(draw, path)
    if kind == "encoder layer":
        draw.styles |= {f"{path}.linear1": "column", f"{path}.linear2": "row"}
        return nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=draw.drawn.choice([0.0, 0.25]))
    whole = draw.one_of(
        "lstm", "multihead", "conv1d", "batch norm of all", "convolution", "weight norm", "subclass"
    )
    if whole in ("weight norm", "subclass"):
        draw.styles[path] = draw.one_of("whole", "column")
    if whole == "conv1d" and draw.happens(0.3):
        draw.styles[path] = "column"
    return {
        "lstm": Recurrent,
        "multihead": SelfAttention,
        "conv1d": Conv1D,
        "batch norm of all": lambda: OverTokens(nn.BatchNorm1d(HIDDEN)),
        "convolution": lambda: Computed(nn.Conv1d(SAMPLES, SAMPLES, 3, padding=1)),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)),
        "subclass": lambda: Doubled(HIDDEN, HIDDEN),
    }[whole]()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Model(nn.Module):
    """ids [s, b] -> logits [s, b, vocab]."""

    def __init__(self, draw: Draw, vocab: int) -> None:
        super().__init__()
        padding = draw.drawn.choice([None] * 25 + [1])
        self.embedding = nn.Embedding(vocab, HIDDEN, padding_idx=padding)
        draw.styles["embedding"] = draw.drawn.choice(["vocab"] * 4 + ["whole"])
        self.positions = draw.one_of("none", "table", "parameter")
        if self.positions == "table":
            self.place = nn.Embedding(LENGTH, HIDDEN)
            draw.styles["place"] = draw.drawn.choice(["vocab", "whole"])
        if self.positions == "parameter":
            self.offset = nn.Parameter(torch.randn(LENGTH, 1, HIDDEN))
        self.first = draw.drawn.choice([nn.Identity, lambda: nn.Dropout(0.25), FunctionalDropout])()
        self.blocks = nn.ModuleList(
            block_of(draw, f"blocks.{n}") for n in range(draw.drawn.randint(1, 2))
        )
        norms = [lambda: nn.LayerNorm(HIDDEN), lambda: nn.RMSNorm(HIDDEN, eps=1e-5), nn.Identity]
        self.norms = nn.ModuleList(draw.drawn.choice(norms)() for _ in self.blocks)
        self.after = draw.drawn.choice([nn.Identity, nn.Identity, lambda: nn.Dropout(0.25)])()
        self.residual = draw.happens(0.8)
        self.last = draw.drawn.choice([lambda: nn.LayerNorm(HIDDEN, bias=False), *norms])()
        self.ties = draw.one_of("apart", "apart", "apart", "apart", "tied", "tied", "by function")
        if self.ties != "by function":
            self.head = nn.Linear(HIDDEN, vocab, bias=draw.happens(0.3))
            draw.styles["head"] = draw.one_of("column", "column", "whole", "row")
        if self.ties == "tied":
            self.head.weight = self.embedding.weight
            if draw.happens(0.9):
                both = draw.one_of("vocab", "vocab", "whole")
                draw.styles |= {"embedding": both, "head": "column" if both == "vocab" else "whole"}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.positions == "table":
            x = x + self.place(torch.arange(len(ids)))[:, None]
        if self.positions == "parameter":
            x = x + self.offset
        x = self.first(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y = self.after(block(norm(x)))
            x = x + y if self.residual else y
        x = self.last(x)
        if self.ties == "by function":
            return F.linear(x, self.embedding.weight)
        return self.head(x)


def drawn_model(number: int) -> Drawn:
    """The model of this number, with the same values wherever it is drawn."""
    draw = Draw(random.Random(number))
    torch.manual_seed(number)
    vocab = draw.drawn.choice([12] * 19 + [11])
    model = Model(draw, vocab).double()
    if draw.happens(0.3):
        frozen = [name for name, _ in model.named_parameters() if draw.happens(0.3)]
    else:
        frozen = []
    if len(frozen) < sum(1 for _ in model.parameters()):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    parallel_loss = draw.styles.get("head") == "column" and draw.happens(0.85)
    return Drawn(
        model, draw.styles, vocab, parallel_loss, tuple(draw.words), adam=draw.happens(0.5)
    )


def batches(number: int, vocab: int, steps: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Ids and targets [s, b] of each step."""
    generator = torch.Generator().manual_seed(1000 + number)
    drawn = torch.randint(vocab, (steps, 2, LENGTH, SAMPLES), generator=generator)
    return [(ids, targets) for ids, targets in drawn]
