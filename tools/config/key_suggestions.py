"""Suggestions for unknown keys of a run file.

Users of other trainers try the names that they know, and the letters of `lr` are far from
`lr.peak`. A name from the settings of Megatron-LM, DeepSpeed or Hugging Face is therefore answered
with the key that has its meaning, or with the reason why there is none, and any other unknown key
with the known key that is spelled most like it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import get_origin

from pydantic.fields import FieldInfo

from megaprec.errors import SHORT_WORD, closest, did_you_mean
from tools.config.wrong_values import example_in_help
from tools.console.toml import Setting, toml
from tools.interop.arguments import deepspeed, megatron

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "model.layers": ("num_hidden_layers", "n_layer", "n_layers", "depth"),
    "model.hidden": ("n_embd", "d_model", "dim", "width", "embed_dim"),
    "model.heads": ("n_head", "n_heads"),
    "model.kv_heads": ("num_key_value_heads",),
    "model.ffn": ("intermediate_size", "ffn_dim"),
    "model.mlp": ("activation", "activation_function", "hidden_act", "hidden_activation"),
    "model.rope_base": ("rope_theta",),
    "model.tied": ("tie_word_embeddings",),
    "model.experts": ("num_local_experts",),
    "model.experts_per_token": ("num_experts_per_tok",),
    "model.router_aux_loss": ("router_aux_loss_coef",),
    "model.z_loss": ("z_loss_multiplier", "softmax_auxiliary_loss"),
    "model.init_std": ("initializer_range",),
    "data.source": ("dataset", "train_data", "path", "data_dir", "train", "train_file"),
    "data.tokenizer": ("tokenizer_path",),
    "parallel.tensor": ("tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tp"),
    "parallel.pipeline": ("pipeline_parallel_size", "pipeline_parallel_degree", "pp"),
    "parallel.data": ("data_parallel", "data_parallel_size", "data_parallel_degree", "dp"),
    "parallel.context": ("context_parallel", "context_parallel_degree", "cp"),
    "parallel.expert": ("expert_parallel", "expert_parallel_size", "expert_parallel_degree", "ep"),
    "parallel.sequence": ("sequence_parallel_enabled",),
    "parallel.async_tensor": ("async_tensor_parallel", "async_tp", "tp_comm_overlap"),
    "parallel.chunks": ("virtual_pipeline_model_parallel_size", "num_model_chunks"),
    "parallel.recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "parallel.zero": ("zero_stage",),
    "precision.compute": ("dtype", "mixed_precision"),
    "precision.gradients": ("grad_dtype",),
    "precision.reduce": ("reduce_dtype", "grad_reduce_in_fp32"),
    "precision.initial_scale": ("init_scale",),
    "fp8.kind": ("recipe",),
    "fp8.history_length": ("amax_history_len",),
    "fp8.amax_algo": ("amax_compute_algo",),
    "fp8.parameters": ("fp8_params",),
    "optimizer.eps": ("adam_epsilon",),
    "optimizer.clip": ("max_grad_norm", "grad_clip"),
    "lr.peak": ("learning_rate", "max_lr", "rate"),
    "lr.final": ("min", "end", "eta_min", "final_lr", "end_lr", "minimum"),
    "lr.warmup": (
        "lr_warmup_steps",
        "warmup_steps",
        "warmup_iters",
        "warmup_ratio",
        "warmup_fraction",
    ),
    "lr.decay": ("lr_decay_steps",),
    "lr.schedule": ("lr_scheduler_type",),
    "train.steps": ("max_steps", "max_iters", "num_steps", "iterations", "iters"),
    "train.micro_batch": ("per_device_train_batch_size",),
    "train.seq_length": ("max_seq_len", "block_size", "context_length"),
    "train.folder": ("output_dir", "out_dir", "run_dir", "log_dir", "save_dir"),
    "train.eval_every": ("eval_steps", "eval_freq"),
    "checkpoint.every": ("save_steps", "save_every", "save_freq"),
    "checkpoint.keep": ("save_total_limit",),
    "checkpoint.resume": ("resume_from_checkpoint",),
    "log.every": ("logging_steps",),
    "log.to": ("tensorboard", "wandb", "mlflow", "trackio", "report_to", "loggers"),
}
"""Our keys, and the words for them in Hugging Face's settings and other trainers'; of Megatron-LM
and DeepSpeed, `tools.interop.arguments` knows every name."""

EPOCHS = (
    "a run is given in steps: one epoch is the tokens of the text / (train.global_batch x "
    "train.seq_length) of them"
)
ACCUMULATION = (
    "it follows from the batches: train.global_batch / (train.micro_batch x parallel.data)"
)
WEIGHTS = (
    "each text of a blend has its own, as data.blend = "
    '[{source = "a.txt", weight = 2.0}, {source = "b.txt", weight = 1.0}]'
)
WITHOUT_KEY: Mapping[str, str] = {
    "weights": WEIGHTS,
    "data_weights": WEIGHTS,
    "dataset_weights": WEIGHTS,
    "mixture_weights": WEIGHTS,
    "epochs": EPOCHS,
    "num_epochs": EPOCHS,
    "max_epochs": EPOCHS,
    "num_train_epochs": EPOCHS,
    "gradient_accumulation": ACCUMULATION,
    "grad_accum": ACCUMULATION,
    "grad_accum_steps": ACCUMULATION,
    "accumulate_grad_batches": ACCUMULATION,
}
"""Words of other trainers for what no key says here, with the reason."""


def _keys_of_others() -> dict[str, tuple[str, ...]]:
    """Return our keys by the names of what is read of Megatron-LM and DeepSpeed.

    A key of DeepSpeed is known by its path, by its last word if that has an underscore, and by the
    first word, its table. Of equal names the first counts, and those of Megatron-LM before all.
    """
    arguments = megatron.READ.values()
    keys_by_name = {argument.kept: argument.keys for argument in arguments}
    keys_by_name |= {argument.name: argument.keys for argument in arguments}
    for path, keys in deepspeed.READ.items():
        table, _, _ = path.partition(".")
        _, _, last = path.rpartition(".")
        for name in (path, last, table):
            # single words, such as "type", mean something else in other tables
            if name in (path, table) or "_" in last:
                keys_by_name.setdefault(name, keys)
    return keys_by_name


KEYS: Mapping[str, tuple[str, ...]] = _keys_of_others()
"""Our keys by the names of Megatron-LM and DeepSpeed."""


def unknown_key_problems(
    settings: Mapping[str, Setting], known_fields: Mapping[str, FieldInfo | None]
) -> Iterator[str]:
    """Yield one line for each unknown key, and a single line for all keys of an unknown table.

    known_fields: all keys, as "table.name", with their fields if they have one; of two that are
        equally similar, the first is suggested.
    """
    tables = dict.fromkeys(key.partition(".")[0] for key in known_fields)
    reported = set[str]()
    for key, setting in settings.items():
        table, dot, _ = key.partition(".")
        if dot and table not in tables:
            # someone may write megatron.lr, or a table that is the name of an option
            if answer := _answer(key) or _answer(table):
                yield f"{key} = {toml(setting.value)} ({setting.origin}): no such key{answer}"
                continue
            if table not in reported:
                suggestion = did_you_mean(table, tables, "[{}]")
                yield f"[{table}] ({setting.origin}): no such table{suggestion}"
            reported.add(table)
        elif message := _unknown_key(key, setting, known_fields):
            yield message


def _unknown_key(key: str, setting: Setting, known_fields: Mapping[str, FieldInfo | None]) -> str:
    """Return the line about a key of a known table, or without a table; "" if it is known."""
    table, dot, name = key.partition(".")
    printed = f"{key} = {toml(setting.value)} ({setting.origin})"
    keys_of_table = _keys_of(table, known_fields)
    if not dot and keys_of_table:
        return f"{printed}: a table, not a key; give keys of it, as {keys_of_table[0]}"
    # a key inside the value of a known key
    outer, _, inner = key.rpartition(".")
    if outer in known_fields:
        example = f"{{{inner} = {toml(setting.value)}, ...}}"
        remedy = _as_a_whole(outer, known_fields[outer], example)
        return f"{key} ({setting.origin}): {outer} {remedy}"
    if key in known_fields:
        return ""
    return f"{printed}: no such key{_suggestion(table, name or key, known_fields)}"


def _as_a_whole(key: str, field: FieldInfo | None, example: str) -> str:
    """Return how a key is given that someone gave a part of. example: that part, as a table."""
    if field is None or example_in_help(field, "{").startswith("{"):
        return f"is given as a whole, like '{key}={example}'"
    if get_origin(field.annotation) is tuple:
        return f"is a list, given as a whole, like '{key}={example_in_help(field, '[')}'"
    return f"has no keys of its own: give {key}=VALUE"


def _keys_of(table: str, known_keys: Collection[str]) -> list[str]:
    return [key for key in known_keys if key.startswith(f"{table}.")]


def _suggestion(table: str, name: str, known_keys: Collection[str]) -> str:
    """Return a hint at the known key that is called `name`, in any table; without one, at the
    key that `name` means in other trainers, or why there is none; otherwise at the most similar
    key, for a short word one of `table`. "" if nothing is similar.
    """
    first, _, _ = name.partition(".")
    # of keys with the same name the last counts: those of `table`
    keys = _by_name([*known_keys, *_keys_of(table, known_keys)])
    if first in keys:
        return f"; did you mean {keys[first]}?"
    if answer := _answer(name) or _answer(first):
        return answer
    # a short word is like some key of any table
    nearby = _by_name(_keys_of(table, known_keys))
    similar = closest(first, keys if len(first) > SHORT_WORD else nearby)
    return f"; did you mean {keys[similar]}?" if similar else ""


def _by_name(keys: Iterable[str]) -> dict[str, str]:
    """Return dotted keys by their names without the table; of equal names the last one."""
    by_name = dict[str, str]()
    for key in keys:
        _, _, name = key.partition(".")
        by_name[name] = key
    return by_name


def _answer(name: str) -> str:
    """Return the end of a line about a name of another system; "" if it is none."""
    # options of command lines have dashes
    name = name.replace("-", "_")
    if name in WITHOUT_KEY:
        return f": {WITHOUT_KEY[name]}"
    keys = [key for key, names in ELSEWHERE.items() if name in names]
    if not keys:
        keys = KEYS.get(name)
    if keys:
        return f"; did you mean {' or '.join(keys)}?"
    reason = _reason(name)
    return f", for {reason}" if reason else ""


def _reason(name: str) -> str:
    """Return why a name of Megatron-LM or DeepSpeed has no key here; "" if neither has the name."""
    if name in megatron.REFUSED:
        return megatron.REFUSED[name].why
    if name in deepspeed.WHY:
        return deepspeed.WHY[name]
    if megatron.is_unused(name):
        return f"Megatron-LM's {megatron.option(name)} is not used here"
    return f"DeepSpeed's {name} is not used here" if deepspeed.is_unused(name) else ""
