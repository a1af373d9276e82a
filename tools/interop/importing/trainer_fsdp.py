"""FSDP of Hugging Face's Trainer: what `--fsdp` and its configuration shard.

The names are those of transformers' TrainingArguments, from 4.30 to 5.23: FSDP2's, and those of
FSDP1, which are the strategies of torch.distributed.fsdp.ShardingStrategy.
"""

import re
from collections.abc import Mapping
from typing import Any

from tools.interop.importing.draft import Draft

# the value of parallel.zero by strategy
STRATEGIES: Mapping[str, bool | int] = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": False,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
}
HYBRID = "hybrid_"
# keys of the configuration whose value says what is sharded, and those that offload
RESHARDS = ("reshard_after_forward", "sharding_strategy")
OFFLOADS = ("cpu_offload", "offload_params")
OFFLOADS_ACTIVATIONS = "activation_checkpointing_offload"
RECOMPUTES = "activation_checkpointing"
# they choose how modules are wrapped, prefetched, loaded and saved
_UNUSED = """
version cpu_ram_efficient_loading state_dict_type auto_wrap_policy min_num_params
transformer_layer_cls_to_wrap forward_prefetch backward_prefetch use_orig_params sync_module_states
limit_all_gathers xla_fsdp_settings xla_fsdp_grad_ckpt
"""
UNUSED = frozenset(_UNUSED.split())
XLA = ("xla", "xla_fsdp_v2")
NO_OFFLOADING = (
    "weights stay on the device here: remove it, and give optimizer.offload=host for masters and "
    "moments in host memory"
)


def add_fsdp(draft: Draft, said: str, text: str, config: Mapping[str, Any]) -> list[str]:
    """Add what `--fsdp` and its configuration decide, and return the keys of the configuration that
    are not used here.

    said: how they were given. text: the value of `--fsdp`.
    """
    draft.has_fsdp = True
    words = re.findall(r"\w+", text.lower())
    strategies = [word for word in words if word in STRATEGIES]
    for word in words:
        if word == "offload":
            draft.problems.append(f"{said}: {NO_OFFLOADING}")
        elif word not in (*STRATEGIES, "auto_wrap", "true", "1"):
            draft.problems.append(f"{said}: {word}: no such option of FSDP is known here")
    unused: list[str] = []
    for written, value in config.items():
        # legacy names, and those of accelerate, have the prefix
        key = written.removeprefix("fsdp_")
        if key in RESHARDS:
            strategies.append(_strategy(value))
        elif key in (*OFFLOADS, *XLA, OFFLOADS_ACTIVATIONS):
            _refuse_if_on(draft, said, key, value)
        elif key == RECOMPUTES:
            if _is_on(value):
                draft.put("parallel.recompute", "full", f"{said}: {key} = {value}")
        elif key in UNUSED:
            unused.append(f"{key} = {value!r}")
        else:
            unknown = f"{said}: {written} = {value!r}"
            draft.problems.append(f"{unknown}: no such key of FSDP is known here")
    _add_stage(draft, said, strategies)
    return unused


def _strategy(value: Any) -> str:
    """Return the strategy that a configuration says: by name, or by what is done after a forward
    pass."""
    name = str(value).lower()
    if name in ("true", "false"):
        return "full_shard" if name == "true" else "shard_grad_op"
    # the numbers are those of ShardingStrategy
    by_number = dict(enumerate(STRATEGIES, start=1))
    return by_number.get(int(name), name) if name.isdigit() else name


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1")


def _refuse_if_on(draft: Draft, said: str, key: str, value: Any) -> None:
    """Add a problem with a switch that no run here has, if it is on."""
    if _is_on(value):
        why = "runs train with torch's own collectives here"
        if key in OFFLOADS:
            why = NO_OFFLOADING
        elif key == OFFLOADS_ACTIVATIONS:
            why = "activations stay on the device here: parallel.recompute=full keeps fewer"
        draft.problems.append(f"{said}: {key} = {value!r}: {why}")


def _add_stage(draft: Draft, said: str, strategies: list[str]) -> None:
    """Add the stage of ZeRO. strategies: those that were named; the first counts, as in the
    Trainer."""
    strategy = strategies[0] if strategies else "full_shard"
    if strategy not in STRATEGIES:
        if draft.needs("parallel.zero"):
            known = ", ".join(STRATEGIES)
            draft.problems.append(f"{said}: {strategy} is not one of {known}")
        return
    draft.put("parallel.zero", STRATEGIES[strategy], said)
    if strategy.startswith(HYBRID) and draft.needs("parallel.zero_size"):
        draft.problems.append(
            f"{said}: {strategy} shards over the ranks of a machine: parallel.zero_size=N beside "
            "says how many these are"
        )
