"""YAML trees that spread precision over several tables: NeMo 1, NxDT, SMP's recipes, Automodel,
Accelerate.

Each form is recognized by keys that only it has. Its keys are mapped to those of the system's
dialect, which interprets them. Sources: NeMo's examples/nlp/language_modeling/conf and
nlp/models/language_modeling, neuronx-distributed-training's examples/conf and
lightning_modules/model/base.py, Automodel's components/distributed/config.py, Accelerate's
utils/dataclasses.py, sagemaker-hyperpod-training-adapter-for-nemo's conf/config_schemas.py,
utils/fsdp_utils.py and collections/model/sagemaker_base_model.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megaprec.dialects import nemo_v1
from tools.interop.foreign.findings import Findings, Settings
from tools.interop.foreign.plain import Entry, Row, Table, Unknown, inner_table
from tools.interop.foreign.systems import (
    NEMO,
    NXD,
    NXD_ENVIRONMENT,
    NXD_OPTIMIZER,
    SMP_FP8,
    SMP_POLICY,
    SMP_POLICY2,
    SMP_SCALER,
)

NEMO1_OPTIMIZER = {
    "optim_name": "name",
    "optim_dtype": "dtype",
    "grad_sync_dtype": "grad_sync_dtype",
}
NEMO1_MARKS = frozenset(
    {"megatron_amp_O2", "native_amp_init_scale", "tensor_model_parallel_size", "mcore_gpt"}
)
NXDT_MANUAL = {"master_weights": "use_master_weights", "fp32_grad_acc": "use_fp32_grad_acc"}
NXDT_ENVIRONMENT_KEYS = {
    "xla_use_bf16": "XLA_USE_BF16",
    "xla_downcast_bf16": "XLA_DOWNCAST_BF16",
    "neuron_rt_stochastic_rounding_en": "NEURON_RT_STOCHASTIC_ROUNDING_EN",
}
HYPERPOD = frozenset({"max_context_width", "backward_fetch_policy"})
HYPERPOD_DTYPES = {"bf16": "bfloat16", 16: "float16", 32: "float32"}
HYPERPOD_FP8 = {
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
}
AUTOMODEL = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "bfloat16"}
ACCELERATE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "no": "float32"}
NO_NUMBERS = (
    *("grad_div_ar_fusion", "gradient_accumulation_fusion", "grad_allreduce_chunk_size_mb"),
    "apex_transformer_log_level",
)
OFF = (
    *("model.fp16_lm_cross_entropy", "model.fsdp", "downcast_bf16"),
    *("model.fp8_dot_product_attention", "model.fp8_multi_head_attention"),
)
"""Switches that change no number while they are off."""


def read_forms(tree: Table, findings: Findings) -> bool:
    """Read a tree in one of the forms; return True if it is in one."""
    for path in OFF:
        entry = find(tree, path)
        if entry is not None and entry.value in (False, "no", None):
            findings.take(entry)
    for form in (_nxdt, _hyperpod, _nemo1, _automodel, _accelerate):
        places = list(form(tree, findings))
        for settings in places:
            findings.add(settings)
        if places:
            return True
    return False


def find(tree: Table, path: str) -> Entry | None:
    """Return the entry under a dotted path."""
    *tables, last = path.split(".")
    place: Any = tree
    for name in tables:
        place = inner_table(place.get(name))
        if not isinstance(place, Table):
            return None
    return place.entries.get(last)


def _moved(tree: Table, moves: Mapping[str, str]) -> dict[str, Entry]:
    """Return the existing entries by their new keys. moves: new key -> path."""
    entries = dict[str, Entry]()
    for key, path in moves.items():
        entry = find(tree, path)
        if entry is not None:
            entries[key] = entry
    return entries


def _take(tree: Table, findings: Findings, paths: Iterable[str]) -> None:
    for path in paths:
        entry = find(tree, path)
        if entry is not None:
            findings.take(entry)


def _nemo1(tree: Table, findings: Findings) -> Iterator[Settings]:
    model = tree.get("model")
    precision = find(tree, "trainer.precision")
    if precision is None or not isinstance(model, Table) or not NEMO1_MARKS & set(model.entries):
        return
    moves = {key: f"model.{key}" for key in nemo_v1.Nemo1.model_fields}
    moves |= {key: f"model.optim.{name}" for key, name in NEMO1_OPTIMIZER.items()}
    moves |= {"precision": "trainer.precision", "gradient_clip_val": "trainer.gradient_clip_val"}
    entries = _moved(tree, moves)
    fields = {key: entry for key, entry in entries.items() if entry.value is not None}
    no_numbers = [f"model.{key}" for key in NO_NUMBERS]
    # the dtype of FSDP is in every template
    _take(tree, findings, ["model.precision", "model.fsdp_grad_reduce_dtype", *no_numbers])
    sharded = model.entries.get("fsdp")
    if sharded is not None and sharded.value:
        why = "FSDP, which does without O2's masters and dtypes, is not read"
        remedy = "take PyTorch's policy as SMP's keys"
        findings.refuse(sharded.line, f"model.fsdp = {sharded.value}: {why}: {remedy}")
    yield Settings("nemo.v1", fields, precision.line, "trainer.precision")


def _nxdt(tree: Table, findings: Findings) -> Iterator[Settings]:
    kind = find(tree, "precision.type")
    if kind is None:
        return
    is_manual = kind.value == "manual"
    saved = "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt"
    fields = {"precision_type": kind} | _moved(tree, {"use_master_weights_in_ckpt": saved})
    manual = {key: f"precision.{name}" for name, key in NXDT_MANUAL.items()}
    environment = {key: f"precision.{name}" for name, key in NXDT_ENVIRONMENT_KEYS.items()}
    idle = ("precision", "precision.fp32_grads_cc", "precision.parallel_layers_reduce_dtype")
    _take(tree, findings, [*idle, *manual.values(), *environment.values()])
    _note_nxdt(tree, findings, str(kind.value))
    if is_manual:
        fields |= dict.fromkeys(manual, Entry(False, kind.line)) | _moved(tree, manual)
    yield Settings(NXD, fields, kind.line, "precision.type")
    variables = _moved(tree, environment)
    for key, entry in variables.items():
        # YAML takes the text of a variable for a number
        if type(entry.value) is int:
            variables[key] = replace(entry, value=str(entry.value))
    if is_manual and variables:
        yield Settings(NXD_ENVIRONMENT, variables, kind.line, "precision")
    zero = find(tree, "distributed_strategy.zero1") or Entry(True, kind.line)
    clip = find(tree, "trainer.gradient_clip_val") or Entry(None, kind.line)
    clipping = {"max_grad_norm": clip}
    if clip.value is None:
        clipping = {"grad_clipping": replace(clip, value=False)}
    optimizer = {"zero_one_enabled": zero} | clipping
    yield Settings(NXD_OPTIMIZER, optimizer, kind.line, "distributed_strategy")


def _note_nxdt(tree: Table, findings: Findings, kind: str) -> None:
    """Name what changes numbers in neuronx-distributed-training and has no key here.

    Its layers reduce in BF16, with type fp32 in FP32. Its adamw_fp32OptState has FP32 moments where
    FP64 becomes FP32.
    """
    reduce = find(tree, "precision.parallel_layers_reduce_dtype") or Entry(None)
    usual = ("None", "fp32", "float32") if kind == "fp32" else ("None", "bf16", "bfloat16")
    if str(reduce.value).removeprefix("torch.") not in usual:
        why = "sums over tensor ranks are in the dtype of the activations here"
        text = f"precision.parallel_layers_reduce_dtype = {reduce.value}: {why}"
        findings.note(reduce.line, text)
    optimizer = find(tree, "model.optim.name") or Entry(None)
    downcast = find(tree, "precision.xla_downcast_bf16") or Entry(None)
    masters = find(tree, "precision.master_weights") or Entry(None)
    is_wide = optimizer.value == "adamw_fp32OptState" and str(downcast.value) == "1"
    if kind == "manual" and is_wide and not masters.value:
        why = "its moments are FP32 beside BF16 weights; here they are as wide as the masters"
        findings.note(optimizer.line, f"model.optim.name = {optimizer.value}: {why}")


def _hyperpod(tree: Table, findings: Findings) -> Iterator[Settings]:
    """Read a recipe of SageMaker HyperPod for SMP v2, with the defaults of its schema."""
    model = tree.get("model")
    smp = tree.entries.get("use_smp_model")
    if not isinstance(model, Table) or not (smp or set(model.entries) >= HYPERPOD):
        return
    with_smp = smp is None or bool(smp.value)
    if smp is not None:
        findings.take(smp)
    precision = _dtype_of_hyperpod(tree, model, findings)
    if precision is None:
        return
    buffers = replace(precision, value="float32") if with_smp else precision
    fields = {"param_dtype": precision, "reduce_dtype": precision, "buffer_dtype": buffers}
    if _casts_inputs(tree, model, findings):
        fields["cast_forward_inputs"] = Entry(True, precision.line)
    yield Settings(SMP_POLICY, fields, precision.line, "model.precision")
    clip = model.entries.get("grad_clip") or Entry(1.0, model.line)
    yield Settings("smp", {"max_grad_norm": clip}, clip.line, "model.grad_clip", completes=True)
    yield from _fp8_of_hyperpod(tree, model, findings, with_smp)


def _casts_inputs(tree: Table, model: Table, findings: Findings) -> bool:
    """Return True if a recipe of HyperPod casts the inputs of all modules: for fine-tuning by
    adapters, and for images."""
    adapter = find(tree, "model.peft.peft_type") or Entry(None)
    if adapter.value == "qlora_4bit":
        why = "weights of 4 bits are not supported"
        findings.refuse(adapter.line, f"model.peft.peft_type = qlora_4bit: {why}")
    return bool(adapter.value) or model.get("multi_modal") is True


def _dtype_of_hyperpod(tree: Table, model: Table, findings: Findings) -> Entry | None:
    """Return the dtype of a recipe of HyperPod, of the model before that of the trainer; None for
    one that is refused."""
    of_model = model.entries.get("precision", Entry(None, model.line))
    of_trainer = find(tree, "trainer.precision") or of_model
    findings.take(of_model, of_trainer)
    precision = of_trainer if of_model.value is None else of_model
    if isinstance(precision.value, Unknown):
        return precision
    if precision.value not in HYPERPOD_DTYPES:
        why = "SMP's recipes take bf16, 16 or 32"
        findings.refuse(precision.line, f"precision = {precision.value}: {why}")
        return None
    return replace(precision, value=HYPERPOD_DTYPES[precision.value])


def _fp8_of_hyperpod(
    tree: Table, model: Table, findings: Findings, with_smp: bool
) -> Iterator[Settings]:
    switches = _moved(tree, {key: f"model.{key}" for key in ("fp8", *HYPERPOD_FP8)})
    findings.take(*switches.values())
    if not with_smp:
        return
    if "fp8" not in switches:
        findings.note(model.line, "model.fp8 is not given: the schema of SMP's recipes takes true")
    enabled = switches.get("fp8", Entry(True, model.line))
    recipe = {key: switches[name] for name, key in HYPERPOD_FP8.items() if name in switches}
    yield _delayed(enabled, recipe, "model.fp8")


def _delayed(enabled: Entry, fields: Mapping[str, Entry], name: str) -> Settings:
    """Return FP8 with the recipe of delayed scaling."""
    line = enabled.line
    recipe = Table({"recipe": Entry("DelayedScaling", line), **fields}, line)
    entries = {"enabled": enabled, "fp8_recipe": Entry(recipe, line)}
    return Settings(SMP_FP8, entries, line, name)


def _automodel(tree: Table, findings: Findings) -> Iterator[Settings]:
    policy = find(tree, "distributed.mp_policy") or Entry(None)
    strategy = find(tree, "distributed.strategy")
    if strategy is None or strategy.value not in ("fsdp2", "megatron_fsdp", "ddp"):
        return
    content = inner_table(policy.value)
    if isinstance(content, Table):
        findings.take(policy)
        fields = dict[str, Entry]()
        for key, entry in content.entries.items():
            if key != "_target_" and entry.value is not None:
                fields[key] = entry
    else:
        why = "Automodel's default, BF16 reduced in FP32"
        findings.note(strategy.line, f"distributed.mp_policy is not given: {why}")
        fields = {key: Entry(value, strategy.line) for key, value in AUTOMODEL.items()}
    model_dtype = find(tree, "model.torch_dtype") or Entry(None)
    if str(model_dtype.value).removeprefix("torch.") == "float32":
        findings.take(model_dtype)  # masters are FP32 in any case
    yield Settings(SMP_POLICY2, fields, strategy.line, "distributed.mp_policy")


def _accelerate(tree: Table, findings: Findings) -> Iterator[Settings]:
    precision = tree.entries.get("mixed_precision")
    if precision is None or tree.get("distributed_type") != "FSDP":
        return
    version = find(tree, "fsdp_config.fsdp_version") or Entry(None)
    is_second = str(version.value) == "2"
    # YAML takes a bare no for false
    name = "no" if precision.value is False else str(precision.value)
    findings.take(precision)
    if name not in ACCELERATE_DTYPES:
        remedy = "use no, fp16, bf16 or fp8"
        findings.refuse(precision.line, f"mixed_precision = {precision.value}: {remedy}")
        return
    dtype = replace(precision, value=ACCELERATE_DTYPES[name])
    last: str = "output_dtype" if is_second else "buffer_dtype"
    fields = {"param_dtype": dtype, "reduce_dtype": dtype, last: dtype}
    table = SMP_POLICY2 if is_second else SMP_POLICY
    yield Settings(table, fields, precision.line, "mixed_precision")
    if name == "fp16":  # Accelerate makes torch's scaler, with torch's defaults
        yield Settings(SMP_SCALER, {}, precision.line, "mixed_precision")
    if name == "fp8":
        yield from _accelerate_fp8(tree, findings, precision.line)


def _accelerate_fp8(tree: Table, findings: Findings, line: int) -> Iterator[Settings]:
    config = tree.entries.get("fp8_config", Entry(None))
    recipe = dict(config.value.entries) if isinstance(config.value, Table) else {}
    findings.take(config, *recipe.values())
    backend = recipe.pop("backend", Entry("TE", line))
    recipe.pop("use_autocast_during_eval", None)
    if backend.value != "TE":
        why = "only Transformer Engine's (TE) is read"
        findings.refuse(backend.line, f"fp8_config.backend = {backend.value}: {why}")
        return
    default = {"amax_compute_algo": Entry("most_recent", line)}
    yield _delayed(Entry(True, line), default | recipe, "fp8_config")


def note_composed(tree: Table, findings: Findings) -> None:
    """Name the files that Hydra would lay under this one, by its `defaults`; what they set is not
    in this file."""
    entry = tree.entries.get("defaults", Entry(None))
    items = entry.value.items if isinstance(entry.value, Row) else ()
    names = list[str]()
    for item in items:
        names += _brought(item)
    if names:
        why = "Hydra takes in other files, and what they say of precision is not read"
        text = f"defaults: {', '.join(names)}: {why}: give the composed file"
        findings.note(entry.line, text)


def _brought(item: Any) -> Iterator[str]:
    """Yield what an item of `defaults` takes in, but for the file itself, Hydra's own settings and
    NeMo's overlap."""
    entries = item.entries if isinstance(item, Table) else {str(item): Entry("")}
    for key, entry in entries.items():
        name = key.removeprefix("override ").removeprefix("optional ").strip()
        is_plain = name == "_self_" or name.startswith(("hydra/", "tp_overlap"))
        if not is_plain and entry.value is not None:
            yield f"{name}: {entry.value}" if entry.value else name


def read_flat(tree: Table, findings: Findings) -> None:
    """Read a tree whose top level is the fields of NeMo's plugin, or names a recipe."""
    plugins = tree.entries.get("plugins")
    if plugins is not None and isinstance(plugins.value, str):
        findings.add(Settings(NEMO, {"recipe": plugins}, plugins.line, plugins.value))
    elif {"recipe", "precision"} & set(tree.entries):
        fields = dict[str, Entry]()
        for key, entry in tree.entries.items():
            if not isinstance(entry.value, Table):
                fields[key] = entry
        if {"recipe", "precision"} & set(fields):
            line = next(iter(fields.values())).line
            findings.add(Settings(NEMO, fields, line, "the file"))
