"""The arguments of Hugging Face's Trainer, and of LLaMA-Factory and ms-swift, which are built on
it: all weights of a model that is there are trained further on plain texts.

The names and defaults are those of transformers' TrainingArguments (4.57), of LLaMA-Factory 0.9,
and of ms-swift 3, which has some defaults of its own. Each argument is read, is not used here, or
is refused by its name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from megaprec.errors import Problem, did_you_mean
from megaprec.kinds import is_number
from tools.interop.importing.draft import Draft
from tools.interop.importing.megatron_data import OPEN_SOURCE
from tools.interop.importing.named_files import read_named_json
from tools.interop.importing.shell_words import Word
from tools.interop.importing.trainer_fsdp import add_fsdp

TRAINER = "Hugging Face's Trainer"
LLAMA_FACTORY = "LLaMA-Factory"
SWIFT = "ms-swift"
# names by which a program is known
MARKS = {
    LLAMA_FACTORY: {"finetuning_type", "cutoff_len", "stage"},
    SWIFT: {"tuner_type", "train_type", "attn_impl"},
}
# other names of an argument
SAME = {
    "model": "model_name_or_path",
    "model_id_or_path": "model_name_or_path",
    "tuner_type": "finetuning_type",
    "train_type": "finetuning_type",
    "cutoff_len": "max_length",
    "block_size": "max_length",
    "max_seq_length": "max_length",
    "dtype": "torch_dtype",  # of transformers 5
}
NUMBERS: Mapping[str, Callable[[str], Any]] = {
    "per_device_train_batch_size": int,
    "gradient_accumulation_steps": int,
    "max_length": int,
    "max_steps": int,
    "warmup_steps": float,
    "seed": int,
    "save_steps": float,
    "save_total_limit": int,
    "logging_steps": float,
    "warmup_ratio": float,
    "num_train_epochs": float,
    "learning_rate": float,
    "weight_decay": float,
    "adam_beta1": float,
    "adam_beta2": float,
    "adam_epsilon": float,
    "max_grad_norm": float,
    "val_size": float,
    "split_dataset_ratio": float,
    "validation_split_percentage": float,
}
TEXTS = (
    "model_name_or_path",
    "lr_scheduler_type",
    "output_dir",
    "torch_dtype",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "report_to",
    "save_strategy",
)
FLAGS = ("bf16", "fp16", "tf32", "gradient_checkpointing")
# arguments with the values that leave the run as it is here, and why others are refused
FIXED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "finetuning_type": (("full",), "all weights are trained here, and no adapters (LoRA)"),
    "stage": (("pt",), "a run trains on plain texts here"),
    "optim": (
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
        "give optimizer.name=... beside",
    ),
    "resume_from_checkpoint": (("none", "null", "false"), "give train.branch_from=... beside"),
}
# arguments of data, whose texts become token files first
_OF_DATA = """
dataset dataset_dir dataset_name dataset_config_name train_file validation_file eval_dataset
custom_dataset_info data_path max_samples max_train_samples template val_size
validation_split_percentage split_dataset_ratio tokenizer_name tokenizer_name_or_path
"""
# those of them that hold a part of the texts out, each with what all of them would be
HOLD_OUTS = {"val_size": 1, "split_dataset_ratio": 1, "validation_split_percentage": 100}
# what the Trainer's parser takes for a switch
SWITCHES = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
_UNUSED = """
attn_impl cache_dir data_cache_dir data_seed dataset_num_proc ddp_find_unused_parameters
ddp_timeout device_groups disable_tqdm do_eval do_train eval_strategy evaluation_strategy
eval_steps flash_attn load_best_model_at_end log_level logging_dir logging_first_step
logging_nan_inf_filter logging_strategy lazy_tokenize low_cpu_mem_usage metric_for_best_model
overwrite_cache
overwrite_output_dir packing per_device_eval_batch_size plot_loss preprocessing_num_workers
push_to_hub run_name save_on_each_node save_only_model save_safetensors streaming
fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
trust_remote_code use_fast_tokenizer use_hf use_ray gradient_checkpointing_kwargs
torch_compile
"""
# those of adapters change nothing without them
UNUSED_SUBJECTS = ("lora_", "dataloader_", "hub_", "ray_", "swanlab_", "eval_")
# arguments of a model with new weights, which is described in keys here
_OF_NEW_MODEL = ("config_name", "model_type", "config_overrides")
DATA_NAMES = tuple(_OF_DATA.split())
UNUSED_NAMES = frozenset(_UNUSED.split())
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16"}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 500,
}
OF_PROGRAM: Mapping[str, Mapping[str, Any]] = {
    TRAINER: {},
    LLAMA_FACTORY: {"max_length": 2048},
    SWIFT: {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": None,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "logging_steps": 5,
        "gradient_checkpointing": True,
        "bf16": True,
    },
}
LEAST_BATCH = 16  # samples, of ms-swift where it chooses the accumulation
STAGE = re.compile(r"(?:zero|z)([0-3])\Z")
OFF = ("false", "none", "null", "no", "")


def is_unused(name: str) -> bool:
    """Return True if an argument has no meaning here."""
    return name in UNUSED_NAMES or name.startswith(UNUSED_SUBJECTS)


@dataclass(frozen=True)
class Given:
    """An argument as it is given. unknown: why its value is not known; None if it is."""

    value: str
    said: str
    place: str
    unknown: Problem | None = None


class TrainerArguments:
    """The arguments of a run that the Trainer does, for a draft of ours.

    dropped: names to leave out. left_out: those that were found.
    """

    def __init__(self, given: Mapping[str, Given], draft: Draft, dropped: frozenset[str]) -> None:
        self.draft = draft
        self.left_out = dict[str, str]()
        self.unused = dict[str, str]()
        self.values = dict[str, Any]()
        self.said = dict[str, str]()
        programs = [program for program, marks in MARKS.items() if marks & given.keys()]
        self.program = next(iter(programs), TRAINER)
        self.defaults = {**DEFAULTS, **OF_PROGRAM[self.program]}
        for typed, argument in given.items():
            name = SAME.get(typed, typed)
            if typed in dropped or name in dropped:
                self.left_out[typed] = argument.said
            elif name in self.said:
                self._refuse(argument, f"{self.said[name]} says it already: leave one of them out")
            else:
                self._take(name, argument)

    def _take(self, name: str, argument: Given) -> None:
        """Read an argument, note it, or add a problem."""
        text = argument.value.strip()
        self.said[name] = argument.said
        # where this run is kept, and a seed that the shell draws
        is_open = name in ("output_dir", "seed") and argument.unknown
        if is_unused(name) or is_open:
            self.unused[name] = argument.said
        elif name in DATA_NAMES and name not in HOLD_OUTS:  # the user says what becomes of them
            return
        elif argument.unknown:
            self._refuse(argument, argument.unknown)
        else:
            self._read(name, text, argument)

    def _read(self, name: str, text: str, argument: Given) -> None:
        """Read the value of an argument, or add a problem with it."""
        if name in FIXED:
            permitted, why = FIXED[name]
            if text.lower() not in permitted:
                self._refuse(argument, why)
        elif name in NUMBERS:
            self._take_number(name, text, argument)
        elif name in FLAGS:
            self._take_flag(name, text, argument)
        elif name in TEXTS:
            self.values[name] = text
        elif name in _OF_NEW_MODEL:
            self._answer_for_new_model(argument)
        elif text.lower() in OFF:
            self.unused[name] = argument.said
        else:
            known = (*NUMBERS, *TEXTS, *FLAGS, *FIXED, *SAME)
            hint = did_you_mean(name, known)
            self._refuse(argument, f"no such argument is known here{hint}")

    def _answer_for_new_model(self, argument: Given) -> None:
        """Note that the model given beside counts, or add a problem if there is none."""
        if has_model(self.draft):
            self.draft.notes.append(
                f"{argument.said}: the model that is given beside counts instead"
            )
        else:
            self._refuse(
                argument, "a new model is described in keys here: give model.preset=... beside"
            )

    def _take_number(self, name: str, text: str, argument: Given) -> None:
        try:
            number = NUMBERS[name](text)
        except ValueError:
            number = None
        if is_number(number):
            self.values[name] = number
        else:
            self._refuse(argument, "give a number")

    def _take_flag(self, name: str, text: str, argument: Given) -> None:
        if text.lower() in SWITCHES:
            self.values[name] = SWITCHES[text.lower()]
        else:
            self._refuse(argument, "give true or false")

    def _refuse(self, argument: Given, why: str) -> None:
        where = f" ({argument.place})" if argument.place else ""
        self.draft.problems.append(Problem(why).within(f"{argument.said}{where}: "))

    def get(self, name: str) -> Any:
        """Return the value of an argument, or the program's default."""
        return self.values.get(name, self.defaults.get(name))

    def origin(self, *names: str) -> str:
        """Return how arguments were given, or that the program's default counts."""
        said = [self.said[name] for name in names if name in self.values]
        return " ".join(said) or f"default of {self.program}"

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of the run file."""
        self.draft.put(key, value, self.origin(*names))


def given_in_words(words: Sequence[Word]) -> dict[str, Given]:
    """Return the arguments of a command line."""
    given = dict[str, Given]()
    name = ""
    for word in words:
        if word.text.startswith("--"):
            typed, equals, value = word.text.partition("=")
            name = typed.removeprefix("--").replace("-", "_")
            given[name] = Given(value if equals else "true", word.text, word.place, word.unknown)
        elif name:
            before = given[name]
            is_first = before.said.startswith("--") and " " not in before.said
            value = word.text if is_first else f"{before.value} {word.text}"
            said = f"{before.said} {word.text}"
            given[name] = Given(value, said, before.place, before.unknown or word.unknown)
    return given


def add_trainer(
    given: Mapping[str, Given],
    draft: Draft,
    ranks: int | None,
    dropped: frozenset[str],
    folder: Path,
    documents: Mapping[str, str],
) -> tuple[TrainerArguments, dict[str, Mapping[str, Any]]]:
    """Add the keys of a run. Returns what was read, and DeepSpeed's configuration by its name.

    ranks: how many there are; None if that is not known. folder: of the file, in which the
    configuration may be. documents: files that a script writes.
    """
    settings = TrainerArguments(given, draft, dropped)
    _add_model(settings)
    _add_length(settings, ranks)
    _add_rate(settings)
    _add_optimizer(settings)
    _add_precision(settings)
    _add_rest(settings)
    _add_fsdp(settings, folder, documents)
    return settings, _deepspeed(settings, folder, documents)


def has_model(draft: Draft) -> bool:
    """Return True if the user gives a model in keys beside the arguments."""
    return any(key.startswith("model.") for key in draft.settled)


def _add_model(settings: TrainerArguments) -> None:
    """Add the model whose weights are trained further, by its folder."""
    draft = settings.draft
    name = "model_name_or_path"
    path = settings.get(name)
    if path is None:
        is_new = any(of_new in settings.said for of_new in _OF_NEW_MODEL)
        if draft.needs("train.init_from") and not is_new and not has_model(draft):
            draft.missing.append(
                f"--{name} is missing: train.init_from=FOLDER names the model, or model.preset=..."
            )
        return
    settings.put("train.init_from", path, name)
    draft.notes.append(
        f"{settings.said[name]}: train.init_from takes a folder: if this is a name on the hub, "
        "download it first, and name the folder"
    )


def _add_length(settings: TrainerArguments, ranks: int | None) -> None:
    """Add the length of samples and of the run, the batches and the seed. ranks: all of them are
    replicas; None if their number is not known."""
    draft = settings.draft
    length = settings.get("max_length")
    if length:
        settings.put("train.seq_length", length, "max_length")
    elif draft.needs("train.seq_length"):
        draft.missing.append("--max_length is missing: train.seq_length=N beside gives it")
    steps = settings.get("max_steps") or 0
    if steps > 0:
        settings.put("train.steps", steps, "max_steps")
    elif draft.needs("train.steps"):
        epochs = settings.said.get("num_train_epochs", "without --max_steps")
        draft.problems.append(
            f"{epochs}: the steps of a run depend on how many tokens there are: train.steps=N "
            "beside gives them"
        )
    micro = settings.get("per_device_train_batch_size")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    settings.put("train.micro_batch", micro, names[0])
    replicas = draft.value("parallel.data", ranks)
    if isinstance(replicas, int):
        times = settings.get("gradient_accumulation_steps") or _times(micro, replicas)
        settings.put("train.global_batch", micro * times * replicas, *names)
        draft.put("parallel.data", replicas, "ranks")
    elif draft.needs("train.global_batch"):
        draft.problems.append(
            f"{settings.origin(*names)}: the batch depends on the number of ranks: give --ranks N"
        )
    settings.put("train.seed", settings.get("seed"), "seed")


def _times(micro: int, replicas: int) -> int:
    """Return how many micro-batches ms-swift accumulates by default: those of its least batch."""
    samples = max(1, micro * replicas)
    return ceil(LEAST_BATCH / samples)


def _add_rate(settings: TrainerArguments) -> None:
    """Add the schedule of the rate, which ends at 0."""
    draft = settings.draft
    settings.put("lr.peak", settings.get("learning_rate"), "learning_rate")
    name = settings.get("lr_scheduler_type")
    if name in SCHEDULES:
        settings.put("lr.schedule", SCHEDULES[name], "lr_scheduler_type")
    elif draft.needs("lr.schedule"):
        listed = ", ".join(SCHEDULES)
        draft.problems.append(
            f"{settings.origin('lr_scheduler_type')}: {listed} are read: lr.schedule=... beside "
            "gives one"
        )
    settings.put("lr.final", 0.0, "lr_scheduler_type")
    _add_warmup(settings)


def _add_warmup(settings: TrainerArguments) -> None:
    """Add the warm-up: --warmup_steps, of transformers 5 also as a fraction below 1, and in place
    of 0 --warmup_ratio."""
    draft = settings.draft
    warmup = settings.get("warmup_steps")
    ratio = settings.get("warmup_ratio")
    origin = "warmup_steps"
    if ratio and not warmup:
        warmup = ratio
        origin = "warmup_ratio"
    elif ratio:
        said = settings.said
        draft.notes.append(
            f"{said['warmup_ratio']}: {said['warmup_steps']} overrules it, as in {TRAINER}"
        )
    steps = draft.value("train.steps")
    if 0 < warmup < 1 and isinstance(steps, int):
        # as TrainingArguments.get_warmup_steps rounds it
        warmup = ceil(steps * warmup)
    elif warmup == int(warmup):
        warmup = int(warmup)
    if warmup and settings.get("lr_scheduler_type") == "constant":
        draft.notes.append(
            f"{settings.origin(origin)}: --lr_scheduler_type constant has no warm-up, as in "
            f"{TRAINER} (constant_with_warmup has one)"
        )
        warmup = 0
        origin = "lr_scheduler_type"
    settings.put("lr.warmup", warmup, origin)


def _add_optimizer(settings: TrainerArguments) -> None:
    settings.put("optimizer.name", "adamw", "optim")
    betas = [settings.get("adam_beta1"), settings.get("adam_beta2")]
    settings.put("optimizer.betas", betas, "adam_beta1", "adam_beta2")
    settings.put("optimizer.eps", settings.get("adam_epsilon"), "adam_epsilon")
    settings.put("optimizer.weight_decay", settings.get("weight_decay"), "weight_decay")
    settings.put("optimizer.clip", settings.get("max_grad_norm"), "max_grad_norm")


def _add_precision(settings: TrainerArguments) -> None:
    """Add the dtype of products: of --fp16, otherwise of the weights that are loaded, otherwise of
    --bf16."""
    draft = settings.draft
    dtype = DTYPES.get(str(settings.values.get("torch_dtype")).removeprefix("torch."), "")
    if settings.values.get("fp16"):
        dtype = "fp16"
    elif settings.get("bf16"):
        dtype = dtype or "bf16"
    if not dtype and draft.given("precision.compute"):
        return  # accelerate's configuration says it
    settings.put("precision.compute", dtype or "fp32", "bf16", "fp16", "torch_dtype")
    if settings.get("tf32"):
        settings.put("precision.tf32", True, "tf32")
    if dtype:
        draft.notes.append(
            "precision.compute: weights have a master copy in FP32 here; the Trainer has one with "
            "DeepSpeed, or if the model is loaded in FP32"
        )


def _add_rest(settings: TrainerArguments) -> None:
    """Add data, folder, checkpoints and log lines."""
    draft = settings.draft
    of_data = [settings.said[name] for name in DATA_NAMES if name in settings.said]
    if draft.needs("data.source") and draft.needs("data.blend"):
        said = " ".join(of_data) or "no data are named"
        draft.put("data.source", OPEN_SOURCE, said)
        draft.notes.append(
            f"{said}: texts become token files first (megaprec data build, docs/data.md); instead "
            f"of {OPEN_SOURCE} give their prefix. Samples are train.seq_length tokens of all texts "
            "in a row, without padding"
        )
    elif of_data:
        draft.notes.append(f"{' '.join(of_data)}: the data that are given beside count instead")
    _add_held_out(settings)
    if settings.get("gradient_checkpointing"):
        settings.put("parallel.recompute", "full", "gradient_checkpointing")
    if settings.get("output_dir"):
        settings.put("train.folder", settings.get("output_dir"), "output_dir")
    _add_saves(settings)
    limit = settings.get("save_total_limit")
    settings.put("checkpoint.keep", limit or "all", "save_total_limit")
    _put_steps_between(settings, "log.every", "logging_steps")
    trackers = str(settings.get("report_to") or "").split()
    known = [tracker for tracker in trackers if tracker in ("tensorboard", "wandb")]
    if known:
        settings.put("log.to", known, "report_to")


def _add_saves(settings: TrainerArguments) -> None:
    """Add the steps between checkpoints."""
    strategy = (settings.get("save_strategy") or "steps").lower()
    if strategy == "steps":
        _put_steps_between(settings, "checkpoint.every", "save_steps")
    elif strategy in OFF:
        # the end of the run is saved, as the programs save their model
        settings.put("checkpoint.every", 0, "save_strategy")
    elif settings.draft.needs("checkpoint.every"):
        settings.draft.problems.append(
            f"{settings.said['save_strategy']}: checkpoints are saved every N steps here: give "
            "checkpoint.every=N beside, or 0 for the end alone"
        )


def _put_steps_between(settings: TrainerArguments, key: str, name: str) -> None:
    """Set a key to a number of steps, which below 1 is a fraction of the run's."""
    draft = settings.draft
    every = settings.get(name)
    if 0 < every < 1:
        steps = draft.value("train.steps")
        if not isinstance(steps, int):
            return  # another line says that they are not known
        every = ceil(steps * every)
    settings.put(key, int(every) if every == int(every) else every, name)


def _add_held_out(settings: TrainerArguments) -> None:
    """Add the part of the texts that is held out; none where no argument says one."""
    draft = settings.draft
    for name, whole in HOLD_OUTS.items():
        share = (settings.get(name) or 0) / whole
        if 0 < share < 1:
            settings.put("data.held_out", share, name)
        elif share and draft.needs("data.held_out"):
            draft.problems.append(
                f"{settings.said[name]}: give data.held_out=0.1 beside, or another share of the "
                "documents"
            )
    if not draft.given("data.held_out"):
        draft.put("data.held_out", 0.0, "evaluation has data of its own in these programs")


def _deepspeed(
    settings: TrainerArguments, folder: Path, documents: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """Return DeepSpeed's configuration: that of a file, or the stage of ZeRO that a name says."""
    named = settings.get("deepspeed")
    if named is None or named.lower() in OFF:
        return {}
    said = settings.said["deepspeed"]
    if stage := STAGE.match(named.lower()):
        content = {"zero_optimization": {"stage": int(stage[1])}, "gradient_clipping": "auto"}
        return {said: content}
    content = _json_of(settings, "deepspeed", folder, documents)
    name = "deepspeed" if named.startswith("{") else Path(named).name
    return {name: content} if content else {}


def _add_fsdp(settings: TrainerArguments, folder: Path, documents: Mapping[str, str]) -> None:
    """Add what FSDP shards, if it is switched on."""
    switch = settings.get("fsdp")
    names = [name for name in ("fsdp", "fsdp_config") if name in settings.values]
    if switch is None or switch.lower() in OFF:
        settings.unused |= {name: settings.said[name] for name in names}
        return
    config: Mapping[str, Any] = {}
    if settings.get("fsdp_config"):
        config = _json_of(settings, "fsdp_config", folder, documents)
    unused = add_fsdp(settings.draft, settings.origin(*names), switch, config)
    for key in unused:
        settings.unused[key] = f"fsdp_config: {key}"


def _json_of(
    settings: TrainerArguments, name: str, folder: Path, documents: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the JSON object of the file that an argument names, or {} and a problem."""
    content, problem = read_named_json(settings.get(name), folder, documents)
    if problem:
        settings.draft.problems.append(f"{settings.said[name]}: {problem}")
    return content
