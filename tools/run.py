"""A run: one TOML file and `key=value` overrides, read into one frozen, checked `RunConfig`.

Every value has an origin: "default", "file run.toml", "command line", "preset gpt2". Reading goes in that
order from weakest to strongest (a preset below the file), then every table is typed, then the laws between
tables are checked; all problems of all three are reported together, before any rank starts. `save` writes
the whole resolved run, origins as comments, as a run file that can be run again.

An override is `table.key=value`, the value in TOML's grammar. For a key that holds text the quotes may be
left out; elsewhere, what TOML cannot read (`parallel.schedule=gpipe`) is taken as text.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megaprec.errors import UserError
from megaprec.lr import LRSchedule
from models.config import PRESETS, ModelConfig
from tools.checks import cross_problems, lr_schedule
from tools.convert.config import model_fields
from tools.convert.hf import CONFIG, TOKENIZER_FILES, hf_model
from tools.convert.vocabulary import main_file
from tools.settings import LR, Checkpoint, Data, Log, Optimizer, Parallel, Precision, Train

SAVED = "# Written by megaprec: the resolved run. Comments say where a value came from."
PRESET_DOC = f"a model known by name, to which the keys here are changes: {', '.join(PRESETS)}"
FREE = {"dropout", "attention_dropout", "init_std"}  # keys of [model] that do not make it another model
PLAINER = {"bool_type": "must be true or false", "string_type": "must be text in quotes"}


class RunConfig(BaseModel):
    """Everything one run is decided by. Built by `load_run`, or from tables: `RunConfig(model=..., train=...)`.

    Raises pydantic's ValidationError (a ValueError) when the tables do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    data: Data = Data()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    lr: LR = LR()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _tables_fit(self) -> Self:
        if problems := cross_problems(dict(self)):
            raise UserError(*problems)
        return self

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.data

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per step of one replica."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all replicas."""
        return self.train.global_batch * self.train.seq_length

    @property
    def checkpoint_folder(self) -> Path:
        """Where the run's checkpoints lie."""
        return Path(self.train.folder) / "checkpoints"

    @property
    def lr_schedule(self) -> LRSchedule:
        """The learning rate; ask it at the steps or samples taken, as lr.unit says."""
        return lr_schedule(self.lr, self.train)

    def origin(self, key: str) -> str:
        """Where the value of the dotted `key` came from: "default", "file ...", "command line" or "preset ..."."""
        return self._origins.get(key, "default")

    def value(self, key: str) -> str:
        """The value of the dotted `key`, in TOML's grammar."""
        table, name = key.split(".")
        return _toml(getattr(getattr(self, table), name))

    def save_resolved(self, folder: Path) -> Path:
        """Writes the run to folder/run.toml and returns that path; a run file of the user's own is left alone."""
        path = folder / "run.toml"
        if path.exists() and not path.read_bytes().startswith(SAVED.encode()):
            path = folder / "run.resolved.toml"
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(self._as_toml(), encoding="utf-8")
        os.replace(unfinished, path)
        return path

    def _as_toml(self) -> str:
        lines = [SAVED]
        for table, values in self.model_dump().items():
            lines += ["", f"[{table}]"]
            lines += [f"{k} = {_toml(v)}  # {_toml(self.origin(f'{table}.{k}'))[1:-1]}" for k, v in values.items()]
        return "\n".join(lines) + "\n"


def check_world(config: RunConfig, world_size: int) -> None:
    """Raises UserError unless the `world_size` ranks that joined are those that the layout needs."""
    if world_size == config.world_size:
        return
    p = config.parallel
    replica = p.tensor * p.pipeline
    advice = f"start {config.world_size} ranks"
    if world_size % replica == 0:
        advice += f" or set parallel.data = {world_size // replica}"
    raise UserError(
        f"world size {world_size} != parallel.tensor {p.tensor} x parallel.pipeline {p.pipeline} x "
        f"parallel.data {p.data} = {config.world_size}: {advice}"
    )


def describe() -> str:
    """All keys of a run file with default and explanation, a line each, by table."""
    lines: list[str] = []
    for table, kind in _tables().items():
        lines += ["", f"[{table}]  {(kind.__doc__ or '').splitlines()[0]}"]
        if kind is ModelConfig:
            lines.append(f"{'model.preset':28}{'none':16}{PRESET_DOC}")
        lines += [f"{table + '.' + name:28}{_default(f):16}{f.description}" for name, f in kind.model_fields.items()]
    return "\n".join(lines[1:])


def load_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The run described by the TOML file `path` and changed by `overrides`. Raises UserError with all problems."""
    given, problems = _overridden(overrides)
    if path is not None:
        given = _from_file(Path(path)) | given
    problems += _unknown(given)
    problems += _add_preset(given)
    problems += _add_initial(given)
    length = given.get("train.seq_length")
    if length is not None and isinstance(length.value, int):
        given.setdefault("model.max_positions", _Given(length.value, "train.seq_length"))
    tables: dict[str, Any] = {}
    for table, kind in _tables().items():
        values = {name: given[f"{table}.{name}"].value for name in kind.model_fields if f"{table}.{name}" in given}
        try:
            tables[table] = kind.model_validate(values)
        except ValidationError as error:
            problems += _explained(table, kind, error, given)
    problems += cross_problems(tables)
    if problems:
        raise UserError(*problems)
    config = RunConfig(**tables)
    config._origins = {key: entry.origin for key, entry in given.items()}
    return config


@dataclass(frozen=True)
class _Given:
    """A value and where it came from."""

    value: Any
    origin: str


def _tables() -> dict[str, type[BaseModel]]:
    kinds = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def _fields() -> dict[str, FieldInfo]:
    """Every dotted key but model.preset."""
    return {f"{t}.{name}": field for t, kind in _tables().items() for name, field in kind.model_fields.items()}


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"run file {path}: cannot be read ({reason})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"run file {path}: not TOML: {error}") from error
    origin = f"file {path}"
    given: dict[str, _Given] = {}
    for table, values in content.items():
        if isinstance(values, dict):
            given |= {f"{table}.{name}": _Given(value, origin) for name, value in values.items()}
        else:
            given[table] = _Given(values, origin)
    return given


def _overridden(overrides: Sequence[str]) -> tuple[dict[str, _Given], list[str]]:
    given: dict[str, _Given] = {}
    problems: list[str] = []
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if equals:
            given[key] = _Given(_override_value(key, text), "command line")
        else:
            problems.append(f'"{override}" (command line): an override is table.key=value, like train.steps=100')
    return given, problems


def _override_value(key: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    field = _fields().get(key)
    wants_text = key == "model.preset" or (field is not None and field.annotation is str)
    if parsed.keys() != {"value"} or (wants_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _add_preset(given: dict[str, _Given]) -> list[str]:
    """Puts the preset's fields under the given ones."""
    chosen = given.pop("model.preset", None)
    if chosen is None:
        return []
    if not isinstance(chosen.value, str) or chosen.value not in PRESETS:
        would = f"{', '.join(PRESETS)}{_did_you_mean(str(chosen.value), PRESETS)}"
        return [f"model.preset = {_toml(chosen.value)} ({chosen.origin}): no such preset; there are {would}"]
    for name, value in PRESETS[chosen.value].items():
        given.setdefault(f"model.{name}", _Given(value, f"preset {chosen.value}"))
    return []


def _add_initial(given: dict[str, _Given]) -> Iterator[str]:
    """Puts in what the folder of train.init_from says of model and tokenizer; yields what contradicts it."""
    asked = given.get("train.init_from")
    if asked is None or not isinstance(asked.value, str) or not asked.value:
        return
    folder = Path(asked.value).expanduser()
    try:
        said = model_fields(hf_model(folder))
    except UserError as error:
        yield from (f"train.init_from ({asked.origin}): {problem}" for problem in error.problems)
        return
    origin = f"{folder / CONFIG}"
    for name, value in said.items():
        chosen = given.setdefault(f"model.{name}", _Given(value, origin))
        if chosen.value != value and name not in FREE:
            there = f"it is {_toml(value)} in {origin}; leave it out, or leave train.init_from out"
            yield f"model.{name} = {_toml(chosen.value)} ({chosen.origin}): {there}"
    if tokenizer := main_file([folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]):
        given.setdefault("data.tokenizer", _Given(str(tokenizer), origin))


def _unknown(given: Mapping[str, _Given]) -> Iterator[str]:
    """One line for each unknown key, and only one for all keys of an unknown table."""
    known, tables, reported = [*_fields(), "model.preset"], _tables(), set[str]()
    for key, entry in given.items():
        table, dot, name = key.partition(".")
        if dot and table not in tables:
            if table not in reported:
                yield f"[{table}] ({entry.origin}): no such table{_did_you_mean(table, tables, '[{}]')}"
            reported.add(table)
        elif key not in known:
            yield f"{key} = {_toml(entry.value)} ({entry.origin}): no such key{_nearest_key(table, name or key, known)}"


def _nearest_key(table: str, name: str, known: Sequence[str]) -> str:
    """A hint at the key whose name within its table is most like `name`; at one of `table` rather than another."""
    here_last = sorted(known, key=lambda key: key.startswith(f"{table}."))
    keys = {key.partition(".")[2]: key for key in here_last}
    close = difflib.get_close_matches(name, keys, n=1)
    return f"; did you mean {keys[close[0]]}?" if close else ""


def _explained(table: str, kind: type[BaseModel], error: ValidationError, given: Mapping[str, _Given]) -> Iterator[str]:
    """Pydantic's findings in one table, each as a line that names key, value, origin and what would do."""
    for found in error.errors(include_url=False):
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            yield from (f"{table}.{problem}" for problem in cause.problems)
        elif found["type"] == "missing" and len(found["loc"]) == 1:
            name = str(found["loc"][0])
            instead = " (or choose a model.preset)" if table == "model" else ""
            yield f"{table}.{name} is missing: {kind.model_fields[name].description}{instead}"
        elif found["type"] != "default_factory_not_called":  # a consequence of another line
            key = f"{table}.{found['loc'][0]}"
            yield f"{key} = {_toml(given[key].value)} ({given[key].origin}): {_must(found)}"


def _must(found: ErrorDetails) -> str:
    """What would do in place of the value that pydantic found wrong."""
    if found["type"] == "missing":
        return "too few values"
    message = PLAINER.get(found["type"], found["msg"].replace("Input should be", "must be"))
    where = f"value {int(found['loc'][1]) + 1} " if len(found["loc"]) > 1 else ""
    if found["type"] == "literal_error":
        expected = str(found.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        message += _did_you_mean(str(found["input"]), expected)
    return where + message


def _did_you_mean(word: str, known: Mapping[str, Any] | Sequence[str], form: str = "{}") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "derived" if field.default_factory is not None else _toml(field.default)


def _toml(value: Any) -> str:
    """A value in TOML's grammar; what TOML has no form for, as Python shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value)
