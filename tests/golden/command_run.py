"""The published run by `megaprec train`, from a run file.

Its windows lie anywhere in the text, and each is a document of one token more than its length. With
samples of as many tokens as documents have, sample and document begin together; the last target of
a sample is the first token of the next document, which data.eod_mask_loss leaves out of the loss.
So the model has one position more, which no target is predicted from.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from megaprec.tokens.indexed import IndexedWriter
from tests.golden.runs import Curve
from tests.golden.stream import (
    BETAS,
    CLIP,
    EPS,
    WEIGHT_DECAY,
    Setting,
    Stream,
    Text,
    Windows,
)
from tools.console.toml import toml
from tools.convert.core.target import convert
from tools.convert.native import native_target
from tools.verify.oracle.transformers_model import source_of

NAME = "megaprec train"


def start(words: Sequence[str], output: Path) -> None:
    """Run the command in a process of its own. output: a file, which what it says is added to."""
    command = [sys.executable, "-m", "tools.cli", *words]
    with output.open("a") as stream:
        subprocess.run(command, check=True, stdout=stream, stderr=subprocess.STDOUT)


Start = Callable[[Sequence[str], Path], None]


def command_run(
    setting: Setting, text: Text, folder: Path, stop: int = 0, start: Start = start
) -> Curve:
    """Train by the command in an empty folder.

    stop: the step after which the run ends, and is resumed; 0: none.
    """
    stream = Stream(setting, text)
    vocab = len(text.characters)
    batches: list[Windows] = []
    validation: list[dict[str, str]] = []
    for step, drawn in enumerate(stream.steps()):
        batches.append(drawn.batch)
        for part, windows in drawn.evaluation.items():
            name = f"{part}_{step}"
            validation.append({"name": name, "source": str(folder / name)})
            _write(folder / name, windows, vocab)
    _write(folder / "batches", batches, vocab)
    _write_weights(setting, stream, vocab, folder / "weights")
    run_file = folder / "run.toml"
    run_file.write_text(_run_file(setting, validation, folder))
    words = ["train", str(run_file)]
    output = folder / "output.txt"
    if stop:
        start([*words, f"train.steps={stop}"], output)
    start(words, output)
    return _read_curve(setting, folder / "run")


def _write(prefix: Path, batches: Iterable[Windows], vocab: int) -> None:
    """Write windows as documents, each of the tokens and the last target."""
    with IndexedWriter(prefix, vocab) as writer:
        for batch in batches:
            whole = torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
            for document in whole.tolist():
                writer.add_document(document)
        # the last sample has a next token too
        writer.add_document([0])


def _write_weights(setting: Setting, stream: Stream, vocab: int, folder: Path) -> None:
    """Write the initial weights as a checkpoint, with a last position of zeros."""
    weights = dict(stream.weights)
    weights["positions.weight"] = F.pad(weights["positions.weight"], (0, 0, 0, 1))
    model = setting.model(vocab)
    model = type(model)(**{**model.model_dump(), "max_positions": setting.length + 1})
    source = source_of(model, weights)
    convert(source, native_target(source, None), folder, lambda written, what: None)


def _run_file(setting: Setting, validation: list[dict[str, str]], folder: Path) -> str:
    tables = {
        "data": {
            "source": str(folder / "batches"),
            "shuffle": False,
            "held_out": 0.0,
            "eod_mask_loss": True,
            "validation": validation,
        },
        "precision": {"compute": "fp32"},
        "optimizer": {
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
            "clip": CLIP,
        },
        "lr": {
            "schedule": "cosine",
            "initial": setting.peak / (setting.warmup + 1),
            "peak": setting.peak,
            "final": setting.final,
            "warmup": setting.warmup,
            "length": setting.decay_end,
        },
        "train": {
            "init_from": str(folder / "weights"),
            "steps": setting.steps,
            "global_batch": setting.samples,
            "micro_batch": setting.samples,
            "seq_length": setting.length + 1,
            "eval_first": True,
            "eval_every": setting.eval_every,
            "eval_samples": setting.samples * setting.eval_batches,
            "threads": 1,
            "folder": str(folder / "run"),
        },
    }
    lines: list[str] = []
    for table, keys in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {toml(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _read_curve(setting: Setting, run: Path) -> Curve:
    """Read the losses from the files of the run."""
    curve = Curve()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (first,) = [event for event in events if event["event"] == "first_evaluation"]
    curve.evaluations[0] = _means(first["losses"], 0)
    for record in records:
        curve.batches.append(record["loss"])
        curve.norms.append(record["grad_norm"])
        if setting.evaluates(record["step"]):
            curve.evaluations[record["step"]] = _means(record, record["step"])
    return curve


def _means(record: dict[str, float], step: int) -> dict[str, float]:
    return {part: record[f"eval_loss/{part}_{step}"] for part in ("train", "held_out")}
