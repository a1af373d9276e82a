"""What a model can know at most of its text is a number of mathematics; no loss may be lower.

A fault that all layouts share, such as a label that is shifted or a token that sees the next one,
agrees with every other layout and with itself, and not with these numbers.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.precision.plan import plan
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.pipeline.kinds import schedule
from tests.closed_forms.sources import (
    CHAIN,
    LOG_VOCAB,
    VOCAB,
    conditional_entropy,
    draw_chain,
    draw_uniform,
    entropy_rate,
    share_of,
)
from tests.ranks import run_ranks

LENGTH = 32
SAMPLES = 32
IN_LAYOUTS = pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
ATTENTION = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "ffn": 64}
# two layers that are feed-forwards alone: such a model knows the present token and no other
NO_ATTENTION = {
    "family": "nemotron_h",
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "ffn": 64,
    "hybrid_pattern": "--",
}


@dataclass(frozen=True)
class Lesson:
    """What a model learns. batches: [steps, samples, length + 1], again from the first one on after
    the last. held_out: [samples, length + 1]."""

    model: dict[str, Any] = field(hash=False)
    batches: Tensor
    held_out: Tensor
    steps: int
    lr: float
    packing: Packing = UNPACKED
    mask: Tensor | None = None


@dataclass(frozen=True)
class Learned:
    """Losses of training, of each step, and of held-out samples in the end."""

    training: list[float]
    held_out: float


def learn(lesson: Lesson, sizes: dict[str, int]) -> Learned:
    return run_ranks(_learn, sizes, lesson=lesson)[0]


def _learn(mesh: DeviceMesh, lesson: Lesson) -> Learned:
    dp = Axis.of(mesh, "dp")
    count = lesson.batches.shape[1] // dp.size
    part = slice(dp.rank * count, (dp.rank + 1) * count)
    engine = Engine.build(
        ModelConfig(vocab=VOCAB, max_positions=LENGTH, **lesson.model),
        plan("fp32"),
        mesh,
        schedule("1f1b", Axis.of(mesh, "pp").size, 2),
        EngineOptions(micro_batch=count // 2, seq_length=LENGTH, seed=3),
        weight_decay=0.0,
    )

    def share(stream: Tensor) -> Any:
        return share_of(stream, lesson.packing, lesson.mask, part)

    training: list[float] = []
    for step in range(lesson.steps):
        batch = lesson.batches[step % len(lesson.batches)]
        lr = lesson.lr * (1 - step / lesson.steps)
        training.append(engine.step(share(batch), lr, step).loss)
    return Learned(training, engine.evaluate(share(lesson.held_out)))


def fresh(draw: Any, steps: int) -> Tensor:
    return torch.stack([draw(seed) for seed in range(steps)])


def of_chain(seed: int) -> Tensor:
    return draw_chain(CHAIN, SAMPLES, LENGTH + 1, seed)


def one_text(chain: Tensor) -> Tensor:
    """Samples that are cut from one text, each of whose tokens is a target once."""
    (text,) = draw_chain(chain, 1, SAMPLES * LENGTH + 1, seed=5)
    return text.unfold(0, LENGTH + 1, LENGTH)


def documents_of_halves(samples: int) -> Packing:
    """Two documents in each sample, with positions of their own."""
    half = LENGTH // 2
    documents = torch.arange(LENGTH).div(half, rounding_mode="floor").expand(samples, -1)
    positions = torch.arange(LENGTH).remainder(half).expand(samples, -1)
    return Packing(documents, positions)


@IN_LAYOUTS
def test_without_attention_a_model_reaches_the_conditional_entropy_of_its_text_and_never_less(
    sizes: dict[str, int],
) -> None:
    text = one_text(CHAIN)
    entropy = conditional_entropy(text[:, :-1], text[:, 1:])

    learned = learn(Lesson(NO_ATTENTION, text[None], text, steps=120, lr=2e-2), sizes)

    assert min(learned.training) > entropy - 1e-6
    assert entropy - 1e-6 < learned.held_out < entropy + 1e-3


@IN_LAYOUTS
def test_first_tokens_of_documents_that_do_not_count_are_not_in_the_entropy_that_is_reached(
    sizes: dict[str, int],
) -> None:
    text = one_text(CHAIN)
    packing = documents_of_halves(SAMPLES)
    mask = torch.ones(SAMPLES, LENGTH)
    # what follows the last token of a document is another document's first one
    mask[:, LENGTH // 2 - 1 :: LENGTH // 2] = 0
    # fewer in each sample than in the one before: a mean of samples, or of micro-batches, is another
    for sample in range(SAMPLES):
        mask[sample, :sample] = 0
    entropy = conditional_entropy(text[:, :-1], text[:, 1:], mask)

    learned = learn(
        Lesson(NO_ATTENTION, text[None], text, steps=120, lr=2e-2, packing=packing, mask=mask),
        sizes,
    )

    assert min(learned.training) > entropy - 1e-6
    assert learned.held_out < entropy + 1e-3


@IN_LAYOUTS
def test_a_source_of_known_entropy_rate_is_learned_to_it_and_never_below(
    sizes: dict[str, int],
) -> None:
    rate = entropy_rate(CHAIN)
    # the numbers themselves have a mean that is not quite the rate
    held_out = draw_chain(CHAIN, SAMPLES, LENGTH + 1, seed=10**6)
    surprise = -CHAIN[held_out[:, :-1], held_out[:, 1:]].log().mean().item()

    learned = learn(Lesson(ATTENTION, fresh(of_chain, 150), held_out, steps=150, lr=1e-2), sizes)

    late = learned.training[100:]
    assert abs(sum(late) / len(late) - rate) < 0.03
    # the true probabilities are the best guess: another one can be lucky by its own deviation alone
    assert surprise - 0.005 < learned.held_out < surprise + 0.03


@IN_LAYOUTS
def test_nothing_is_learned_of_uniform_tokens(sizes: dict[str, int]) -> None:
    batches = fresh(lambda seed: draw_uniform(SAMPLES, LENGTH + 1, seed), 60)
    held_out = draw_uniform(SAMPLES, LENGTH + 1, seed=10**6)

    learned = learn(Lesson(ATTENTION, batches, held_out, steps=60, lr=1e-2), sizes)

    assert LOG_VOCAB - 0.005 < learned.held_out < LOG_VOCAB + 0.05


def twice_the_same(seed: int) -> Tensor:
    """Each sample is a document of uniform tokens, and the same document again."""
    document = draw_uniform(SAMPLES, LENGTH // 2, seed)
    following = draw_uniform(SAMPLES, 1, seed + 10**5)
    return torch.cat((document, document, following), 1)


@IN_LAYOUTS
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "one document"])
def test_a_document_that_is_there_twice_helps_only_one_who_sees_both(
    is_packed: bool, sizes: dict[str, int]
) -> None:
    packing = documents_of_halves(SAMPLES) if is_packed else UNPACKED
    held_out = twice_the_same(10**6)

    learned = learn(
        Lesson(ATTENTION, fresh(twice_the_same, 200), held_out, 200, lr=1e-2, packing=packing),
        sizes,
    )

    if is_packed:
        assert LOG_VOCAB - 0.01 < learned.held_out < LOG_VOCAB + 0.1
    else:
        assert learned.held_out < 0.8 * LOG_VOCAB
    assert not math.isnan(learned.held_out)
