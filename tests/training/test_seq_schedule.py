"""Sequences whose length changes with the samples: each step is that of a plain model on the pieces
of its samples, no token is lost, and the run resumes with the bits of the whole one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.pieces import in_pieces
from megaprec.tokens.samples import Resets, Samples
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.passes import Share
from tests import layouts, oracle, runs
from tests.layouts import Recording, Run, fragments
from tests.ranks import run_ranks
from tests.refusals import raises
from tools.config.run_file import load_run
from tools.journal.records import read_events
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

LENGTH = 16
SAMPLES = 4
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
RUN = Run(
    model=MODEL, compute="fp64", clip=0.0, length=LENGTH, samples=SAMPLES, steps=1, micro_batch=1
)


def batch_of(masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    dice = torch.Generator().manual_seed(7)
    tokens = torch.randint(MODEL["vocab"], (SAMPLES, LENGTH), generator=dice)
    targets = torch.randint(MODEL["vocab"], (SAMPLES, LENGTH), generator=dice)
    mask = (torch.rand(SAMPLES, LENGTH, generator=dice) < 0.6).float() if masked else None
    return tokens, targets, mask


def cut(share: Share, pieces: int) -> Share:
    def shorter(values: Tensor) -> Tensor:
        return values.reshape(len(values) * pieces, -1)

    return replace(
        share,
        tokens=shorter(share.tokens),
        targets=shorter(share.targets),
        mask=None if share.mask is None else shorter(share.mask),
        first=share.first * pieces,
        pieces=pieces,
    )


def stepped(mesh: DeviceMesh, run: Run, masked: bool) -> tuple[list[float], list[Any], list[Any]]:
    """The losses and gradients of steps of long, short and long sequences, with one engine, and the
    weights, which stay."""
    engine = layouts.make_engine(mesh, run)
    assert isinstance(engine, Engine) and isinstance(engine.optimizer, Recording)
    before = fragments(engine.optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    share = layouts.share_of(mesh, batch_of(masked))
    losses = [engine.step(cut(share, n), 0.0, 0).loss for n in (1, 4, 2, 1)]
    return losses, engine.optimizer.seen, before


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2}, {"sequence": True}),
        ({}, {}),
        ({"pp": 2}, {}),
        ({"pp": 2, "tp": 2}, {"kind": "1f1b", "sequence": True}),
        ({"cp": 2}, {}),
        ({"dp": 2}, {"zero_size": 2}),
        ({"pp": 2, "dp": 2}, {"micro_batch": 2}),
        ({"tp": 2}, {"shards": 4}),
    ],
)
def test_a_step_of_pieces_trains_as_a_plain_model_on_these_sequences(
    layout: dict[str, int], changes: dict[str, Any], masked: bool
) -> None:
    axes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1} | layout
    ranks = run_ranks(stepped, axes, run=replace(RUN, **changes), masked=masked)
    weights = layouts.assemble([before for _, _, before in ranks])
    for step, pieces in enumerate((1, 4, 2, 1)):
        w = {name: value.clone().requires_grad_() for name, value in weights.items()}
        tokens, targets, mask = batch_of(masked)
        rows = SAMPLES * pieces
        logits = oracle.logits(ModelConfig(**MODEL), w, tokens.reshape(rows, -1))
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        counted = torch.ones(SAMPLES * LENGTH).double() if mask is None else mask.flatten().double()
        loss = (losses * counted).sum() / counted.sum()
        loss.backward()
        gradients = layouts.assemble([seen[step] for _, seen, _ in ranks])
        for reported, _, _ in ranks:
            assert abs(reported[step] - loss.item()) < 1e-12
        for name, value in gradients.items():
            torch.testing.assert_close(value, w[name].grad, rtol=1e-11, atol=1e-12)


def test_pieces_have_every_target_once_and_the_documents_of_their_own_tokens(
    tmp_path: Path,
) -> None:
    """Beside samples of the short length, which the same stream is cut into anyway."""
    dice = np.random.default_rng(3)
    with IndexedWriter(tmp_path / "set", 300) as writer:
        for length in dice.integers(1, 30, 40).tolist():
            writer.add_document(dice.integers(0, 300, length))
    dataset = IndexedDataset(tmp_path / "set")
    resets = Resets(True, True, True)
    count = 16
    long = Samples(dataset, LENGTH, 0, False, resets=resets).batch(0, count)
    for pieces in (1, 2, 8):
        short = Samples(dataset, LENGTH // pieces, 0, False, resets=resets)
        expected = short.batch(0, count * pieces)
        found = in_pieces(long, pieces)
        for name in ("tokens", "targets", "mask", "documents", "positions"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (pieces, name)
        assert found.ids.tolist() == [id for id in range(count) for _ in range(pieces)]


SCHEDULE = "train.seq_schedule=[[0,4],[10,8],[30,16]]"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_run(tmp_path_factory.mktemp("lengths"))


def test_a_run_resumed_or_branched_between_lengths_has_the_bits_of_the_whole_run(
    file: Path, tmp_path: Path
) -> None:
    given = [SCHEDULE, "checkpoint.every=1", "checkpoint.keep=all"]
    whole = tmp_path / "whole"
    assert runs.train(file, *given, f"train.folder={whole}") == 0
    records = runs.steps(whole)
    # a step has the length that holds at its first sample
    assert [record["seq_length"] for record in records] == [4, 4, 8, 8, 16, 16]
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 7)]
    for step in (1, 3):
        resumed = runs.rewind(whole, tmp_path / f"resumed{step}", step)
        assert runs.train(file, *given, f"train.folder={resumed}") == 0
        assert runs.steps(resumed) == records
        begin = f"train.branch_from={whole}/checkpoints/step_{step:08d}"
        branched = tmp_path / f"branched{step}"
        assert runs.train(file, *given, begin, f"train.folder={branched}") == 0
        assert runs.steps(branched) == records[step:]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_lengths_change_alike_in_every_layout(
    layout: dict[str, int], file: Path, tmp_path: Path
) -> None:
    """With dropout, which is drawn by the place of a token in its sequence."""
    given = [SCHEDULE, "precision.compute=fp64", "train.eval_every=2"]
    assert runs.train(file, *given, f"train.folder={tmp_path}/one") == 0
    other = runs.train_on(file, *given, f"train.folder={tmp_path}/other", **layout)
    runs.assert_close(runs.steps(tmp_path / "one"), runs.steps(other), 1e-9)


PACKED = "data.reset_attention_mask=true data.reset_position_ids=true data.eod_mask_loss=true"


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    "keys",
    [
        "model.dropout=0.1",
        "model.mtp_layers=1",
        "model.experts=4 model.experts_per_token=2 model.router_aux_loss=0.01",
        f"precision.compute=bf16 {PACKED}",
        "train.numerics=canonical train.canonical_shards=2",
        "train.sentinel=1 precision.compute=fp16",
    ],
)
def test_a_step_of_short_sequences_is_that_of_a_run_of_short_samples(
    keys: str, file: Path, tmp_path: Path
) -> None:
    """The same text in file order: four times the batch of a quarter of the length."""
    given = ["data.shuffle=false", "data.held_out=0", "train.steps=3", *keys.split()]
    cut_always = "train.seq_schedule=[[0,4],[999999,16]]"
    assert runs.train(file, *given, cut_always, f"train.folder={tmp_path}/cut") == 0
    short = ["train.seq_length=4", "train.global_batch=32", "train.micro_batch=8"]
    short.append("model.max_positions=16")
    assert runs.train(file, *given, *short, f"train.folder={tmp_path}/short") == 0
    ours, theirs = runs.steps(tmp_path / "cut"), runs.steps(tmp_path / "short")
    of_schedule = [record.pop("seq_length") for record in ours]
    assert of_schedule == [4, 4, 4]
    assert ours == theirs


def test_what_is_wrong_in_a_piece_is_told_by_its_sample(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a batch of 8 samples in 32 pieces."""
    overflowing = ["precision.compute=fp16", "precision.loss_scale=1e38", "train.steps=2"]
    run = tmp_path / "overflow"
    runs.train(file, SCHEDULE, *overflowing, f"train.folder={run}")
    for event in read_events(run, "overflow"):
        first, end = event["first_sample"], event["first_sample"] + event["num_samples"]
        spans = [offender["samples"] for offender in event["offenders"] if offender["samples"]]
        assert spans
        # a micro-batch has two samples
        assert all(first <= begin and stop == begin + 2 <= end for begin, stop in spans)
    capfd.readouterr()
    with IndexedWriter(tmp_path / "bad", 300) as writer:
        ids = np.arange(400) % 200
        ids[16 * 5 + 9] = 250
        writer.add_document(ids)
    keys = [f"data.source={tmp_path}/bad", "data.tokenizer=", "model.vocab=300", "data.held_out=0"]
    keys += ["data.shuffle=false", f"train.folder={tmp_path}/bad_run", SCHEDULE]
    config = load_run(file, keys)
    corpus = open_corpus(config)
    smaller = replace(corpus, model=corpus.model.with_vocab(220))
    with raises("data.sample_outside_vocabulary", sample=5):
        Trainer(config, smaller, None).run()


@pytest.mark.parametrize(
    ("schedule", "more", "code"),
    [
        ("[[1,4],[9,16]]", [], "config.seq_schedule_begin"),
        ("[[0,4],[9,8],[9,16]]", [], "config.seq_schedule_order"),
        ("[[0,4],[9,8]]", [], "config.seq_schedule_last"),
        ("[[0,3],[9,16]]", [], "config.seq_schedule_undivided"),
        (
            "[[0,1],[9,16]]",
            ["parallel.tensor=2", "parallel.sequence=true"],
            "config.sequence_length",
        ),
        ("[[0,2],[9,16]]", ["model.mtp_layers=2"], "config.mtp_too_far"),
        (
            "[[0,2],[9,16]]",
            ["train.numerics=canonical", "train.canonical_shards=4", "model.kv_heads=4"],
            "config.canonical_sizes",
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    schedule: str, more: list[str], code: str, file: Path
) -> None:
    with raises(code):
        load_run(file, [f"train.seq_schedule={schedule}", *more])
