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
    """A run with what decides its numbers.

    identity: of the files it was trained on; None if that is not known.
    """

    name: str
    run: Run
    config: RunConfig
    identity: Identity | None


def differences(names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each reason why numbers of the runs cannot simply be compared."""
    compared = list[_Compared]()
    for name, run in zip(names, runs, strict=True):
        if isinstance(run.config, RunConfig):
            compared.append(_Compared(name, run, run.config, _read_identity(run)))
        elif len(runs) > 1:
            unknown = "whether its text and settings are those of the others is not known"
            yield f"{name}: {unknown}, for no run.toml can be read"

    # Digests of files can be compared only if they are known of all runs.
    by_files = all(run.identity is not None for run in compared)
    yield from _compare_facts(
        (
            "losses are per token of different tokenizers; bits per byte of `megaprec evaluate` "
            "can be compared"
        ),
        {run.name: _tokenizer_facts(run, by_files) for run in compared},
    )
    yield from _compare_facts(
        "losses are of different text",
        {run.name: _text_facts(run, by_files) for run in compared},
    )
    yield from _compare_facts(
        "losses are of samples of another kind",
        {run.name: _key_facts(run, SAMPLE_KEYS) for run in compared},
    )
    yield from _compare_facts(
        "held-out losses are of different text",
        {run.name: _held_out_facts(run) for run in compared if _is_evaluated(run)},
    )
    newest_steps = dict[str, int]()
    for name, run in zip(names, runs, strict=True):
        newest_steps[name] = run.records[-1]["step"]
    yield from _compare_facts(
        "the runs are at different steps",
        {name: {"step": f"{step:,}"} for name, step in newest_steps.items()},
    )
    yield from _older_evaluations(names, runs, newest_steps)


def _older_evaluations(
    names: Sequence[str], runs: Sequence[Run], newest_steps: Mapping[str, int]
) -> Iterator[str]:
    """Yield a line if held-out losses are older than the newest steps.

    The other losses are means up to the newest steps.
    """
    older = list[str]()
    for name, run in zip(names, runs, strict=True):
        step = Curve(name, run.records).held_out_step
        newest = newest_steps[name]
        if step is not None and step < newest:
            older.append(f"after step {step:,} of {newest:,} in {name}")
    if older:
        yield f"held-out losses are older than the newest step: {', '.join(older)}"


def _is_evaluated(run: _Compared) -> bool:
    return any("eval_loss" in record for record in run.run.records)


def _read_identity(run: Run) -> Identity | None:
    try:
        newest = latest(run.folder / "checkpoints")
        return read_identity(Store(newest)) if newest else None
    except UserError:  # damaged: what it was trained on is not known
        return None


def _tokenizer_facts(run: _Compared, by_files: bool) -> Facts:
    if not by_files or run.identity is None:
        return _key_facts(run, TOKENIZER_KEYS)
    digest = run.identity.tokenizer
    return {"tokenizer": f"SHA-256 {digest[:12]}" if digest else "none"}


def _text_facts(run: _Compared, by_files: bool) -> Facts:
    if not by_files or run.identity is None:
        return _key_facts(run, TEXT_KEYS)
    names = list[str]()
    digests = list[str]()
    for dataset in run.identity.sets:
        names.append(f"{dataset.source} ({dataset.tokens:,} tokens)")
        digests.append(f"{dataset.bin_sha256[:12]} x {dataset.weight:g}")
    return {"data": f"{', '.join(names)}, SHA-256 {','.join(digests)}"}


def _held_out_facts(run: _Compared) -> Facts:
    train = run.config.train
    facts = dict(_key_facts(run, HELD_OUT_KEYS))
    requested = train.eval_batches * train.global_batch
    # Of a blend the held-out parts of all sets are mixed: their number alone says nothing.
    if run.identity is None or len(run.identity.sets) > 1:
        facts[EVALUATED] = f"{requested:,} samples at most"
        return facts
    samples = (run.identity.sets[0].tokens - 1) // train.seq_length  # the last token has no target
    held_out = held_out_samples(samples, run.config.data.held_out)
    evaluated = min(held_out, requested)
    facts["the evaluated part"] = f"{evaluated:,} of {held_out:,} samples"
    return facts


def _key_facts(run: _Compared, keys: Sequence[str]) -> Facts:
    return {key: run.config.value(key) for key in keys}


def _compare_facts(reason: str, facts_by_run: Mapping[str, Facts]) -> Iterator[str]:
    """Yield a line, which begins with the reason, if the runs differ in a fact."""
    keys = dict[str, None]()  # a set that keeps the order
    for facts in facts_by_run.values():
        keys |= dict.fromkeys(facts)
    parts = list[str]()
    for key in keys:
        runs_by_value: dict[str, list[str]] = {}
        for name, facts in facts_by_run.items():
            runs_by_value.setdefault(facts.get(key, "not known"), []).append(name)
        if len(runs_by_value) > 1:
            values = [f"{value} in {', '.join(names)}" for value, names in runs_by_value.items()]
            parts.append(f"{key} is {'; '.join(values)}")
    if parts:
        yield f"{reason}: {'. '.join(parts)}"
