"""Faults of the model: attention, positions, norms, feed-forwards and experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.activations import ACTIVATIONS
from models.attention import kernels, packing, rope
from models.attention.attention import Attention
from models.attention.kernels import KernelInputs
from models.attention.packing import Packing
from models.decoder import stages
from models.decoder.stages import Stage
from models.engine.passes import Passes
from models.feed_forward import router
from models.feed_forward.mlp import MLP
from models.feed_forward.router import WithLoss
from parallel import dropout, norms
from parallel.dropout import MicrobatchInfo
from parallel.layers import VocabParallelEmbedding
from tests.shared_faults.fault import Fault, both, change

MASK_TESTS = ("tests/models/test_blocks.py", "tests/models/test_packing.py")
ROUTER_TESTS = ("tests/models/test_moe.py", "tests/models/test_router.py")
DROPOUT_TESTS = ("tests/comm/test_random.py",)
DOCUMENTS = ("data.reset_attention_mask=true",)


def family_test(name: str) -> tuple[str]:
    """The fast test that compares a family with transformers."""
    test = "test_every_family_is_the_model_of_transformers"
    return (f"tests/models/test_families.py::{test}[(1, 1, False)-{name}]",)


def attends(changed: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Each mask of attention is changed, also where kernels need none."""

    def explicit(inner: Any) -> Any:
        def mask_of(self: KernelInputs, query: Tensor) -> Tensor:
            right = inner(self, query)
            if right is not None:
                return right
            return packing.causal_mask(query.shape[2], 0, None, query.device)

        return mask_of

    def wrong(inner: Any) -> Any:
        def causal_mask(
            length: int, window: int, documents: Any, device: torch.device, past: int = 0
        ) -> Tensor:
            right = inner(length, window, documents, device, past)
            return right if past else changed(right)

        return causal_mask

    return both(
        change(packing, "causal_mask", wrong),
        change(KernelInputs, "mask_of", explicit),
    )


def too_far(mask: Tensor) -> Tensor:
    """The next token is attended to as well."""
    return mask | torch.ones_like(mask).tril(1).triu(1)


def too_near(mask: Tensor) -> Tensor:
    """A token does not attend to itself, but for the first of a document."""
    size = mask.shape[-1]
    itself = torch.eye(size, dtype=torch.bool, device=mask.device)
    earlier = mask & ~itself
    return earlier | (itself & ~earlier.any(-1, keepdim=True))


def longer_window(inner: Any) -> Any:
    def causal_mask(
        length: int, window: int, documents: Any, device: torch.device, past: int = 0
    ) -> Tensor:
        return inner(length, window + 1 if window else 0, documents, device, past)

    return causal_mask


def other_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Query heads take key/value heads in turn, and not in groups."""
    groups = query.shape[1] // key.shape[1]
    return key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)


def interleaved(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Neighbouring features are a pair."""
    pairs = cosine.shape[-1]
    rotated = x.clone()
    even = x[..., 0 : 2 * pairs : 2]
    odd = x[..., 1 : 2 * pairs : 2]
    rotated[..., 0 : 2 * pairs : 2] = (even * cosine - odd * sine).to(x.dtype)
    rotated[..., 1 : 2 * pairs : 2] = (odd * cosine + even * sine).to(x.dtype)
    return rotated


def unscaled(inner: Any) -> Any:
    def init(self: Attention, *given: Any, **named: Any) -> None:
        inner(self, *given, **named)
        self.scale = 1.0

    return init


def later_positions(inner: Any) -> Any:
    def rows(self: Stage, x: Tensor, positions: Tensor | None) -> Any:
        right = inner(self, x, positions)
        if isinstance(right, slice):
            right = torch.arange(right.start, right.stop).unsqueeze(1).expand(x.shape[:2])
        return (right + 1).remainder(len(self.position_table))

    return rows


def trained_once(inner: Any) -> Any:
    """A tied weight has the gradient of the head alone."""
    return lambda self, ids: inner(self, ids).detach()


def swapped(inner: Any) -> Any:
    def activate(self: MLP, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return inner(
            self, torch.cat((up, gate), -1) if self.activation is ACTIVATIONS["swiglu"] else y
        )

    return activate


def gelu_by_tanh(inner: Any) -> Any:
    def activate(self: MLP, y: Tensor) -> Tensor:
        if self.activation is ACTIVATIONS["gelu_exact"]:
            return F.gelu(y, approximate="tanh")
        return inner(self, y)

    return activate


def exact_gelu(inner: Any) -> Any:
    def activate(self: MLP, y: Tensor) -> Tensor:
        return F.gelu(y) if self.activation is ACTIVATIONS["gelu"] else inner(self, y)

    return activate


def norm(changed: Callable[..., Any]) -> Callable[[], None]:
    """RMSNorm computes changed(inner, x, weight, eps, ...)."""
    return change(norms, "_norm", lambda inner: lambda x, *rest: changed(inner, x, *rest))


def drops_in_evaluation(inner: Any) -> Any:
    def info(self: Passes, state: Any, rows: slice) -> MicrobatchInfo | None:
        right = inner(self, state, rows)
        if right is not None:
            return right
        samples = torch.arange(rows.start, rows.stop, device=self.optimizer.device)
        return MicrobatchInfo(0, samples, weight=state.scale)

    return info


def passes_over_the_best(inner: Any) -> Any:
    def choose(settings: Any, scores: Tensor, correction: Any, per_token: int) -> Tensor:
        return inner(settings, scores, correction, per_token + 1)[..., 1:]

    return choose


def wrong_sign(inner: Any) -> Any:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        same, weight, _ = inner(ctx, grad)
        return same, -weight, None

    return backward


def one_position_for_all(inner: Any) -> Any:
    def rows(self: Packing, rows: slice) -> Packing:
        right = inner(self, rows)
        return Packing(right.documents, None, right.counts)

    return rows


FAULTS = {
    "mask too far": Fault(
        "a token attends to the next one too",
        attends(too_far),
        "llama",
        family_test("llama"),
    ),
    "mask too near": Fault(
        "a token does not attend to itself",
        attends(too_near),
        "llama",
        family_test("llama"),
    ),
    "documents see each other": Fault(
        "attention goes beyond a document",
        change(Stage, "_make_masks", lambda inner: lambda self, length, device, packed: {}),
        "llama",
        MASK_TESTS,
        DOCUMENTS,
    ),
    "positions go on over documents": Fault(
        "positions do not begin anew with a document",
        change(Packing, "rows", one_position_for_all),
        "llama",
        MASK_TESTS,
        ("data.reset_position_ids=true",),
    ),
    "window off by one": Fault(
        "a window has one token more",
        change(packing, "causal_mask", longer_window),
        "mistral",
        family_test("mistral"),
    ),
    "heads in turn": Fault(
        "query heads take key/value heads in turn, not in groups",
        change(kernels, "_repeat_heads", lambda inner: other_heads),
        "llama",
        family_test("llama"),
    ),
    "scores not divided": Fault(
        "scores are not divided by sqrt(d)",
        change(Attention, "__init__", unscaled),
        "llama",
        family_test("llama"),
    ),
    "no soft cap": Fault(
        "scores and logits have no soft cap",
        change(kernels, "softcap", lambda inner: lambda x, cap: x),
        "gemma2",
        family_test("gemma2"),
    ),
    "rotary base": Fault(
        "rotary positions have the base 10,000 whatever is asked for",
        change(
            rope,
            "frequencies",
            lambda inner: lambda scaling, base, dims, length: inner(scaling, 1e4, dims, length),
        ),
        "llama",
        family_test("llama"),
    ),
    "rotary interleaved": Fault(
        "rotary pairs are neighbours, not halves",
        change(rope, "_rotary", lambda inner: interleaved),
        "llama",
        family_test("llama"),
    ),
    "rotary backwards": Fault(
        "rotary positions turn the other way",
        change(rope, "_rotary", lambda inner: lambda x, cosine, sine: inner(x, cosine, -sine)),
        "llama",
        family_test("llama"),
    ),
    "learned positions off by one": Fault(
        "each token has the position after its own",
        change(Stage, "_position_rows", later_positions),
        "gpt2",
        family_test("gpt2"),
    ),
    "embedding not scaled": Fault(
        "embeddings are not multiplied by sqrt(hidden)",
        change(stages, "nearest", lambda inner: lambda value, dtype: 1.0),
        "gemma2",
        family_test("gemma2"),
    ),
    "tied weight trained once": Fault(
        "the gradient of a tied embedding is that of the head alone",
        change(VocabParallelEmbedding, "forward", trained_once),
        "gpt2",
        family_test("gpt2"),
    ),
    "gate and up swapped": Fault(
        "the activation is of up, not of the gate",
        change(MLP, "activate", swapped),
        "llama",
        family_test("llama"),
    ),
    "gelu by tanh": Fault(
        "the exact gelu is the tanh approximation",
        change(MLP, "activate", gelu_by_tanh),
        "gpt_neox",
        family_test("gpt_neox"),
    ),
    "gelu exact": Fault(
        "the tanh approximation of gelu is the exact one",
        change(MLP, "activate", exact_gelu),
        "gpt2",
        family_test("gpt2"),
    ),
    "norm without epsilon": Fault(
        "RMSNorm adds no epsilon",
        norm(lambda inner, x, weight, eps, *rest: inner(x, weight, 0.0, *rest)),
        "llama",
        family_test("llama"),
    ),
    "norm in bf16": Fault(
        "RMSNorm reads its input rounded to bf16",
        norm(lambda inner, x, *rest: inner(x.bfloat16().to(x.dtype), *rest)),
        "llama",
        family_test("llama"),
    ),
    "dropout without its scale": Fault(
        "what is kept is not divided by the probability of being kept",
        change(
            dropout,
            "_dropout_gradient",
            lambda inner: lambda x, mask, probability: torch.where(mask, x, 0),
        ),
        "gpt2",
        DROPOUT_TESTS,
        ("model.dropout=0.2",),
    ),
    "dropout in evaluation": Fault(
        "an evaluation drops as training does",
        change(Passes, "_microbatch_info", drops_in_evaluation),
        "gpt2",
        DROPOUT_TESTS,
        ("model.dropout=0.2",),
    ),
    "experts' weights not normalized": Fault(
        "weights of the chosen experts do not sum to one",
        change(
            router,
            "expert_weights",
            lambda inner: (
                lambda settings, scores, chosen, normalize: inner(settings, scores, chosen, False)
            ),
        ),
        "mixtral",
        family_test("mixtral"),
    ),
    "the best expert is passed over": Fault(
        "a token goes to the second and third of its experts",
        change(router, "choose_experts", passes_over_the_best),
        "mixtral",
        family_test("mixtral"),
    ),
    "balance loss with the wrong sign": Fault(
        "the router is trained towards experts that have many tokens",
        change(WithLoss, "backward", wrong_sign),
        "mixtral",
        ROUTER_TESTS,
        ("model.router_aux_loss=0.1",),
    ),
    "router not trained": Fault(
        "the weights of experts have no gradient",
        change(
            router,
            "expert_weights",
            lambda inner: (
                lambda settings, scores, chosen, normalize: inner(
                    settings, scores, chosen, normalize
                ).detach()
            ),
        ),
        "mixtral",
        family_test("mixtral"),
    ),
}
