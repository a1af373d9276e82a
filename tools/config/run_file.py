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
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.engine.options import EngineOptions
from models.equivalence import TRAINING
from models.estimate.flops import StageCost, stage_costs
from models.presets import PRESETS
from parallel.activation_checkpoint import Recompute
from parallel.pipeline.instructions import Instruction
from parallel.pipeline.schedules import Schedule
from tools.config.checks import cross_problems, lr_schedule, with_vocabulary_size
from tools.config.data_settings import Data
from tools.config.effectless import PERIODS, Tables, effectless
from tools.config.key_suggestions import unknown_key_problems
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
from tools.config.wrong_values import explain, too_large
from tools.console.toml import Setting, toml
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
    # private attributes are no tables: a run file cannot set them
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
        # the place of a stage does not depend on costs, the order of instructions may
        rank_of_stage = pipeline_schedule(self.parallel, self.num_microbatches).rank_of_stage
        costs = self.stage_costs(self.sized_model, rank_of_stage)

        def cost(instruction: Instruction) -> float:
            return costs[instruction.stage].of(instruction)

        return pipeline_schedule(self.parallel, self.num_microbatches, cost)

    def stage_costs(self, model: ModelConfig, rank_of_stage: Sequence[int]) -> list[StageCost]:
        """Return the layers of `model` in each stage and their FLOPs per micro-batch."""
        train = self.train
        stages = len(rank_of_stage)
        recompute = self.recompute
        stage_cuts = cuts(
            model, stages, train.seq_length, self.parallel.cuts, rank_of_stage, recompute
        )
        return stage_costs(model, stage_cuts, train.seq_length, train.micro_batch, recompute)

    @property
    def sized_model(self) -> ModelConfig:
        """The model with a vocabulary size: data.vocab_size as long as model.vocab leaves it to the
        tokenizer."""
        return with_vocabulary_size(self.model, self.data)

    @property
    def recompute(self) -> Recompute:
        """The activations that are recomputed in the backward pass."""
        return Recompute(
            self.parallel.recompute_modules,
            self.parallel.recompute_fraction,
            self.parallel.recompute_layers,
        )

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
        return _cached_plan((self.precision, self.fp8), tuple(self._origins.items()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on keys without effect and on how another system's configuration was
        understood."""
        return self._notes

    def with_parallel(self, parallel: Parallel, origin: str) -> Self:
        """Return the run in another layout that it can have. origin: of the keys that differ."""
        config = self.model_copy(update={"parallel": parallel})
        changed = [key for key, value in parallel if value != getattr(self.parallel, key)]
        config._origins = {**self._origins, **{f"parallel.{key}": origin for key in changed}}
        return config

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
        # a user may train in the folder that has the run file
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
            for name, value in values:
                key = f"{table}.{name}"
                if key not in PLAN_ONLY:
                    # as TOML text, an origin has no line break that would end the comment
                    origin = toml(self.origin(key))[1:-1]
                    lines.append(f"{name} = {toml(value)}  # {origin}")
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def _cached_plan(
    tables: tuple[Precision, FP8], origins: tuple[tuple[str, str], ...]
) -> PrecisionPlan:
    """Return the plan of both tables, which is asked for again with each instruction that is
    timed."""
    return with_origins(plan_of(*tables), dict(origins))


def load_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run of the TOML file `path`, changed by `overrides`. Raises UserError with all
    problems."""
    settings, problems = read_run_settings(path, overrides)
    # first, for no later message could print such a number
    if large := [*too_large(settings)]:
        raise UserError(*problems, *large)

    # other names and other systems' tables become native keys; then unknown keys are known
    notes_renamed = take_renamed(settings)
    notes_resolved, resolve_problems = _resolve(settings, known_keys())
    problems += resolve_problems
    readable = {key: setting for key, setting in settings.items() if key not in PLAN_ONLY}
    problems += unknown_key_problems(readable, _known_fields())
    problems += _two_sources(settings)

    # weaker origins fill in what is still open: the preset, then the checkpoint to start from
    notes_replaced = [*_replace_model(settings)]
    contradictions = list[str]()
    unread = [*_add_preset(settings), *_add_initial(settings, contradictions)]
    problems += [*unread, *contradictions]
    length = settings.get("train.seq_length")
    if length is not None and isinstance(length.value, int):
        settings.setdefault("model.max_positions", Setting(length.value, "train.seq_length"))

    kinds = tables_of_a_run()
    tables, type_problems = _read_tables(settings, kinds, incomplete="model" if unread else "")
    problems += [*type_problems, *cross_problems(tables)]
    if problems:
        raise UserError(*problems)
    config = RunConfig.model_validate(tables)
    notes_effectless = effectless(Tables.of(dict(config)), _written_keys(settings, path))
    config._origins = _origins(settings)
    config._notes = (*notes_renamed, *notes_resolved, *notes_replaced, *notes_effectless)
    return config


def _written_keys(settings: Mapping[str, Setting], path: str | Path | None) -> set[str]:
    """Return the keys that the user wrote and means for this run.

    A resolved run has all keys, and was told what it is when it began. A trial that the command
    line shortens need not reach the steps that its file names.
    """
    typed = {key for key, setting in settings.items() if setting.origin == "command line"}
    if path is None or read_whole(Path(path)).startswith(SAVED.encode()):
        return typed
    in_file = {key for key, setting in settings.items() if setting.origin == f"file {path}"}
    if "train.steps" in typed:
        in_file = in_file.difference(PERIODS)
    return typed | in_file


def load_precision(
    settings: dict[str, Setting],
) -> tuple[PrecisionPlan, dict[str, Setting], tuple[str, ...]]:
    """Return the plan of keys that need not be a whole run, the other keys that they decide, and
    notes.

    Raises UserError with all problems.
    """
    # keys that a dialect adds are not of the user
    before = set(settings)
    notes, problems = _resolve(settings, None)
    written = {key: setting for key, setting in settings.items() if key in before}
    problems += unknown_key_problems(written, _known_fields())
    kinds = {"precision": Precision, "fp8": FP8}
    tables, type_problems = _read_tables(settings, kinds)
    problems += [*type_problems, *cross_problems(tables)]
    if problems:
        raise UserError(*problems)
    precision = Precision.model_validate(tables["precision"])
    fp8 = FP8.model_validate(tables["fp8"])
    plan = with_origins(plan_of(precision, fp8), _origins(settings))
    others = {
        key: setting for key, setting in settings.items() if key.partition(".")[0] not in kinds
    }
    return plan, others, notes


def read_run_settings(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[dict[str, Setting], list[str]]:
    """Return the values of the file and of the overrides by dotted key, and the problems of the
    overrides' grammar."""
    settings, problems = _read_overrides(overrides)
    if path is not None:
        settings = _read_file(Path(path)) | settings
    return settings, problems


def _resolve(
    settings: dict[str, Setting], own_keys: frozenset[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Replace in `settings` the keys of other systems by native ones. Returns notes and problems.

    own_keys: see `resolve_dialect`.
    """
    notes, problems = take_plan_only(settings)
    dialect_notes, dialect_problems = resolve_dialect(settings, own_keys)
    return (*notes, *dialect_notes), problems + dialect_problems


def _read_tables(
    settings: Mapping[str, Setting], kinds: Mapping[str, type[BaseModel]], incomplete: str = ""
) -> tuple[dict[str, BaseModel], list[str]]:
    """Return the tables that can be read, and the problems of the others.

    incomplete: the table whose missing keys are not reported, for another line has said why they
        are missing.
    """
    tables = dict[str, BaseModel]()
    problems = list[str]()
    for table, kind in kinds.items():
        values = {
            name: settings[f"{table}.{name}"].value
            for name in kind.model_fields
            if f"{table}.{name}" in settings
        }
        # missing keys have defaults; pydantic reports those that have none
        try:
            tables[table] = kind.model_validate(values)
        except ValidationError as error:
            report_missing = table != incomplete
            problems += explain(table, kind, error, settings, report_missing)
    return tables, problems


def _origins(settings: Mapping[str, Setting]) -> dict[str, str]:
    return {key: setting.origin for key, setting in settings.items()}


def tables_of_a_run() -> dict[str, type[BaseModel]]:
    """Return the class of each table of a run file, by name."""
    tables = dict[str, type[BaseModel]]()
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            tables[name] = kind
    return tables


def _fields() -> dict[str, FieldInfo]:
    """Return the field of every dotted key but model.preset."""
    fields = dict[str, FieldInfo]()
    for table, kind in tables_of_a_run().items():
        for name, field in kind.model_fields.items():
            if f"{table}.{name}" not in PLAN_ONLY:
                fields[f"{table}.{name}"] = field
    return fields


def _known_fields() -> dict[str, FieldInfo | None]:
    """Return every key that a run file may have, with its field if it has one."""
    without_field = ("model.preset", *(f"precision.{name}" for name in DIALECTS))
    return {**_fields(), **dict.fromkeys(without_field)}


def known_keys() -> frozenset[str]:
    """Return every dotted key of a resolved run."""
    return frozenset(_fields())


def _read_file(path: Path) -> dict[str, Setting]:
    """Return the values of a run file by dotted key. Raises UserError if it is none."""
    if path.is_dir():
        run_file = path / "run.toml"
        hint = f"`megaprec init {path}` writes a run file for a folder of text"
        if run_file.is_file():
            hint = f"give {run_file}"
        raise UserError.of("config.run_file_is_folder", path=path, hint=hint)
    try:
        text = read_text(path, MOST_SETTINGS)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError.of("config.run_file_unreadable", path=path, reason=reason) from error
    try:
        content = parse_toml(text)
    except ValueError as error:
        message = _other_system_message(path, text) or f"run file {path}: not TOML: {error}"
        raise UserError(message) from error
    # other systems have TOML too; tables that only a run file has settle it
    if not content.keys() & OURS_ALONE and (message := _other_system_message(path, text)):
        raise UserError(message)

    origin = f"file {path}"
    settings: dict[str, Setting] = {}
    for table, values in content.items():
        if not isinstance(values, dict):
            settings[table] = Setting(values, origin)
            continue
        for name, value in values.items():
            settings[f"{table}.{name}"] = Setting(value, origin)
    return settings


def _other_system_message(path: Path, text: str) -> str:
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


def _read_overrides(overrides: Sequence[str]) -> tuple[dict[str, Setting], list[str]]:
    """Return the values of the overrides by dotted key, and the problems of their grammar."""
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if equals:
            settings[key] = Setting(_override_value(key, text), "command line")
        else:
            problems.append(
                f'"{override}" (command line): an override is table.key=value, like train.steps=100'
            )
    return settings, problems


def _override_value(key: str, text: str) -> Any:
    """Return the value of an override: read as TOML, or the text itself where that is meant."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    field = _fields().get(key)
    # a folder may be called 1 or true
    wants_text = key == "model.preset" or (field is not None and field.annotation is str)
    if wants_text and not isinstance(parsed.get("value"), str):
        return text
    # a line break in the text can begin further keys
    return parsed["value"] if parsed.keys() == {"value"} else text


def _two_sources(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield a problem if the command line names training data that data.blend of the file would
    overrule."""
    source = settings.get("data.source")
    blend = settings.get("data.blend")
    if source is None or source.origin != "command line" or source.value != "python":
        return  # the checks between tables refuse every other source beside a blend
    if blend is None or blend.origin == "command line":
        return  # who writes both means the blend
    if blend.value:
        yield (
            f'data.source = "python" (command line) and data.blend ({blend.origin}) both name the '
            "training data: give data.blend=[] as well"
        )


def _replace_model(settings: dict[str, Setting]) -> Iterator[str]:
    """Take out of `settings` what the file says of the model, if the command line chooses a preset;
    yield a note of it."""
    chosen = settings.get("model.preset")
    if chosen is None or chosen.origin != "command line" or not isinstance(chosen.value, str):
        return
    preset = PRESETS.get(chosen.value)
    if preset is None:
        return
    asides = list[str]()
    for key in [*settings]:
        table, _, name = key.partition(".")
        setting = settings[key]
        stays = name == "preset" or name in TRAINING or setting.origin == "command line"
        if table != "model" or stays or (name == "vocab" and "vocab" not in preset):
            continue
        del settings[key]
        # a key that only repeats the preset needs no note
        if preset.get(name) != setting.value:
            asides.append(f"{key} = {toml(setting.value)}")
    if asides:
        yield (
            f"model.preset = {toml(chosen.value)} (command line) is the model; left aside: "
            f"{', '.join(asides)}"
        )


def _add_preset(settings: dict[str, Setting]) -> list[str]:
    """Add the fields of the preset that are not given. Returns a problem if there is no such
    preset."""
    chosen = settings.pop("model.preset", None)
    if chosen is None:
        return []
    if not isinstance(chosen.value, str) or chosen.value not in PRESETS:
        names = ", ".join(PRESETS)
        closest_preset = did_you_mean(str(chosen.value), PRESETS)
        hint = f"{closest_preset} There are {names}" if closest_preset else f"; there are {names}"
        return [f"model.preset = {toml(chosen.value)} ({chosen.origin}): no such preset{hint}"]
    for name, value in PRESETS[chosen.value].items():
        # file and command line are stronger
        settings.setdefault(f"model.{name}", Setting(value, f"preset {chosen.value}"))
    return []


def _add_initial(settings: dict[str, Setting], contradictions: list[str]) -> Iterator[str]:
    """Add the model and the tokenizer of the folder train.init_from, or yield the problems of
    reading it.

    contradictions: receives a line for each given key that has another value there.
    """
    init_from = settings.get("train.init_from")
    if init_from is None or not isinstance(init_from.value, str) or not init_from.value:
        return  # the checks of the table's types report a value that cannot be
    if home_problem(init_from.value):
        return  # so do they of a ~ that has no meaning
    try:
        initial = initial_model(Path(home_expanded(init_from.value)))
    except UserError as error:
        hint = beside_run_file(init_from.origin, init_from.value)
        for problem in error.problems:
            yield f"train.init_from ({init_from.origin}): {problem}{hint}"
        return
    origin = initial.origin
    yield from _add_initial_model(settings, initial.model, origin)
    begin = settings.get("data.begin", Setting("auto", origin))
    if initial.begin is not None and begin.value == "auto":
        settings["data.begin"] = Setting(initial.begin, origin)
    if initial.tokenizer:
        settings.setdefault("data.tokenizer", Setting(str(initial.tokenizer), origin))


def _add_initial_model(
    settings: dict[str, Setting], model: ModelConfig, origin: str
) -> Iterator[str]:
    """Add the keys of `model` that are not given; yield a line for each that is given another
    value."""
    # training may change these, and with rotary positions the length of sequences
    free = {*TRAINING}
    if model.positions == "rope":
        free.add("max_positions")
    # a dropout of the embedding that equals the model's follows a given dropout
    follows = {"embedding_dropout"} if model.embedding_dropout == model.dropout else set[str]()
    for name, value in model.model_dump(exclude=follows).items():
        chosen = settings.setdefault(f"model.{name}", Setting(value, origin))
        left_open = name in ZERO_LEAVES and chosen.value == 0
        if left_open and name == "vocab":
            # the tokenizer may have fewer tokens, beside which the weights are padded
            settings[f"model.{name}"] = Setting(value, origin)
        if left_open or name in free or _equal_values(getattr(model, name), chosen.value):
            continue
        remedy = f"it is {toml(value)} in {origin}; remove this key or train.init_from"
        yield f"model.{name} = {toml(chosen.value)} ({chosen.origin}): {remedy}"


def _equal_values(initial: Any, chosen: Any) -> bool:
    """Return True if the given value equals the folder's; keys that a given table leaves out have
    their default."""
    if not isinstance(initial, BaseModel) or not isinstance(chosen, Mapping):
        return initial == (tuple(chosen) if isinstance(chosen, list) else chosen)
    defaults = {
        name: field.default
        for name, field in type(initial).model_fields.items()
        if not field.is_required()
    }
    return {**defaults, **chosen} == initial.model_dump()
