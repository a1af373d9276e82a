"""By what, besides the run, the numbers of several runs differ: other tokens, other text, other
samples, another step.

Two losses say something about two models only if they are means over the same tokens of the same
text. Where the newest checkpoints know the files that runs were trained on, those decide; elsewhere
the keys of the run files do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaprec.checkpoint.atomic import latest
from megaprec.checkpoint.reader import Store
from megaprec.data.samples import held_out_samples
from megaprec.errors import UserError
from tools.config.run_file import RunConfig
from tools.plots.compare_plot import Curve
from tools.report.run import Run
from tools.training.data_identity import Identity, read_identity

Facts = Mapping[str, str]

TEXT_KEYS = ("data.source", "data.blend", "data.text_field", "data.max_chars")
TOKENIZER_KEYS = ("data.tokenizer", "data.vocab_size")
SAMPLE_KEYS = (
    "train.seq_length",
    "data.reset_attention_mask",
    "data.reset_position_ids",
    "data.eod_mask_loss",
)
HELD_OUT_KEYS = ("data.held_out",)
EVALUATED = "train.eval_batches x train.global_batch"


@dataclass(frozen=True)
class _Compared:
    """A run with what decides its numbers. identity: of the files it was trained on; None if that
    is not known."""

    name: str
    run: Run
    config: RunConfig
    identity: Identity | None


def differences(names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each reason why numbers of the runs, beside each other, say something else
    than they seem to."""
    known = []
    for name, run in zip(names, runs, strict=True):
        if isinstance(run.config, RunConfig):
            known.append(_Compared(name, run, run.config, _identity(run)))
        elif len(runs) > 1:
            unknown = "whether its text and settings are those of the others is not known"
            yield f"{name}: {unknown}, for no run.toml can be read"
    with_files = all(one.identity is not None for one in known)
    yield from _told(
        (
            "losses are per token of different tokenizers; bits per byte of `megaprec evaluate` "
            "can be compared"
        ),
        {one.name: _tokenizer(one, with_files) for one in known},
    )
    yield from _told(
        "losses are of different text", {one.name: _text(one, with_files) for one in known}
    )
    yield from _told(
        "losses are of samples of another kind",
        {one.name: _keys(one, SAMPLE_KEYS) for one in known},
    )
    evaluated = [one for one in known if any("eval_loss" in record for record in one.run.records)]
    yield from _told(
        "held-out losses are of different text", {one.name: _held_out(one) for one in evaluated}
    )
    newest = dict(zip(names, (run.records[-1]["step"] for run in runs), strict=True))
    yield from _told(
        "the runs are at different steps",
        {name: {"step": f"{step:,}"} for name, step in newest.items()},
    )
    yield from _older_evaluations(names, runs, newest)


def _older_evaluations(
    names: Sequence[str], runs: Sequence[Run], newest: Mapping[str, int]
) -> Iterator[str]:
    """Yield a line if held-out losses are not those of the newest steps, which the other losses are
    means up to."""
    at = {
        name: Curve(name, run.records).held_out_step for name, run in zip(names, runs, strict=True)
    }
    older = {name: step for name, step in at.items() if step is not None and step < newest[name]}
    if older:
        steps = ", ".join(
            f"after step {step:,} of {newest[name]:,} in {name}" for name, step in older.items()
        )
        yield f"held-out losses are older than the newest step: {steps}"


def _identity(run: Run) -> Identity | None:
    try:
        newest = latest(run.folder / "checkpoints")
        return read_identity(Store(newest)) if newest else None
    except UserError:
        return None


def _tokenizer(one: _Compared, with_files: bool) -> Facts:
    if with_files and one.identity is not None:
        return {
            "tokenizer": f"SHA-256 {one.identity.tokenizer[:12]}"
            if one.identity.tokenizer
            else "none"
        }
    return _keys(one, TOKENIZER_KEYS)


def _text(one: _Compared, with_files: bool) -> Facts:
    if not with_files or one.identity is None:
        return _keys(one, TEXT_KEYS)
    sets = [f"{dataset.source} ({dataset.tokens:,} tokens)" for dataset in one.identity.sets]
    digests = ",".join(
        f"{dataset.bin_sha256[:12]} x {dataset.weight:g}" for dataset in one.identity.sets
    )
    return {"data": f"{', '.join(sets)}, SHA-256 {digests}"}


def _held_out(one: _Compared) -> Facts:
    train = one.config.train
    asked = train.eval_batches * train.global_batch
    if one.identity is None or len(one.identity.sets) > 1:
        return {**_keys(one, HELD_OUT_KEYS), EVALUATED: f"{asked:,} samples at most"}
    held = held_out_samples(
        (one.identity.sets[0].tokens - 1) // train.seq_length, one.config.data.held_out
    )
    return {
        **_keys(one, HELD_OUT_KEYS),
        "the evaluated part": f"{min(held, asked):,} of {held:,} samples",
    }


def _keys(one: _Compared, keys: Sequence[str]) -> Facts:
    return {key: one.config.value(key) for key in keys}


def _told(what: str, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Yield a line if the runs differ in a fact. facts: by the name of the run."""
    keys = dict.fromkeys(key for known in facts.values() for key in known)
    parts = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for name, known in facts.items():
            by_value.setdefault(known.get(key, "not known"), []).append(name)
        if len(by_value) > 1:
            values = "; ".join(
                f"{value} in {', '.join(names)}" for value, names in by_value.items()
            )
            parts.append(f"{key} is {values}")
    if parts:
        yield f"{what}: {'. '.join(parts)}"
