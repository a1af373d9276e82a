"""YAML that is no plain table of settings ends with one line that names the file, whatever a value
calls itself."""

from pathlib import Path

import pytest

from megaprec.errors import UserError
from tools.interop.foreign.data_files import from_yaml

ODD = [
    "a: " + "9" * 20_000,
    "a: 0x" + "f" * 5_000,
    "a: -" + "9" * 400,
    "a: 2024-13-45",
    "2024-13-45: a",
    "a: 2001-12-14t21:59:43.10-99:99",
    "a: !!int abc",
    "a: !!int ''",
    "a: !!float 1.0.0",
    "a: !!bool maybe",
    "a: !!timestamp yesterday",
    "{lr: 1, lr: 2}",
    "? [a, b]\n: 1",
    "? {a: b}\n: 1",
    "a: 1\n\tb: 2",
    "a: &a [*a]",
    "a: &a {b: *a}",
    "a: \0",
    "a: 1\n---\nb: 2",
]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_a_value_that_is_none_of_its_kind_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        from_yaml(Path("odd.yaml"), text)
    (line,) = caught.value.problems
    assert line.startswith("odd.yaml") and len(line) < 200


def test_no_object_is_made_of_a_tag(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = from_yaml(
        Path("odd.yaml"),
        f"a: !!python/object/apply:os.system ['touch {mark}']\nb: !!python/name:os.x\n",
    )
    assert data is not None and not mark.exists()
