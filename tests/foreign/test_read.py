"""Other systems' files are read without being run, quickly, and what is wrong with one is a line
with its place."""

import json
import os
import re
import time
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from tests.foreign.expected import TABLE
from tests.refusals import raises, sentence, shows
from tools.cli import main
from tools.commands.precision import read_precision
from tools.interop.foreign.data_files import from_yaml
from tools.interop.foreign.read import LARGEST

BF16 = torch.bfloat16
FP16 = torch.float16
HOSTILE = {
    "does not end.py": "while True:\n    x = 1\ndef f():\n    return f()\nf()\n",
    "calls itself.py": "def f(x):\n    return f(f(x))\nf(f(1))\n",
    "doubles.py": "def a(): pass\n"
    + "\n".join(f"def {b}(): {a}(); {a}()" for a, b in pairwise(ascii_lowercase)),
    "deep.py": "x = " + "(" * 5000 + ")" * 5000,
    "deep sum.py": "x = " + "1 + " * 30000 + "1",
    "megabyte.py": "x = [" + "[1, 2], " * 130_000 + "]",
    "quarter megabyte.py": "x = [" + "[1, 2], " * 30_000 + "]\n",
    "many names.py": "\n".join(f"fp8_margin_{i} = fp8_amax_{i}(dtype={i})" for i in range(2500)),
    "null.py": "x = 1\0",
    "deep.json": "[" * 100_000 + "]" * 100_000,
    "deep.toml": "x = " + "[" * 5000 + "]" * 5000,
    "deep.yaml": "[" * 5000 + "]" * 5000,
    "laughs.yaml": "a0: &a0 [x]\n"
    + "\n".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 20)),
    "object.yaml": "mp_policy:\n  param_dtype: !!python/object/apply:os.system ['touch {mark}']\n",
    "runs.py": (
        "import os\nos.system('touch {mark}')\nfp16 = dict(mode=__import__('os').system('touch "
        "{mark}'))\n"
    ),
    "calls.py": "fp16 = dict(mode=exec('import os; os.system(\"touch {mark}\")') or 'TORCH')\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_with_its_name_soon_and_runs_nothing(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    mark = tmp_path / "ran"
    path.write_text(HOSTILE[name].replace("{mark}", str(mark)))
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        read_precision(path)
    assert time.process_time() - began < 60, (
        "what grows without bound takes for ever, whatever the machine"
    )
    assert not mark.exists()
    assert all(len(problem.splitlines()) == 1 for problem in caught.value.problems)
    assert str(path) in caught.value.problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "trainer: " + "[" * 50_000 + "]" * 50_000,
        "trainer: " + "[" * 50_000,
        "- " * 50_000 + "a",
        "{a: " * 50_000,
    ],
)
def test_yaml_of_any_depth_does_not_crash_its_library(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    with raises("precision_file.yaml_too_deep", path=path):
        from_yaml(path, text)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.py", b"x = 1\nfp16 = dict(mode=\n", "a.py, line 2: not Python"),
        ("a.py", b"\xff\xfe", sentence("precision_file.file_unreadable", reason="not UTF-8 text")),
        (
            "a.yaml",
            b"a: [1\nb: }\n",
            sentence("precision_file.not_yaml", path=re.compile(r"a\.yaml"), line=", line 2"),
        ),
        (
            "a.yaml",
            b"- 1\n- 2\n",
            sentence(
                "precision_file.not_python", path=re.compile(r"a\.yaml"), what="a YAML mapping"
            ),
        ),
        ("a.json", b"{", sentence("precision_file.not_json", path=re.compile(r"a\.json"))),
        (
            "a.toml",
            b"x = \n",
            sentence("precision_file.not_python", path=re.compile(r"a\.toml"), what="TOML"),
        ),
        ("a.py", b"", sentence("precision_file.nothing_of_precision")),
        ("a.py", b"#" * (LARGEST + 1), sentence("precision_file.file_too_large")),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(
    name: str, content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["precision", "show", str(path)]) == 2
    captured = capsys.readouterr()
    assert re.search(line, captured.err) and not captured.out


def test_a_folder_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", "show", str(tmp_path)]) == 2
    assert shows(capsys.readouterr().err, "precision_file.file_unreadable", reason="Is a directory")


def write(folder: Path, text: str, name: str = "config.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


OPEN = """
from torch.distributed.fsdp import MixedPrecision
def wrap(args, dtype=torch.float32):
    policy = MixedPrecision(param_dtype=args.dtype, reduce_dtype=dtype)
    return FSDP(model, mixed_precision=policy)
"""


def test_what_a_file_leaves_open_is_refused_until_the_command_says_it(tmp_path: Path) -> None:
    path = write(tmp_path, OPEN)
    with pytest.raises(UserError) as caught:
        read_precision(path)
    reasons = (
        "line 4: param_dtype of MixedPrecision(...): `args.dtype` belongs to what is an argument of "
        "wrap(); ",
        "line 4: reduce_dtype of MixedPrecision(...): `dtype` is an argument of wrap(); ",
    )
    for problem, reason in zip(caught.value.problems, reasons, strict=True):
        assert reason in problem
    keys = [line.split("add ")[1].split("=VALUE")[0] for line in caught.value.problems]
    found = read_precision(path, [f"{keys[0]}=float16", f"{keys[1]}=bfloat16"])
    assert (found.plan.compute, found.plan.reduce) == (FP16, BF16)
    assert found.plan.origin["reduce"].endswith("(command line)")


CONDITIONS = {
    "an if": "if args.bf16:\n    policy = MixedPrecision(torch.bfloat16)\n",
    "an else": "if args.fp32:\n    pass\nelse:\n    policy = MixedPrecision(torch.bfloat16)\n",
    "an expression": "policy = None if args.fp32 else MixedPrecision(torch.bfloat16)\n",
    "an or": "policy = args.policy or MixedPrecision(torch.bfloat16)\n",
    "an except": "try:\n    go()\nexcept OSError:\n    policy = MixedPrecision(torch.bfloat16)\n",
    "a match": "match args.kind:\n    case 1:\n        policy = MixedPrecision(torch.bfloat16)\n",
    "a comprehension": "policies = [MixedPrecision(torch.bfloat16) for part in parts if part.bf16]\n",
    "a return before": (
        "def main():\n    if args.fp32:\n        return\n"
        "    policy = MixedPrecision(torch.bfloat16)\n"
    ),
    "a break before": (
        "for part in parts:\n    if part.fp32:\n        break\n"
        "    policy = MixedPrecision(torch.bfloat16)\n"
    ),
    "the name of a recipe": (
        "from megatron.bridge.training.config import ConfigContainer\n"
        "if args.bf16:\n    config = ConfigContainer(mixed_precision='bf16_mixed')\n"
    ),
    "a call that may not be": (
        "def main():\n    return MixedPrecision(torch.bfloat16)\nif args.bf16:\n    main()\n"
    ),
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_what_depends_on_a_condition_is_refused_with_the_condition(
    case: str, tmp_path: Path
) -> None:
    setting = re.compile(r"^the arguments of \w+\(\.\.\.\)$")
    with raises("precision_file.unknown_value", setting=setting, why=re.compile("^it depends on")):
        read_precision(write(tmp_path, CONDITIONS[case]))


def test_a_loop_and_a_main_guard_are_no_conditions(tmp_path: Path) -> None:
    text = (
        "for batch in batches:\n    with te.fp8_autocast(True):\n        train(batch)\n"
        'if __name__ == "__main__":\n    policy = MixedPrecision(torch.bfloat16)\n'
    )
    found = read_precision(write(tmp_path, text))
    assert found.plan.compute == BF16 and found.plan.fp8 is not None


TWO = (
    "one = run.Config(nl.Trainer, plugins=bf16_mixed())\ntwo = run.Config(nl.Trainer, "
    "plugins=fp16_mixed())\n"
)


def test_of_several_runs_in_a_file_none_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    with raises("precision_file.refused"):
        read_precision(path)


ELSEWHERE = """
from training_utils import get_mixed_precision_config
import neuronx_distributed as nxd
config = nxd.neuronx_distributed_config(
    optimizer_config={"zero_one_enabled": True},
    mixed_precision_config=get_mixed_precision_config(args.precision > 0),
)
"""


def test_a_function_of_the_same_name_from_elsewhere_is_refused(tmp_path: Path) -> None:
    """As in NxD's own examples, whose helper has the name of a function of Megatron-Bridge."""
    with raises("precision_file.refused"):
        read_precision(write(tmp_path, ELSEWHERE))


def test_an_unknown_size_of_a_layout_is_noted_and_left_to_the_run_file(tmp_path: Path) -> None:
    text = "HybridParallelPlugin(tp_size=world(), pp_size=2, precision='bf16')\n"
    found = read_precision(write(tmp_path, text))
    assert "parallel.tensor" not in found.settings
    assert found.settings["parallel.pipeline"].value == 2
    assert any("tp_size of HybridParallelPlugin(...)" in note for note in found.notes)


def test_strict_refuses_what_would_be_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "plugins = bf16_mixed()\ntorch.set_float32_matmul_precision('high')\n")
    assert main(["precision", "show", str(path)]) == 0
    note = f"note: {path}, line 2: torch.set_float32_matmul_precision('high'): not read"
    assert note in capsys.readouterr().out
    assert main(["precision", "show", str(path), "--strict"]) == 2
    assert note in capsys.readouterr().err


def test_translate_writes_notes_as_comments_and_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "plugins = bf16_mixed()\nmodel.half()\n")
    assert main(["precision", "translate", str(path), "--to", "native"]) == 0
    captured = capsys.readouterr()
    assert "line 2: model.half(): not read" in captured.err
    assert any(
        line.startswith("# note: ") and "model.half()" in line for line in captured.out.splitlines()
    )
    assert main(["precision", "translate", str(path), "--to", "native", "--strict"]) == 2


def test_show_prints_the_plan_as_json_with_the_line_that_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "cfg = bf16_mixed()\ncfg.fp8 = 'hybrid'\ncfg.fp8_margin = 2\n")
    assert main(["precision", "show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["compute"]["value"] == "bf16"
    assert shown["plan"]["fp8"]["value"]["margin"] == 2
    assert f"precision.nemo.fp8_margin (file {path}, line 3)" in shown["plan"]["fp8"]["origin"]
    assert shown["notes"] == []


def test_a_terminal_shows_names_of_files_without_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    path = write(tmp_path, "plugins = bf16_mixed()")
    assert main(["precision", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert (
        "precision plan of config.py" in out
        and "recipe (line 1)" in out
        and str(tmp_path) not in out
    )


@pytest.mark.slow
def test_a_run_names_what_was_noted_about_its_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (
        '[model]\npreset = "llama-demo"\n[train]\nsteps = 1\nglobal_batch = 2\nmicro_batch = '
        "1\nseq_length = 8\n"
    )
    run += f'folder = "{tmp_path / "run"}"\n[data]\nsource = "nowhere.txt"\n'
    run += '[precision.smp.mp_policy]\nparam_dtype = "bfloat16"\n'
    path = write(tmp_path, run, "run.toml")
    for command in ("train", "schedule"):
        main([command, str(path)])
        assert "note: mp_policy.reduce_dtype is not given" in capsys.readouterr().err
        assert main([command, str(path), "--strict"]) == 2


SYSTEMS = ("nxd", "smp", "colossalai", "internevo", "nemo")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_corpus_has_a_dozen_files_of_each_system(system: str) -> None:
    assert sum(entry.file.startswith(f"{system}_") for entry in TABLE) >= 12


def test_reading_leaves_the_environment_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    text = 'import os, neuronx_distributed\nos.environ["XLA_DOWNCAST_BF16"] = "1"\n'
    text += 'optimizer_config = {"zero_one_enabled": True}\n'
    read_precision(
        write(tmp_path, text + 'mixed_precision_config = {"use_master_weights": True}\n')
    )
    assert dict(os.environ) == before


ALIASES = """
import torch.sagemaker as smp
fp8_autocast(True, fp8_recipe=DelayedScaling(), fp8_group=smp.state.world_process_group)
"""
MODULES = """
from transformer_engine.common import recipe as r
import transformer_engine.pytorch as t
with t.autocast(recipe=r.DelayedScaling(2, r.Format.E4M3)):
    pass
"""
RENAMED: list[tuple[str, dict[str, Any]]] = [
    (ALIASES, {"reduce_over": "world"}),
    (MODULES, {"format": "e4m3", "margin": 2}),
    (
        "te.fp8_autocast(True, False, DelayedScaling(amax_history_len=4), None)",
        {"history_length": 4},
    ),
]


@pytest.mark.parametrize(("text", "fields"), RENAMED)
def test_transformer_engine_is_known_by_any_alias_and_by_position(
    text: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    fp8 = read_precision(write(tmp_path, text)).plan.fp8
    assert fp8 is not None and {name: getattr(fp8, name) for name in fields} == fields


TWICE = {
    "x.py": (
        (
            "from torch.distributed.fsdp import MixedPrecision\nMixedPrecision(param_dtype=a, "
            "param_dtype=b)"
        ),
        "line 2",
    ),
    "y.py": ("fp16 = {'mode': AMP_TYPE.TORCH,\n'init_scale': 2, 'init_scale': 4}", "line 2"),
    "x.yaml": ("trainer:\n  precision: bf16\n  devices: 8\n  precision: 16\n", "line 4"),
    "x.json": (
        '{"mixed_precision_config": {"use_master_weights": true, "use_master_weights": false}}',
        "use_master",
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_key_that_is_given_twice_is_refused_by_name(name: str, tmp_path: Path) -> None:
    text, place = TWICE[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}.*twice") as refused:
        read_precision(tmp_path / name)
    assert place in str(refused.value)


NOTED = {
    "a holder's words of precision that it does not read": (
        "import nemo.lightning as nl\n"
        "nl.Trainer(plugins=bf16_mixed(), precision='16', gradient_clip_val=0.5)\n",
        ("precision = 16", "gradient_clip_val = 0.5"),
    ),
    "a variable of the environment that a call may set": (
        "optimizer_config = {'zero_one_enabled': True}\n"
        "mixed_precision_config = {'use_master_weights': True}\n"
        "os.environ.setdefault('XLA_USE_BF16', '1')\n",
        ("line 3: os.environ.setdefault('XLA_USE_BF16', '1')",),
    ),
    "what a function of the file is given": (
        "plugins = bf16_mixed()\ndef train(**more): run(more)\ntrain(fp8='hybrid')\n",
        ("line 3: fp8 = hybrid",),
    ),
    "an attribute of an object of their own": (
        "plugins = bf16_mixed()\nclass Model:\n    def __init__(self):\n"
        "        self.dtype = torch.float16\n",
        ("line 4: dtype = torch.float16",),
    ),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_no_setting_covers_is_noted(case: str, tmp_path: Path) -> None:
    text, expected = NOTED[case]
    notes = read_precision(write(tmp_path, text)).notes
    assert [words for words in expected if not any(words in note for note in notes)] == []


LEFT_OPEN = {
    "a variable is named once": (
        "model = dict(dtype='torch.float16', num_attention_heads=2)\n"
        "use_fp32_norm = os.environ.get('X')\n",
        {"setting": "use_fp32_norm"},
    ),
    "a case depends on what is matched": (
        "match kind:\n    case 1:\n        fp16 = dict(mode='TORCH')\n",
        {"why": re.compile(r"^it depends on `match kind: case 1: .*` \(line 1\)$")},
    ),
    "what stands beside a plugin in a list": (
        "import nemo.lightning as nl\nnl.Trainer(plugins=[bf16_mixed(), other])\n",
        {"setting": "argument plugins of Trainer(...)"},
    ),
    "what a star import brings": (
        "from local_overrides import *\nplugins = bf16_mixed()\n",
        {"setting": "from local_overrides import *"},
    ),
}


@pytest.mark.parametrize("case", LEFT_OPEN)
def test_what_is_left_open_is_named_with_its_reason(case: str, tmp_path: Path) -> None:
    text, fields = LEFT_OPEN[case]
    with raises("precision_file.unknown_value", **fields):
        read_precision(write(tmp_path, text))
