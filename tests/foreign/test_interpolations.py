"""OmegaConf's `${...}` in YAML stands for the value that it names in the file, or is refused where
it is needed."""

import re
from pathlib import Path

import pytest

from tests.refusals import raises
from tools.commands.precision import read_precision

MODEL = "model: {megatron_amp_O2: true, tensor_model_parallel_size: 1}\n"
FOUND = {
    "of the whole file": "dtype: bf16\ntrainer: {precision: '${dtype}'}\n",
    "deep": "a: {b: {c: bf16}}\ntrainer: {precision: '${a.b.c}'}\n",
    "by way of another": "a: '${b.c}'\nb: {c: bf16}\ntrainer: {precision: '${a}'}\n",
}
OPEN = {
    "beside": "trainer: {kind: bf16, precision: '${.kind}'}\n",
    "above": "kind: bf16\ntrainer: {precision: '${..kind}'}\n",
    "under the name of the group": "kind: bf16\ntrainer: {precision: '${training.kind}'}\n",
    "nothing of this name": "trainer: {precision: '${dtype}'}\n",
    "in a circle": "a: '${b}'\nb: '${a}'\ntrainer: {precision: '${a}'}\n",
    "itself": "trainer: {precision: '${trainer.precision}'}\n",
    "a table": "a: {b: bf16}\ntrainer: {precision: '${a}'}\n",
    "a part of a text": "a: bf\ntrainer: {precision: '${a}16'}\n",
    "a function": "trainer: {precision: '${oc.env:PRECISION}'}\n",
    "above the file": "kind: bf16\ntrainer: {precision: '${....kind}'}\n",
    "not filled in": "a: ???\ntrainer: {precision: '${a}'}\n",
}


@pytest.mark.parametrize("case", FOUND)
def test_a_value_named_by_another_is_that_value(case: str, tmp_path: Path) -> None:
    (path := tmp_path / "config.yaml").write_text(FOUND[case] + MODEL)
    found = read_precision(path)
    assert str(found.plan.compute) == "torch.bfloat16" and not found.notes


@pytest.mark.parametrize("case", OPEN)
def test_what_names_no_value_of_the_file_is_refused(case: str, tmp_path: Path) -> None:
    (path := tmp_path / "config.yaml").write_text(OPEN[case] + MODEL)
    with raises(
        "precision_file.unknown_value",
        setting="precision of trainer.precision",
        why=re.compile("interpolation|filled in"),
    ):
        read_precision(path)
