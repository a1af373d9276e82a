"""Keys of a run file from the configuration of Hugging Face's accelerate: how many ranks there are,
what they share, and in which precision they train.

It says nothing of model, data and batches: arguments of Hugging Face's Trainer, or keys, are given
beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megaprec.dialects.scaling import TorchGradScaler, torch_scaling
from megaprec.errors import did_you_mean
from tools.interop.arguments.accelerate import PERMITTED, READ, TABLES, UNUSED, WHY, class_of
from tools.interop.importing.draft import Draft
from tools.interop.importing.named_files import read_named_json
from tools.interop.importing.trainer_fsdp import add_fsdp

# values of mixed_precision; "no" is said by no dtype
DTYPES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
ACCELERATE = "accelerate"
AXES = "parallelism_config.parallelism_config_"
OF_DEEPSPEED = "deepspeed_config."
# keys of deepspeed_config, and those of DeepSpeed's configuration that accelerate makes of them
DEEPSPEEDS: Mapping[str, tuple[str, ...]] = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}


@dataclass
class AccelerateConfig:
    """A file whose keys go into a draft.

    values: what is read, by dotted key. unused: what is not used here, as it is given. deepspeed:
    configurations of DeepSpeed that it has or names. ranks: how many it starts; None: not said.
    """

    place: str
    draft: Draft
    values: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    deepspeed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: int | None = None

    def said(self, *keys: str) -> str:
        """Return how keys are given, those of them that are."""
        given = [key for key in keys if key in self.values]
        return ", ".join(f"{key} = {self.values[key]}" for key in given)

    def refuse(self, key: str, why: str) -> None:
        """Add a problem with the value of a dotted key."""
        problem = f"{self.said(key)} ({self.place}): {why}"
        self.draft.problems.append(problem)

    def size(self, name: str) -> int:
        """Return the size of an axis, or 1."""
        return self.count(f"{AXES}{name}_size") or 1

    def count(self, key: str) -> int | None:
        """Return a whole number above 0; None if it is not given, or with a problem."""
        value = self.values.get(key)
        if value is None or (type(value) is int and value > 0):
            return value
        self.refuse(key, "give a whole number above 0")
        return None


def add_accelerate(content: Mapping[str, Any], path: Path, draft: Draft) -> AccelerateConfig:
    """Add the keys that a configuration of accelerate decides, and return what was read."""
    config = AccelerateConfig(path.name, draft)
    _read(content, config)
    kind = str(config.values.get("distributed_type", "")).upper()
    _add_layout(config, kind)
    _add_precision(config)
    if kind == "FSDP":
        _add_fsdp(config)
    elif kind == "DEEPSPEED":
        _add_deepspeed(config, path.parent)
    elif kind in ("MEGATRON_LM", "TPU", "XLA"):
        config.refuse("distributed_type", "FSDP, DEEPSPEED and MULTI_GPU are read")
    elif "distributed_type" in config.values and config.ranks != 1:
        # replicas of DistributedDataParallel share no state
        said = config.said("distributed_type")
        draft.put("parallel.zero", False, said)
    return config


def _read(content: Mapping[str, Any], config: AccelerateConfig) -> None:
    """Keep what is read, and add a problem for each key that is refused or not known."""
    written_kind = content.get("distributed_type", "")
    kind = str(written_kind).lower()
    for key, value in _leaves(content):
        if class_of(key) == "unused" or _is_idle(key, kind):
            config.unused[key] = f"{key} = {value!r}"
            continue
        config.values[key] = value
        reason = _reason_against(key, value)
        if reason:
            config.refuse(key, reason)


def _is_idle(key: str, kind: str) -> bool:
    """Return True for a key of a table that accelerate passes by: it looks at the table of the
    type that is chosen alone. kind: that type, in small letters."""
    table, dot, _ = key.partition(".")
    is_of_a_type = bool(dot) and table in ("fsdp_config", "deepspeed_config")
    return is_of_a_type and not table.startswith(kind or "none")


def _reason_against(key: str, value: object) -> str:
    """Return why a setting is refused; "" for what is read."""
    if key in TABLES and value is not None:  # `_leaves` has taken tables apart
        return "give a table of keys"
    class_of_key = class_of(key)
    if class_of_key == "read":
        return ""
    if class_of_key == "refused":
        if value in (None, PERMITTED.get(key)):
            return ""
        table, _, _ = key.partition(".")
        return WHY.get(key) or WHY[table]
    hint = did_you_mean(key, [*READ, *WHY, *UNUSED])
    return f"no such key of accelerate is known here{hint}"


def _leaves(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings by dotted key, with those of the tables that are read."""
    leaves: list[tuple[str, Any]] = []
    for key, value in content.items():
        if key in TABLES and isinstance(value, Mapping):
            for name, inner in value.items():
                dotted = f"{key}.{name}"
                leaves.append((dotted, inner))
        else:
            leaves.append((str(key), value))
    return leaves


def _add_layout(config: AccelerateConfig, kind: str) -> None:
    """Add the axes that parallelism_config names; without it every rank is a replica.

    kind: the distributed_type, in capital letters.
    """
    config.ranks = config.count("num_processes")
    tensor = config.size("tp")
    context = config.size("cp")
    replicate_key = f"{AXES}dp_replicate_size"
    shard_key = f"{AXES}dp_shard_size"
    copies = config.size("dp_replicate")
    shards = config.size("dp_shard")
    draft = config.draft
    has_axes = any(key.startswith(AXES) for key in config.values)
    if has_axes:
        axes = prod((tensor, context, copies, shards))
        if config.ranks is not None and config.ranks != axes:
            config.refuse("num_processes", f"the axes of parallelism_config are {axes} ranks")
        config.ranks = axes
        if tensor > 1:
            draft.put("parallel.tensor", tensor, config.said(f"{AXES}tp_size"))
        if context > 1:
            draft.put("parallel.context", context, config.said(f"{AXES}cp_size"))
        said = config.said(replicate_key, shard_key) or "parallelism_config names no replicas"
        draft.put("parallel.data", copies * shards, said)
        if kind == "FSDP" and copies > 1 and shards > 1:
            draft.put("parallel.zero_size", shards * context, said)
    elif config.ranks is not None:
        draft.put("parallel.data", config.ranks, config.said("num_processes"))


def _add_precision(config: AccelerateConfig) -> None:
    """Add the dtype of products. FP32 is not put down: the Trainer's arguments may say another."""
    if "mixed_precision" not in config.values:
        return
    # YAML has a plain no as false
    written = config.values["mixed_precision"] or "no"
    dtype = DTYPES.get(str(written).lower())
    if dtype is None:
        if config.draft.needs("precision.compute"):
            known = ", ".join(DTYPES)
            config.refuse("mixed_precision", f"{known} are read: fp8.kind=... beside gives FP8")
    elif dtype != "fp32":
        said = config.said("mixed_precision")
        config.draft.put("precision.compute", dtype, said)


def _add_fsdp(config: AccelerateConfig) -> None:
    """Add what FSDP shards; under FSDP2 replicas of shards are axes of their own."""
    prefix = "fsdp_config."  # of dotted keys
    settings: dict[str, Any] = {}
    for key, value in config.values.items():
        if key.startswith(prefix):
            settings[key.removeprefix(prefix)] = value
    said = f"{config.place}: fsdp_config"
    for unused in add_fsdp(config.draft, said, "", settings):
        config.unused[f"{prefix}{unused}"] = f"fsdp_config: {unused}"


def _add_deepspeed(config: AccelerateConfig, folder: Path) -> None:
    """Keep DeepSpeed's configuration: that of a file, or what accelerate makes of its own keys."""
    file_key = f"{OF_DEEPSPEED}deepspeed_config_file"
    named = config.values.get(file_key)
    if named not in (None, "none"):
        file = Path(str(named))
        content, problem = read_named_json(str(named), folder)
        if problem:
            config.refuse(file_key, problem)
        elif content:
            # what the file says of a dtype comes before accelerate's
            config.deepspeed[file.name] = {**_table_of_dtype(config), **content}
        return
    made: dict[str, Any] = _table_of_dtype(config)
    for name, place in DEEPSPEEDS.items():
        value = config.values.get(f"{OF_DEEPSPEED}{name}")
        if value is None:
            continue
        *tables, last = place
        table = made
        for table_name in tables:
            table = table.setdefault(table_name, {})
        table[last] = value
    config.deepspeed[f"deepspeed_config of {config.place}"] = made


def _table_of_dtype(config: AccelerateConfig) -> dict[str, Any]:
    """Return the table of DeepSpeed's configuration that accelerate adds for mixed precision; empty
    for FP32."""
    dtype = config.draft.value("precision.compute")
    return {dtype: {"enabled": True}} if dtype in ("bf16", "fp16") else {}


def add_half_of_accelerate(draft: Draft) -> None:
    """Add what accelerate, on which the Trainer is built, makes of 16 bits without DeepSpeed: the
    loss scale of torch's scaler, and FSDP's gradients that are reduced in the dtype of products."""
    compute = draft.value("precision.compute")
    if compute not in ("bf16", "fp16"):
        return
    if draft.has_fsdp:
        draft.put("precision.reduce", compute, "as FSDP of accelerate has it")
    if compute == "fp16":
        scaling = torch_scaling(TorchGradScaler())
        origin = "as torch's GradScaler has it"
        draft.put("precision.initial_scale", scaling.initial, origin)
        draft.put("precision.min_scale", scaling.minimum, origin)
        draft.put("precision.growth_interval", scaling.growth_interval, origin)
        draft.put("precision.hysteresis", scaling.hysteresis, origin)
