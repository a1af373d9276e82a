"""`megaprec precision`: configurations as users have them, shown with what decided each field, and
translated."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.comm.layout import layout_of
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS, FP8Recipe
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.logical_shapes import logical_shapes
from models.parameter_counts import num_parameters
from models.presets import preset
from parallel.context import Context
from tests.refusals import sentence, shows
from tools.cli import main
from tools.commands.precision import read_precision
from tools.config.precision_modules import rows
from tools.config.rules.precision_advice import PlanInRun, advice
from tools.config.tables.native_keys import native_keys_of

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
RUN = """
[model]
preset = "llama-demo"
[train]
steps = 10
global_batch = 32
micro_batch = 2
seq_length = 64
"""
NXD = """
mixed_precision_config = {
    "use_master_weights": True,
    "use_fp32_grad_acc": False,
    "use_master_weights_in_ckpt": True,
}
optimizer_config = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0}
config = {
    "mixed_precision_config": mixed_precision_config,
    "optimizer_config": optimizer_config,
}
"""
SMP = """
import torch.sagemaker as tsm
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
tsm.init()
model = AutoModelForCausalLM.from_config(ModelConfig)
fp8_format = Format.HYBRID
fp8_recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=32, amax_compute_algo="max")
dtype = torch.bfloat16
mixed_precision_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=torch.float32)
model = FSDP(model, mixed_precision=mixed_precision_policy)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe, fp8_group=tsm.state.world_process_group):
    out = model(inp)
loss = out.sum()
"""
COLOSSALAI = """
from colossalai.engine import AMP_TYPE
fp16=dict(
mode=AMP_TYPE.TORCH,
# below are default values for grad scaler
init_scale=2.**16,
growth_factor=2.0,
backoff_factor=0.5,
growth_interval=2000,
enabled=True
)
"""
INTERNEVO = """
HIDDEN_SIZE = 2048
MLP_RATIO = 8 / 3
model = dict(
    checkpoint=False,  # True/False/[0-1]
    num_attention_heads=NUM_ATTENTION_HEAD,
    hidden_size=HIDDEN_SIZE,
    mlp_ratio=MLP_RATIO,
    dtype="torch.tf32",
    norm_type="rmsnorm",
    num_chunks=2,
)
grad_scaler = dict(fp16=dict(initial_scale=2**10), max_scale=2**24)
hybrid_zero_optimizer = dict(clip_grad_norm=0.5)
parallel = dict(zero1=dict(size=-1), tensor=dict(size=2, mode="msp"))
"""
NEMO = """
import nemo_run as run
from nemo import lightning as nl
recipe.trainer.plugins = bf16_with_fp8_mixed(fp8_margin=1)
"""


@pytest.fixture
def pasted(tmp_path: Path) -> Any:
    def write(text: str, name: str = "pasted.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "fields", "settings"),
    [
        (
            NXD,
            {"masters": FP32, "gradients": BF16, "masters_in_checkpoint": True},
            {"parallel.zero": True},
        ),
        (
            '{"mixed_precision_config": {"use_master_weights": false}}',
            {"masters": BF16},
            {"parallel.zero": False},
        ),
        (
            "use_master_weights = false\n[optimizer_config]\nzero_one_enabled = true\n",
            {"masters": BF16},
            {},
        ),
        (SMP, {"parameters": BF16, "buffers": FP32, "fp8": FP8Recipe(history_length=32)}, {}),
        (
            '{"mixed_precision": {"param_dtype": "float16"}, "grad_scaler": {}}',
            {"compute": FP16},
            {},
        ),
        (
            "policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
            {"compute": BF16, "reduce": FP32},
            {},
        ),
        (COLOSSALAI, {"parameters": FP32, "compute": FP16}, {}),
        (
            INTERNEVO,
            {"tf32": True, "compute": FP32},
            {
                "model.ffn": 5632,
                "parallel.chunks": 2,
                "optimizer.clip": 0.5,
                "parallel.sequence": True,
            },
        ),
        ("model = dict(dtype=torch.bfloat16())", {"compute": BF16}, {}),
        (NEMO, {"fp8": FP8Recipe(margin=1, reduce_over="stage", parameters=True)}, {}),
        ('[precision]\ncompute = "bf16"\n[fp8]\nkind = "mx"', {"fp8": FP8Recipe("mx")}, {}),
        (
            "[precision.nxd]\nuse_fp32_grad_acc = false\n[parallel]\nzero = true",
            {"gradients": BF16},
            {},
        ),
    ],
)
def test_a_pasted_configuration_is_understood(
    text: str, fields: dict[str, Any], settings: Any, pasted: Any
) -> None:
    found = read_precision(pasted(text, "file.txt"))
    assert {name: getattr(found.plan, name) for name in fields} == fields
    assert {key: found.settings[key].value for key in settings} == settings


def test_what_the_file_does_not_tell_is_left_out_and_said(pasted: Any) -> None:
    found = read_precision(pasted(INTERNEVO))
    assert "model.heads" not in found.settings
    assert any(
        "num_attention_heads of model: `NUM_ATTENTION_HEAD` is not defined" in note
        for note in found.notes
    )
    assert any(
        "NxD leaves ZeRO-1 off" in n
        for n in read_precision(pasted('x = {"use_master_weights": False}')).notes
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 3", sentence("precision_file.nothing_of_precision")),
        ('{"precision": "16-mixed"}', sentence("precision_file.nothing_of_precision") + "(\n.*)*"),
        (
            "x = = 3",
            sentence(
                "precision_file.not_python",
                path=re.compile(", line 1$"),
                what="TOML, JSON or Python: invalid syntax",
            ),
        ),
        (
            "a = bf16_mixed()\nb = fp16_mixed()",
            r".*, line 2: a second one, and they differ: bf16_mixed\(...\) in line 1, fp16_mixed\(...\) in line 2; .*",
        ),
        (
            "fp16 = dict(mode='TORCH')\nmodel = dict(dtype='torch.half')",
            r"\[precision.colossalai\] and \[precision.inter.*",
        ),
        (
            "fp16 = dict(mode=AMP_TYPE.TORCH, initial_scale=2)",
            r"precision.colossalai.fp16.initial_scale = 2 \(file .*",
        ),
        (
            "fp16 = dict(mode=AMP_TYPE.TORCH, init_scale=9**9**9)",
            r".*, line 1: init_scale of fp16: `9 \*\* 9 .*",
        ),
        (
            "fp16 = dict(mode=__import__('os').getcwd())",
            r".*, line 1: mode .* comes of a call that is not run; .*",
        ),
        ("[precision]\ncompute = 'bf16'\n[trian]\nsteps = 3", r"\[trian\] .*: no such table.*"),
    ],
)
def test_what_cannot_be_understood_is_refused_and_nothing_is_run(
    text: str, line: str, pasted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["precision", "show", str(pasted(text, "file.txt"))])
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert re.fullmatch(line, err.strip()), err


def test_a_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", "show", "nowhere.toml"]) == 2
    assert shows(
        capsys.readouterr().err,
        "precision_file.file_unreadable",
        path="nowhere.toml",
        reason="No such file or directory",
    )


def test_show_names_every_field_what_decided_it_and_every_module(
    pasted: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal, which a pipe is not
    whole = pasted(RUN + "[precision.nxd]\nuse_fp32_grad_acc = false\n", "run.toml")
    monkeypatch.chdir(whole.parent)
    path = whole.name  # short, so that a cell of 120 columns' table is one line
    assert (
        main(["precision", "show", str(path), "precision.nxd.use_master_weights_in_ckpt=false"])
        == 0
    )
    out = capsys.readouterr().out
    assert re.search(rf"gradients +│ bf16 +│ precision.nxd.use_fp32_grad_acc \(file {path}\)", out)
    assert re.search(
        r"masters_in_checkpoint +│ no +│ precision.nxd.use_master_weights_in_ckpt \(command line\)",
        out,
    )
    assert re.search(r"layers.0-5.mlp +bf16 +bf16 +bf16 +bf16 +fp32 +fp32", out)
    assert "warning: gradients are added up in bf16 over 16 micro-batches" in out
    assert "warning: checkpoints leave out the masters" in out


def test_translate_prints_toml_that_reads_back_and_says_what_is_lost(
    pasted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["precision", "translate", str(pasted(NXD)), "--to", "nemo"]) == 0
    out = capsys.readouterr().out
    assert (
        "clip_grad = 1" in out and "# not said: masters_in_checkpoint = yes; it has no" not in out
    )
    found = read_precision(pasted(NXD))
    again = read_precision(pasted(out, "nemo.toml"))
    assert again.plan == replace(found.plan, masters_in_checkpoint=True)


@pytest.mark.parametrize("text", [NXD, SMP, COLOSSALAI, NEMO])
def test_native_says_all_of_a_plan_that_a_run_computes_with(
    text: str, pasted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pasted(text)
    assert main(["precision", "translate", str(path), "--to", "native"]) == 0
    out = capsys.readouterr().out
    found = read_precision(path)
    again = read_precision(pasted(out, "native.toml"))
    assert native_keys_of(again.plan) == native_keys_of(found.plan)
    assert {k: v.value for k, v in again.settings.items()} == {
        k: v.value for k, v in found.settings.items()
    }


def test_a_run_file_is_translated_with_its_model(
    pasted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(pasted(RUN, "run.toml"))
    assert main(["precision", "translate", run, "optimizer.clip=0.5", "--to", "internevo"]) == 0
    out = capsys.readouterr().out
    for line in (
        'dtype = "torch.float32"',
        "num_layers = 6",
        "hidden_size = 256",
        "clip_grad_norm = 0.5",
    ):
        assert line in out


def test_an_unknown_system_is_refused(pasted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", "translate", str(pasted(NXD)), "--to", "deepspeed"]) == 2
    assert shows(
        capsys.readouterr().err,
        "command.system_unknown",
        to="deepspeed",
        dialects=re.compile("nxd, smp"),
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logical_tensors_are_those_of_a_model_that_is_built(name: Any) -> None:
    config = ModelConfig(family=name, layers=3, hidden=16, heads=4, vocab=40)
    stage = Stage(config, Context(plan("fp32")), cuts(config, 1, 8)[0])
    built = {part.name: part.shape for p in stage.parameters() for part in layout_of(p).parts}
    assert logical_shapes(config) == built


def test_bytes_per_module_add_up_to_those_of_the_model() -> None:
    config = preset("llama-demo", vocab=100)
    table = rows(plan("bf16", keep_fp32=("layers.0.mlp.*", "*norm.weight")), config)
    by_name = {row.name: row for row in table}
    kept = by_name["layers.0.mlp"]
    other = by_name["layers.1-5.mlp"]
    assert set(kept.dtypes.values()) == {"fp32"} and kept.bytes["master"] == 0
    assert list(other.dtypes.values()) == ["bf16", "bf16", "fp32", "fp32", "fp32", "fp32"]
    assert other.bytes["parameter"] * 2 == other.bytes["gradient"] == other.bytes["master"]
    assert other.bytes["gradient"] == kept.bytes["gradient"] * 5
    assert sum(row.bytes["moment"] for row in table) == 8 * num_parameters(config)


@pytest.mark.parametrize("kind", EIGHT_BIT_KINDS)
def test_the_formats_of_fp8_are_shown_for_every_kind(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    assert main(["precision", "show", str(file), f"fp8.kind={kind}"]) == 0
    usual = "e4m3" if kind in ("blockwise", "mx") else "hybrid"
    assert f"{kind}, format {usual}" in capsys.readouterr().out


def test_fp8_is_shown_where_it_is_used() -> None:
    recipe = FP8Recipe("current", parameters=True, first_layers=1, last_layers=2)
    table = {
        row.name: row.dtypes
        for row in rows(plan("bf16", fp8=recipe), preset("llama-demo", vocab=100))
    }
    assert table["layers.1-3.mlp"]["compute"] == table["layers.1-3.mlp"]["parameter"] == "fp8"
    assert {
        table[name]["compute"] for name in ("layers.0.mlp", "layers.4-5.mlp", "head", "final_norm")
    } == {"bf16"}


def test_split_masters_take_two_bytes() -> None:
    (row,) = (
        r
        for r in rows(plan("bf16", masters="split"), preset("llama-demo", vocab=100))
        if r.name == "head"
    )
    assert (row.dtypes["master"], row.bytes["master"]) == ("16 bits", 100 * 256 * 2)


NONE = LossScaling()
UNWISE = {
    "fp16 without loss scaling": PlanInRun(plan("fp16", NONE)),
    "constant loss scale 8": PlanInRun(plan("fp16", LossScaling("constant", 8.0))),
    "the loss scale starts at": PlanInRun(plan("fp16", LossScaling("dynamic", 2.0**32))),
    "gradients are added up in bf16": PlanInRun(plan("bf16", gradients="bf16"), microbatches=9),
    "gradients are summed over 9": PlanInRun(plan("bf16", reduce="bf16"), replicas=9),
    "no masters, and bf16": PlanInRun(plan("bf16", masters="none")),
    "stochastic rounding beside": PlanInRun(plan("bf16", rounding="stochastic")),
    "bf16 moments": PlanInRun(plan("bf16", moments="bf16")),
    "checkpoints leave out the masters": PlanInRun(plan("bf16", masters_in_checkpoint=False)),
    "bf16 buffers": PlanInRun(plan("bf16", buffers=BF16)),
    "stages send fp32 though": PlanInRun(plan("bf16", pipeline=FP32)),
    "stages send bf16, narrower": PlanInRun(plan("fp32", pipeline=BF16)),
    "tf32 concerns fp32 products": PlanInRun(plan("bf16", tf32=True)),
    "steps with an inf or a NaN": PlanInRun(plan("bf16", on_nonfinite="ignore")),
    "FP8 scales follow the last pass": PlanInRun(
        plan("bf16", fp8=FP8Recipe(amax_algo="most_recent"))
    ),
    "inputs are not cast": PlanInRun(plan("bf16", cast_inputs="none")),
}


def test_every_rule_warns_of_what_is_unwise_and_of_nothing_else() -> None:
    for begin, planned_run in UNWISE.items():
        assert any(line.startswith(begin) for line in advice(planned_run))
    for wise in (
        plan("fp32"),
        plan("bf16"),
        plan("fp64"),
        plan("fp16"),
    ):
        assert advice(PlanInRun(wise, microbatches=64, replicas=64)) == []
    assert advice(PlanInRun(plan("bf16", gradients="bf16"), microbatches=8, replicas=8)) == []
