"""A command line of Megatron-LM becomes the run file of the same training, or is refused by the
names of arguments."""

import os
import random
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import UserError
from tests.importing.scripts import ASSUMED, SCRIPTS
from tests.refusals import sentence, shows
from tools.cli import main
from tools.config.run_file import RunConfig, load_run, read_run_settings
from tools.convert.megatron.args import model_of_args
from tools.interop.arguments.megatron import READ, REFUSED, UNUSED, option
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.megatron_model import completed
from tools.interop.importing.read_arguments import read_words
from tools.interop.importing.run import import_run
from tools.interop.importing.shell import split_words

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 100 --data-path tokens/mine --vocab-size 500 "
    "--save runs/mine"
)


def run_of(
    tmp_path: Path, *items: str, ranks: int | None = None, keys: Sequence[str] = ()
) -> RunConfig:
    """The run that the text of an import describes."""
    given, _ = read_run_settings(None, keys)
    made = import_run(items, given, ASSUMED, ranks)
    path = tmp_path / "imported.toml"
    path.write_text(made.text)
    return load_run(path)


@pytest.mark.parametrize("name", ["pipe", "pipe.yaml", "pipe.json", "device.sh"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.startswith("pipe"):
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull)
    with pytest.raises(UserError, match="not a regular file"):
        run_of(tmp_path, str(path))


def refused(
    *items: str, ranks: int | None = None, keys: Sequence[str] = (), drop: str = ""
) -> tuple[str, ...]:
    given, _ = read_run_settings(None, keys)
    with pytest.raises(UserError) as caught:
        import_run(items, given, {}, ranks, frozenset(drop.split()))
    return caught.value.problems


@pytest.fixture
def scripts(tmp_path: Path) -> dict[str, str]:
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.sh").write_text(text)
    return {name: str(tmp_path / f"{name}.sh") for name in SCRIPTS}


def test_a_gpt_script_becomes_its_run(scripts: dict[str, str], tmp_path: Path) -> None:
    run = run_of(tmp_path, scripts["gpt"])
    m = run.model
    p = run.parallel
    t = run.train
    lr = run.lr
    assert (m.family, m.layers, m.hidden, m.heads, m.ffn, m.vocab) == (
        "gpt2",
        32,
        1024,
        16,
        4096,
        50257,
    )
    assert (m.mlp, m.norm, m.positions, m.tied, m.bias, m.dropout, m.attention_dropout) == (
        "gelu", "layer", "learned", True, True, 0.1, 0.1,
    )  # fmt: skip
    assert (p.tensor, p.pipeline, p.data, p.zero, p.cuts) == (4, 2, 2, False, (16, 16))
    assert (t.steps, t.global_batch, t.micro_batch, t.seq_length, t.folder) == (
        500000,
        1536,
        1,
        2048,
        "runs/mine",
    )
    assert (lr.schedule, lr.peak, lr.final, lr.warmup, lr.length, lr.unit) == (
        "cosine",
        6e-5,
        6e-6,
        430,
        430000,
        "steps",
    )
    precision = run.precision
    assert (precision.compute, precision.gradients, precision.initial_scale) == (
        "fp16",
        "fp16",
        2.0**32,
    )
    assert (precision.growth_interval, precision.hysteresis, precision.on_nonfinite) == (
        1000,
        2,
        "skip",
    )
    assert run.optimizer.betas == (0.9, 0.95) and run.optimizer.weight_decay == 0.1
    assert run.data.source == "tokens/mine_text_document" and run.data.held_out == pytest.approx(
        0.051
    )
    assert run.data.held_out_from == "end"  # Megatron's split
    assert (run.checkpoint.every, run.log.every, t.eval_every, t.eval_batches) == (
        10000,
        100,
        1000,
        10,
    )


def test_a_llama_script_counts_in_samples_and_blends_data(
    scripts: dict[str, str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, scripts["llama"])
    m = run.model
    lr = run.lr
    assert (m.family, m.mlp, m.norm, m.tied, m.bias, m.kv_heads, m.rope_base) == (
        "llama", "swiglu", "rms", False, False, 8, 1e6,
    )  # fmt: skip
    assert (lr.unit, lr.warmup, lr.length) == ("samples", 3906252, 1949218748)
    assert run.train.steps == 1953125000 // 128
    assert [(one.source, one.weight) for one in run.data.blend] == [
        ("tokens/a", 0.7),
        ("tokens/b", 0.3),
    ]
    assert (
        run.data.tokenizer == "tokenizers/llama/tokenizer.json"
        and run.data.held_out == pytest.approx(0.01)
    )
    assert (run.fp8.kind, run.fp8.history_length, run.fp8.amax_algo, run.fp8.parameters) == (
        "delayed",
        1024,
        "max",
        True,
    )
    assert (run.precision.compute, run.precision.gradients, run.precision.on_nonfinite) == (
        "bf16",
        "bf16",
        "raise",
    )
    assert not run.parallel.sequence  # as in Megatron-LM with one tensor-parallel rank
    assert run.parallel.zero and run.parallel.overlap and run.parallel.data == 16


def test_a_mixtral_script_keeps_its_interleaved_stages(
    scripts: dict[str, str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, scripts["mixtral"])
    m = run.model
    p = run.parallel
    assert (m.family, m.experts, m.experts_per_token, m.router_aux_loss, m.norm_topk) == (
        "mixtral",
        8,
        2,
        0.01,
        True,
    )
    assert (p.schedule, p.chunks, p.cuts, p.sequence) == ("interleaved", 2, (4,) * 8, True)
    assert (p.recompute, p.recompute_layers, p.tensor, p.pipeline, p.data) == ("full", 2, 2, 4, 2)
    assert (p.expert, p.expert_tensor) == (2, 0)
    assert run.data.tokenizer == "tokenizer.model"
    assert (run.lr.warmup, run.lr.length, run.lr.final) == (500, 320000, 1e-5)


@pytest.mark.parametrize(
    ("kind", "what"), [("aux_loss", "each micro-batch"), ("global_aux_loss", "the global batch")]
)
def test_a_balance_over_other_tokens_than_a_samples_is_said(
    kind: str, what: str, scripts: dict[str, str], tmp_path: Path
) -> None:
    script = Path(scripts["mixtral"]).read_text()
    changed = tmp_path / "changed.sh"
    notes = []
    for one in (kind, "seq_aux_loss"):
        changed.write_text(script.replace("balancing-type aux_loss", f"balancing-type {one}"))
        made = import_run([str(changed)], {}, ASSUMED, None)
        notes.append([note for note in made.notes if "balances each sample" in note])
    assert [note.endswith(f"not {what}") for note in notes[0]] == [True] and not notes[1]


EP = "--expert-model-parallel-size 2"
ETP = "--expert-tensor-parallel-size 1"


def test_experts_go_over_as_many_ranks_as_there_are(
    scripts: dict[str, str], tmp_path: Path
) -> None:
    script = Path(scripts["mixtral"]).read_text()
    changed = tmp_path / "changed.sh"
    changed.write_text(script.replace(EP, f"{EP[:-1]}4 {ETP}"))
    run = run_of(tmp_path, str(changed))
    assert (run.parallel.expert, run.parallel.expert_tensor) == (4, 1)
    changed.write_text(script.replace(EP, f"{EP[:-1]}8"))
    with pytest.raises(
        UserError,
        match=sentence(
            "comm.experts_ranks",
            expert=8,
            expert_tensor=2,
            expert_ranks=16,
            data=2,
            tensor=2,
            stage_size=4,
        ),
    ):
        run_of(tmp_path, str(changed))


_LATENT = "--multi-latent-attention --qk-layernorm --normalization RMSNorm --position-embedding-type rope --swiglu"
_LATENT += " --disable-bias-linear --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16"
_ROUTED = "--num-experts 8 --moe-ffn-hidden-size 48 --moe-router-topk 4 --moe-router-score-function sigmoid"
_ROUTED += " --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-bias-update-rate 0.002"
HYBRID = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --squared-relu"
HYBRID += " --position-embedding-type none --disable-bias-linear --normalization RMSNorm"
DELTA = "--experimental-attention-variant gated_delta_net --linear-key-head-dim 8 --linear-value-head-dim 16"
DELTA += " --linear-num-key-heads 2 --linear-num-value-heads 4 --normalization RMSNorm --swiglu"
CHANGES = (
    "", "--swiglu", "--normalization RMSNorm", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias",
    "--position-embedding-type rope --rotary-percent 0.5", "--use-rotary-position-embeddings --rotary-base 5000",
    "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4", "--no-bias-gelu-fusion",
    "--position-embedding-type rope --rotary-seq-len-interpolation-factor 2", "--untie-embeddings-and-output-weights",
    "--group-query-attention --num-query-groups 2", "--num-query-groups 2", "--kv-channels 32",
    "--ffn-hidden-size 100", "--swiglu --ffn-hidden-size 100", "--norm-epsilon 1e-6", "--layernorm-epsilon 1e-6",
    "--hidden-dropout 0 --attention-dropout 0.2", "--init-method-std 0.01", "--window-size 15,0",
    "--window-size (15,0) --window-attn-skip-freq 2", "--window-size 15,0 --window-attn-skip-freq ([1]*2+[0])+[1]",
    "--qk-layernorm --normalization RMSNorm", "--disable-bias-linear --num-experts 4 --moe-router-topk 1 "
    "--moe-router-pre-softmax --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.2 --moe-ffn-hidden-size 32",
    "--disable-bias-linear --num-experts 4 --moe-router-load-balancing-type none --moe-layer-freq ([1]*4)",
    f"{_LATENT} --q-lora-rank 24 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0",
    f"{_LATENT} --rope-type rope --moe-layer-freq [0]+[1]*3 {_ROUTED} --moe-shared-expert-intermediate-size 96",
    f"--disable-bias-linear --add-qkv-bias {_ROUTED} --moe-router-num-groups 4 --moe-router-group-topk 2",
    "--num-experts 4 --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable "
    "--no-bias-gelu-fusion --position-embedding-type yarn --rotary-scaling-factor 32 --yarn-beta-fast 16 "
    "--yarn-original-max-position-embeddings 64 --no-yarn-correction-range-round-to-int",
    "--position-embedding-type none", "--squared-relu",
    f"{HYBRID} --hybrid-override-pattern M-*M --mamba-num-groups 2 --mamba-head-dim 16",
    f"{HYBRID} --hybrid-attention-ratio 0.25 --hybrid-mlp-ratio 0.25 --is-hybrid-model --mamba-num-heads 16",
    f"{DELTA} --linear-attention-freq 4", f"{DELTA} --linear-attention-freq [1]*3+[0] --attention-output-gate",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_model_is_the_one_that_a_checkpoint_of_the_same_arguments_has(
    change: str, tmp_path: Path
) -> None:
    line = f"{BASE} {shlex.join(change.split())}"
    arguments = Arguments()
    read_words(split_words(line, {}).words, arguments)
    assert not arguments.draft.problems
    assert run_of(tmp_path, line).model == model_of_args(completed(arguments), None)


def test_a_hybrid_models_pattern_says_its_layers_and_where_stages_end(tmp_path: Path) -> None:
    line = f"{BASE.replace('--num-layers 4 ', '')} {HYBRID} --mamba-num-groups 2"
    run = run_of(
        tmp_path,
        f"{line} --hybrid-layer-pattern 'M|-*|M-|M' --pipeline-model-parallel-size 2",
    )
    assert (run.model.hybrid_pattern, run.model.layers) == ("M-*M-M", 6)
    assert (run.parallel.cuts, run.parallel.chunks) == ((1, 2, 2, 1), 2)
    assert run.parallel.schedule == "interleaved"
    assert run_of(tmp_path, f"{line} --hybrid-layer-pattern M-*M").parallel.pipeline == 1


def test_a_hybrid_model_without_attention_takes_megatrons_defaults_of_attention() -> None:
    line = f"{BASE} {HYBRID} --mamba-num-groups 2".replace("--disable-bias-linear", "")
    made = import_run([f"{line} --attention-dropout 0.2"], {}, {}, None)
    assert any("--attention-dropout 0.2: no layer has attention" in note for note in made.notes)
    assert "router" not in made.text


def test_settings_of_fp8_beside_fp4_are_said_to_change_nothing() -> None:
    made = import_run([f"{BASE} --bf16 --fp4-format e2m1 --fp8-margin 2"], {}, {}, None)
    assert any("--fp8-margin 2: beside --fp4-format" in note for note in made.notes)
    assert "margin =" not in made.text


def test_sizes_of_what_no_layer_has_are_said_to_change_nothing() -> None:
    made = import_run([f"{BASE} --mamba-state-dim 64 --linear-key-head-dim 8"], {}, {}, None)
    assert any("--mamba-state-dim 64: no layer has a Mamba-2 mixer" in n for n in made.notes)
    assert any("--linear-key-head-dim 8: no layer has a gated" in n for n in made.notes)


def test_the_feed_forward_of_swiglu_has_megatrons_width(tmp_path: Path) -> None:
    line = BASE.replace("--hidden-size 64", "--hidden-size 4096")
    # int(4 * 4096 * 2 / 3 / 64) * 64
    assert run_of(tmp_path, f"{line} --swiglu").model.ffn == 10880
    assert run_of(tmp_path, line).model.ffn == 16384


RATES = (
    "--lr-decay-style linear", "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 10",
    "--lr-decay-style constant", "--lr-decay-style cosine --lr-warmup-init 1e-4 --lr-warmup-iters 10",
    "--lr-decay-style cosine --lr-warmup-fraction 0.05 --lr-decay-iters 60", "--lr-warmup-fraction 0.03",
    "--lr-decay-iters 150 --min-lr 1e-5", "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-warmup-iters 5",
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-decay-iters 80 --min-lr 1e-4",
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear --min-lr 1e-4",
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style cosine",
    "--lr-decay-style WSD --lr-wsd-decay-iters 30 --lr-wsd-decay-style minus_sqrt --min-lr 1e-4",
    "--train-samples 803 --lr-warmup-samples 33", "--train-samples 800 --lr-decay-samples 600 --lr-warmup-fraction 0.1",
    "--train-samples 800 --lr-decay-style WSD --lr-wsd-decay-samples 100 --lr-decay-samples 700 --min-lr 2e-4",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", RATES)
def test_every_rate_is_that_of_megatrons_scheduler(change: str, tmp_path: Path) -> None:
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler", exc_type=ImportError)
    line = f"{BASE} {change}"
    line = line.replace("--train-iters 100 ", "") if "--train-samples" in change else line
    run = run_of(tmp_path, line)
    arguments = Arguments()
    read_words(split_words(line, {}).words, arguments)
    theirs = scheduler(module, arguments)
    unit = 8 if run.lr.unit == "samples" else 1
    for step in range(run.train.steps):
        theirs.num_steps = step * 8
        assert run.lr_schedule.at(step * unit) == pytest.approx(
            theirs.get_lr({}), rel=1e-12, abs=1e-18
        ), step


def scheduler(module: Any, a: Arguments) -> Any:
    """Megatron-core's scheduler, with the steps that training.py's get_optimizer_param_scheduler
    gives it."""
    batch = a.get("global_batch_size")
    by_samples = a.has("train_samples")
    unit, factor = ("samples", 1) if by_samples else ("iters", batch)
    decay = (a.get(f"lr_decay_{unit}") or a.get(f"train_{unit}")) * factor
    wsd = a.get(f"lr_wsd_decay_{unit}")
    share = a.get("lr_warmup_fraction")
    warmup = a.get(f"lr_warmup_{unit}") * factor if share is None else share * decay
    optimizer = type("Optimizer", (), {"param_groups": []})()
    return module.OptimizerParamScheduler(
        optimizer, a.get("lr_warmup_init"), a.get("lr"), a.get("min_lr"), warmup, decay, a.get("lr_decay_style"), 0.0, 0.0, 1, "constant",
        wsd_decay_steps=wsd and wsd * factor, lr_wsd_decay_style=a.get("lr_wsd_decay_style"),
    )  # fmt: skip


def test_where_megatrons_default_differs_from_ours_the_run_file_states_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, BASE)
    assert (run.lr.schedule, run.optimizer.betas, run.optimizer.weight_decay) == (
        "linear",
        (0.9, 0.999),
        0.01,
    )
    run = run_of(tmp_path, f"{BASE} --train-iters 2000")
    assert (run.train.eval_every, run.train.eval_batches, run.log.every, run.checkpoint.every) == (
        1000,
        100,
        100,
        0,
    )
    assert (
        run.data.held_out == pytest.approx(0.031)
        and not run.parallel.zero
        and run.precision.on_nonfinite == "raise"
    )


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("--bf16", "precision.gradients", "fp32"),
        ("--bf16 --grad-reduce-in-bf16", "precision.gradients", "bf16"),
        ("--fp16", "precision.gradients", "fp16"),
        ("--fp16", "precision.initial_scale", 2.0**32),  # Megatron's default, not ours
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "precision.gradients", "fp32"),
        ("--fp16 --loss-scale 1024", "precision.loss_scale", 1024.0),
        # `if config.loss_scale:` in core/optimizer
        ("--fp16 --loss-scale 0", "precision.loss_scale", 0.0),
        ("--fp16 --loss-scale 0", "precision.growth_interval", 1000),
        ("--fp16 --loss-scale-window 500 --hysteresis 3 --initial-loss-scale 65536", "precision.growth_interval", 500),
        ("--bf16 --no-check-for-nan-in-loss-and-grad", "precision.on_nonfinite", "ignore"),
        ("--bf16 --fp32-residual-connection", "precision.residual", "fp32"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe tensorwise", "fp8.kind", "current"),
        ("--bf16 --fp8-format hybrid --no-fp8-wgrad", "fp8.weight_gradients", False),
        ("--bf16 --fp4-format e2m1", "fp8.kind", "nvfp4"),
        (
            "--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            "fp8.last_layers",
            2,
        ),
        ("--optimizer sgd --sgd-momentum 0.5", "optimizer.options", {"momentum": 0.5}),
        ("--optimizer lion --lion-beta1 0.9", "optimizer.options", {"betas": [0.9, 0.98]}),
        ("--clip-grad 0", "optimizer.clip", 0.0),
        ("--qk-clip", "optimizer.qk_clip", 100.0),
        ("--qk-clip --qk-clip-threshold 30", "optimizer.qk_clip", 30.0),
        ("--qk-clip --qk-clip-alpha 0.3", "optimizer.qk_clip_alpha", 0.3),
        ("--optimizer-cpu-offload", "optimizer.offload", "host"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "optimizer.offload", "host"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", "optimizer.offload", "none"),
        ("--optimizer-offload-fraction 0.5", "optimizer.offload", "none"),
        ("--recompute-activations", "parallel.recompute_modules", ("attention",)),
        ("--recompute-granularity selective --recompute-modules core_attn layernorm", "parallel.recompute_modules",
         ("attention", "norm")),
        ("--tokenizer-type NullTokenizer", "model.vocab", 501),
        ("--split 100,0,0", "train.eval_every", 0),
        ("--eval-iters 0", "train.eval_every", 0),
        ("--train-iters 90 --lr-warmup-iters 0 --eval-iters 5", "train.eval_every", 90),
        ("--train-iters 90 --lr-warmup-iters 0 --eval-iters 5 --eval-interval 30", "train.eval_every", 30),
        ("--train-iters 7 --train-iters 9", "train.steps", 9),
        ("--load ck --finetune", "train.init_from", "ck"),
        ("--load ck", "train.branch_from", "ck"),
        ("--load ck --save other", "train.branch_from", "ck"),
        ("--load ck --save ck", "train.branch_from", ""),
        ("--load ck --finetune", "train.branch_from", ""),
        ("--embedding-init-method-std 0.5", "model.init", None),
    ],
)  # fmt: skip
def test_arguments_mean_what_they_mean_in_megatron(
    change: str, key: str, value: object, tmp_path: Path
) -> None:
    line = BASE.replace(" --vocab-size 500", " --vocab-size 500")
    if value == "ck":  # it need not be there to be written down
        _, _, name = key.partition(".")
        assert f'{name} = "ck"' in import_run([f"{line} {change}"], {}, {}, None).text
        return
    found = run_of(tmp_path, f"{line} {change}").get(key)
    assert found.embedding == 0.5 if value is None else found == value


def test_a_run_that_is_shorter_than_megatrons_period_of_evaluation_is_told_of_no_key_without_effect(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, f"{BASE} --train-iters 90 --lr-warmup-iters 0 --eval-iters 5")
    assert not [note for note in run.notes if "eval_every" in note]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            "--swigul",
            re.escape(
                "--swigul: no such argument of Megatron-LM is known here; did you mean --swiglu?"
            ),
        ),
        ("--num-layer 3", "--num-layer: no such argument"),
        (
            "--hierarchical-context-parallel-sizes 2 2",
            "the ranks of parallel.context are one group here",
        ),
        (
            "--phase-transition-iterations 10",
            "--phase-transition-iterations 10: each phase is a process with --data-path of its own",
        ),
        ("--lr abc", "--lr abc: the value must be a number"),
        ("--num-layers 2.5", "--num-layers 2.5: the value must be a whole number"),
        ("--normalization rms", "--normalization rms: the values are LayerNorm, RMSNorm"),
        ("--swiglu=true", "--swiglu=true: is a flag, which takes no value"),
        ("--seed", "--seed: a value must follow"),
        ("stray", "--save runs/mine stray: the argument takes one value"),
        ("--bf16 --fp16", "--bf16 --fp16: give one of them"),
        (
            "--lr-decay-style inverse-square-root",
            "--lr-decay-style inverse-square-root: the schedules here are",
        ),
        ("--lr-warmup-samples 5", "--lr-warmup-samples 5: the length of the run is in iters"),
        ("--optimizer muon", "--optimizer muon: the update rules here are adamw"),
        (
            "--position-embedding-type mrope",
            "--position-embedding-type = 'mrope' cannot be converted",
        ),
        ("--num-experts 4 --moe-layer-freq 2", "--add-bias-linear = True"),
        ("--multi-latent-attention", "--qk-layernorm = False beside multi_latent_attention = True"),
        ("--softmax-type off-by-one", "--softmax-type = 'off-by-one' cannot be converted"),
        (
            "--context-parallel-size 2 --cp-comm-type a2a",
            re.escape("--cp-comm-type a2a: keys and values go round (p2p)"),
        ),
        (
            "--num-attention-heads 0",
            "--num-attention-heads 0: the value must be a whole number from 1 on",
        ),
        ("--hidden-size 65", sentence("import.heads_multiple", said="--hidden-size 65", heads=4)),
        ("--data-path a b", "--data-path a b: give the weight of each data set"),
        ("--pipeline-model-parallel-size 3", "4 layers cannot be cut evenly into 3 x 1 stages"),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
            "--decoder-first-pipeline-num-layers 1: write the layers of each stage as parallel.cuts",
        ),
        (
            "--num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances 2: parallel.zero_size is the number",
        ),
        (
            "--lr-warmup-fraction 0.033",
            "--lr-warmup-fraction 0.033: are 3.3 of 100, no whole number: give lr.warmup=N",
        ),
        (
            "--position-embedding-type rope --rotary-percent 0",
            "^--rotary-percent 0: model.rotary_fraction = 0.0 must be greater",
        ),
        ("--fp16 --loss-scale -5", "^--loss-scale = -5.0: must be .* 1.175e-38$"),
        ("--fp4-format e2m1", "^--fp4-format e2m1: .* BF16 alone: give --bf16"),
        ("--fp16 --fp4-format e2m1", "^--fp4-format e2m1 --fp16: .* BF16 alone: give --bf16"),
        (
            "--hybrid-override-pattern M*-M --num-experts 4 --mamba-num-groups 2",
            sentence("model.hybrid_experts_unused", experts=4),
        ),
        ("--bf16 --fp4-format e2m1 --fp8-format e4m3", "--fp4-format = .*fp8 is given too"),
        ("--bf16 --fp4-format e2m1 --fp4-recipe custom", "--fp4-recipe = .*the one recipe"),
        ("--fp4-param-gather", "--fp4-param-gather: there is no such quantization here"),
        ("--spec my.layers layer_spec", "--spec = my.layers layer_spec cannot be converted"),
        (
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|*|M",
            "has 3 stages of .2, 1, 1. layers, but there are 2 ranks of them",
        ),
        (
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-*M|",
            "has stages of .4, 0. layers: a stage needs a layer",
        ),
        (
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|*M "
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2: the pattern ends 1 stages of each rank",
        ),
        ("--expert-model-parallel-size 0", "the value must be a whole number from 1 on"),
        ("--moe-layer-freq __import__('os')", "--moe-layer-freq"),
        ("--main-params-dtype fp16 --use-precision-aware-optimizer", "--main-params-dtype = "),
        (
            "--tokenizer-type TikTokenizer --vocab-size x",
            "--vocab-size x: the value must be a whole number",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(change: str, line: str) -> None:
    said = refused(f"{BASE} {shlex.join(change.split())}")
    assert any(re.search(line, one) for one in said), said


@pytest.mark.parametrize(
    "name", ["--lr", "--num-layers", "--seq-length", "--train-iters", "--micro-batch-size"]
)
def test_what_megatron_needs_and_is_not_there_is_named(name: str) -> None:
    line = re.sub(rf"{name} \S+ ", "", BASE)
    assert any(name in problem and "missing" in problem for problem in refused(line))


@pytest.mark.parametrize(
    ("script", "way"),
    [
        (
            'for x in 1 2; do ARGS="$ARGS --seed $x"; done\npython pretrain_gpt.py $ARGS',
            "--assume ARGS=VALUE",
        ),
        (f"read -r ARGS <<E\n{BASE}\nE\npython pretrain_gpt.py $ARGS", "--assume ARGS=VALUE"),
        (f"A=({BASE})\nunset 'A[0]'\npython pretrain_gpt.py \"${{A[@]}}\"", "--assume A=VALUE"),
        (f'A=({BASE})\npython pretrain_gpt.py "${{A[*]}}"', "$NAME bare"),
        (f"python pretrain_gpt.py {BASE} --use-flash-attn $MORE", "--assume MORE=VALUE"),
        (f"A='{BASE}'\npython pretrain_gpt.py \"$A\"", "$NAME bare"),
    ],
)
def test_what_may_stand_in_an_open_word_is_not_called_missing(
    script: str, way: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.sh"
    path.write_text(script)
    (line,) = refused(str(path))
    assert way in line and "missing" not in line


def test_without_a_global_batch_the_ranks_decide_it(tmp_path: Path) -> None:
    line = BASE.replace("--global-batch-size 8 ", "")
    assert any("--ranks N" in problem for problem in refused(line))
    run = run_of(tmp_path, f"{line} --tensor-model-parallel-size 2", ranks=8)
    assert (run.parallel.data, run.train.global_batch) == (4, 8)


def test_a_key_beside_the_arguments_settles_what_they_leave_open(tmp_path: Path) -> None:
    line = (
        BASE.replace("--vocab-size 500 ", "") + " --vocab-file vocab.json --merge-file merges.txt"
    )
    assert 'tokenizer = "FILL-IN/tokenizer.json"' in import_run([line], {}, {}, None).text
    assert run_of(tmp_path, line, keys=["model.vocab=50257", "train.steps=7"]).model.vocab == 50257
    other_style = f"{BASE} --lr-decay-style inverse-square-root --min-lr 1e-6 --lr-warmup-iters 3"
    lr = run_of(tmp_path, other_style, keys=["lr.schedule=linear"]).lr
    assert (lr.schedule, lr.final, lr.warmup) == ("linear", 1e-6, 3)


def test_heads_of_muon_are_those_of_the_rule_that_stands_beside_the_arguments(
    tmp_path: Path,
) -> None:
    """Another rule has no such option, and says that the argument is not used."""
    line = f"{BASE} --optimizer muon --muon-split-qkv-per-head"
    for_muon = run_of(tmp_path, line, keys=["optimizer.name=muon"])
    assert for_muon.optimizer.options == {"per_head": True}
    given, _ = read_run_settings(None, ["optimizer.name=adamw"])
    other = import_run((line,), given, ASSUMED, None)
    assert "per_head" not in other.text
    assert "--muon-split-qkv-per-head" in other.text.split("Not used here")[1]


def test_a_layout_beside_the_arguments_is_the_one_that_counts(tmp_path: Path) -> None:
    line = f"{BASE} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    run = run_of(tmp_path, line, ranks=8, keys=["parallel.tensor=1", "parallel.pipeline=4"])
    assert (run.parallel.data, run.parallel.cuts) == (2, (1, 1, 1, 1))


def test_an_argument_that_is_dropped_is_left_out_and_named() -> None:
    made = import_run(
        [f"{BASE} --rampup-batch-size 2 2 4 --no-such 1 2"],
        {},
        {},
        None,
        frozenset({"rampup_batch_size", "no_such"}),
    )
    assert "# - left out, as --drop says: --rampup-batch-size 2 2 4" in made.text
    (told,) = refused(BASE, drop="swiglu")
    assert told.startswith("--drop swiglu: no such argument is given")


def test_ranks_that_share_sequences_are_ranks_of_a_replica(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, f"{BASE} --tensor-model-parallel-size 2 --context-parallel-size 2", ranks=8
    )
    assert (run.parallel.tensor, run.parallel.context, run.parallel.data) == (2, 2, 2)
    assert "parallel.context" not in import_run([BASE], {}, {}, None, frozenset()).text


def test_words_after_two_dashes_and_yaml_and_a_quoted_line_are_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml", reason="needs the package PyYAML (pip install pyyaml)")
    words = BASE.split()
    texts = []
    listed = dict(zip(words[::2], words[1::2], strict=True))
    yaml = tmp_path / "a.yaml"
    yaml.write_text(
        "MODEL_ARGS:\n"
        + "\n".join(f"  {key}: {value}" for key, value in listed.items())
        + "\n  --bf16: true\n"
    )
    flat = tmp_path / "b.yaml"
    flat.write_text(
        "\n".join(f"{key[2:].replace('-', '_')}: {value}" for key, value in listed.items())
        + "\nbf16: true\n"
    )
    for command in ([f"{BASE} --bf16"], ["--", *words, "--bf16"], [str(yaml)], [str(flat)]):
        assert main(["import-args", *command]) == 0
        texts.append(
            [
                line.partition("  #")[0].strip()
                for line in capsys.readouterr().out.splitlines()
                if " = " in line
            ]
        )
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_names_that_megatron_keeps_are_read_from_yaml_with_their_own_value(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="needs the package PyYAML (pip install pyyaml)")
    path = tmp_path / "c.yaml"
    names = [
        f"{key[2:].replace('-', '_')}: {value}"
        for key, value in zip(BASE.split()[::2], BASE.split()[1::2], strict=True)
        if key != "--lr"  # YAML takes 1e-3 for a text
    ]
    path.write_text(
        "\n".join(
            [
                *names,
                "add_bias_linear: false",
                "swiglu: null",
                "bias_gelu_fusion: true",
                "lr: 0.001",
            ]
        )
    )
    run = run_of(tmp_path, str(path))
    assert not run.model.bias and run.model.mlp == "gelu_exact"
    path.write_text("model:\n  num_layers: 2\nother:\n  num_layers: 3\n")
    assert any("is 2 and 3: keep one of them" in problem for problem in refused(str(path)))
    path.write_text("num_layers: ${oc.env:LAYERS}\n")
    assert any("interpolation" in problem for problem in refused(str(path)))


def test_products_that_megatron_fuses_with_transfers_are_said_to_be_a_key_that_is_off(
    tmp_path: Path,
) -> None:
    given = f"{BASE} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    assert not run_of(tmp_path, given).parallel.async_tensor
    said = "# Not used here: --tp-comm-overlap (parallel.async_tensor = true does it here)\n"
    assert said in (tmp_path / "imported.toml").read_text()


def test_the_command_writes_a_file_once_and_says_what_it_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["import-args", f"{BASE} --num-workers 2", "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert (
        f"12 arguments read, 1 not needed here; wrote {path}" in said.out
        and said.err.startswith("note: parallel.data = 1")
    )
    assert "# Not used here: --num-workers 2\n" in path.read_text()
    assert main(["import-args", BASE, "-o", str(path)]) == 2
    assert capsys.readouterr().err == f"{path} exists: give another name, or remove it\n"


@pytest.mark.parametrize(
    "words", [["--bf16", "--num-layers", "2"], ["-o", "run.toml", "--swiglu"], ["--seed=1"]]
)
def test_arguments_without_quotes_are_answered_with_a_line_that_says_how_to_quote(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["import-args", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = next(word for word in words if word.startswith("--"))
    assert line.startswith(
        f"{name} is no option of import-args: give a command line in quotes, as in megaprec import"
    )
    assert "megaprec import-args -o run.toml -- --num-layers 24" in line


FLAGS = [option(name) for name in (*READ, *UNUSED, *REFUSED)]
VALUES = [
    "1",
    "-1",
    "0",
    "abc",
    "1e400",
    "nan",
    "",
    "9" * 30,
    "rope",
    "--",
    "-",
    "=",
    "'",
    '"',
    "$X",
    "[",
    "1,2",
    "\u2028",
    "a b",
]


@pytest.mark.parametrize("seed", range(4))
def test_random_arguments_end_with_a_run_or_with_lines(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        words: list[str] = [*BASE.split()]
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(words))
            kind = rng.random()
            if kind < 0.4:
                words[at:at] = [rng.choice(FLAGS), *rng.choices(VALUES, k=rng.randrange(3))]
            elif kind < 0.7:
                words[at] = rng.choice(VALUES)
            else:
                del words[at]
        for item in (shlex.join(words), " ".join(words)):
            try:
                import_run([item], {}, {}, rng.choice([None, 1, 8]))
            except UserError as error:
                problems = error.problems
            else:
                continue
            assert problems and all(line and line.isprintable() for line in problems)


def test_a_refusal_of_arguments_tells_how_one_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["import-args", f"{BASE} --skip-train"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("--drop NAME leaves out an argument")


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ("--rampup-batch-size 2 2 100", ""),
        ("--decrease-batch-size-if-needed", "--global-batch-size 8"),
        # what the run file itself is refused for
        ("--rampup-batch-size 2 3 100", "--global-batch-size 8 --micro-batch-size 2"),
    ],
)
def test_an_argument_that_a_batch_cannot_be_made_of_is_named_with_the_way_out(
    given: str, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = re.sub(r"--(train-iters|global-batch-size) \S+", "", BASE)
    assert main(["import-args", f"{line} {given} --train-samples 90 {others}"]) == 2
    problem, command, hint = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"{given}: ")
    assert command.startswith("all answers at once")
    assert hint.startswith("--drop NAME leaves out an argument")


@pytest.mark.parametrize(
    "split",
    ["nan", "969,nan,1", "969,-30,1", "inf,1", "1e2,3", "9,1,0,0", "0,0,0", "x", "9:1", ","],
)
def test_shares_of_a_split_that_are_no_numbers_are_refused(split: str) -> None:
    (problem,) = refused(f"{BASE} --split {split}")
    assert problem.startswith(f"--split {split}: give the shares")


@pytest.mark.parametrize(
    ("split", "held_out"),
    [("'969, 30, 1'", 0.031), ("'[9,1,0]'", 0.1), ("1", 0.0), ("1.0,.25", 0.2), ("'(3, 1)'", 0.25)],
)
def test_shares_of_a_split_are_those_of_training_and_the_rest(
    split: str, held_out: float, tmp_path: Path
) -> None:
    assert run_of(tmp_path, f"{BASE} --split {split}").data.held_out == held_out


@pytest.mark.parametrize("given", ["--hidden-size 0", "--num-layers 0", "--lr nothing"])
def test_an_argument_that_every_run_needs_is_not_to_be_left_out(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-args", f"{BASE} {given}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--num-experts 4 --moe-router-topk 8", "--moe-router-topk 8 --num-experts 4: "),
        ("--num-experts 1", "--moe-router-topk --num-experts 1: "),
    ],
)
def test_values_that_do_not_fit_together_are_told_by_all_their_arguments(
    given: str, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        import_run([f"{BASE} {given}"], {}, {}, 1)
    told = [
        problem for problem in caught.value.problems if shows(problem, "model.experts_per_token")
    ]
    assert told and told[0].startswith(said)


def test_one_of_two_arguments_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-args", f"{BASE} --train-samples 100"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("--drop NAME leaves out an argument")


def test_a_tokenizer_that_is_not_read_for_a_given_vocabulary_is_named() -> None:
    line = (
        BASE.replace("--vocab-size 500 ", "")
        + " --tokenizer-type Llama2Tokenizer --tokenizer-model mine.model"
    )
    given, _ = read_run_settings(None, ["model.vocab=500"])
    notes = import_run([line], given, {}, None).notes
    assert [note for note in notes if note.startswith("--tokenizer-model mine.model: not read")]


LINE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 "
    "--micro-batch-size 4 --global-batch-size 64 --lr 3e-4 --train-iters 100 --data-path tokens/mine "
    "--vocab-size 500 --save runs/mine"
)


@pytest.mark.cases(4, sample=12)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_argument_that_is_refused_is_left_out_as_the_last_line_says(name: str) -> None:
    values = {"flag": "", "value": " 77", "values": " 77 78"}[REFUSED[name].form]
    line = f"{LINE} {option(name)}{values}"
    with pytest.raises(UserError) as caught:
        import_run([line], {}, {}, 1)
    assert any(option(name) in problem for problem in caught.value.problems)
    imported = import_run([line], {}, {}, 1, frozenset({name}))
    assert any(
        note.startswith(f"left out, as --drop says: {option(name)}") for note in imported.notes
    )
