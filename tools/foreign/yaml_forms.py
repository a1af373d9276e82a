"""YAML trees that spread precision over several tables: NeMo 1, NxDT, SMP's recipes, Automodel,
Accelerate.

Each form is recognized by keys that only it has. Its keys are mapped to those of the system's
dialect, which interprets them. Sources: NeMo's examples/nlp/language_modeling/conf and
nlp/models/language_modeling, neuronx-distributed-training's examples/conf and
lightning_modules/model/base.py, Automodel's components/distributed/config.py, Accelerate's
utils/dataclasses.py, sagemaker-hyperpod-training-adapter-for-nemo's conf/config_schemas.py,
utils/fsdp_utils.py and collections/model/sagemaker_base_model.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaprec.dialects import nemo_v1
from tools.foreign.account import Account, Saying
from tools.foreign.systems import (
    NEMO,
    NXD,
    NXD_OPTIMIZER,
    SMP_FP8,
    SMP_POLICY,
    SMP_POLICY2,
    SMP_SCALER,
)
from tools.foreign.values import Entry, Row, Table, Thing

Moves = Mapping[str, str]
NEMO1 = ("trainer.precision", "trainer.gradient_clip_val")
NEMO1_IN_MODEL = tuple(
    key for key in nemo_v1.Nemo1.model_fields if key not in ("precision", "gradient_clip_val")
)
NXDT_TYPE = "precision.type"
NXDT_CLIP = "trainer.gradient_clip_val"
NXDT_ZERO = "distributed_strategy.zero1"
NXDT_SAVED = "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt"
NXDT_MANUAL = {"master_weights": "use_master_weights", "fp32_grad_acc": "use_fp32_grad_acc"}
NXDT_ENVIRONMENT = {
    "xla_use_bf16": "XLA_USE_BF16",
    "xla_downcast_bf16": "XLA_DOWNCAST_BF16",
    "neuron_rt_stochastic_rounding_en": "NEURON_RT_STOCHASTIC_ROUNDING_EN",
}
HYPERPOD = {"max_context_width", "backward_fetch_policy"}
HYPERPOD_DTYPES = {"bf16": "bfloat16", 16: "float16", 32: "float32"}
HYPERPOD_FP8 = {
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
}
NO_NUMBERS = ("grad_div_ar_fusion", "gradient_accumulation_fusion", "grad_allreduce_chunk_size_mb")
NO_NUMBERS += ("apex_transformer_log_level",)
OFF = (
    "model.fp16_lm_cross_entropy",
    "model.fsdp",
    "downcast_bf16",
    "model.fp8_dot_product_attention",
)
OFF += ("model.fp8_multi_head_attention",)
"""Switches that change no number while they are off."""


def read_forms(tree: Table, account: Account) -> bool:
    """Read a tree in one of the forms; return True if it is in one."""
    _strike_off(tree, account)
    for form in (_nxdt, _hyperpod, _nemo1, _automodel, _accelerate):
        sayings = list(form(tree, account))
        for saying in sayings:
            account.add(saying)
        if sayings:
            return True
    return False


def find(tree: Table, path: str) -> Entry | None:
    """Return the entry under a dotted path."""
    *tables, last = path.split(".")
    place: Any = tree
    for name in tables:
        entry = place.entries.get(name)
        if entry and isinstance(entry.value, Thing):
            place = entry.value.arguments
        else:
            place = entry and entry.value
        if not isinstance(place, Table):
            return None
    return place.entries.get(last)


def _moved(tree: Table, moves: Moves) -> dict[str, Entry]:
    """Return the existing entries by their new keys."""
    found = {key: find(tree, path) for path, key in moves.items()}
    return {key: entry for key, entry in found.items() if entry is not None}


def _strike_off(tree: Table, account: Account) -> None:
    for path in OFF:
        if (entry := find(tree, path)) is not None and entry.value in (False, "no", None):
            account.take(entry.node)


def _strike(tree: Table, account: Account, paths: Sequence[str]) -> None:
    for path in paths:
        if (entry := find(tree, path)) is not None:
            account.take(entry.node)


def _nemo1(tree: Table, account: Account) -> Iterator[Saying]:
    model = tree.get("model")
    precision = find(tree, "trainer.precision")
    if precision is None or not isinstance(model, Table) or not _is_megatron(model):
        return
    moves = {"trainer.precision": "precision", "trainer.gradient_clip_val": "gradient_clip_val"}
    of_optim = {"name": "optim_name", "dtype": "optim_dtype", "grad_sync_dtype": "grad_sync_dtype"}
    moves |= {f"model.{key}": key for key in NEMO1_IN_MODEL if key not in of_optim.values()}
    moves |= {f"model.optim.{name}": key for name, key in of_optim.items()}
    fields = {key: entry for key, entry in _moved(tree, moves).items() if entry.value is not None}
    _strike(tree, account, ["model.precision", *(f"model.{key}" for key in NO_NUMBERS)])
    sharded = model.entries.get("fsdp")
    if sharded is not None and sharded.value:
        why = (
            "FSDP, which does without O2's masters and dtypes, is not read: take PyTorch's "
            "policy as SMP's keys"
        )
        account.refuse(sharded.line, f"model.fsdp = {sharded.value}: {why}")
    _strike(tree, account, ["model.fsdp_grad_reduce_dtype"])  # it is in every template
    yield Saying(("nemo", "v1"), fields, precision.line, "trainer.precision")


def _is_megatron(model: Table) -> bool:
    keys = {str(key) for key in model.entries}
    return bool(
        keys
        & {"megatron_amp_O2", "native_amp_init_scale", "tensor_model_parallel_size", "mcore_gpt"}
    )


def _nxdt(tree: Table, account: Account) -> Iterator[Saying]:
    kind = find(tree, NXDT_TYPE)
    if kind is None:
        return
    manual = kind.value == "manual"
    fields = {"precision_type": kind} | _moved(tree, {NXDT_SAVED: "use_master_weights_in_ckpt"})
    own = {f"precision.{name}": key for name, key in NXDT_MANUAL.items()}
    environment = {f"precision.{name}": key for name, key in NXDT_ENVIRONMENT.items()}
    idle = ("precision.fp32_grads_cc", "precision.parallel_layers_reduce_dtype")
    _strike(tree, account, ["precision", *own, *environment, *idle])
    _note_nxdt(tree, account, str(kind.value))
    if manual:
        fields |= {key: Entry(False, kind.line) for key in own.values()} | _moved(tree, own)
    yield Saying(NXD, fields, kind.line, "precision.type")
    if manual and (variables := _moved(tree, environment)):
        yield Saying(
            ("nxd", "environment"),
            {k: _as_text(e) for k, e in variables.items()},
            kind.line,
            "precision",
        )
    yield Saying(NXD_OPTIMIZER, _nxdt_optimizer(tree, kind.line), kind.line, "distributed_strategy")


def _note_nxdt(tree: Table, account: Account, kind: str) -> None:
    """Name what changes numbers in neuronx-distributed-training and has no key here.

    Its layers reduce in BF16, with type fp32 in FP32. Its adamw_fp32OptState has FP32 moments where
    FP64 becomes FP32.
    """
    reduce = find(tree, "precision.parallel_layers_reduce_dtype")
    usual = ("fp32", "float32") if kind == "fp32" else ("bf16", "bfloat16")
    if (
        reduce is not None
        and reduce.value is not None
        and str(reduce.value).removeprefix("torch.") not in usual
    ):
        why = "sums over tensor ranks are in the dtype of the activations here"
        account.note(reduce.line, f"precision.parallel_layers_reduce_dtype = {reduce.value}: {why}")
    optimizer = find(tree, "model.optim.name")
    downcast = find(tree, "precision.xla_downcast_bf16")
    masters = find(tree, "precision.master_weights")
    if (
        kind != "manual"
        or optimizer is None
        or downcast is None
        or (masters is not None and masters.value)
    ):
        return
    if optimizer.value == "adamw_fp32OptState" and str(downcast.value) == "1":
        why = "its moments are FP32 beside BF16 weights; here they are as wide as the masters"
        account.note(optimizer.line, f"model.optim.name = {optimizer.value}: {why}")


def _as_text(entry: Entry) -> Entry:
    number = type(entry.value) is int
    return Entry(str(entry.value), entry.line, entry.node) if number else entry


def _nxdt_optimizer(tree: Table, line: int) -> dict[str, Entry]:
    zero = find(tree, NXDT_ZERO)
    clip = find(tree, NXDT_CLIP)
    fields = {"zero_one_enabled": zero or Entry(True, line)}
    if clip is None or clip.value is None:
        return fields | {"grad_clipping": Entry(False, clip.line if clip else line)}
    return fields | {"max_grad_norm": clip}


def _hyperpod(tree: Table, account: Account) -> Iterator[Saying]:
    """Read a recipe of SageMaker HyperPod for SMP v2, with the defaults of its schema."""
    model = tree.get("model")
    smp = tree.entries.get("use_smp_model")
    if not isinstance(model, Table) or not (
        "use_smp_model" in tree.entries or set(model.entries) >= HYPERPOD
    ):
        return
    precision = model.entries.get("precision")
    if precision is None or precision.value is None:
        precision = find(tree, "trainer.precision") or Entry(None, model.line)
    line = precision.line
    account.take(
        *(e.node for e in (smp, precision, find(tree, "trainer.precision")) if e is not None)
    )
    dtype = "" if isinstance(precision.value, Thing) else HYPERPOD_DTYPES.get(precision.value)
    if dtype is None:
        account.refuse(line, f"precision = {precision.value}: SMP's recipes take bf16, 16 or 32")
        return
    held = replace(precision, value=dtype) if dtype else precision
    with_smp = smp is None or smp.value
    if with_smp:
        kept = ("param_dtype", "reduce_dtype")
    else:
        kept = ("param_dtype", "reduce_dtype", "buffer_dtype")
    fields = dict.fromkeys(kept, held) | (
        {"buffer_dtype": replace(held, value="float32")} if with_smp else {}
    )
    if _peft_casts(tree, account, model):
        fields["cast_forward_inputs"] = Entry(True, line)
    yield Saying(SMP_POLICY, fields, line, "model.precision")
    clip = model.entries.get("grad_clip") or Entry(1.0, model.line)
    yield Saying(("smp", ""), {"max_grad_norm": clip}, clip.line, "model.grad_clip", adds=True)
    yield from _hyperpod_fp8(model, account, bool(with_smp))


def _peft_casts(tree: Table, account: Account, model: Table) -> bool:
    """Return True if inputs of all modules are cast, as for fine-tuning by adapters."""
    kind = find(tree, "model.peft.peft_type")
    if kind is not None and kind.value == "qlora_4bit":
        account.refuse(
            kind.line, "model.peft.peft_type = qlora_4bit: weights of 4 bits are not supported"
        )
    return bool((kind is not None and kind.value) or model.get("multi_modal") is True)


def _hyperpod_fp8(model: Table, account: Account, with_smp: bool) -> Iterator[Saying]:
    given = {key: model.entries[key] for key in ("fp8", *HYPERPOD_FP8) if key in model.entries}
    account.take(*(entry.node for entry in given.values()))
    on = given.get("fp8", Entry(True, model.line))
    if not with_smp:
        return
    if "fp8" not in given:
        account.note(model.line, "model.fp8 is not given: the schema of SMP's recipes takes true")
    own = {key: given[name] for name, key in HYPERPOD_FP8.items() if name in given}
    recipe = Table({"recipe": Entry("DelayedScaling", on.line), **own}, on.line)
    yield Saying(
        SMP_FP8, {"enabled": on, "fp8_recipe": Entry(recipe, on.line)}, on.line, "model.fp8"
    )


def _automodel(tree: Table, account: Account) -> Iterator[Saying]:
    policy = find(tree, "distributed.mp_policy")
    strategy = find(tree, "distributed.strategy")
    if strategy is None or strategy.value not in ("fsdp2", "megatron_fsdp", "ddp"):
        return
    if policy is not None and isinstance(policy.value, Table):
        account.take(policy.node)
        fields = {
            str(k): e
            for k, e in policy.value.entries.items()
            if k != "_target_" and e.value is not None
        }
    else:
        account.note(
            strategy.line,
            "distributed.mp_policy is not given: Automodel's default, BF16 reduced in FP32",
        )
        values = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "bfloat16"}
        fields = {key: Entry(value, strategy.line) for key, value in values.items()}
    held = find(tree, "model.torch_dtype")
    if (
        held is not None and str(held.value).removeprefix("torch.") == "float32"
    ):  # masters are FP32 in any case
        account.take(held.node)
    yield Saying(SMP_POLICY2, fields, strategy.line, "distributed.mp_policy")


def _accelerate(tree: Table, account: Account) -> Iterator[Saying]:
    kind = tree.entries.get("distributed_type")
    precision = tree.entries.get("mixed_precision")
    if kind is None or precision is None or kind.value != "FSDP":
        return
    version = find(tree, "fsdp_config.fsdp_version")
    second = version is not None and str(version.value) == "2"
    # YAML takes a bare no for false
    said = "no" if precision.value is False else str(precision.value)
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "no": "float32"}.get(said)
    account.take(precision.node)
    if dtype is None:
        account.refuse(
            precision.line, f"mixed_precision = {precision.value}: use no, fp16, bf16 or fp8"
        )
        return
    last = "output_dtype" if second else "buffer_dtype"
    fields = {key: Entry(dtype, precision.line) for key in ("param_dtype", "reduce_dtype", last)}
    yield Saying(SMP_POLICY2 if second else SMP_POLICY, fields, precision.line, "mixed_precision")
    if said == "fp16":  # Accelerate makes torch's scaler, with torch's defaults
        yield Saying(SMP_SCALER, {}, precision.line, "mixed_precision")
    if precision.value == "fp8":
        yield from _accelerate_fp8(tree, account, precision.line)


def _accelerate_fp8(tree: Table, account: Account, line: int) -> Iterator[Saying]:
    config = tree.get("fp8_config")
    given = dict(config.entries) if isinstance(config, Table) else {}
    account.take(*(entry.node for entry in given.values()))
    if isinstance(entry := tree.entries.get("fp8_config"), Entry):
        account.take(entry.node)
    backend = given.pop("backend", Entry("TE", line))
    if backend.value != "TE":
        account.refuse(
            backend.line,
            f"fp8_config.backend = {backend.value}: only Transformer Engine's (TE) is read",
        )
        return
    fields = {
        key: Entry(value, line) for key, value in {"amax_compute_algo": "most_recent"}.items()
    }
    fields |= {str(key): entry for key, entry in given.items() if key != "use_autocast_during_eval"}
    recipe = Table({"recipe": Entry("DelayedScaling", line), **fields}, line)
    yield Saying(SMP_FP8, {"fp8_recipe": Entry(recipe, line)}, line, "fp8_config")


def note_composed(tree: Table, account: Account) -> None:
    """Name the files that Hydra would lay under this one, by its `defaults`; what they set is not
    in this file."""
    entry = tree.entries.get("defaults")
    items = entry.value.items if entry is not None and isinstance(entry.value, Row) else ()
    brought = [name for item in items for name in _brought(item)]
    if entry is not None and brought:
        why = (
            "Hydra takes in other files, and what they say of precision is not read: give the "
            "composed file"
        )
        account.note(entry.line, f"defaults: {', '.join(brought)}: {why}")


def _brought(item: Any) -> Iterator[str]:
    """Yield what an item of `defaults` takes in, but for the file itself, Hydra's own settings and
    NeMo's overlap."""
    if isinstance(item, Table):
        pairs = [(key, e.value) for key, e in item.entries.items()]
    else:
        pairs = [(item, "")]
    for key, value in pairs:
        name = str(key).removeprefix("override ").removeprefix("optional ").strip()
        if name != "_self_" and not name.startswith(("hydra/", "tp_overlap")) and value is not None:
            yield f"{name}: {value}" if value else name


def read_flat(tree: Table, account: Account) -> None:
    """Read a tree whose top level is the fields of NeMo's plugin, or names a recipe."""
    if isinstance(name := tree.get("plugins"), str):
        account.add(
            Saying(NEMO, {"recipe": tree.entries["plugins"]}, tree.entries["plugins"].line, name)
        )
    elif {"recipe", "precision"} & set(tree.entries) and not isinstance(
        tree.get("precision"), Table
    ):
        fields = {
            str(key): entry
            for key, entry in tree.entries.items()
            if not isinstance(entry.value, Table)
        }
        account.add(Saying(NEMO, fields, next(iter(fields.values())).line, "the file"))
