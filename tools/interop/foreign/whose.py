"""The system that a configuration or a launch script belongs to, by the names in it: whose file it
is.

A door that takes another system's file asks here first, so that its refusal names that system and
what to do instead.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megaprec.errors import UserError
from tools.interop.foreign.data_files import TooLarge, from_json, from_toml, from_yaml
from tools.interop.foreign.plain import Fields, PlainDict

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")
KEYS = (
    "its keys are not read: write a run file (megaprec init FOLDER begins one for a folder of text)"
)
HF_FOLDER = (
    "train.init_from=FOLDER begins with the weights of its folder, from which [model] follows"
)
IMPORTED = "megaprec import-args FILE reads it"
SHOWN = "megaprec precision show FILE reads its precision"
# package, and what is imported from it
IMPORT = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+([\w.]+)(?:[ \t]+import[ \t]+(\w+))?", re.MULTILINE
)
TARGET = re.compile(r"['\"]?_target_['\"]?\s*[:=]\s*['\"]?([\w.]+)")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    whose: its name in a message. marks: sets of names, one of which the file has whole; a name of a
    table within a table is written with a dot, and so is a package behind "_target_" or
    "_import_". way: what to do here. shown: `megaprec precision show` reads it.
    """

    whose: str
    marks: tuple[str, ...]
    way: str
    shown: bool = False

    def of(self, file: object) -> str:
        """Return the line that refuses `file`."""
        return f"{file}: {self.whose}: {self.way.replace('FILE', str(file))}"


def _keys(pairs: str) -> str:
    """Return the way out of pairs, theirs and ours: "lr=lr.peak, max_steps=train.steps"."""
    return f"{KEYS}; {pairs.replace('=', ' is ')}"


DEEPSPEED = Kind(
    "a configuration of DeepSpeed",
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "zero_allow_untested_optimizer",
    ),
    "megaprec import-args FILE reads it, if it is JSON and its name ends with .json",
)
RUN = Kind(
    "a run file of megaprec",
    ("train.steps", "train.global_batch", "train.init_from", "data.source model", "model.preset"),
    "megaprec train FILE runs it",
)
# Kinds of other systems, the most particular first: the first one that fits counts
KINDS: tuple[Kind, ...] = (
    Kind(
        "a configuration of NxD",
        ("mixed_precision_config", "distributed_strategy", "optimizer_config.zero_one_enabled"),
        f"{SHOWN} (docs/migrating.md)",
        shown=True,
    ),
    Kind(
        "a configuration of GPT-NeoX",
        ("pipe_parallel_size", "zero_optimization num_layers", "zero_optimization hidden_size"),
        "megaprec import-args FILE reads it, with the other files of its run behind it",
    ),
    Kind(
        "a configuration of Axolotl",
        (
            "base_model datasets",
            "base_model sequence_len",
            "base_model adapter",
            "base_model micro_batch_size",
            "base_model pretraining_dataset",
            "base_model rl",
            "_import_.axolotl",
        ),
        _keys("base_model=train.init_from, sequence_len=train.seq_length, learning_rate=lr.peak"),
    ),
    Kind(
        "a configuration of LLaMA-Factory",
        ("finetuning_type", "model_name_or_path stage", "model_name_or_path cutoff_len"),
        _keys(
            "model_name_or_path=train.init_from, cutoff_len=train.seq_length, learning_rate=lr.peak"
        ),
    ),
    Kind(
        "a recipe of SageMaker HyperPod",
        (
            "use_smp_model",
            "model.backward_fetch_policy",
            "model.shard_degree",
            "run.model_type training_config",
            "cluster_type base_results_dir",
        ),
        _keys(
            "model.precision=precision.compute, model.fp8=fp8.kind, model.grad_clip=optimizer.clip"
        ),
    ),
    Kind(
        "a configuration of accelerate",
        ("compute_environment", "distributed_type", "mixed_precision num_processes"),
        f"{IMPORTED}, with arguments of the Trainer or keys beside it",
    ),
    Kind(
        "arguments of Hugging Face's Trainer",
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "num_train_epochs",
            "TrainingArguments",
            "SFTConfig",
            "model_name_or_path output_dir",
            "learning_rate output_dir",
        ),
        _keys(
            "per_device_train_batch_size=train.micro_batch, max_steps=train.steps, "
            "learning_rate=lr.peak, model_name_or_path=train.init_from"
        ),
    ),
    Kind(
        "a recipe of torchtune",
        ("model._component_", "tokenizer._component_", "optimizer._component_"),
        _keys("max_steps_per_epoch=train.steps, optimizer.lr=lr.peak, dtype=precision.compute"),
    ),
    Kind(
        "a configuration of torchtitan",
        (
            "training parallelism",
            "job training",
            "training.local_batch_size",
            "training.seq_len",
            "model.flavor",
            "job.config_file",
        ),
        IMPORTED,
    ),
    Kind(
        "a configuration of nanotron",
        ("tokens.train_steps", "parallelism tokens", "model.model_config"),
        _keys(
            "tokens.train_steps=train.steps, tokens.sequence_length=train.seq_length, "
            "parallelism=[parallel]"
        ),
    ),
    Kind(
        "a configuration of MosaicML's Composer or OLMo",
        ("max_duration", "global_train_batch_size", "device_train_microbatch_size"),
        _keys(
            "global_train_batch_size=train.global_batch, max_seq_len=train.seq_length, "
            "optimizer.lr=lr.peak"
        ),
    ),
    Kind(
        "a configuration of litgpt",
        (
            "train.max_tokens",
            "train.lr_warmup_steps",
            "out_dir train eval",
            "checkpoint_dir train eval",
        ),
        _keys(
            "train.global_batch_size=train.global_batch, "
            "train.micro_batch_size=train.micro_batch, "
            "train.max_seq_length=train.seq_length, precision=precision.compute"
        ),
    ),
    Kind(
        "Hugging Face's configuration of a model",
        (
            "model_type",
            "architectures",
            "num_hidden_layers",
            "transformers_version",
        ),
        HF_FOLDER,
    ),
    Kind(
        "a configuration of nanoGPT",
        (
            "block_size batch_size",
            "block_size n_layer",
            "n_embd n_head",
            "block_size learning_rate",
        ),
        _keys(
            "n_layer=model.layers, n_embd=model.hidden, n_head=model.heads, "
            "block_size=train.seq_length, batch_size=train.micro_batch, "
            "learning_rate=lr.peak, max_iters=train.steps"
        ),
    ),
    Kind(
        "a configuration of veRL",
        ("actor_rollout_ref",),
        "reinforcement learning has no trainer here",
    ),
    Kind(
        "a configuration of Megatron-Bridge",
        ("_target_.megatron.bridge", "_import_.megatron.bridge"),
        (
            f"{SHOWN}, and its arguments are read without _target_: a table of names such as "
            "train_iters"
        ),
        shown=True,
    ),
    Kind(
        "a recipe of NeMo 2",
        (
            "_target_.nemo",
            "_target_.nemo_automodel",
            "_import_.nemo.lightning",
            "_import_.nemo.collections.llm",
            "_import_.nemo_run",
        ),
        (
            f"{SHOWN} (docs/migrating.md); "
            f"{_keys('trainer.max_steps=train.steps, model.config=[model]')}"
        ),
        shown=True,
    ),
    Kind(
        "a configuration of NeMo",
        (
            "exp_manager",
            "trainer model",
            "trainer.devices",
            "trainer.precision",
            "model.megatron_amp_O2",
        ),
        f"{SHOWN} (docs/migrating.md), and megaprec import-args FILE the settings of its run",
        shown=True,
    ),
    Kind(
        "a configuration of InternEvo",
        ("JOB_NAME", "hybrid_zero_optimizer", "grad_scaler model"),
        f"{SHOWN} (docs/migrating.md)",
        shown=True,
    ),
    Kind(
        "a script with Colossal-AI",
        ("HybridParallelPlugin", "LowLevelZeroPlugin", "GeminiPlugin", "Booster"),
        f"{SHOWN} (docs/migrating.md)",
        shown=True,
    ),
    Kind("an index of tensors", ("weight_map",), HF_FOLDER),
    Kind(
        "a tokenizer",
        ("added_tokens model", "tokenizer_class", "added_tokens_decoder"),
        "data.tokenizer=FILE takes a tokenizer.json",
    ),
)


OF_NEOX = "a configuration of GPT-NeoX"
OF_NEMO = "a configuration of NeMo"
OF_TORCHTITAN = "a configuration of torchtitan"
OF_ACCELERATE = "a configuration of accelerate"
"""Kinds whose settings `megaprec import-args` reads by tables of names."""
OF_TRAINER = ("arguments of Hugging Face's Trainer", "a configuration of LLaMA-Factory")
"""Kinds whose arguments `megaprec import-args` reads from a script or YAML."""


def whose(names: Iterable[str]) -> Kind | None:
    """Return the kind of a file with these names; None if it is not known. Dashes count as
    underscores."""
    have = {name.removeprefix("--").replace("-", "_") for name in names}
    for kind in (*KINDS, RUN, DEEPSPEED):
        if any(set(mark.split()) <= have for mark in kind.marks):
            return kind
    return None


def names_in(table: PlainDict) -> set[str]:
    """Return the names in a table, and with a dot those in its tables."""
    names = set[str]()
    for key, entry in table.entries.items():
        names.add(str(key))
        if isinstance(entry.value, Fields):
            names |= {f"{key}.{name}" for name in entry.value.entries}
    return names


def other_owner(path: Path, text: str) -> Kind | None:
    """Return the kind of another system's file; None if it is not known, or if it is a run file."""
    kind = whose_file(path, text)
    return None if kind is RUN else kind


def whose_file(path: Path, text: str) -> Kind | None:
    """Return the kind of a file of data or Python, by its suffix; None if it is not known or cannot
    be read."""
    suffix = path.suffix.lower()
    if suffix == ".py":
        # what it assigns at its top, what it calls, and what it imports
        names = {*re.findall(r"^\w+(?= *=)|\w+(?=\()", text, re.MULTILINE)}
        imported = [".".join(filter(None, parts)) for parts in IMPORT.findall(text)]
        return whose(names | _packages("_import_", imported))
    try:
        if suffix in (".yaml", ".yml"):
            data = from_yaml(path, text)
        elif suffix == ".json":
            data = from_json(text)
        elif suffix == ".toml":
            data = from_toml(text)
        else:
            return None
    except (UserError, TooLarge, RecursionError):
        return None
    if data is None:
        return None
    return whose(names_in(data.table) | _packages("_target_", TARGET.findall(text)))


def _packages(holder: str, dotted_names: Iterable[str]) -> set[str]:
    """Return dotted names and the packages that they are in, as marks have them: behind
    `holder`."""
    marked = (f"{holder}.{name}".split(".") for name in dotted_names)
    return {".".join(parts[:end]) for parts in marked for end in range(2, len(parts) + 1)}
