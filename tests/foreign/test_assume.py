"""What a refusal says of `--assume` is what a user can type."""

import re
import shlex
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tools.commands.precision import read_precision

PLUGIN = "plugin = HybridParallelPlugin(precision='bf16')\nbooster = Booster(plugin=plugin)\n"
CONDITIONS = {
    "a comparison": ("args.plugin == '3d'", "args.plugin='3d'"),
    "two comparisons": ("args.fp8 == 1 and args.smp >= 2", "args.smp=2"),
    "a method of a text": ("args.plugin.startswith('hybrid')", "args.plugin='hybrid_parallel'"),
    "an item of a table": ('args["a b"] != None', "args['a b']=1"),
    "a text with an equals sign": ("args.kind == 'a=b'", "args.kind='a=b'"),
    "a long one": (" or ".join(f"args.plugin == 'plugin number {n}'" for n in range(5)), ""),
}


def write(folder: Path, condition: str) -> Path:
    (path := folder / "train.py").write_text(
        f"if {condition}:\n    " + PLUGIN.replace("\n", "\n    ", 1)
    )
    return path


@pytest.mark.parametrize("case", CONDITIONS)
def test_the_option_that_a_refusal_gives_answers_it(case: str, tmp_path: Path) -> None:
    path = write(tmp_path, CONDITIONS[case][0])
    with pytest.raises(UserError) as caught:
        read_precision(path)
    options = re.findall(r"(--assume .*) or False says it", str(caught.value))
    assert options, caught.value
    word, item = shlex.split(options[0])
    assert (
        word == "--assume"
        and str(read_precision(path, assume=[item]).plan.compute) == "torch.bfloat16"
    )


@pytest.mark.parametrize("case", [case for case, (_, value) in CONDITIONS.items() if value])
def test_a_value_that_decides_a_condition_may_be_assumed_instead(case: str, tmp_path: Path) -> None:
    condition, item = CONDITIONS[case]
    path = write(tmp_path, condition.replace("args.fp8 == 1 and ", ""))
    assert str(read_precision(path, assume=[item]).plan.compute) == "torch.bfloat16"


@pytest.mark.parametrize(
    "head", ["for name in names", "while running()", "with opened() as plugin"]
)
def test_no_option_is_given_for_what_cannot_be_assumed(head: str, tmp_path: Path) -> None:
    text = (
        f"{head}:\n    precision = pick(one_of_many_names, another_of_many_names, "
        "and_a_third_of_the_many_names)\n"
    )
    (path := tmp_path / "train.py").write_text(
        text + "    HybridParallelPlugin(precision=precision)\n"
    )
    with pytest.raises(UserError) as caught:
        read_precision(path)
    for option in re.findall(r"(--assume .*?)(?: or False says it| gives it)", str(caught.value)):
        name = shlex.split(option)[1].rpartition("=")[0]
        compile(name, "", "eval")


def test_an_unknown_size_of_a_layout_is_noted_and_left_to_the_run_file(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(
        "HybridParallelPlugin(tp_size=world(), pp_size=2, precision='bf16')\n"
    )
    found = read_precision(path)
    assert (
        "parallel.tensor" not in found.settings and found.settings["parallel.pipeline"].value == 2
    )
    assert any("tp_size of HybridParallelPlugin(...)" in note for note in found.notes)


ELSEWHERE = """
from training_utils import get_mixed_precision_config
import neuronx_distributed as nxd
config = nxd.neuronx_distributed_config(
    optimizer_config={"zero_one_enabled": True},
    mixed_precision_config=get_mixed_precision_config(args.precision > 0),
)
"""


def test_the_result_of_a_function_from_elsewhere_may_be_assumed(tmp_path: Path) -> None:
    """As in NxD's own examples, whose helper has the name of a function of Megatron-Bridge."""
    (path := tmp_path / "train.py").write_text(ELSEWHERE)
    with pytest.raises(
        UserError,
        match="get_mixed_precision_config comes from training_utils: what it does is not known",
    ) as caught:
        read_precision(path)
    option = re.findall(r"--assume '(.*?)=\.\.\.' gives it", str(caught.value))[0]
    found = read_precision(
        path, assume=[option + "={'use_master_weights': True, 'use_fp32_grad_acc': False}"]
    )
    assert (str(found.plan.masters), str(found.plan.gradients)) == (
        "torch.float32",
        "torch.bfloat16",
    )
    assert not found.notes
