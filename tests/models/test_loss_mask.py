"""A data set's loss mask trains as a plain model does whose labels are -100 where nothing counts, in
every layout; the samples of a data set have it wherever its tokens stand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.tokens.blend import Blend, WeightedStretch
from megaprec.tokens.document_tokens import with_begin
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Batch, Resets, Samples
from models.config import ModelConfig
from models.engine.engine import Engine, mean_loss
from tests import layouts, oracle
from tests.layouts import Recording, Run, fragments
from tests.ranks import run_ranks

LENGTH = 16
SAMPLES = 8
IGNORED = -100
MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 48,
    "max_positions": 32,
    "init_std": 0.4,
}
RUN = Run(model=MODEL, compute="fp64", clip=0.0, length=LENGTH, samples=SAMPLES, steps=1)


def write(prefix: Path, seed: int, has_mask: bool = True) -> list[tuple[list[int], list[bool]]]:
    """A data set of conversations, whose counted tokens come in runs; return its documents."""
    dice = np.random.default_rng(seed)
    written: list[tuple[list[int], list[bool]]] = []
    with IndexedWriter(prefix, MODEL["vocab"], has_mask=has_mask) as writer:
        for length in dice.integers(3, 40, 12).tolist():
            ids = dice.integers(0, MODEL["vocab"] - 1, length)
            counted = np.repeat(dice.random(length // 5 + 1) < 0.4, 5)[:length]
            writer.extend(ids, np.array([length]), counted if has_mask else None)
            written.append((ids.tolist(), counted.tolist() if has_mask else [True] * length))
    return written


def labels_of(documents: list[tuple[list[int], list[bool]]]) -> list[int]:
    """The stream's tokens as labels, -100 where they do not count."""
    return [
        token if counts else IGNORED
        for ids, counted in documents
        for token, counts in zip(ids, counted, strict=True)
    ]


def batch_of(prefix: Path) -> Batch:
    resets = Resets(loss_mask=True)
    return Samples(IndexedDataset(prefix), LENGTH, 0, False, resets=resets).batch(0, SAMPLES)


def stepped(mesh: DeviceMesh, run: Run, prefix: Path) -> tuple[float, list[Any], list[Any]]:
    """The loss, the gradients and the weights before them of one step on this rank's share."""
    engine = layouts.make_engine(mesh, run)
    optimizer = engine.optimizer
    assert isinstance(engine, Engine) and isinstance(optimizer, Recording)
    before = fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    batch = batch_of(prefix)
    share = layouts.share_of(mesh, (batch.tokens, batch.targets, batch.mask))
    report = engine.step(share, 0.0, 0)
    return report.loss, optimizer.seen[0], before


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2}, {"sequence": True}),
        ({}, {}),
        ({"pp": 2}, {}),
        ({"cp": 2}, {}),
        ({"dp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"micro_batch": 1}),
    ],
)
def test_a_mask_trains_as_labels_that_are_ignored(
    tmp_path: Path, layout: dict[str, int], changes: dict[str, Any]
) -> None:
    labels = labels_of(write(tmp_path / "set", 1))
    run = replace(RUN, **changes)
    axes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1} | layout
    ranks = run_ranks(stepped, axes, run=run, prefix=tmp_path / "set")
    weights = layouts.assemble([before for _, _, before in ranks])
    gradients = layouts.assemble([seen for _, seen, _ in ranks])

    w: dict[str, Tensor] = {name: value.clone().requires_grad_() for name, value in weights.items()}
    batch = batch_of(tmp_path / "set")
    rows = [labels[n * LENGTH + 1 : (n + 1) * LENGTH + 1] for n in range(SAMPLES)]
    logits = oracle.logits(ModelConfig(**MODEL), w, batch.tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(rows).flatten(), ignore_index=IGNORED)
    loss.backward()
    for reported, _, _ in ranks:
        assert abs(reported - loss.item()) < 1e-12
    assert gradients.keys() == {name for name, value in w.items() if value.grad is not None}
    for name, value in gradients.items():
        torch.testing.assert_close(value, w[name].grad, rtol=1e-12, atol=1e-12)


def test_a_held_out_loss_is_the_mean_over_tokens_and_not_over_samples() -> None:
    losses_and_counts = torch.tensor([[2.0, 3.0, 0.0], [1.0, 3.0, 0.0]], dtype=torch.float64)
    assert mean_loss(losses_and_counts) == 1.25


def test_samples_have_the_mask_of_their_targets_and_begin_tokens_do_not_count(
    tmp_path: Path,
) -> None:
    begin = MODEL["vocab"] - 1
    documents = write(tmp_path / "set", 2)
    with_begins = [([begin, *ids], [False, *counted]) for ids, counted in documents]
    for stream, expected in (
        (IndexedDataset(tmp_path / "set"), documents),
        (with_begin(IndexedDataset(tmp_path / "set"), begin), with_begins),
    ):
        labels = torch.tensor(labels_of(expected))
        samples = Samples(stream, LENGTH, 0, False, resets=Resets(loss_mask=True))
        batch = samples.batch(0, len(samples))
        assert batch.mask is not None
        shifted = labels[1 : 1 + batch.targets.numel()].reshape(batch.targets.shape)
        masked = torch.where(batch.mask > 0, batch.targets, IGNORED)
        torch.testing.assert_close(masked, shifted)
        assert samples.count_without_target() == int((batch.mask.sum(1) == 0).sum()) > 0


def test_a_mask_of_a_data_set_and_of_document_ends_are_both_followed(tmp_path: Path) -> None:
    write(tmp_path / "set", 3)
    dataset = IndexedDataset(tmp_path / "set")
    of_mask, of_ends, of_both = (
        Samples(dataset, LENGTH, 0, False, resets=resets).batch(0, SAMPLES).mask
        for resets in (
            Resets(loss_mask=True),
            Resets(eod_mask_loss=True),
            Resets(loss_mask=True, eod_mask_loss=True),
        )
    )
    assert of_mask is not None and of_ends is not None and of_both is not None
    assert torch.equal(of_both, of_mask * of_ends)
    assert not torch.equal(of_both, of_mask) and not torch.equal(of_both, of_ends)


def test_in_a_blend_all_of_a_text_counts_beside_the_answers_of_conversations(
    tmp_path: Path,
) -> None:
    write(tmp_path / "chats", 4)
    write(tmp_path / "text", 5, has_mask=False)
    parts = [
        Samples(IndexedDataset(tmp_path / name), LENGTH, 0, False, resets=Resets(loss_mask=True))
        for name in ("chats", "text")
    ]
    blend = Blend(parts, [WeightedStretch.first([0.5, 0.5])], ["chats", "text"])
    for position in range(8):
        batch = blend.batch(position, 1)
        assert batch.mask is not None
        is_text = blend.labels(batch.ids)[0].startswith("text")
        assert bool(batch.mask.all()) is is_text
