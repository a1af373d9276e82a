"""YAML trees that spread precision over several tables: those of NeMo 1 and of NxDT.

Each form is recognized by keys that only it has. Its keys are mapped to those of the system's
dialect, which interprets them. Sources: NeMo's examples/nlp/language_modeling/conf and
nlp/models/language_modeling, neuronx-distributed-training's examples/conf and
lightning_modules/model/base.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megaprec.dialects import nemo_v1
from tools.interop.foreign.findings import Findings, FoundSettings
from tools.interop.foreign.plain import DictEntry, PlainDict, PlainSequence, find, items_of
from tools.interop.foreign.systems import NXD, NXD_ENVIRONMENT, NXD_OPTIMIZER

NEMO1 = {
    **{key: f"model.{key}" for key in nemo_v1.Nemo1.model_fields},
    "optim_name": "model.optim.name",
    "optim_dtype": "model.optim.dtype",
    "grad_sync_dtype": "model.optim.grad_sync_dtype",
    "precision": "trainer.precision",
    "gradient_clip_val": "trainer.gradient_clip_val",
}
NEMO1_MARKS = frozenset(
    {"megatron_amp_O2", "native_amp_init_scale", "tensor_model_parallel_size", "mcore_gpt"}
)
# Keys that every template has and that change no number without FSDP
NEMO1_IDLE = (
    "model.precision",
    "model.fsdp_grad_reduce_dtype",
    "model.grad_div_ar_fusion",
    "model.gradient_accumulation_fusion",
    "model.grad_allreduce_chunk_size_mb",
    "model.apex_transformer_log_level",
)
_SAVED = "use_master_weights_in_ckpt"
NXDT_SAVED = {_SAVED: f"exp_manager.checkpoint_callback_params.{_SAVED}"}
IDLE_DEFAULTS = ("_self_", "hydra/", "tp_overlap")
NXDT_MANUAL = {
    "use_master_weights": "precision.master_weights",
    "use_fp32_grad_acc": "precision.fp32_grad_acc",
}
NXDT_VARIABLES = {
    "XLA_USE_BF16": "precision.xla_use_bf16",
    "XLA_DOWNCAST_BF16": "precision.xla_downcast_bf16",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "precision.neuron_rt_stochastic_rounding_en",
}
# Switches that change no number while they are off
OFF = (
    "model.fp16_lm_cross_entropy",
    "model.fsdp",
    "model.fp8_dot_product_attention",
    "model.fp8_multi_head_attention",
)


def read_forms(tree: PlainDict, findings: Findings) -> bool:
    """Read a tree in one of the forms; return True if it is in one. The switches of `OFF` that are
    off are accounted for in any tree."""
    for entry in _moved(tree, dict(zip(OFF, OFF, strict=True))).values():
        if entry.value in (False, None):
            findings.take(entry)
    places = [*_nxdt(tree, findings)] or [*_nemo1(tree, findings)]
    for settings in places:
        findings.add(settings)
    return bool(places)


def _moved(tree: PlainDict, moves: Mapping[str, str]) -> dict[str, DictEntry]:
    """Return the existing entries by their new keys. moves: new key -> path."""
    entries = {key: find(tree, path) for key, path in moves.items()}
    return {key: entry for key, entry in entries.items() if entry is not None}


def _take(tree: PlainDict, findings: Findings, paths: Iterable[str]) -> None:
    """Account for the entries under dotted paths, those of them that are there."""
    findings.take(*_moved(tree, {path: path for path in paths}).values())


def _nemo1(tree: PlainDict, findings: Findings) -> Iterator[FoundSettings]:
    """Yield the settings of NeMo 1, whose files have a trainer's precision and a model of
    Megatron's."""
    model = tree.get("model")
    precision = find(tree, "trainer.precision")
    is_model = isinstance(model, PlainDict) and not NEMO1_MARKS.isdisjoint(model.entries)
    if precision is None or not is_model:
        return
    fields = _moved(tree, NEMO1)
    given = {key: entry for key, entry in fields.items() if entry.value is not None}
    _take(tree, findings, NEMO1_IDLE)
    sharded = model.entries.get("fsdp")
    if sharded is not None and sharded.value:
        why = "FSDP, which does without O2's masters and dtypes, is not read"
        remedy = "take PyTorch's policy as SMP's keys"
        findings.refuse(sharded.line, f"model.fsdp = {sharded.value}: {why}: {remedy}")
    yield FoundSettings("nemo.v1", given, precision.line, "trainer.precision")


def _nxdt(tree: PlainDict, findings: Findings) -> Iterator[FoundSettings]:
    """Yield the settings of neuronx-distributed-training. Of its table `precision` only the type
    counts, unless that is "manual"."""
    kind = find(tree, "precision.type")
    if kind is None:
        return
    is_manual = kind.value == "manual"
    fields = {"precision_type": kind} | _moved(tree, NXDT_SAVED)
    manual = _moved(tree, NXDT_MANUAL)
    variables = _moved(tree, NXDT_VARIABLES)
    # the name of the table is accounted for, not all that it holds
    table = replace(tree.entries["precision"], value=None)
    findings.take(table, *manual.values(), *variables.values())
    # in its examples, and read by none of its code
    _take(tree, findings, ("precision.fp32_grads_cc",))
    _note_nxdt(tree, findings, kind)
    if is_manual:
        fields |= dict.fromkeys(NXDT_MANUAL, DictEntry(False, kind.line)) | manual
    yield FoundSettings(NXD, fields, kind.line, "precision.type")
    if is_manual and variables:
        texts = {key: _as_text(entry) for key, entry in variables.items()}
        yield FoundSettings(NXD_ENVIRONMENT, texts, kind.line, "precision")
    zero = find(tree, "distributed_strategy.zero1") or DictEntry(True, kind.line)
    clip = find(tree, "trainer.gradient_clip_val") or DictEntry(None, kind.line)
    clipping = {"max_grad_norm": clip}
    if clip.value is None:
        clipping = {"grad_clipping": replace(clip, value=False)}
    optimizer = {"zero_one_enabled": zero} | clipping
    yield FoundSettings(NXD_OPTIMIZER, optimizer, kind.line, "distributed_strategy")


def _as_text(entry: DictEntry) -> DictEntry:
    """Return a variable, whose text YAML takes for a number."""
    return replace(entry, value=str(entry.value)) if type(entry.value) is int else entry


def _note_nxdt(tree: PlainDict, findings: Findings, kind: DictEntry) -> None:
    """Name what changes numbers in neuronx-distributed-training and has no key here."""
    optimizer = find(tree, "model.optim.name") or DictEntry(None)
    masters = find(tree, "precision.master_weights") or DictEntry(None)
    if kind.value == "manual" and optimizer.value == "adamw_fp32OptState" and not masters.value:
        why = "its moments are wider than BF16 weights; here they are as wide as the masters"
        findings.note(optimizer.line, f"model.optim.name = {optimizer.value}: {why}")


def note_composed(tree: PlainDict, findings: Findings) -> None:
    """Name the files that Hydra would lay under this one, by its `defaults`; what they set is not
    in this file."""
    entry = tree.entries.get("defaults", DictEntry(PlainSequence([])))
    names = list[str]()
    for item in items_of(entry.value):
        names += map(str, item.entries if isinstance(item, PlainDict) else [item])
    others = [name for name in names if not any(word in name for word in IDLE_DEFAULTS)]
    if others:
        why = "Hydra takes in other files, and what they say of precision is not read"
        text = f"defaults: {', '.join(others)}: {why}: give the composed file"
        findings.note(entry.line, text)
