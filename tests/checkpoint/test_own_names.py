"""A file that a checkpoint holds a copy of has a name of its own."""

from pathlib import Path

import pytest

from megaprec.checkpoint.saving import require_own_names
from tests.refusals import raises


@pytest.mark.parametrize(
    "names",
    [
        ["checkpoint.json"],
        ["index-00000.json"],
        ["model.safetensors"],
        ["tokenizer.json", "other/tokenizer.json"],
        ["a.txt", "index-1.json"],
    ],
)
def test_the_name_of_a_file_of_a_checkpoint_and_one_given_twice_are_refused(
    names: list[str],
) -> None:
    with raises("checkpoint.name_taken_in_checkpoint", name=Path(names[-1]).name):
        require_own_names([*map(Path, names)])


def test_other_names_are_taken() -> None:
    names = ["tokenizer.json", "my_index-0.json", "index-0.txt", "index.json", "safetensors.txt"]
    require_own_names([*map(Path, names)])
