"""Reading a run: one TOML file and `key=value` overrides become one frozen, checked `RunConfig`.

Every value has an origin: "default", "file run.toml", "command line" or "preset gpt2". Defaults are
the weakest, then the preset, the file and the command line. A preset of the command line takes the
place of the file's model: what the file says of the model, but for what only training reads, is
left aside, and a note names it.

Every table is typed, then the rules between tables are checked; all problems are reported together,
before any rank starts. `save_resolved` writes the whole run, with origins as comments, as a run
file that can be run again.

An override is `table.key=value`, with the value in TOML's grammar. For a key that holds text the
quotes may be omitted; for others, text that TOML cannot read (`parallel.schedule=gpipe`) is taken
as a string.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from megaprec.data.files import write_whole
from megaprec.dialects.translate import DIALECTS
from megaprec.durable import read_whole
from megaprec.errors import UserError, did_you_mean
from megaprec.optim.lr import LRSchedule
from megaprec.parsing import MOST_SETTINGS, home_expanded, home_problem, parse_toml, read_text
from megaprec.precision.plan import PrecisionPlan
from models.computed import TRAINING
from models.config import ModelConfig
from models.cutting import EngineOptions, cuts
from models.estimate.flops import StageCost, stage_costs
from models.presets import PRESETS
from parallel.activation_checkpoint import Recompute
from parallel.pipeline.schedules import Schedule
from tools.config.checks import cross_problems, lr_schedule, sized
from tools.config.data_settings import Data
from tools.config.effectless import PERIODS, Tables, effectless
from tools.config.key_suggestions import unknown
from tools.config.native_keys import (
    plan_of,
    resolve_dialect,
    take_plan_only,
    take_renamed,
    with_origins,
)
from tools.config.precision_settings import FP8, PLAN_ONLY, Precision
from tools.config.relative_paths import beside_run_file
from tools.config.schedules import pipeline_schedule
from tools.config.settings import LR, Checkpoint, Log, Optimizer, Parallel, Train
from tools.config.wrong_values import explained, too_large
from tools.console.toml import Given, toml
from tools.convert.initial import initial_model
from tools.foreign.whose import RUN, whose_file

SAVED = "# Written by megaprec: the resolved run. Comments say where a value came from."
OURS_ALONE = frozenset({"train", "data", "parallel"})  # tables that no other system's TOML has
ZERO_LEAVES = ("vocab", "head_dim", "mtp_layers")  # 0: open, or left aside


class RunConfig(BaseModel):
    """All settings of one run. Built by `load_run`, or from tables: `RunConfig(model=...,
    train=...)`.

    Raises pydantic's ValidationError (a ValueError) when the tables do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    data: Data = Data()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    fp8: FP8 = FP8()
    optimizer: Optimizer = Optimizer()
    lr: LR = LR()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _tables_fit(self) -> Self:
        if problems := cross_problems(dict(self)):
            raise UserError(*problems)
        return self

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.parallel.ranks

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per step of one replica."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule of one replica, planned by the FLOPs of its stages."""
        placed = pipeline_schedule(self.parallel, self.num_microbatches).rank_of_stage
        costs = self.stage_costs(self.sized_model, placed)
        return pipeline_schedule(
            self.parallel, self.num_microbatches, lambda i: costs[i.stage].of(i)
        )

    def stage_costs(self, model: ModelConfig, rank_of_stage: Sequence[int]) -> list[StageCost]:
        """Return the layers of `model` in each stage and their FLOPs per micro-batch."""
        train = self.train
        cut = cuts(
            model,
            len(rank_of_stage),
            train.seq_length,
            self.parallel.cuts,
            rank_of_stage,
            self.recompute,
        )
        return stage_costs(model, cut, train.seq_length, train.micro_batch, self.recompute)

    @property
    def sized_model(self) -> ModelConfig:
        """The model with a vocabulary size: data.vocab_size as long as model.vocab leaves it to the
        tokenizer."""
        return sized(self.model, self.data)

    @property
    def recompute(self) -> Recompute:
        """The activations that are recomputed in the backward pass."""
        p = self.parallel
        return Recompute(p.recompute_modules, p.recompute_fraction, p.recompute_layers)

    @property
    def canonical_shards(self) -> int:
        """The number of virtual tensor-parallel ranks; 0 for fast numerics."""
        if self.train.numerics == "canonical":
            return self.train.canonical_shards
        return 0

    @property
    def engine_options(self) -> EngineOptions:
        """The options of the run's engine; initial weights are drawn, and nothing is compiled."""
        parallel = self.parallel
        return EngineOptions(
            micro_batch=self.train.micro_batch,
            seq_length=self.train.seq_length,
            sequence=parallel.sequence,
            canonical_shards=self.canonical_shards,
            layers=parallel.cuts,
            recompute=self.recompute,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            ring=parallel.context_by == "ring",
            seed=self.train.seed,
            trace=self.precision.trace_overflows,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all replicas."""
        return self.train.global_batch * self.train.seq_length

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self.train.folder) / "checkpoints"

    @property
    def lr_schedule(self) -> LRSchedule:
        """The learning-rate schedule, a function of the steps or samples taken so far (lr.unit)."""
        return lr_schedule(self.lr, self.train)

    @property
    def plan(self) -> PrecisionPlan:
        """The precision plan of [precision] and [fp8]; its `origin` names the key that decided each
        field."""
        return _plan((self.precision, self.fp8), tuple(self._origins.items()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on keys without effect and on how another system's configuration was
        understood."""
        return self._notes

    def with_parallel(self, parallel: Parallel, origin: str) -> Self:
        """Return the run in another layout that it can have. origin: of the keys that differ."""
        made = self.model_copy(update={"parallel": parallel})
        differ = {key for key, value in parallel if value != getattr(self.parallel, key)}
        made._origins = {**self._origins, **{f"parallel.{key}": origin for key in differ}}
        return made

    def origin(self, key: str) -> str:
        """Return the origin of the dotted `key`: "default", "file ...", "command line" or "preset
        ..."."""
        return self._origins.get(key, "default")

    def given(self, key: str) -> bool:
        """Return True if the run file, the command line or a preset gives the dotted `key` a
        value."""
        return key in self._origins

    def get(self, key: str) -> Any:
        """Return the value of the dotted `key`."""
        table, name = key.split(".")
        return getattr(getattr(self, table), name)

    def value(self, key: str) -> str:
        """Return the value of the dotted `key` in TOML's grammar."""
        return toml(self.get(key))

    def save_resolved(self, folder: Path) -> Path:
        """Write the run to folder/run.toml, or to run.resolved.toml if the user's own file has that
        name."""
        path = folder / "run.toml"
        if path.exists() and not read_whole(path).startswith(SAVED.encode()):
            path = folder / "run.resolved.toml"
        write_whole(path, self.as_toml(SAVED).encode())
        return path

    def as_toml(self, comment: str) -> str:
        """Return the run as a run file that begins with `comment`. Other comments say where values
        came from."""
        lines = [comment]
        for table, values in self:
            lines += ["", f"[{table}]"]
            keys = ((name, value, f"{table}.{name}") for name, value in values)
            lines += [
                f"{k} = {toml(v)}  # {toml(self.origin(d))[1:-1]}"
                for k, v, d in keys
                if d not in PLAN_ONLY
            ]
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def _plan(tables: tuple[Precision, FP8], origins: tuple[tuple[str, str], ...]) -> PrecisionPlan:
    """Return the plan of both tables, which is asked for again with each instruction that is
    timed."""
    return with_origins(plan_of(*tables), dict(origins))


def load_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run of the TOML file `path`, changed by `overrides`. Raises UserError with all
    problems."""
    given, problems = given_in(path, overrides)
    if large := [*too_large(given)]:
        raise UserError(*problems, *large)
    renamed = take_renamed(given)
    notes, wrong = _resolved(given, known_keys())
    problems += wrong
    problems += unknown(
        {key: entry for key, entry in given.items() if key not in PLAN_ONLY}, _known()
    )
    problems += _two_sources(given)
    replaced = [*_replace_model(given)]
    unread = [*_add_preset(given), *_add_initial(given, contradicted := list[str]())]
    problems += [*unread, *contradicted]
    length = given.get("train.seq_length")
    if length is not None and isinstance(length.value, int):
        given.setdefault("model.max_positions", Given(length.value, "train.seq_length"))
    tables, wrong = _typed(given, tables_of_a_run(), told="model" if unread else "")
    problems += [*wrong, *cross_problems(tables)]
    if problems:
        raise UserError(*problems)
    config = RunConfig.model_validate(tables)
    said = effectless(Tables.of(dict(config)), _written(given, path))
    config._origins = _origins(given)
    config._notes = (*renamed, *notes, *replaced, *said)
    return config


def _written(given: Mapping[str, Given], path: str | Path | None) -> set[str]:
    """Return the keys that the user wrote and means for this run.

    A resolved run has all keys, and was told what it is when it began. A trial that the command
    line shortens need not reach the steps that its file names.
    """
    asked = {key for key, entry in given.items() if entry.origin == "command line"}
    if path is None or read_whole(Path(path)).startswith(SAVED.encode()):
        return asked
    inside = {key for key, entry in given.items() if entry.origin == f"file {path}"}
    return asked | (inside.difference(PERIODS) if "train.steps" in asked else inside)


def load_precision(
    given: dict[str, Given],
) -> tuple[PrecisionPlan, dict[str, Given], tuple[str, ...]]:
    """Return the plan of keys that need not be a whole run, the other keys that they decide, and
    notes.

    Raises UserError with all problems.
    """
    before = set(given)
    notes, problems = _resolved(given, None)
    problems += unknown({key: entry for key, entry in given.items() if key in before}, _known())
    numbers = {
        name: kind for name, kind in tables_of_a_run().items() if name in ("precision", "fp8")
    }
    tables, wrong = _typed(given, numbers)
    problems += [*wrong, *cross_problems(tables)]
    if problems:
        raise UserError(*problems)
    precision = Precision.model_validate(tables["precision"])
    fp8 = FP8.model_validate(tables["fp8"])
    plan = with_origins(plan_of(precision, fp8), _origins(given))
    return (
        plan,
        {key: entry for key, entry in given.items() if key.partition(".")[0] not in numbers},
        notes,
    )


def given_in(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[dict[str, Given], list[str]]:
    """Return the values of the file and of the overrides by dotted key, and the problems of the
    overrides' grammar."""
    given, problems = _overridden(overrides)
    return (_from_file(Path(path)) | given if path is not None else given), problems


def _resolved(
    given: dict[str, Given], known: frozenset[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Replace in `given` the keys of other systems by native ones. Returns notes and problems."""
    notes, problems = take_plan_only(given)
    more, wrong = resolve_dialect(given, known)
    return (*notes, *more), problems + wrong


def _typed(
    given: Mapping[str, Given], kinds: Mapping[str, type[BaseModel]], told: str = ""
) -> tuple[dict[str, BaseModel], list[str]]:
    """Return the tables that can be read, and the problems of the others.

    told: the table whose missing keys are not reported, for another line has said why they are
        missing.
    """
    tables = dict[str, BaseModel]()
    problems = list[str]()
    for table, kind in kinds.items():
        values = {
            name: given[f"{table}.{name}"].value
            for name in kind.model_fields
            if f"{table}.{name}" in given
        }
        try:
            tables[table] = kind.model_validate(values)
        except ValidationError as error:
            problems += explained(table, kind, error, given, missing_too=table != told)
    return tables, problems


def _origins(given: Mapping[str, Given]) -> dict[str, str]:
    return {key: entry.origin for key, entry in given.items()}


def tables_of_a_run() -> dict[str, type[BaseModel]]:
    """Return the class of each table of a run file, by name."""
    kinds = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


def _fields() -> dict[str, FieldInfo]:
    """Return the field of every dotted key but model.preset."""
    fields = (
        (f"{t}.{name}", f)
        for t, kind in tables_of_a_run().items()
        for name, f in kind.model_fields.items()
    )
    return {key: field for key, field in fields if key not in PLAN_ONLY}


def _known() -> dict[str, FieldInfo | None]:
    """Return every key that a run file may have, with its field if it has one."""
    return {
        **_fields(),
        **dict.fromkeys(("model.preset", *(f"precision.{name}" for name in DIALECTS))),
    }


def known_keys() -> frozenset[str]:
    """Return every dotted key of a resolved run."""
    return frozenset(_fields())


def _from_file(path: Path) -> dict[str, Given]:
    if path.is_dir():
        own = path / "run.toml"
        text = f"`megaprec init {path}` writes a run file for a folder of text"
        raise UserError(
            f"{path} is a folder, no run file; {f'give {own}' if own.is_file() else text}"
        )
    try:
        text = read_text(path, MOST_SETTINGS)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"run file {path}: cannot be read ({reason})") from error
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise UserError(
            _of_another_system(path, text) or f"run file {path}: not TOML: {error}"
        ) from error
    if not content.keys() & OURS_ALONE and (line := _of_another_system(path, text)):
        raise UserError(line)
    origin = f"file {path}"
    given: dict[str, Given] = {}
    for table, values in content.items():
        if isinstance(values, dict):
            given |= {f"{table}.{name}": Given(value, origin) for name, value in values.items()}
        else:
            given[table] = Given(values, origin)
    return given


def _of_another_system(path: Path, text: str) -> str:
    """Return the line that names whose file it is; "" if that is not known, or if it is a run
    file."""
    kind = whose_file(path, text)
    if kind is not None and kind is not RUN:
        return kind.of(path)
    if path.suffix.lower() in (".sh", ".bash", ".slurm", ".sbatch"):
        return (
            f"{path}: a shell script, no run file: megaprec import-args {path} makes one of "
            "Megatron-LM's arguments"
        )
    return ""


def _overridden(overrides: Sequence[str]) -> tuple[dict[str, Given], list[str]]:
    given: dict[str, Given] = {}
    problems: list[str] = []
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if equals:
            given[key] = Given(_override_value(key, text), "command line")
        else:
            problems.append(
                f'"{override}" (command line): an override is table.key=value, like train.steps=100'
            )
    return given, problems


def _override_value(key: str, text: str) -> Any:
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    field = _fields().get(key)
    wants_text = key == "model.preset" or (field is not None and field.annotation is str)
    if parsed.keys() != {"value"} or (wants_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _two_sources(given: Mapping[str, Given]) -> Iterator[str]:
    """Yield a problem if the command line names training data that data.blend of the file would
    overrule."""
    source = given.get("data.source")
    blend = given.get("data.blend")
    if source is None or source.origin != "command line" or source.value != "python":
        return  # the checks between tables refuse every other source beside a blend
    if blend is None or blend.origin == "command line":
        return  # who writes both means the blend
    if blend.value:
        yield (
            f'data.source = "python" (command line) and data.blend ({blend.origin}) both name '
            "the training data: give "
            "data.blend=[] as well"
        )


def _replace_model(given: dict[str, Given]) -> Iterator[str]:
    """Take out of `given` what the file says of the model, if the command line chooses a preset;
    yield a note of it."""
    chosen = given.get("model.preset")
    if chosen is None or chosen.origin != "command line" or not isinstance(chosen.value, str):
        return
    preset = PRESETS.get(chosen.value)
    if preset is None:
        return
    asides = []
    for key in [*given]:
        table, _, name = key.partition(".")
        entry = given[key]
        stays = name == "preset" or name in TRAINING or entry.origin == "command line"
        if table != "model" or stays or (name == "vocab" and "vocab" not in preset):
            continue
        del given[key]
        if preset.get(name) != entry.value:
            asides.append(f"{key} = {toml(entry.value)}")
    if asides:
        yield (
            f"model.preset = {toml(chosen.value)} (command line) is the model; left aside: "
            f"{', '.join(asides)}"
        )


def _add_preset(given: dict[str, Given]) -> list[str]:
    """Add the fields of the preset that are not given. Returns a problem if there is no such
    preset."""
    chosen = given.pop("model.preset", None)
    if chosen is None:
        return []
    if not isinstance(chosen.value, str) or chosen.value not in PRESETS:
        close = did_you_mean(str(chosen.value), PRESETS)
        there = f"there are {', '.join(PRESETS)}"
        said = f"{close} T{there[1:]}" if close else f"; {there}"
        return [f"model.preset = {toml(chosen.value)} ({chosen.origin}): no such preset{said}"]
    for name, value in PRESETS[chosen.value].items():
        given.setdefault(f"model.{name}", Given(value, f"preset {chosen.value}"))
    return []


def _add_initial(given: dict[str, Given], contradicted: list[str]) -> Iterator[str]:
    """Add the model and the tokenizer of the folder train.init_from, or yield the problems of
    reading it.

    contradicted: receives a line for each given key that has another value there.
    """
    asked = given.get("train.init_from")
    if (
        asked is None
        or not isinstance(asked.value, str)
        or not asked.value
        or home_problem(asked.value)
    ):
        return  # the checks of the table's kinds report a value that cannot be
    try:
        initial = initial_model(Path(home_expanded(asked.value)))
    except UserError as error:
        hint = beside_run_file(asked.origin, asked.value)
        yield from (
            f"train.init_from ({asked.origin}): {problem}{hint}" for problem in error.problems
        )
        return
    said = initial.model
    origin = initial.origin
    free = {*TRAINING, *(("max_positions",) if said.positions == "rope" else ())}
    # follow a given dropout
    follows = {"embedding_dropout"} if said.embedding_dropout == said.dropout else set[str]()
    for name, value in said.model_dump(exclude=follows).items():
        chosen = given.setdefault(f"model.{name}", Given(value, origin))
        left_open = name in ZERO_LEAVES and chosen.value == 0
        if (
            left_open and name == "vocab"
        ):  # the tokenizer may have fewer tokens, beside which the weights are padded
            given[f"model.{name}"] = Given(value, origin)
        if not _same(getattr(said, name), chosen.value) and name not in free and not left_open:
            there = f"it is {toml(value)} in {origin}; remove this key or train.init_from"
            yield f"model.{name} = {toml(chosen.value)} ({chosen.origin}): {there}"
    if initial.begin is not None and given.get("data.begin", Given("auto", origin)).value == "auto":
        given["data.begin"] = Given(initial.begin, origin)
    if initial.tokenizer:
        given.setdefault("data.tokenizer", Given(str(initial.tokenizer), origin))


def _same(said: Any, chosen: Any) -> bool:
    """Return True if the given value equals the folder's; keys that a given table leaves out have
    their default."""
    if not isinstance(said, BaseModel) or not isinstance(chosen, Mapping):
        return said == (tuple(chosen) if isinstance(chosen, list) else chosen)
    usual = {
        name: field.default
        for name, field in type(said).model_fields.items()
        if not field.is_required()
    }
    return {**usual, **chosen} == said.model_dump()
