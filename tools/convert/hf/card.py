"""The model card of a Hugging Face folder, README.md: metadata for the Hub, then what is known
of the training.

The metadata are the YAML between two lines of "---". Values are written as JSON, which is YAML too,
so that no text of a run file changes what the metadata say. Secrets of URLs are in no `RunRecord`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from megaprec.durable import put_bytes
from megaprec.errors import UserError
from megaprec.parsing import parse_toml
from megaprec.tested_versions import installed_version
from tools.config.run_file import tables_of_a_run
from tools.console.toml import toml
from tools.convert.core.source import RunRecord, Source, TrainedText
from tools.convert.core.tensors import torch_name
from tools.convert.hf.config import model_type_of
from tools.journal.records import AVERAGE_LOSS, HELD_OUT_LOSS
from tools.saved.train_state import TrainState

CARD = "README.md"
TAG = "megaprec"
# what YAML takes only escaped
UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
LICENCES = "https://huggingface.co/docs/hub/repositories-licenses"
HUB_DATA = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")
model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")
```"""


def write_card(folder: Path, source: Source, dtype: torch.dtype) -> None:
    """Write the card of a folder that has the model of `source`. dtype: of its weights. Raises
    OSError."""
    card = model_card(source, dtype)
    # the name of a file need not be UTF-8
    put_bytes(folder / CARD, card.encode(errors="replace"))


def model_card(source: Source, dtype: torch.dtype) -> str:
    """Return the card of a model. dtype: of its weights in the folder.

    What a source does not say, as other formats than ours do not, is left out. The licence is left
    to the user.
    """
    name = _name_of(source)
    lines = ["---", *_metadata(source, name), "---", "", f"# {name}", ""]
    lines += [*_description(source, dtype), "", USE, ""]
    run = source.facts.run
    if run is not None and run.data:
        lines += ["## Data", "", *_data_table(run), ""]
    numbers = [*_numbers(source)]
    if numbers:
        lines += ["## Training", "", "| | |", "|---|---|", *numbers, ""]
    if run is not None and run.keys:
        lines += [*_settings(source, run), ""]
    lines += ["## Licence", "", "Not chosen yet: name one here and as `license` above.", ""]
    lines += ["## Limits", "", "Biases, risks and uses of the model have not been looked at."]
    return "\n".join(lines) + "\n"


def _name_of(source: Source) -> str:
    """Return the name of the run's folder, or that of the source."""
    run = source.facts.run
    folder = json.loads(run.keys.get("train.folder", '""')) if run else ""
    name = Path(folder).name or source.path.name
    return " ".join(name.split())


def _yaml(value: Any) -> str:
    """Return a value in one line of YAML."""

    def escaped(unprintable: re.Match[str]) -> str:
        return f"\\u{ord(unprintable[0]):04x}"

    return UNPRINTABLE.sub(escaped, json.dumps(value, ensure_ascii=False))


def _metadata(source: Source, name: str) -> Iterator[str]:
    """Yield the lines of a card's head that the hub reads."""
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    yield f"tags: {_yaml([TAG])}"
    datasets = _hub_data(source.facts.run)
    if datasets:
        yield f"datasets: {_yaml(datasets)}"
    yield f"# license: left to you; names are at {LICENCES}"
    results = _results(source)
    if results:
        yield f"model-index: {_yaml([{'name': name, 'results': results}])}"


def _hub_data(run: RunRecord | None) -> list[str]:
    """Return the data sets of the Hub that a run was trained on, each once."""
    if run is None:
        return []
    names: dict[str, None] = {}  # in order, each once
    for text in run.data:
        names |= dict.fromkeys(HUB_DATA.findall(text.source))
    return [*names]


def _results(source: Source) -> list[dict[str, Any]]:
    """Return the held-out loss as the Hub has results of evaluations; none if it is not known."""
    loss, bits = _evaluation(source)
    if loss is None:
        return []
    metrics = [{"type": "loss", "name": "held-out loss, nats a token", "value": loss}]
    if bits is not None:
        metrics.append({"type": "bits_per_byte", "name": "bits per byte", "value": bits})
    return [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": "held-out part of the training text", "type": "held-out"},
            "metrics": metrics,
        }
    ]


def _evaluation(source: Source) -> tuple[float | None, float | None]:
    """Return the held-out loss of the weights in nats a token and its bits per byte, each None if
    it is not known."""
    run = source.facts.run
    if run is None:
        return None, None
    field = AVERAGE_LOSS if source.facts.averaged else HELD_OUT_LOSS
    evaluated = run.evaluated.get(field)
    if evaluated is None:
        return None, None
    if run.held_out_bytes is None or run.held_out_tokens != evaluated.tokens:
        return evaluated.loss, None
    bits = evaluated.loss / math.log(2)
    return evaluated.loss, bits * evaluated.tokens / run.held_out_bytes


def _description(source: Source, dtype: torch.dtype) -> Iterator[str]:
    """Yield the sentences that say what the weights are."""
    shapes = [source.shapes[key] for key in source.keys("weight")]
    count = sum(map(prod, shapes))
    family = model_type_of(source.model)
    version = installed_version("megaprec") or "(not installed)"
    yield (
        f"A language model of the family `{family}` with {count:,} parameters, in "
        f"`{torch_name(dtype)}`, written by megaprec {version}."
    )
    if source.facts.averaged:
        yield "The weights are the moving average of those of the training (`optimizer.ema`)."
    for merged_input in source.facts.merged:
        factor = f"{merged_input.weight:g}"
        yield f"The weights are a mean, with a factor of {factor} for {merged_input.path.name}."
    if source.kind != TAG:
        yield f"It was converted from a checkpoint of the format `{source.kind}`."


def _data_table(run: RunRecord) -> Iterator[str]:
    yield "| source | weight | tokens | documents |"
    yield "|---|---|---|---|"
    for text in run.data:
        name = " ".join(text.source.split()).replace("|", "\\|")
        yield f"| `{name}` | {_weights(text)} | {text.tokens:,} | {text.documents:,} |"


def _weights(text: TrainedText) -> str:
    """Return the weight of a text, and those that follow it: "0.8, 0.2 from sample 80 on"."""
    changes = [f"{weight:g} from sample {samples:,} on" for samples, weight in text.later_weights]
    return ", ".join([f"{text.weight:g}", *changes])


def _numbers(source: Source) -> Iterator[str]:
    """Yield rows of the table of the training."""
    progress = TrainState(**source.facts.progress)
    if progress.step:
        skipped = progress.skipped
        note = f", of which {skipped:,} were skipped" if skipped else ""
        yield f"| steps | {progress.step:,}{note} |"
        # files of another program may not count them
        tokens = f"{progress.learned_tokens:,}" if progress.tokens else "not known"
        yield f"| tokens | {tokens} |"
    loss, bits = _evaluation(source)
    if loss is not None:
        yield f"| held-out loss | {loss:.4f} nats a token |"
    elif progress.step:
        yield "| held-out loss | not evaluated after this step (`train.eval_every`) |"
    if bits is not None:
        yield f"| bits per byte | {bits:.4f} |"
    elif loss is not None:
        yield "| bits per byte | not known |"
    run = source.facts.run
    if run is not None and run.torch:
        yield f"| torch | {run.torch} |"


def _settings(source: Source, run: RunRecord) -> Iterator[str]:
    """Yield the command and its run file: the keys that differ from their defaults."""
    yield "```sh"
    yield "megaprec train run.toml"
    yield "```"
    yield ""
    yield "`run.toml`; what it leaves out has its default:"
    yield ""
    yield "```toml"
    for table, values in _tables(source, run).items():
        if values:
            yield f"[{table}]"
            yield from (f"{name} = {toml(value)}" for name, value in values.items())
    yield "```"


def _tables(source: Source, run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return the keys of a run that another run file needs to be the same run, by table."""
    tables: dict[str, dict[str, Any]] = {}
    for table, table_class in tables_of_a_run().items():
        if table == "model":
            values = source.model.model_dump()
        else:
            values = _values(run.keys, table)
        given = {name: value for name, value in values.items() if value is not None}
        tables[table] = _needed(table_class, given)
    return tables


def _values(keys: Mapping[str, str], table: str) -> dict[str, Any]:
    """Return the values of a table.

    keys: of all tables, by dotted name, with values as TOML writes them. A key that was not given
        has a text that is no TOML, and is left out.
    """
    values: dict[str, Any] = {}
    for key, text in keys.items():
        if key.startswith(f"{table}."):
            with suppress(ValueError):
                values[key.removeprefix(f"{table}.")] = parse_toml(f"value = {text}")["value"]
    return values


def _needed(table_class: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that have to be given for the table to be the same: the others are defaults
    given these. All of them are returned if this version knows no such table."""
    try:
        table = table_class(**values)
    except (ValueError, UserError):
        return values
    needed = values
    for name in values:
        others = {key: value for key, value in needed.items() if key != name}
        # a key without a default, or without which others do not fit
        with suppress(ValueError, UserError):
            if table_class(**others) == table:
                needed = others
    return needed
