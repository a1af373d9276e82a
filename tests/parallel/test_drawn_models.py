"""Drawn models of torch's modules and styles: two tensor-parallel ranks train what one process
does, or refuse."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec import SGD, AdamW, Axis, ParallelAMPOptimizer, UserError, plan
from parallel import Context, parallelize, vocab_parallel_loss
from parallel.plain_layers import CheckedPasses, Dropout
from tests.parallel.drawn_models import Drawn, batches, drawn_model
from tests.ranks import run_ranks

MODELS = 300
EACH = 10
STEPS = 3
# of AdamW: a gradient that is zero but for rounding, as of a key's bias, would be divided by its
# own size
EPS = 1e-3
# losses, of the steps and of an evaluation, and weights by name
Trained = tuple[list[float], dict[str, Tensor]]


def on_one_process(number: int) -> Trained:
    """Plain torch's training, with the dropout that the layout draws."""
    drawn = drawn_model(number)
    model = drawn.model
    alone = CheckedPasses(Context(plan("fp64")))
    for path, old in list(model.named_modules()):
        if type(old) is nn.Dropout:
            model.set_submodule(path, Dropout(old, path, alone))
    trained = [p for p in model.parameters() if p.requires_grad]
    if drawn.adam:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            trained, drawn.lr, (0.9, 0.95), EPS, weight_decay=0.0
        )
    else:
        optimizer = torch.optim.SGD(trained, drawn.lr)
    losses = []
    torch.manual_seed(number)
    for ids, targets in batches(number, drawn.vocab, STEPS):
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    losses.append(evaluated(drawn, None))
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def evaluated(drawn: Drawn, parallel_loss: Any) -> float:
    """The loss of other samples in evaluation."""
    drawn.model.eval()
    ids, targets = batches(-1, drawn.vocab, 1)[0]
    with torch.no_grad():
        return float(loss_of(drawn, ids, targets, parallel_loss))


def loss_of(drawn: Drawn, ids: Tensor, targets: Tensor, parallel_loss: Any) -> Tensor:
    logits = drawn.model(ids)
    if parallel_loss is not None:
        return parallel_loss(logits, targets).mean()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def on_two_ranks(mesh: DeviceMesh, numbers: list[int]) -> list[Trained | tuple[str, ...]]:
    """What is trained, or the lines that refuse it."""
    results: list[Trained | tuple[str, ...]] = []
    for number in numbers:
        try:
            results.append(cut_and_trained(mesh, number))
        except UserError as error:
            results.append(error.problems)
    return results


def cut_and_trained(mesh: DeviceMesh, number: int) -> Trained:
    drawn = drawn_model(number)
    model = drawn.model
    precision = plan("fp64")
    styles: Any = drawn.styles
    parallelize(model, Context(precision, Axis.of(mesh, "tp")), styles)
    rule = AdamW((0.9, 0.95), EPS) if drawn.adam else SGD(0.0)
    optimizer = ParallelAMPOptimizer(
        [model], precision, mesh, lr=drawn.lr, average=False, rule=rule, weight_decay=0.0, clip=0.0
    )
    parallel_loss = vocab_parallel_loss(model.head) if drawn.parallel_loss else None  # type: ignore[arg-type]
    losses = []
    torch.manual_seed(number)
    for step, (ids, targets) in enumerate(batches(number, drawn.vocab, STEPS)):
        try:
            loss = loss_of(drawn, ids, targets, parallel_loss)
            loss.backward()
            optimizer.step()
        except UserError:
            assert step == 0, f"model {number} was refused in step {step + 1}"
            raise
        losses.append(float(loss.detach()))
    losses.append(evaluated(drawn, parallel_loss))
    tensors = optimizer.state_dict()["tensors"]
    return losses, {
        key.removeprefix("weight/"): value
        for key, value in tensors.items()
        if key.startswith("weight/")
    }


def differences(one: Trained, two: Trained) -> list[str]:
    """What two ranks trained otherwise than one process."""
    assert one[1].keys() == two[1].keys()
    pairs: dict[str, tuple[Any, Any]] = {"losses": (torch.tensor(one[0]), torch.tensor(two[0]))}
    pairs |= {name: (value, two[1][name]) for name, value in one[1].items()}
    return [
        f"{name}: {(a.double() - b.double()).abs().max():.1e}"
        for name, (a, b) in pairs.items()
        if not torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-12)
    ]


def tried(numbers: list[int]) -> tuple[list[str], Counter[str]]:
    """What is wrong, and how often which line refuses."""
    wrong: list[str] = []
    refused: Counter[str] = Counter()
    first, second = run_ranks(on_two_ranks, {"tp": 2}, numbers=numbers)
    for number, one_rank, other_rank in zip(numbers, first, second, strict=True):
        words = f"{number}: {', '.join(drawn_model(number).words)}"
        if isinstance(one_rank[0], str):
            if other_rank != one_rank:
                wrong.append(f"{words}: other lines on rank 1: {one_rank} {other_rank}")
            refused[one_rank[0]] += 1
            continue
        if isinstance(other_rank[0], str) or one_rank[0] != other_rank[0]:
            wrong.append(f"{words}: ranks differ")
            continue
        if apart := differences(on_one_process(number), one_rank):
            wrong.append(f"{words}: {'; '.join(apart)}")
    return wrong, refused


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("first", range(0, MODELS, EACH))
def test_two_tensor_ranks_train_what_one_process_trains_or_refuse_the_model_in_its_first_step(
    first: int,
) -> None:
    wrong, _ = tried(list(range(first, first + EACH)))
    assert not wrong, "\n".join(wrong)
