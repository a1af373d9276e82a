"""Every argument of Megatron-LM and key of DeepSpeed is of one class, and is as their parsers have
it.

`megatron_arguments.txt` lists what Megatron-LM's parser has, versions 2.5 to August 2026 taken
together, and what pull request 6326 adds to it (--muon-split-qkv-per-head): the name as typed, the
form (a flag that sets true or false, one value or several) and the default.
"""

import ast
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tools.config.key_suggestions import ELSEWHERE, KEYS
from tools.config.run_file import known_keys, load_run
from tools.convert.megatron.keys import ALLOWED_VALUES, OFF
from tools.interop.arguments import deepspeed
from tools.interop.arguments.megatron import READ, REFUSED, UNUSED, form_of, is_unused, option

FACTS = [
    line.split(" ", 2)
    for line in (Path(__file__).parent / "megatron_arguments.txt").read_text().splitlines()
]
DEFAULT_HERE = {
    "eval_interval": 1000,
    "moe_layer_freq": "1",
    "split": "969,30,1",
    "initial_loss_scale": 2.0**32,
}
MINIMAL = [
    "model.preset=llama-demo",
    "train.steps=1",
    "train.global_batch=2",
    "train.micro_batch=1",
]
MINIMAL += ["train.seq_length=64"]
# The arguments that users of both type most; each is answered with our key, or with why there is
# none.
KEYED = {
    "num_layers": "model.layers", "hidden_size": "model.hidden", "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_heads", "group_query_attention": "model.kv_heads", "kv_channels": "model.head_dim",
    "ffn_hidden_size": "model.ffn", "normalization": "model.norm", "swiglu": "model.mlp",
    "untie_embeddings_and_output_weights": "model.tied", "position_embedding_type": "model.positions",
    "rotary_base": "model.rope_base", "disable_bias_linear": "model.bias", "num_experts": "model.experts",
    "hidden_dropout": "model.dropout", "init_method_std": "model.init_std", "vocab_size": "data.vocab_size",
    "micro_batch_size": "train.micro_batch", "global_batch_size": "train.global_batch", "train_iters": "train.steps",
    "rampup_batch_size": "train.batch_schedule", "step_batch_size_schedule": "train.batch_schedule",
    "train_samples": "train.steps", "lr_decay_style": "lr.schedule", "lr_decay_iters": "lr.length",
    "lr_warmup_iters": "lr.warmup", "lr_warmup_fraction": "lr.warmup", "lr_warmup_init": "lr.initial", "min_lr": "lr.final",
    "clip_grad": "optimizer.clip", "adam_beta2": "optimizer.betas", "bf16": "precision.compute",
    "tensor_model_parallel_size": "parallel.tensor", "pipeline_model_parallel_size": "parallel.pipeline",
    "expert_model_parallel_size": "parallel.expert", "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence", "use_distributed_optimizer": "parallel.zero",
    "recompute_granularity": "parallel.recompute", "data_path": "data.source", "split": "data.held_out",
    "tokenizer_model": "data.tokenizer", "save_interval": "checkpoint.every", "eval_interval": "train.eval_every",
    "load": "checkpoint.resume", "loss_scale_window": "precision.growth_interval", "fp8_format": "fp8.format",
    "train_batch_size": "train.global_batch", "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch", "gradient_clipping": "optimizer.clip",
    "zero_optimization": "parallel.zero", "zero_optimization.stage": "parallel.zero",
    "zero_optimization.offload_optimizer.device": "optimizer.offload", "optimizer_cpu_offload": "optimizer.offload",
    "fp16.initial_scale_power": "precision.initial_scale", "scheduler.type": "lr.schedule",
    "steps_per_print": "log.every", "warmup_num_steps": "lr.warmup", "bf16.enabled": "precision.compute",
}  # fmt: skip
WITHOUT = {
    "hierarchical_context_parallel_sizes": "one group here", "phase_transition_iterations": "data.blend",
    **dict.fromkeys(("wandb_exp_name", "use_flash_attn", "use_mcore_models", "exit_interval", "num_workers", "transformer_impl", "distributed_backend", "wall_clock_breakdown", "flops_profiler"), "is not used here"),
}  # fmt: skip


def test_every_argument_of_megatron_is_in_exactly_one_of_three_classes() -> None:
    theirs = {name[2:].replace("-", "_") for name, _, _ in FACTS}
    assert not set(READ) & set(REFUSED) and set(READ) | set(REFUSED) | UNUSED <= theirs
    for name in theirs:
        assert (name in READ) + (name in REFUSED) + is_unused(name) == 1, name


def test_every_argument_has_the_form_of_megatrons_parser() -> None:
    forms = {"true": "flag", "false": "flag", "value": "value", "values": "values"}
    for name, form, _ in FACTS:
        typed = name[2:].replace("-", "_")
        assert form_of(typed) == forms[form] or is_unused(typed), name
        if typed in READ and READ[typed].form == "flag":
            assert READ[typed].sets == (form == "true"), name


def test_every_default_is_that_of_megatrons_parser() -> None:
    for name, _, default in FACTS:
        typed = name[2:].replace("-", "_")
        if typed in READ and READ[typed].form != "flag" and typed not in DEFAULT_HERE:
            value = READ[typed].default
            theirs = ast.literal_eval(default)
            assert value in (
                theirs,
                (theirs,),
                tuple(theirs) if isinstance(theirs, list) else theirs,
            ), name
        permitted = REFUSED[typed].permitted if typed in REFUSED else None
        if permitted is not None and typed != "dataloader_type":
            assert permitted == str(ast.literal_eval(default)), name
    assert {name: READ[name].default for name in DEFAULT_HERE} == DEFAULT_HERE


def test_an_argument_that_makes_another_model_of_a_checkpoint_is_refused_on_a_command_line() -> (
    None
):
    names = {name for name, values in ALLOWED_VALUES.items() if values == OFF}
    typed = {name[2:].replace("-", "_") for name, _, _ in FACTS}
    assert len(names & typed) >= 20
    assert not (names & typed) - set(REFUSED)


def test_every_key_that_an_argument_becomes_is_a_key_and_every_reason_is_a_clause() -> None:
    keys = known_keys()
    for row in READ.values():
        assert row.keys and set(row.keys) <= keys, row.name
    assert {key for named in deepspeed.READ.values() for key in named} <= keys
    reasons = {refused.why for refused in REFUSED.values()} | {*deepspeed.WHY.values()}
    assert not any(why[-1] in ".:" or "  " in why or "- " in why for why in reasons)


def test_no_key_of_deepspeed_is_both_read_and_refused() -> None:
    assert not set(deepspeed.READ) & set(deepspeed.WHY)
    assert not deepspeed.UNUSED & (set(deepspeed.READ) | set(deepspeed.WHY))


def problem(override: str) -> str:
    with pytest.raises(UserError) as caught:
        load_run(None, [*MINIMAL, override])
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize("name", KEYED)
def test_a_name_of_another_trainer_typed_as_a_key_is_answered_with_ours(name: str) -> None:
    for typed in (name, f"train.{name}") if "." not in name else (name,):
        said = problem(f"{typed}=1")
        assert KEYED[name] in said and "did you mean" in said, said


@pytest.mark.parametrize("name", WITHOUT)
def test_a_name_without_a_key_is_answered_with_the_reason(name: str) -> None:
    for typed in (name, f"model.{name}") if "." not in name else (name,):
        said = problem(f"{typed}=1")
        assert WITHOUT[name] in said and "no such key, for " in said, said


def test_words_of_others_are_known_in_one_place() -> None:
    words = {word for there in ELSEWHERE.values() for word in there}
    assert not words & set(KEYS)
    assert option("num_layers") == "--num-layers"
