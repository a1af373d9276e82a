"""Single layers beside numbers that a pencil gives: one weight is chosen, all others are zero or one."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.precision.plan import plan
from models.attention.rope import Rotate, rotary_tables
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.feed_forward.mlp import MLP
from models.feed_forward.moe import MixtureOfExperts
from models.logical_shapes import logical_shapes
from models.rope_scaling import RopeScaling
from parallel.context import Context
from parallel.norms import RMSNorm
from tests.families import put

LENGTH = 8
SIZES: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 8, "vocab": 8}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Numbers are float64 where no dtype is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found), rtol=1e-12, atol=1e-12)


def stage_of(config: ModelConfig, chosen: dict[str, Tensor]) -> Stage:
    """A model in float64 whose norms are ones, and all other tensors but the chosen ones zero."""
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, LENGTH)[0])
    weights = {name: torch.zeros(shape) for name, shape in logical_shapes(config).items()}
    for name, values in weights.items():
        if name.endswith("norm.weight"):
            values += 1 - config.norm_unit_offset
    put(stage, weights | chosen)
    return stage


# --- norms and feed-forwards


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.2345678901])
def test_a_norm_of_equal_features_is_their_size_over_the_root_of_its_square_and_epsilon(
    size: float,
) -> None:
    norm = RMSNorm(Context(plan("fp64")), 8, name="norm", eps=1e-6)
    expected = size / math.sqrt(size**2 + 1e-6)
    close(norm(torch.full((1, 1, 8), size)), torch.full((1, 1, 8), expected))


def gelu_of_normal(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_of_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu_of_one(x: float) -> float:
    """The gate is x, the other factor 1."""
    return x / (1 + math.exp(-x))


ACTIVATED = {
    "gelu_exact": gelu_of_normal,
    "gelu": gelu_of_tanh,
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("kind", ACTIVATED)
def test_an_activation_is_its_formula(kind: str) -> None:
    mlp = MLP(ModelConfig(**SIZES, mlp=kind), Context(plan("fp64")), "mlp")
    values = [-3.0, -1.0, -0.1, 0.5, 2.0]
    expected = [ACTIVATED[kind](x) for x in values]
    close(mlp.activate(torch.tensor(values)), torch.tensor(expected))


def test_a_swiglu_activates_the_gate_and_multiplies_by_the_other_factor() -> None:
    """Features are 2 and 0; the gate reads the first, up is the bias 1."""
    config = ModelConfig(**SIZES, mlp="swiglu", mlp_bias=True)
    mlp = MLP(config, Context(plan("fp64")), "mlp")
    gate = torch.full((8,), 2.0)
    up = torch.ones(8)
    expected = silu_of_one(2.0)
    close(mlp.activate(torch.cat((gate, up))), torch.full((8,), expected))


# --- rotary positions


@pytest.mark.parametrize("base", [4.0, 1e4, 5e5])
def test_a_pair_of_features_turns_forwards_by_its_position_over_a_power_of_the_base(
    base: float,
) -> None:
    """Pair i of n is features i and i + n, and turns by position * base ** (-i / n)."""
    pairs = 3
    tables = rotary_tables(RopeScaling(), base, 2 * pairs, LENGTH, torch.float64)
    for pair in range(pairs):
        x = torch.zeros(LENGTH, 1, 1, 2 * pairs)
        x[..., pair] = 1
        turned = Rotate.apply(x, *tables)
        for position in range(LENGTH):
            angle = position * base ** (-pair / pairs)
            expected = torch.zeros(2 * pairs)
            expected[pair] = math.cos(angle)
            expected[pair + pairs] = math.sin(angle)
            close(turned[position, 0, 0], expected)


# --- attention. The embedding is the identity: each token is a feature of its own.


def added_by_attention(stage: Stage, tokens: Tensor) -> Tensor:
    """What attention of the first layer makes of tokens [s, b]."""
    made_by: list[Tensor] = []

    def keep(module: object, given: object, made: Tensor) -> None:
        made_by.append(made.detach())

    stage.layers["0"].get_submodule("attention").register_forward_hook(keep)
    stage(tokens)
    return made_by[0]


def attending(chosen: dict[str, Tensor], tokens: list[int], **keys: Any) -> Tensor:
    """What attention adds to each token, [s, vocab], by its value of each token.

    Values, output and head are the identity; tokens are normalized to sqrt(8).
    """
    config = ModelConfig(**{**SIZES, "heads": 1, "norm_eps": 1e-30, **keys})
    identity = torch.eye(8)
    attention = "layers.0.attention"
    same = {f"{attention}.value.weight": identity, f"{attention}.output.weight": identity}
    stage = stage_of(config, {"embedding.weight": identity, **same, **chosen})
    return added_by_attention(stage, torch.tensor(tokens)[:, None])[:, 0] / math.sqrt(8)


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_without_scores_a_token_is_the_mean_of_those_that_it_sees(window: int) -> None:
    tokens = list(range(8))
    added = attending({}, tokens, window=window)
    for position in tokens:
        first = max(0, position - window + 1) if window else 0
        expected = torch.zeros(8)
        expected[first : position + 1] = 1 / (position + 1 - first)
        close(added[position], expected)


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_a_score_is_the_product_over_the_root_of_the_width_within_its_cap(cap: float) -> None:
    """The second token asks for the first, by a product of a * 8, over sqrt(8)."""
    strength = 0.3
    query = torch.zeros(8, 8)
    query[0, 1] = strength
    key = torch.zeros(8, 8)
    key[0, 0] = 1.0
    attention = "layers.0.attention"
    chosen = {f"{attention}.query.weight": query, f"{attention}.key.weight": key}
    added = attending(chosen, [0, 1], positions="none", attention_softcap=cap)
    score = strength * 8 / math.sqrt(8)
    if cap:
        score = cap * math.tanh(score / cap)
    share = math.exp(score) / (math.exp(score) + 1)
    expected = torch.zeros(8)
    expected[:2] = torch.tensor([share, 1 - share])
    close(added[1], expected)


def test_neighbouring_heads_share_keys_and_values() -> None:
    """Four heads of width 2, of which the first two have the values of the first token's features."""
    config = ModelConfig(**{**SIZES, "heads": 4, "kv_heads": 2, "norm_eps": 1e-30})
    value = torch.zeros(4, 8)
    value[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    attention = "layers.0.attention"
    chosen = {
        "embedding.weight": torch.eye(8),
        f"{attention}.value.weight": value,
        f"{attention}.output.weight": torch.eye(8),
    }
    stage = stage_of(config, chosen)
    added = added_by_attention(stage, torch.zeros(1, 1, dtype=torch.int64))
    expected = torch.tensor([1.0, 2, 1, 2, 3, 4, 3, 4]) * math.sqrt(8)
    close(added[0, 0], expected)


# --- embeddings and logits


def embedded(stage: Stage, tokens: Tensor) -> Tensor:
    """What the first layer reads, [s, b, hidden]."""
    read: list[Tensor] = []

    def keep(module: object, given: tuple[Tensor, ...]) -> None:
        read.append(given[0].detach())

    stage.layers["0"].register_forward_pre_hook(keep)
    stage(tokens)
    return read[0]


def test_each_token_reads_the_row_of_its_own_position() -> None:
    config = ModelConfig(family="gpt2", **SIZES, norm_eps=1e-30, max_positions=LENGTH)
    # no mean, and a size that the norm leaves
    rows = torch.eye(8) - torch.eye(8).roll(1, 1)
    stage = stage_of(config, {"positions.weight": rows, "embedding.weight": torch.eye(8)})
    tokens = torch.zeros(LENGTH, 1, dtype=torch.int64)
    x = embedded(stage, tokens)[:, 0]
    close(x - torch.eye(8)[0], rows)


@pytest.mark.parametrize("hidden", [8, 32])
def test_gemmas_embeddings_are_multiplied_by_the_root_of_their_width(hidden: int) -> None:
    config = ModelConfig(family="gemma2", **{**SIZES, "hidden": hidden})
    stage = stage_of(config, {"embedding.weight": torch.ones(8, hidden)})
    x = embedded(stage, torch.zeros(1, 1, dtype=torch.int64))
    close(x, torch.full((1, 1, hidden), math.sqrt(hidden)))


def test_a_tied_embedding_has_the_gradients_of_both_of_its_uses() -> None:
    """Of one token whose target is another: the head's part is (p - y) x, and the row that is looked
    up has the head's sum of rows besides, which a norm projects."""
    config = ModelConfig(**{**SIZES, "layers": 1, "tied": True, "norm_eps": 1e-30})
    table = torch.eye(8)
    table[0, 0] = 2.0
    table[0, 1] = 1.0
    stage = stage_of(config, {"embedding.weight": table})
    ids = torch.zeros(1, 1, dtype=torch.int64)
    stage.losses(stage(ids), ids + 2).sum().backward()
    # by the definitions: x = row, n = x sqrt(8) / |x|, logits = table n
    row = table[0]
    size = row.norm()
    normal = row * math.sqrt(8) / size
    logits = table @ normal
    error = logits.softmax(0) - torch.eye(8)[2]
    of_head = torch.outer(error, normal)
    of_normal = table.T @ error
    of_row = math.sqrt(8) / size * (of_normal - row * (row @ of_normal) / size**2)
    expected = of_head.clone()
    expected[0] += of_row
    gradient = stage.head.grad
    assert gradient is not None
    close(gradient, expected)


# --- experts


def routed(logits: list[float], **keys: Any) -> tuple[Tensor, MixtureOfExperts]:
    """What experts make of a token: expert n gives (n + 1) times ones, weighted."""
    sizes = {**SIZES, "mlp": "relu2"}
    config = ModelConfig(**sizes, experts=4, experts_per_token=2, router_aux_loss=0.0, **keys)
    router = torch.zeros(4, 8)
    router[:, 0] = torch.tensor(logits)
    chosen = {"layers.0.mlp.router.weight": router}
    for n in range(4):
        up = torch.zeros(8, 8)
        up[0, 0] = 1.0
        down = torch.zeros(8, 8)
        down[:, 0] = n + 1.0
        chosen[f"layers.0.mlp.experts.{n}.up.weight"] = up
        chosen[f"layers.0.mlp.experts.{n}.down.weight"] = down
    experts = stage_of(config, chosen).layers["0"].get_submodule("mlp")
    assert isinstance(experts, MixtureOfExperts)
    x = torch.zeros(1, 1, 8)
    x[..., 0] = 1.0
    return experts(x, None)[0, 0], experts


def test_a_token_has_its_two_best_experts_by_shares_that_sum_to_one() -> None:
    made, experts = routed([1.0, 0.0, 2.0, -1.0])
    share = math.exp(2.0) / (math.exp(2.0) + math.exp(1.0))
    close(made.detach(), torch.full((8,), 3 * share + 1 * (1 - share)))
    made.sum().backward()
    gradient = dict(experts.named_parameters())["router.weight"].grad
    assert gradient is not None
    # of share (e3 - e1), for the logit of each
    slope = 8 * (3 - 1) * share * (1 - share)
    expected = torch.zeros(4, 8)
    expected[:, 0] = torch.tensor([-slope, 0.0, slope, 0.0])
    close(gradient, expected)
