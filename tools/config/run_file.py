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

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from megaprec.durable import reading
from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.optim.rules.lr import LRSchedule
from megaprec.parsing import MOST_SETTINGS, home_expanded, home_problem, parse_toml, read_text
from megaprec.precision.plan import PrecisionPlan
from megaprec.text.characters import CHARACTERS
from megaprec.text.tokenizer_files import tokenizer_in
from megaprec.tokens.files import write_whole
from megaprec.tokens.places import is_url, path_of
from megaprec.url_secrets import has_password, masked
from models.attention.backends import kernel_names
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.engine.options import EngineOptions, QKClip
from models.equivalence import CONTEXT_KEYS, TRAINING_ONLY_KEYS
from models.estimate.flops import StageCost, stage_costs
from models.presets import PRESETS
from models.recurrent import kernel_choice
from parallel.activation_checkpoint import Recompute
from parallel.pipeline.instructions import Instruction
from parallel.pipeline.schedules import Schedule
from parallel.sequence_cut import length_multiple
from tools.config.dialect_result import DIALECT_NAMES, DialectResult, has_dialect
from tools.config.removed_keys import take_removed
from tools.config.rules.all_rules import cross_problems
from tools.config.rules.derived import lr_schedule, with_vocabulary_size
from tools.config.rules.effectless import PERIODS, Tables, effectless
from tools.config.tables.batch_schedule import BatchSchedule, LengthSchedule
from tools.config.tables.data_settings import Data
from tools.config.tables.native_keys import native_settings, origins_of, plan_of, with_origins
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.schedules import pipeline_schedule
from tools.config.tables.settings import LR, Checkpoint, Log, Optimizer, Parallel, Train
from tools.config.urls import take_urls
from tools.config.warmup_fraction import take_warmup_fraction
from tools.config.wrong_values import explain, too_large
from tools.console.toml import Setting, toml
from tools.parts import optional_parts

if TYPE_CHECKING:
    from tools.config.initial_model import InitialModel

_BY_MEGAPREC = "# Written by megaprec: the resolved run"  # also that of an earlier version
END = "# end"  # the last line of a resolved run: a file that was cut short has none
SAVED = f'{_BY_MEGAPREC}, to the line "{END}". Comments say where a value came from.'
# in a run folder; the second beside a file of the user's own with the first name
RUN_FILES = ("run.toml", "run.resolved.toml")
OURS_ALONE = frozenset({"train", "data", "parallel"})  # tables that no other system's TOML has


def checkpoint_folder(place: str, run_folder: Path) -> Path:
    """Return the folder of the checkpoints of a run. place: the value of checkpoint.folder.

    Raises UserError for a URL that names no place.
    """
    if not place:
        return run_folder / "checkpoints"
    stripped = place.rstrip("/")
    # what is left of "s3://" would be a folder of this machine
    keeps_kind = is_url(place) == is_url(stripped)
    return path_of(stripped if keeps_kind and stripped else place)


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
    _dialect_plan: PrecisionPlan | None = PrivateAttr(default=None)

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
    def batches(self) -> BatchSchedule:
        """The global batch of each step."""
        return BatchSchedule.of(self.train)

    @property
    def lengths(self) -> LengthSchedule:
        """The length of the sequences of each step."""
        return LengthSchedule.of(self.train)

    @property
    def total_samples(self) -> int:
        """Samples of all steps, if no other batches came before."""
        return self.batches.after(0, self.train.steps)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica per step of train.global_batch samples."""
        return self.microbatches_of(self.train.global_batch)

    def microbatches_of(self, batch: int) -> int:
        """Return the micro-batches of one replica in a step of `batch` samples."""
        return batch // (self.train.micro_batch * self.parallel.data)

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule of one replica for train.global_batch, planned by the FLOPs of its
        stages."""
        return self._schedule_for(self.num_microbatches)

    @property
    def other_schedules(self) -> list[Schedule]:
        """The pipeline schedules for the other batches of train.batch_schedule, the smallest
        first."""
        others = [size for size in self.batches.sizes if size != self.train.global_batch]
        return [self._schedule_for(self.microbatches_of(size)) for size in others]

    def _schedule_for(self, microbatches: int) -> Schedule:
        """Return the pipeline schedule of so many micro-batches, planned by the FLOPs of the
        stages."""
        # the place of a stage does not depend on costs, the order of instructions may
        rank_of_stage = pipeline_schedule(self.parallel, microbatches).rank_of_stage
        costs = self.stage_costs(self.sized_model, rank_of_stage)

        def cost(instruction: Instruction) -> float:
            return costs[instruction.stage].flops(instruction)

        return pipeline_schedule(self.parallel, microbatches, cost)

    def with_constant_batch(self, batch: int) -> Self:
        """Return the run with this batch in each step. The schedule of its learning rate keeps its
        length."""
        train = self.train.model_copy(update={"global_batch": batch, "batch_schedule": ()})
        lr = self.lr.model_copy(update={"length": self.lr_schedule.total})
        return self.model_copy(update={"train": train, "lr": lr})

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

    def compile_mode(self, device: str) -> Literal["off", "leaves", "block"]:
        """Return what is compiled, by train.compile. device: type of the ranks' devices."""
        mode = self.train.compile
        if mode != "auto":
            return mode
        # canonical sums have an order that no compiler knows; no leaf of a factory's model is known
        is_compilable = not self.canonical_shards and not self.model.factory
        # on a CPU compiling takes longer than a short run gains by it
        return "block" if device == "cuda" and is_compilable else "off"

    def attention_kernels(self, model: ModelConfig) -> list[str]:
        """Return the kernels of attention that the layers of `model` take in this run, each once,
        for tensors of the default device (`models.attention.backends`)."""
        return kernel_names(
            model,
            self.plan,
            self.parallel.tensor,
            self.parallel.context,
            (self.train.micro_batch, self.train.seq_length),
            self.data.reset_attention_mask,
        )

    def recurrent_kernels(
        self, model: ModelConfig, refused: Mapping[str, str] = MappingProxyType({})
    ) -> list[str]:
        """Return what computes each part of the layers of `model` with a recurrent state in this
        run, for tensors of the default device; none if there are no such layers
        (`models.recurrent.kernel_choice`).

        refused: why a package is not taken, by its name, as an engine has found.
        """
        setting = kernel_choice.KernelSetting(
            device=torch.empty(0).device.type,
            products=self.plan.compute,
            canonical=self.train.numerics == "canonical",
            deterministic=self.train.deterministic,
        )
        ranks = self.parallel.tensor * self.parallel.context
        return kernel_choice.describe(model, ranks, setting, refused)

    @property
    def engine_options(self) -> EngineOptions:
        """The options of the run's engine: initial weights are drawn, and nothing is compiled."""
        parallel = self.parallel
        return EngineOptions(
            micro_batch=self.train.micro_batch,
            seq_length=self.train.seq_length,
            sequence=parallel.sequence,
            async_tensor=parallel.async_tensor,
            canonical_shards=self.canonical_shards,
            layers=parallel.cuts,
            recompute=self.recompute,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            # the engine asks for one of the two ways; the other is "gather"
            ring=parallel.context_by == "ring",
            frozen=self.optimizer.frozen,
            seed=self.train.seed,
            trace=self.precision.trace_overflows,
            attention_logits=self.log.attention_logits,
            qk_clip=self._qk_clip,
        )

    @property
    def _qk_clip(self) -> QKClip | None:
        optimizer = self.optimizer
        if not optimizer.qk_clip:
            return None
        return QKClip(optimizer.qk_clip, optimizer.qk_clip_alpha)

    @property
    def with_batch_of_timeline(self) -> Self:
        """The run with the batch of the step log.timeline; that of train.global_batch if no step is
        recorded or all have one."""
        step = self.log.timeline
        if not step or not self.train.batch_schedule:
            return self
        consumed = self.batches.after(0, step - 1)
        return self.with_constant_batch(self.batches.at(consumed))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of train.global_batch samples, over all replicas."""
        return self.train.global_batch * self.train.seq_length

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of the run's checkpoints, which may be at a URL."""
        return checkpoint_folder(self.checkpoint.folder, Path(self.train.folder))

    @property
    def lr_schedule(self) -> LRSchedule:
        """The learning-rate schedule, a function of the steps or samples taken so far (lr.unit)."""
        return lr_schedule(self.lr, self.train)

    @property
    def plan(self) -> PrecisionPlan:
        """The precision plan of [precision] and [fp8]; its `origin` names the key that decided each
        field."""
        origins = tuple(self._origins.items())
        return _cached_plan((self.precision, self.fp8), origins, self._dialect_plan)

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

    def with_value(self, key: str, value: object, origin: str) -> Self:
        """Return the run with another value of a dotted key.

        Raises ValueError if the run cannot have it.
        """
        return self.with_values({key: value}, origin)

    def with_values(self, values: Mapping[str, object], origin: str) -> Self:
        """Return the run with other values of dotted keys, which are of one table.

        Raises ValueError if the run cannot have them.
        """
        by_name = {key.split(".")[1]: value for key, value in values.items()}
        table, _ = next(iter(values)).split(".")
        # what is not given follows from other keys of the table
        given = getattr(self, table).model_dump(exclude_unset=True)
        changed = type(getattr(self, table)).model_validate({**given, **by_name})
        config = self.model_copy(update={table: changed})
        if problems := cross_problems(dict(config), table):
            raise UserError(*problems)
        config._origins = {**self._origins, **dict.fromkeys(values, origin)}
        return config

    def on_device(self, device: str) -> Self:
        """Return the run with the defaults of its ranks' devices: on GPUs tensor-parallel ranks
        share the activations between products too. device: their type."""
        parallel = self.parallel
        is_free = not self.given("parallel.sequence") and not self.model.factory
        shares = parallel.tensor > 1 and not self.canonical_shards
        if device != "cuda" or not is_free or not shares:
            return self
        if self.train.seq_length % length_multiple(parallel.context, parallel.tensor):
            return self
        shared = parallel.model_copy(update={"sequence": True})
        return self.with_parallel(shared, "default on a GPU")

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
        """Return the value of the dotted `key` in TOML's grammar, without secrets of URLs."""
        return masked(toml(self.get(key)))

    def save_resolved(self, folder: Path) -> Path:
        """Write the run to folder/run.toml, or to run.resolved.toml if the user's own file has that
        name; return the path."""
        # a user may train in the folder that has the run file
        path, beside_own = (folder / name for name in RUN_FILES)
        if path.exists() and not is_resolved(path):
            path = beside_own
        text = self.resolved_text()
        write_whole(path, text.encode())
        # a run that resumes needs the signature of a URL: nobody else should
        if masked(text) != text:
            path.chmod(0o600)
        return path

    def resolved_text(self) -> str:
        """Return the run as a resolved run file, whose end can be told from a cut."""
        return f"{self.as_toml(SAVED)}\n{END}\n"

    def as_toml(self, comment: str) -> str:
        """Return the run as a run file that begins with `comment`. Other comments say where values
        came from."""
        lines = [comment]
        for table, values in self:
            lines += ["", f"[{table}]"]
            for name, value in values:
                # as TOML text, an origin has no line break that would end the comment
                origin = toml(self.origin(f"{table}.{name}"))[1:-1]
                lines.append(f"{name} = {toml(value)}  # {origin}")
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def _cached_plan(
    tables: tuple[Precision, FP8],
    origins: tuple[tuple[str, str], ...],
    dialect: PrecisionPlan | None,
) -> PrecisionPlan:
    """Return the plan of both tables, which is asked for again with each instruction that is
    timed."""
    precision, fp8 = tables
    return with_origins(plan_of(precision, fp8, dialect), dict(origins))


class RunFile:
    """The keys of a run file and of overrides, before the weights of `train.init_from` add what
    they leave open.

    settings: every key that is given, by dotted name. problems, notes: those found so far.
    """

    def __init__(self, path: str | Path | None, overrides: Sequence[str] = ()) -> None:
        """Read the TOML file `path`, changed by `overrides`. Raises UserError for an integer that
        is too large."""
        # as origins write it, without a "./"
        self.path = None if path is None else Path(path)
        self.settings, self.problems = read_run_settings(path, overrides)
        settings = self.settings
        # first, for no later message could print such a number
        if large := [*too_large(settings)]:
            raise UserError(*self.problems, *large)

        # other systems' tables leave the settings; then unknown keys are known
        self._dialect = _dialect_of(settings, known_keys())
        saved_origin = f"file {self.path}" if self._is_saved() else ""
        removed_problems, removed_notes = take_removed(settings, saved_origin)
        self.problems += removed_problems
        self.problems += self._dialect.problems
        self.problems += _unknown_keys(settings)
        self.problems += _two_sources(settings)
        url_problems, url_notes = take_urls(settings, _fields(), saved_origin)
        self.problems += url_problems
        refused_keys = {problem.fields["key"] for problem in url_problems}
        self._refuses_weights = not refused_keys.isdisjoint(
            ("train.init_from", "train.branch_from")
        )

        # weaker origins fill in what is still open
        self.notes = [*removed_notes, *self._dialect.notes, *url_notes, *_replace_model(settings)]
        self._preset_problems = _add_preset(settings)
        self.problems += self._preset_problems

    @property
    def first_weights(self) -> Path | None:
        """Return the folder of train.init_from; None if there is none, or none that a path can
        name."""
        return self._folder_of("train.init_from")

    @property
    def has_own_model(self) -> bool:
        """Return True if the run file, or its preset, says how wide the model is."""
        return "model.hidden" in self.settings

    @property
    def grown_tokenizer(self) -> Path | None:
        """Return the file of data.tokenizer, for whose tokens train.grow_vocabulary adds rows; None
        if there is none."""
        path = self._folder_of("data.tokenizer")
        if path is None or path == Path(CHARACTERS):
            return None
        return tokenizer_in(path)

    @property
    def grows(self) -> bool:
        """Return True if train.grow_vocabulary asks for rows of new tokens."""
        kind = self.settings.get("train.grow_vocabulary")
        return kind is not None and kind.value in ("mean", "zero", "random")

    def _folder_of(self, key: str) -> Path | None:
        """Return the folder or file that a key names; None if it has no value, or one that its
        checks refuse."""
        setting = self.settings.get(key)
        # the checks of the table's types report a value that cannot be
        if setting is None or not isinstance(setting.value, str) or not setting.value:
            return None
        # the checks of URLs report a password, and no server is asked with it
        if home_problem(setting.value) or has_password(setting.value):
            return None
        return path_of(home_expanded(setting.value))

    @property
    def origin_of_model(self) -> Path | None:
        """Return the folder of train.branch_from if no key of [model] is given but those that a
        branch may change (`CONTEXT_KEYS`); else None, and where the run is no branch or the value
        is no path."""
        changeable = {f"model.{key}" for key in CONTEXT_KEYS}
        given = {key for key in self.settings if key.startswith("model.")}
        if not given <= changeable:
            return None
        return self._folder_of("train.branch_from")

    @property
    def run_folder(self) -> Path:
        """Return the folder of the run."""
        default = tables_of_a_run()["train"].model_fields["folder"].default
        return self._folder_of("train.folder") or Path(default)

    @property
    def checkpoint_folder(self) -> Path:
        """Return the folder of the run's checkpoints."""
        setting = self.settings.get("checkpoint.folder")
        place = setting.value if setting and isinstance(setting.value, str) else ""
        return checkpoint_folder(home_expanded(place), self.run_folder)

    def resolve(self, initial: "InitialModel | UserError | None" = None) -> RunConfig:
        """Return the run. Raises UserError with all problems.

        initial: the model of `first_weights` or `origin_of_model`, or the error of reading it; None
            to take all of [model] from the run file.
        """
        settings = dict(self.settings)
        problems = list(self.problems)
        if isinstance(initial, UserError):
            key = "train.init_from" if self.first_weights else "train.branch_from"
            folder = settings[key]
            prefix = f"{key} ({folder.origin}): "
            hint = optional_parts.working_directory_hint(folder.origin, folder.value)
            problems += (problem.within(prefix, hint) for problem in initial.problems)
        elif initial is not None:
            problems += optional_parts.add_initial_model(settings, initial)
        # a model has as many positions as a sequence has tokens, unless anything says otherwise
        length = settings.get("train.seq_length")
        if length is not None and isinstance(length.value, int):
            settings.setdefault("model.max_positions", Setting(length.value, "train.seq_length"))

        problems += take_warmup_fraction(settings)

        # a dialect's plan as native keys: those that the run file gives too are stronger
        plan = self._dialect.plan
        if plan is not None:
            settings = native_settings(plan) | settings
        # Where preset or weights could not be read, keys of the model are missing for that reason.
        lacks_model = (
            bool(self._preset_problems) or self._refuses_weights or isinstance(initial, UserError)
        )
        incomplete = "model" if lacks_model else ""
        tables, type_problems = _read_tables(settings, tables_of_a_run(), incomplete)
        problems += [*type_problems, *cross_problems(tables)]
        if problems:
            raise UserError(*problems)
        config = RunConfig.model_validate(tables)
        idle_notes = effectless(Tables.of(dict(config)), self._written_keys())
        config._origins = origins_of(settings, plan)
        config._notes = (*self.notes, *idle_notes)
        config._dialect_plan = plan
        return config

    def _is_saved(self) -> bool:
        """Return True if the file is a resolved run, which megaprec wrote."""
        return self.path is not None and is_resolved(self.path)

    def _written_keys(self) -> set[str]:
        """Return the keys that the user wrote and means for this run: those told if they are idle.

        The keys of a resolved run do not count: it has all of them, and the idle ones were told
        when the run began. Nor do periods of the file (`PERIODS`) if the command line gives
        train.steps: a short trial need not reach them.
        """
        origins = {key: setting.origin for key, setting in self.settings.items()}
        typed = {key for key, origin in origins.items() if origin == "command line"}
        if self.path is None or self._is_saved():
            return typed
        in_file = {key for key, origin in origins.items() if origin == f"file {self.path}"}
        if "train.steps" in typed:
            in_file = in_file.difference(PERIODS)
        return typed | in_file


def run_file_in(folder: Path, written_by_run: bool = False) -> Path | None:
    """Return the run file of a run folder, which may be the user's own; None if there is none.

    written_by_run: only the resolved one counts, for the user may have changed another since.
    """
    for name in RUN_FILES:
        path = folder / name
        if path.is_file() and (not written_by_run or is_resolved(path)):
            return path
    return None


def is_resolved(path: Path) -> bool:
    """Return True if the run file is one that a run wrote."""
    mark = _BY_MEGAPREC.encode()
    with reading(path) as file:
        return file.read(len(mark)) == mark


def load_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run of the TOML file `path`, changed by `overrides`, whose [model] is whole.

    `resolve_run` also reads what the weights of train.init_from say. Raises
    UserError with all problems.
    """
    return RunFile(path, overrides).resolve()


def load_precision(
    settings: dict[str, Setting],
) -> tuple[PrecisionPlan, dict[str, Setting], tuple[str, ...]]:
    """Return the plan of keys that need not be a whole run, the other keys that they decide, and
    notes.

    Raises UserError with all problems.
    """
    users_keys = set(settings)
    dialect = _dialect_of(settings, None)
    removed_problems, _ = take_removed(settings)
    problems = [*removed_problems, *dialect.problems]
    # keys that a dialect adds are not of the user
    users_settings = {key: setting for key, setting in settings.items() if key in users_keys}
    problems += _unknown_keys(users_settings)
    table_classes = {"precision": Precision, "fp8": FP8}
    native = settings if dialect.plan is None else native_settings(dialect.plan) | settings
    tables, type_problems = _read_tables(native, table_classes)
    problems += [*type_problems, *cross_problems(tables)]
    if problems:
        raise UserError(*problems)
    precision = Precision.model_validate(tables["precision"])
    fp8 = FP8.model_validate(tables["fp8"])
    plan = plan_of(precision, fp8, dialect.plan)
    plan = with_origins(plan, origins_of(native, dialect.plan))
    others: dict[str, Setting] = {}
    for key, setting in settings.items():
        table, _, _ = key.partition(".")
        if table not in table_classes:
            others[key] = setting
    return plan, others, dialect.notes


def read_run_settings(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[dict[str, Setting], list[str]]:
    """Return the values of the file and of the overrides by dotted key, and the problems of the
    overrides' grammar."""
    settings, problems = _read_overrides(overrides)
    if path is not None:
        settings = _read_file(Path(path)) | settings
    return settings, problems


def _read_tables(
    settings: Mapping[str, Setting],
    table_classes: Mapping[str, type[BaseModel]],
    incomplete: str = "",
) -> tuple[dict[str, BaseModel], list[str]]:
    """Return the tables that can be read, and the problems of the others.

    incomplete: the table whose missing keys are not reported, for another line has said why they
        are missing.
    """
    tables = dict[str, BaseModel]()
    problems = list[str]()
    for table, table_class in table_classes.items():
        values: dict[str, Any] = {}
        for name in table_class.model_fields:
            setting = settings.get(f"{table}.{name}")
            if setting is not None:
                values[name] = setting.value
        # missing keys have defaults; pydantic reports those that have none
        try:
            tables[table] = table_class.model_validate(values)
        except ValidationError as error:
            report_missing = table != incomplete
            problems += explain(table, table_class, error, settings, report_missing)
    return tables, problems


def tables_of_a_run() -> dict[str, type[BaseModel]]:
    """Return the class of each table of a run file, by name."""
    table_classes = dict[str, type[BaseModel]]()
    for name, field in RunConfig.model_fields.items():
        table_class = field.annotation
        if isinstance(table_class, type) and issubclass(table_class, BaseModel):
            table_classes[name] = table_class
    return table_classes


def _fields() -> dict[str, FieldInfo]:
    """Return the field of every dotted key but model.preset."""
    fields = dict[str, FieldInfo]()
    for table, table_class in tables_of_a_run().items():
        for name, field in table_class.model_fields.items():
            fields[f"{table}.{name}"] = field
    return fields


def _known_fields() -> dict[str, FieldInfo | None]:
    """Return every key that a run file may have, with its field if it has one."""
    without_field = ("model.preset", *(f"precision.{name}" for name in DIALECT_NAMES))
    return {**_fields(), **dict.fromkeys(without_field)}


def _unknown_keys(settings: Mapping[str, Setting]) -> list[str]:
    """Return a problem for each key that a run file may not have."""
    known = _known_fields()
    if settings.keys() <= known.keys():
        return []
    return [*optional_parts.unknown_key_problems(settings, known)]


def _dialect_of(settings: dict[str, Setting], known: Collection[str] | None) -> DialectResult:
    """Take another system's table out of `settings`, if there is one: see `resolve_dialect`."""
    if not has_dialect(settings):
        return DialectResult()
    return optional_parts.resolve_dialect(settings, known)


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
    text = _whole_text(path)
    try:
        content = parse_toml(text)
    except ValueError as error:
        if message := _other_system_message(path, text):
            raise UserError(message) from error
        raise UserError.of("config.not_toml", path=path, reason=error) from error
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


def _whole_text(path: Path) -> str:
    """Return the text of a run file. Raises UserError if it cannot be read, or was cut short."""
    try:
        text = read_text(path, MOST_SETTINGS)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError.of("config.run_file_unreadable", path=path, reason=reason) from error
    if is_cut(text):
        raise UserError.of("config.run_file_cut", path=path, end=END)
    return text


def is_cut(text: str) -> bool:
    """Return True if a text is the beginning of a run file that a run wrote. What is left may be
    TOML, and would be another run; of the first line, a run of defaults."""
    is_resolved_text = text.startswith(SAVED)
    is_part_of_first_line = text != "" and SAVED.startswith(text)
    return is_part_of_first_line or (is_resolved_text and END not in text.splitlines())


def _other_system_message(path: Path, text: str) -> str:
    """Return the line that names whose file it is; "" if that is not known, or if it is a run
    file."""
    if owner := optional_parts.other_owner(path, text):
        return str(owner.of(path))
    if path.suffix.lower() in (".sh", ".bash", ".slurm", ".sbatch"):
        return Problem.of("config.shell_script", path=path)
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
            problems.append(Problem.of("config.override_form", override=override))
    return settings, problems


def _override_value(key: str, text: str) -> Any:
    """Return the value of an override: read as TOML, or the text itself where that is meant."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    field = _fields().get(key)
    value = parsed.get("value")
    # a folder may be called 1 or true
    wants_text = key == "model.preset" or (field is not None and field.annotation is str)
    if key == "data.source":
        wants_text = not isinstance(value, list)  # of several sources
    if wants_text and not isinstance(value, str):
        return text
    # a line break in the text can begin further keys: then all of it is the value
    has_further_keys = parsed.keys() != {"value"}
    return text if has_further_keys else parsed["value"]


def _two_sources(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield a problem if the command line names training data that data.blend of the file would
    overrule."""
    source = settings.get("data.source")
    blend = settings.get("data.blend")
    # the checks between tables refuse every other source beside a blend
    if source is None or source.origin != "command line" or source.value != "python":
        return
    # who writes both means the blend
    if blend is None or blend.origin == "command line":
        return
    if blend.value:
        yield Problem.of("config.source_beside_blend", origin=blend.origin)


def _replace_model(settings: dict[str, Setting]) -> Iterator[str]:
    """Take out of `settings` what the file says of the model, if the command line chooses a preset;
    yield a note of it."""
    chosen = settings.get("model.preset")
    if chosen is None or chosen.origin != "command line" or not isinstance(chosen.value, str):
        return
    preset = PRESETS.get(chosen.value)
    if preset is None:
        return
    left_aside = list[str]()
    for key in [*settings]:
        table, _, name = key.partition(".")
        setting = settings[key]
        is_typed = setting.origin == "command line"
        is_open_vocab = name == "vocab" and "vocab" not in preset
        stays = name == "preset" or name in TRAINING_ONLY_KEYS or is_typed or is_open_vocab
        if table != "model" or stays:
            continue
        del settings[key]
        # a key that only repeats the preset needs no note
        if preset.get(name) != setting.value:
            left_aside.append(f"{key} = {toml(setting.value)}")
    if left_aside:
        yield (
            f"model.preset = {toml(chosen.value)} (command line) is the model; left aside: "
            f"{', '.join(left_aside)}"
        )


def _add_preset(settings: dict[str, Setting]) -> list[Problem]:
    """Take `model.preset` out of the settings, and add those fields of the preset that neither file
    nor command line gives. Returns a problem if there is no such preset.

    settings: by "table.key".
    """
    chosen = settings.pop("model.preset", None)
    if chosen is None:
        return []
    if not isinstance(chosen.value, str) or chosen.value not in PRESETS:
        hint = did_you_mean(str(chosen.value), PRESETS)
        return [
            Problem.of(
                "config.preset_unknown",
                preset=toml(chosen.value),
                origin=chosen.origin,
                # the hint is a sentence, after which a new one begins
                hint=f"{hint} There" if hint else "; there",
                names=", ".join(PRESETS),
            )
        ]
    for name, value in PRESETS[chosen.value].items():
        # file and command line are stronger
        settings.setdefault(f"model.{name}", Setting(value, f"preset {chosen.value}"))
    return []


def saved_run(folder: Path) -> RunConfig:
    """Return the run that `RunConfig.save_resolved` wrote. Raises UserError if it is not there."""
    path = run_file_in(folder, written_by_run=True)
    if path is None:
        raise UserError.of("command.replay_no_run_file", folder=folder)
    return load_run(path)
