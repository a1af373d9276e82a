"""Every collective of every model's forward has its right partner on the way back, for tp 2 to 8 (1
has none).

spmd_types checks it in one process, in a world whose other ranks are not there. Over tp a tensor is
one of

    I  the same on every rank, and so is its gradient
    R  the same on every rank, but its gradient is a share, still to be summed
    V  another on every rank

and I may not meet R or V: where it does, a sum is missing on the way back. A parameter that every
rank holds whole is I, or R if its layout says that its gradient is partial; one that is cut is V.
What our own autograd functions do is written down below, once each, from their documentation and
not from their code.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models import activations
from models.attention import rope, sink_attention
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.feed_forward import expert_bias, moe, router, router_tally
from parallel import collectives, dropout, layers, linear, loss, norms, sharded_norm
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.linear import InputLayout
from parallel.mesh import make_mesh

spmd = pytest.importorskip("spmd_types", reason="pip install spmd_types")
checker = pytest.importorskip("spmd_types.checker")
I, P, R, V = spmd.I, spmd.P, spmd.R, spmd.V  # noqa: E741
FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "olmo3",
    "gemma3",
    "deepseek_v3",
    "gpt_oss",
)
BATCH = 2
Plant = Callable[[pytest.MonkeyPatch], None]


def kind(x: Tensor, tp: Axis) -> Any:
    """I, R or V. Raises if x was given none."""
    return spmd.get_axis_local_type(x, spmd.normalize_axis(tp.group))


def require(x: Tensor, tp: Axis, *allowed: Any) -> None:
    if kind(x, tp) not in allowed:
        raise spmd.SpmdTypeError(f"{kind(x, tp)} where one of {allowed} belongs")


def stamp(out: Tensor, tp: Axis, made: Any) -> None:
    spmd.assert_type(out, {tp.group: made})


def met(tp: Axis, *tensors: Tensor | None) -> Any:
    """What comes of tensors that meet in a computation of each rank's own."""
    kinds = {kind(x, tp) for x in tensors if x is not None}
    if I in kinds and len(kinds) > 1:
        raise spmd.SpmdTypeError(f"{kinds} meet: a sum is missing on the way back")
    return kinds.pop() if len(kinds) == 1 else V


# --- what our functions do over tp, each as a rule of its outputs


def rules(tp: Axis) -> dict[type, Callable[..., None]]:
    def becomes(before: tuple[Any, ...], after: Any) -> Callable[..., None]:
        def rule(out: Tensor, *, x: Tensor) -> None:
            require(x, tp, *before)
            stamp(out, tp, after)

        return rule

    def linear_(
        out: Tensor, *, x: Tensor, weight: Tensor, bias: Tensor | None, input_layout: InputLayout
    ) -> None:
        if (
            input_layout is InputLayout.OWN and kind(weight, tp) is not V
        ):  # every rank holds all of the weight
            stamp(out, tp, met(tp, x, weight, bias))
            return
        require(
            x,
            tp,
            *{InputLayout.OWN: (R, V), InputLayout.COPIED: (I,), InputLayout.SEQUENCE: (V,)}[
                input_layout
            ],
        )
        for parameter in (weight, bias):
            if parameter is not None:
                require(parameter, tp, V)
        stamp(out, tp, V)

    def lookup(out: Tensor, *, weight: Tensor) -> None:
        require(weight, tp, V)
        stamp(out, tp, V)

    def attend(out: Tensor, *, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> None:
        stamp(out, tp, met(tp, query, key, value, sinks))

    def cross_entropy(out: tuple[Tensor, Tensor], *, logits: Tensor) -> None:
        require(logits, tp, V)
        for result in out:  # the losses, and logs of sums
            stamp(result, tp, I)

    return {
        collectives._Copy: becomes((I,), R),
        collectives._Reduce: becomes((V, P), I),
        collectives._Gather: becomes((V,), R),
        collectives._ReduceScatter: becomes((V, P), V),
        collectives._Split: becomes((I,), V),
        collectives._Join: becomes((V,), I),
        linear.Linear: linear_,
        linear.Add: lambda out, *, x, parameter: stamp(out, tp, met(tp, x, parameter)),
        linear.Widen: lambda out, *, parameter: stamp(out, tp, kind(parameter, tp)),
        layers.Lookup: lookup,
        norms.Normalize: lambda out, *, x, weight: stamp(out, tp, met(tp, x, weight)),
        sharded_norm._NormalizeSharded: lambda out, *, x, weight: stamp(
            out, tp, met(tp, x, weight)
        ),
        activations.Gated: lambda out, *, y: stamp(out, tp, kind(y, tp)),
        activations.ClampedGate: lambda out, *, y: stamp(out, tp, kind(y, tp)),
        expert_bias._AddBiases: lambda out, *, y, biases: stamp(out, tp, met(tp, y, *biases)),
        sink_attention._AttendWithSinks: attend,
        dropout._Dropout: lambda out, *, x: stamp(out, tp, kind(x, tp)),
        rope.Rotate: lambda out, *, x: stamp(out, tp, kind(x, tp)),
        loss.CrossEntropy: cross_entropy,
        router.WithLoss: lambda out, *, x, loss: stamp(out, tp, met(tp, x, loss)),
        router.WithLoads: lambda out, *, x: stamp(out, tp, kind(x, tp)),
        router_tally.WithTally: lambda out, *, x: stamp(out, tp, kind(x, tp)),
        moe.TakeRows: lambda out, *, x: stamp(out, tp, kind(x, tp)),
    }


def hook(forward: Callable[..., Any], rule: Callable[..., None]) -> Callable[..., None]:
    """The rule as spmd_types wants it: told of all arguments, and accounting for all tensors."""
    asked = inspect.signature(rule).parameters.keys() - {"out"}
    keyword = inspect.Parameter.KEYWORD_ONLY

    def check(out: Tensor, **given: Any) -> None:
        flat = (
            one
            for value in given.values()
            for one in (value if isinstance(value, tuple) else (value,))
        )
        spmd.rules.ignore(*(one for one in flat if isinstance(one, Tensor)))
        rule(out, **{name: given[name] for name in asked})

    names = list(inspect.signature(forward).parameters)[1:]
    first = inspect.Parameter("out", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    check.__signature__ = inspect.Signature(
        [first, *(inspect.Parameter(n, keyword) for n in names)]
    )  # type: ignore[attr-defined]
    return check


@contextmanager
def typed(mesh: DeviceMesh, tp: Axis) -> Iterator[None]:
    """Inside, types are checked over tp."""
    with pytest.MonkeyPatch.context() as patch, spmd.set_current_mesh(mesh):
        for function, rule in rules(tp).items():
            check = staticmethod(hook(function.forward, rule))  # type: ignore[attr-defined]
            patch.setattr(function, "spmd_typecheck", check, raising=False)
        with checker.typecheck():
            yield


@contextmanager
def fake_world(size: int) -> Iterator[DeviceMesh]:
    """A world of which only rank 0 is there; what the others send is whatever lies in memory."""
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield make_mesh(tp=size)
    finally:
        dist.destroy_process_group()


def small(family: str, tp: int) -> ModelConfig:
    """A model of the family whose heads and widths tp divides, biased and with dropout where it may
    be.

    Some families have a key/value head for each rank, in others all ranks share one.
    """
    kv_heads = 1 if family in ("mistral", "qwen3") else tp
    sizes = {
        "layers": 2,
        "heads": 2 * tp,
        "kv_heads": kv_heads,
        "head_dim": 4,
        "hidden": 16,
        "ffn": 4 * tp,
    }
    others: dict[str, Any] = {"dropout": 0.1, "vocab": 61, "max_positions": 2 * tp}
    if family == "deepseek_v3":
        others["latent"] = {
            "query_rank": 6,
            "kv_rank": 5,
            "rope_dim": 2,
            "nope_dim": 3,
            "value_dim": 4,
        }
        sizes |= {"kv_heads": 2 * tp, "head_dim": 5}
    if family == "gpt_neox":
        others["rotary_fraction"] = 0.5
    if family == "gpt_oss":
        others |= {"experts": 4, "experts_per_token": 2}
    elif family != "mixtral":
        others["bias"] = True
    return ModelConfig(family=family, **sizes, **others)  # type: ignore[arg-type]


def give_types(stage: nn.Module, tp: Axis) -> None:
    """What each parameter is, by its layout."""
    for parameter in stage.parameters():
        layout = layout_of(parameter)
        cut = any(part.shards > 1 for part in layout.parts)
        stamp(parameter, tp, V if cut else R if layout.partial else I)


def check_forward(config: ModelConfig, size: int, sequence: bool) -> None:
    """Raises SpmdTypeError if a collective has no partner."""
    with fake_world(size) as mesh:
        tp = Axis.of(mesh, "tp")
        length = config.max_positions
        stage = Stage(config, Context(plan("fp32"), tp, sequence), cuts(config, 1, length)[0])
        place = MicrobatchInfo(0, torch.arange(BATCH), torch.ones(()))
        ids = torch.randint(0, config.vocab, (length, BATCH))
        with typed(mesh, tp):
            give_types(stage, tp)
            for same in (ids, place.samples, place.weight):
                assert same is not None
                stamp(same, tp, R)
            losses = stage.losses(stage(ids, place), ids)
            assert kind(losses, tp) is I


@pytest.mark.cases(24, sample=1)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_collective_has_its_partner(family: str, size: int, sequence: bool) -> None:
    check_forward(small(family, size), size, sequence)


# --- planted: what is missing is caught


def a_row_parallel_product_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "reduce", lambda x, axis: x)


def the_input_gradient_of_a_column_parallel_layer_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        layers,
        "InputLayout",
        SimpleNamespace(OWN=InputLayout.OWN, COPIED=InputLayout.OWN, SEQUENCE=InputLayout.SEQUENCE),
    )


def the_gradient_that_flows_to_a_router_and_experts_is_not_summed(
    patch: pytest.MonkeyPatch,
) -> None:
    patch.setattr(collectives, "copy", lambda x, axis: x)


def the_gradient_of_a_gathered_sequence_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "gather", lambda x, axis: collectives.join(x, axis, 0))


def a_norm_says_that_its_gradient_is_whole(patch: pytest.MonkeyPatch) -> None:
    inner = layers.parameter
    patch.setattr(norms, "parameter", lambda *args, partial=False, **others: inner(*args, **others))


def a_bias_says_that_its_gradient_is_whole(patch: pytest.MonkeyPatch) -> None:
    inner = layers.parameter
    patch.setattr(
        layers, "parameter", lambda *args, partial=False, **others: inner(*args, **others)
    )


PLANTS: list[tuple[Plant, str, bool]] = [
    (a_row_parallel_product_is_not_summed, "llama", False),
    (the_input_gradient_of_a_column_parallel_layer_is_not_summed, "llama", False),
    (the_gradient_that_flows_to_a_router_and_experts_is_not_summed, "mixtral", False),
    (the_gradient_of_a_gathered_sequence_is_not_summed, "mixtral", True),
    (a_norm_says_that_its_gradient_is_whole, "llama", True),
    (a_norm_says_that_its_gradient_is_whole, "qwen3", False),
    (a_bias_says_that_its_gradient_is_whole, "gpt2", True),
]


@pytest.mark.parametrize(
    ("plant", "family", "sequence"), PLANTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_missing_partner_is_caught(
    plant: Plant, family: str, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(spmd.SpmdTypeError):
        check_forward(small(family, 2), 2, sequence)
