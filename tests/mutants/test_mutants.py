"""The laws of the mutants: one place is changed, in a copy; a law kills only what it lets live
unchanged."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import switch
from tests.mutants.__main__ import main, read_results
from tests.mutants.changes import TRAINING, Mutant, draw, mutants_of
from tests.mutants.equivalent import EQUIVALENT, reason_of
from tests.mutants.laws import PARITY, folder_of, laws_of
from tests.mutants.session import Reach
from tests.mutants.sessions import chosen_laws
from tests.mutants.switches import IMPORT, SWITCH, with_switches
from tests.mutants.trained import trained_lines
from tests.mutants.trial import KILLED, SURVIVED, Verdict, commit_of

ROOT = Path(__file__).parents[2]
Tell = Callable[[int, Verdict], None]
SOURCE = '''
"""A docstring of 3 < 4 words."""


def price(count: "int | None", each: int = 2) -> int:
    """Return 1 price."""
    if count is None or count < 1:
        raise ValueError(f"{count + 1} is less than {1 + 1}")
    assert each > 0
    print(count)
    return min(count, 9) * each
'''
KINDS = {
    "boolean": [("or", "and")],
    "comparison": [("<", "<=")],
    "condition": [("count is None or count < 1", "(not (count is None or count < 1))")],
    "constant": [("1", "2"), ("9", "10"), ("2", "3")],
    "extreme": [("min", "max")],
    "arithmetic": [("*", "/")],
    "removed call": [("print(count)", "pass")],
}


def test_every_kind_is_found_and_messages_annotations_and_assertions_are_left_alone() -> None:
    found: dict[str, list[tuple[str, str]]] = {}
    for mutant in mutants_of("price.py", SOURCE.encode()):
        found.setdefault(mutant.kind, []).append((mutant.before, mutant.after))
    assert {kind: sorted(pairs) for kind, pairs in found.items()} == {
        kind: sorted(pairs) for kind, pairs in KINDS.items()
    }


@pytest.mark.parametrize("text", ["größe = 'ä' * 2  # ü\n", "x = (1  # < is meant\n     < y)\n"])
def test_places_are_right_behind_letters_of_several_bytes_and_comments(text: str) -> None:
    for mutant in mutants_of("x.py", text.encode()):
        assert mutant.applied(text.encode()).decode().count("#") == text.count("#")
        ast.parse(mutant.applied(text.encode()))


def test_a_mutant_changes_one_place_of_what_is_computed() -> None:
    folders = ["megaprec/comm", "megaprec/precision", "tools/training"]
    drawn = draw(ROOT, 120, 1, folders)
    assert len({(mutant.path, mutant.line) for mutant in drawn}) == 120
    assert len({mutant.kind for mutant in drawn}) == len(KINDS)
    for mutant in drawn:
        source = (ROOT / mutant.path).read_bytes()
        changed = mutant.applied(source)
        assert changed[: mutant.start] == source[: mutant.start]
        behind = len(source) - mutant.stop
        assert changed[len(changed) - behind :] == source[mutant.stop :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant


class Resolved(ast.NodeTransformer):
    """A text in which one switch is on, and all others are off."""

    def __init__(self, chosen: int) -> None:
        self.chosen = chosen

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        if isinstance(node, ast.If | ast.IfExp) and SWITCH in ast.unparse(node.test):
            number = int(ast.unparse(node.test).removeprefix(f"{SWITCH}(").removesuffix(")"))
            new, old = node.body, node.orelse
            if isinstance(new, list) and isinstance(old, list):
                new, old = new[0], old[0]
            chosen = new if number == self.chosen else old
            assert isinstance(chosen, ast.AST)
            return chosen
        return node


def test_a_switch_is_between_the_code_and_its_mutant_and_all_others_leave_it_as_it_is() -> None:
    paths = ["megaprec/optim/decision/scaler.py", "parallel/pipeline/kinds.py"]
    for path in paths:
        source = (ROOT / path).read_bytes()
        mutants = dict(enumerate(mutants_of(path, source)))
        text, numbers = with_switches(source, mutants)
        assert len(numbers) > 0.7 * len(mutants)
        for number in numbers:
            tree = Resolved(number).visit(ast.parse(text.replace(IMPORT, "", 1)))
            assert ast.unparse(tree) == ast.unparse(ast.parse(mutants[number].applied(source)))


def test_what_is_evaluated_at_import_has_no_switch_nor_has_the_code_of_a_kernel() -> None:
    source = (
        b"A = 1\n@triton.jit\ndef f(a=2):\n    return 3\ndef g(b=4):\n    return lambda c=5: 6\n"
    )
    mutants = dict(enumerate(mutants_of("x.py", source)))
    _, numbers = with_switches(source, mutants)
    assert sorted(mutants[number].before for number in numbers) == ["5", "6"]


def test_a_seed_draws_the_same_mutants_and_another_seed_others() -> None:
    folders = ["megaprec/tokens"]
    assert draw(ROOT, 20, 1, folders) == draw(ROOT, 20, 1, folders)
    assert draw(ROOT, 20, 1, folders) != draw(ROOT, 20, 2, folders)


def test_the_laws_of_a_module_come_before_those_of_its_room() -> None:
    first, others = laws_of(ROOT, "megaprec/optim/decision/scaler.py")
    assert "tests/optim/test_scaler.py" in first
    assert first[-1] == PARITY
    assert "tests/optim/test_lr.py" in others
    assert not set(first) & set(others)


def speaking_of_hysteresis() -> tuple[Mutant, Reach, Reach]:
    """A mutant, a law that speaks of its line, and one of another subject that is quicker."""
    path = "megaprec/optim/decision/scaler.py"
    source = (ROOT / path).read_bytes()
    lines = source.decode().splitlines()
    of_path = mutants_of(path, source)
    mutant = next(one for one in of_path if "hysteresis" in lines[one.line - 1])
    law = "tests/optim/test_scaler.py::test_the_scale_falls_once_its_hysteresis_is_used_up"
    other = "tests/optim/test_lr.py::test_a_constant_rate_is_constant"
    return mutant, Reach(law, True, 2.0, [7]), Reach(other, True, 0.1, [7])


def test_laws_that_speak_of_the_line_of_a_mutant_are_tried_first() -> None:
    mutant, speaks, other = speaking_of_hysteresis()
    assert chosen_laws(ROOT, 7, mutant, [other, speaks], 60) == ([speaks.law, other.law], True)
    assert chosen_laws(ROOT, 7, mutant, [other, speaks], 2.05) == ([speaks.law], False)


def test_only_laws_that_hold_and_whose_file_reaches_a_mutant_are_tried() -> None:
    mutant, speaks, other = speaking_of_hysteresis()
    fails = replace(speaks, passed=False)
    elsewhere = replace(speaks, reached=[8])
    # it may have found ready what the other law of its file has computed
    of_file = replace(other, law=f"{other.law}_too", reached=[])
    assert chosen_laws(ROOT, 7, mutant, [fails, other], 60) == ([other.law], True)
    assert chosen_laws(ROOT, 7, mutant, [elsewhere], 60) == ([], True)
    assert chosen_laws(ROOT, 7, mutant, [of_file, other], 60) == ([other.law, of_file.law], True)


@pytest.mark.slow
def test_a_switch_is_reached_also_by_a_law_that_replaces_the_environment(tmp_path: Path) -> None:
    program = (
        "import os\nfrom tests.mutants import switch\nswitch.choose(-1)\nos.environ = {}\n"
        "assert not switch.on(3)\n"
    )
    environment = {**os.environ, switch.FOLDER: str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert (tmp_path / switch.REACHED).read_text() == "3\n"


def test_laws_that_are_named_like_a_module_come_first() -> None:
    first, _ = laws_of(ROOT, "tools/training/saves.py")
    assert first[0] == "tests/training/test_saves.py"


def test_a_mutant_is_drawn_only_in_lines_that_may_be_changed() -> None:
    folders = ["megaprec/tokens"]
    all_drawn = draw(ROOT, 1000, 1, folders)
    lines = {(mutant.path, mutant.line) for mutant in all_drawn[3:7]}
    assert {(one.path, one.line) for one in draw(ROOT, 1000, 1, folders, lines)} == lines


@pytest.mark.slow
def test_lines_that_train_are_those_of_all_ranks_and_none_that_no_run_reaches() -> None:
    lines = trained_lines(ROOT, (("parallel.tensor=2", "train.steps=1", "train.threads=1"),))
    assert all((ROOT / path).exists() for path, _ in lines)
    reached = {path for path, _ in lines}
    assert {"megaprec/optim/optimizer.py", "parallel/layers.py"} <= reached
    source = (ROOT / "parallel/pipeline/executor.py").read_text().splitlines()
    refusal = 1 + source.index(
        '        raise ValueError(f"the last stage must return a scalar loss, not {list(loss.shape)}")'
    )
    assert ("parallel/pipeline/executor.py", refusal) not in lines


def test_every_equivalent_mutant_is_one_of_the_code_as_it_is() -> None:
    mutants = {path: list(mutants_of(path, (ROOT / path).read_bytes())) for path, *_ in EQUIVALENT}
    for path, line, before, after in EQUIVALENT:
        known = [one for one in mutants[path] if (one.before, one.after) == (before, after)]
        assert any(reason_of(one, ROOT) for one in known), (path, line)


def test_every_file_that_trains_is_in_a_room_with_laws() -> None:
    for folder in TRAINING:
        for file in (ROOT / folder).rglob("*.py"):
            assert (ROOT / folder_of(ROOT, file.relative_to(ROOT).as_posix())).is_dir()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A tree of one module and its laws, committed; one of the laws fails without a mutant."""
    tree = tmp_path / "shop"
    files = {
        "goods/price.py": SOURCE,
        "docs/code.md": "| `goods` | prices | `tests/goods` |\n",
        "tests/goods/test_price.py": (
            "import time\nfrom goods.price import price\n\n"
            "def test_wrong():\n    assert False\n\n"
            "def test_price():\n    assert price(3) == 6\n"
        ),
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    who = ["-c", "user.name=shop", "-c", "user.email=shop@example.com"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "A shop"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return tree


@pytest.mark.slow
def test_mutants_are_killed_by_laws_that_hold_without_them_and_the_tree_is_as_it_was(
    shop: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    words = ["9", "0", "--folders", "goods", "--results", str(results)]
    assert main(words, shop) == 1
    verdicts = read_results(results, commit_of(shop))
    told = {name.partition(": ")[2]: verdict for name, verdict in verdicts.items()}
    assert told["removed call: 'print(count)' -> 'pass'"].outcome == SURVIVED
    assert told["constant: '2' -> '3'"].outcome == KILLED
    assert told["constant: '2' -> '3'"].by == "tests/goods/test_price.py::test_price"
    crashed = [name for name, verdict in told.items() if verdict.crashed]
    assert [name.partition(":")[0] for name in crashed] == ["condition"]
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=shop, check=True, capture_output=True, text=True
    )
    assert status.stdout == ""
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=shop, check=True, capture_output=True, text=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_what_has_a_verdict_is_not_tried_again(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def tried(
        tree: Path, mutants: object, untried: Sequence[int], arguments: object, tell: Tell
    ) -> None:
        for number in untried:
            asked.append(number)
            tell(number, Verdict(KILLED, "a law", crashed=True))

    monkeypatch.setattr("tests.mutants.__main__._try", tried)
    words = ["3", "0", "--folders", "goods", "--results", str(tmp_path / "results.jsonl")]
    assert main(words, shop) == 0
    assert len(asked) == 3
    assert main(["4", *words[1:]], shop) == 0
    assert len(asked) == 4
