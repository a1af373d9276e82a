"""By what, besides the compared_run, the numbers of several runs differ: other tokens, other text,
other samples, another step.

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
from tools.analysis.plots.compare_plot import Curve
from tools.analysis.report.run import Run
from tools.config.run_file import RunConfig
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


def differences(run_names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each reason why numbers of the runs cannot simply be compared."""
    compared = list[_Compared]()
    for run_name, compared_run in zip(run_names, runs, strict=True):
        if isinstance(compared_run.config, RunConfig):
            compared.append(
                _Compared(run_name, compared_run, compared_run.config, _read_identity(compared_run))
            )
        elif len(runs) > 1:
            unknown = "whether its text and settings are those of the others is not known"
            yield f"{run_name}: {unknown}, for no run.toml can be read"

    # Digests of files can be compared only if they are known of all runs.
    by_files = all(compared_run.identity is not None for compared_run in compared)
    yield from _compare_facts(
        (
            "losses are per token of different tokenizers; bits per byte of `megaprec evaluate` "
            "can be compared"
        ),
        {compared_run.name: _tokenizer_facts(compared_run, by_files) for compared_run in compared},
    )
    yield from _compare_facts(
        "losses are of different text",
        {compared_run.name: _text_facts(compared_run, by_files) for compared_run in compared},
    )
    yield from _compare_facts(
        "losses are of samples of another kind",
        {compared_run.name: _key_facts(compared_run, SAMPLE_KEYS) for compared_run in compared},
    )
    yield from _compare_facts(
        "held-out losses are of different text",
        {
            compared_run.name: _held_out_facts(compared_run)
            for compared_run in compared
            if _is_evaluated(compared_run)
        },
    )
    newest_steps = dict[str, int]()
    for run_name, compared_run in zip(run_names, runs, strict=True):
        newest_steps[run_name] = compared_run.records[-1]["step"]
    yield from _compare_facts(
        "the runs are at different steps",
        {run_name: {"step": f"{newest_step:,}"} for run_name, newest_step in newest_steps.items()},
    )
    yield from _older_evaluations(run_names, runs, newest_steps)


def _older_evaluations(
    run_names: Sequence[str], runs: Sequence[Run], newest_steps: Mapping[str, int]
) -> Iterator[str]:
    """Yield a line if held-out losses are older than the newest steps.

    The other losses are means up to the newest steps.
    """
    older = list[str]()
    for run_name, compared_run in zip(run_names, runs, strict=True):
        newest_step = Curve(run_name, compared_run.records).held_out_step
        newest = newest_steps[run_name]
        if newest_step is not None and newest_step < newest:
            older.append(f"after step {newest_step:,} of {newest:,} in {run_name}")
    if older:
        yield f"held-out losses are older than the newest step: {', '.join(older)}"


def _is_evaluated(compared_run: _Compared) -> bool:
    return any("eval_loss" in record for record in compared_run.run.records)


def _read_identity(compared_run: Run) -> Identity | None:
    try:
        newest = latest(compared_run.folder / "checkpoints")
        return read_identity(Store(newest)) if newest else None
    except UserError:  # damaged: what it was trained on is not known
        return None


def _tokenizer_facts(compared_run: _Compared, by_files: bool) -> Facts:
    if not by_files or compared_run.identity is None:
        return _key_facts(compared_run, TOKENIZER_KEYS)
    # a few digits tell two files apart, and a line stays readable
    digest = compared_run.identity.tokenizer
    return {"tokenizer": f"SHA-256 {digest[:12]}" if digest else "none"}


def _text_facts(compared_run: _Compared, by_files: bool) -> Facts:
    if not by_files or compared_run.identity is None:
        return _key_facts(compared_run, TEXT_KEYS)
    run_names = list[str]()
    digests = list[str]()
    for dataset in compared_run.identity.sets:
        run_names.append(f"{dataset.source} ({dataset.tokens:,} tokens)")
        digests.append(f"{dataset.bin_sha256[:12]} x {dataset.weight:g}")
    return {"data": f"{', '.join(run_names)}, SHA-256 {','.join(digests)}"}


def _held_out_facts(compared_run: _Compared) -> Facts:
    train = compared_run.config.train
    run_facts = dict(_key_facts(compared_run, HELD_OUT_KEYS))
    requested = train.eval_batches * train.global_batch
    # Of a blend the held-out parts of all sets are mixed: their number alone says nothing.
    if compared_run.identity is None or len(compared_run.identity.sets) > 1:
        run_facts[EVALUATED] = f"{requested:,} samples at most"
        return run_facts
    samples = (
        compared_run.identity.sets[0].tokens - 1
    ) // train.seq_length  # the last token has no target
    held_out = held_out_samples(samples, compared_run.config.data.held_out)
    evaluated = min(held_out, requested)
    run_facts["the evaluated part"] = f"{evaluated:,} of {held_out:,} samples"
    return run_facts


def _key_facts(compared_run: _Compared, keys: Sequence[str]) -> Facts:
    return {fact_name: compared_run.config.value(fact_name) for fact_name in keys}


def _compare_facts(reason: str, facts_by_run: Mapping[str, Facts]) -> Iterator[str]:
    """Yield a line, which begins with the reason, if the runs differ in a fact."""
    keys = dict[str, None]()  # a set that keeps the order
    for run_facts in facts_by_run.values():
        keys |= dict.fromkeys(run_facts)
    parts = list[str]()
    for fact_name in keys:
        runs_by_value: dict[str, list[str]] = {}
        for run_name, run_facts in facts_by_run.items():
            runs_by_value.setdefault(run_facts.get(fact_name, "not known"), []).append(run_name)
        if len(runs_by_value) > 1:
            values = [
                f"{value} in {', '.join(run_names)}" for value, run_names in runs_by_value.items()
            ]
            parts.append(f"{fact_name} is {'; '.join(values)}")
    if parts:
        yield f"{reason}: {'. '.join(parts)}"
