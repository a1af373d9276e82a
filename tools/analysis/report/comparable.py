"""By what, besides the run, the numbers of several runs differ: other tokens, other text, other
samples, another step.

Two losses say something about two models only if they are means over the same tokens of the same
text. Where the newest checkpoints know the files that runs were trained on, those decide; elsewhere
the keys of the run files do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaprec.checkpoint.atomic import latest
from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.tokens.samples import held_out_samples
from tools.analysis.plots.compare_plot import Curve
from tools.analysis.report.run import Run
from tools.config.run_file import RunConfig, checkpoint_folder
from tools.config.tables.table import MAX_SIZE
from tools.training.batches import evaluated_samples
from tools.training.data_identity import Identity, describe_points, read_identity

Facts = Mapping[str, str]

TEXT_KEYS = (
    "data.source",
    "data.blend",
    "data.blend_phases",
    "data.text_field",
    "data.chat_template",
    "data.encoding",
    "data.exclude",
    "data.skip_bad",
    "data.max_chars",
)
TOKENIZER_KEYS = ("data.tokenizer", "data.vocab_size")
SAMPLE_KEYS = (
    "data.pack",
    "train.seq_length",
    "train.seq_schedule",
    "data.reset_attention_mask",
    "data.reset_position_ids",
    "data.eod_mask_loss",
    "data.loss_on",
)
HELD_OUT_KEYS = ("data.held_out",)
FOLDER_KEYS = ("train.folder", "data.cache")
EVALUATED = "the evaluated part"


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
    for run_name, run in zip(run_names, runs, strict=True):
        if not isinstance(run.config, RunConfig) and len(runs) > 1:
            unknown = "whether its text and settings are those of the others is not known"
            yield f"{run_name}: {unknown}, for its run.toml cannot be read"

    known = _with_run_files(run_names, runs)
    by_files = _know_files(known)
    tokenizers = {compared.name: _tokenizer_facts(compared, by_files) for compared in known}
    yield from _compare_facts(
        (
            "losses are per token of different tokenizers; bits per byte of `megaprec evaluate` "
            "can be compared"
        ),
        tokenizers,
    )
    texts = {compared.name: _text_facts(compared, by_files) for compared in known}
    yield from _compare_facts("losses are of different text", texts)
    samples = {compared.name: _key_facts(compared, SAMPLE_KEYS) for compared in known}
    yield from _compare_facts("losses are of samples of another kind", samples)
    evaluated = [compared for compared in known if _is_evaluated(compared)]
    held_out = {compared.name: _held_out_facts(compared) for compared in evaluated}
    yield from _compare_facts("held-out losses are of different text", held_out)
    newest_steps = dict[str, int]()
    steps_as_facts = dict[str, Facts]()
    for run_name, run in zip(run_names, runs, strict=True):
        step = run.records[-1]["step"]
        newest_steps[run_name] = step
        steps_as_facts[run_name] = {"step": f"{step:,}"}
    yield from _compare_facts("the runs are at different steps", steps_as_facts)
    yield from _older_evaluations(run_names, runs, newest_steps)


def has_other_tokens(run_names: Sequence[str], runs: Sequence[Run]) -> bool:
    """Return True if the runs are known to be of different text or of different tokenizers."""
    known = _with_run_files(run_names, runs)
    by_files = _know_files(known)
    for facts_of in (_tokenizer_facts, _text_facts):
        facts = {compared.name: facts_of(compared, by_files) for compared in known}
        if any(_compare_facts("", facts)):
            return True
    return False


def _with_run_files(run_names: Sequence[str], runs: Sequence[Run]) -> list[_Compared]:
    """Return the runs whose run.toml can be read."""
    known = list[_Compared]()
    for run_name, run in zip(run_names, runs, strict=True):
        if isinstance(run.config, RunConfig):
            known.append(_Compared(run_name, run, run.config, _read_identity(run)))
    return known


def _know_files(known: Sequence[_Compared]) -> bool:
    """Return True if all runs know digests of their files: only then can these be compared."""
    return all(compared.identity is not None for compared in known)


def differing_keys(run_names: Sequence[str], runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Return the keys that differ, with the value in each run: those that some run was given, but
    for names of folders. Of runs without a run file nothing."""
    values = dict[str, dict[str, str]]()
    given = set[str]()
    with_keys = 0
    for run_name, run in zip(run_names, runs, strict=True):
        if run.keys:
            with_keys += 1
        for key in run.keys:
            values.setdefault(key.name, {})[run_name] = key.value
            if key.origin != "default":
                given.add(key.name)
    differing = dict[str, dict[str, str]]()
    for name in sorted(given.difference(FOLDER_KEYS)):
        by_run = values[name]
        if len(set(by_run.values())) > 1 or len(by_run) < with_keys:
            differing[name] = by_run
    return differing


def branches(run_names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each run that is a branch of another one."""
    names = {run.folder.resolve(): name for name, run in zip(run_names, runs, strict=True)}
    for run_name, run in zip(run_names, runs, strict=True):
        if run.branching is None:
            continue
        origin = Path(str(run.branching["run"]))
        step = f"step {run.branching['step']:,}"
        if origin in names:
            yield f"{run_name} is a branch of {names[origin]}: they part after {step}"
        else:
            yield f"{run_name} is a branch of {origin}, from which it parts after {step}"


def _older_evaluations(
    run_names: Sequence[str], runs: Sequence[Run], newest_steps: Mapping[str, int]
) -> Iterator[str]:
    """Yield a line if held-out losses are older than the newest steps, up to which the other losses
    are means.
    """
    older = list[str]()
    for run_name, run in zip(run_names, runs, strict=True):
        evaluated_step = Curve(run_name, run.records).held_out_step
        newest_step = newest_steps[run_name]
        if evaluated_step is not None and evaluated_step < newest_step:
            older.append(f"after step {evaluated_step:,} of {newest_step:,} in {run_name}")
    if older:
        yield f"held-out losses are older than the newest step: {', '.join(older)}"


def _is_evaluated(compared: _Compared) -> bool:
    return any("eval_loss" in record for record in compared.run.records)


def _read_identity(run: Run) -> Identity | None:
    try:
        place = run.config.checkpoint.folder if isinstance(run.config, RunConfig) else ""
        newest = latest(checkpoint_folder(place, run.folder))
        return read_identity(Store(newest)) if newest else None
    except UserError:  # damaged: what it was trained on is not known
        return None


def _tokenizer_facts(compared: _Compared, by_files: bool) -> Facts:
    if not by_files or compared.identity is None:
        return _key_facts(compared, TOKENIZER_KEYS)
    # a few digits tell two files apart, and a line stays readable
    digest = compared.identity.tokenizer
    return {"tokenizer": f"SHA-256 {digest[:12]}" if digest else "none"}


def _text_facts(compared: _Compared, by_files: bool) -> Facts:
    """Return what the texts are: files by their digests, otherwise keys of the run file."""
    if not by_files or compared.identity is None:
        return _key_facts(compared, TEXT_KEYS)
    sources = list[str]()
    digests = list[str]()
    for dataset in compared.identity.sets:
        sources.append(f"{dataset.source} ({dataset.tokens:,} tokens)")
        digests.append(f"{dataset.bin_sha256[:12]} x {describe_points(dataset.points)}")
    return {"data": f"{', '.join(sources)}, SHA-256 {','.join(digests)}"}


def _held_out_facts(compared: _Compared) -> Facts:
    """Return what is held out, and how many samples of it an evaluation takes."""
    train = compared.config.train
    facts = dict(_key_facts(compared, HELD_OUT_KEYS))
    requested = evaluated_samples(train, MAX_SIZE)
    if compared.identity is not None:
        facts["data.held_out_from"] = compared.identity.held_out_from
    # Of a blend the held-out parts of all sets are mixed: their number alone says nothing.
    # Of packed documents the number of samples follows from the lengths of all.
    is_packed = compared.config.data.pack != "none"
    if compared.identity is None or len(compared.identity.sets) > 1 or is_packed:
        facts[EVALUATED] = f"{requested:,} samples at most"
        return facts
    tokens = compared.identity.sets[0].tokens
    samples = (tokens - 1) // train.seq_length  # the last token has no target
    held_out = held_out_samples(samples, compared.config.data.held_out)
    evaluated = min(held_out, requested)
    facts[EVALUATED] = f"{evaluated:,} of {held_out:,} samples"
    return facts


def _key_facts(compared: _Compared, keys: Sequence[str]) -> Facts:
    return {key: compared.config.value(key) for key in keys}


def _compare_facts(reason: str, facts_by_run: Mapping[str, Facts]) -> Iterator[str]:
    """Yield a line, which begins with the reason, if the runs differ in a fact."""
    names = dict[str, None]()  # a set that keeps the order
    for facts in facts_by_run.values():
        names |= dict.fromkeys(facts)
    differing = list[str]()
    for name in names:
        runs_by_value: dict[str, list[str]] = {}
        for run_name, facts in facts_by_run.items():
            value = facts.get(name, "not known")
            runs_by_value.setdefault(value, []).append(run_name)
        if len(runs_by_value) == 1:
            continue
        values = list[str]()
        for value, runs in runs_by_value.items():
            values.append(f"{value} in {', '.join(runs)}")
        differing.append(f"{name} is {'; '.join(values)}")
    if differing:
        yield f"{reason}: {'. '.join(differing)}"
