"""House rules that a reader relies on: import order, nothing unpickled, everything shipped."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# each imports only itself and those before it
PACKAGES = (
    "megaprec",
    "parallel",
    "models",
    "tools",
)
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# A program of its own that opens what others pickled, under limits; and the writer of a format that
# is one.
MAY = {
    ("tools/convert/core/untrusted.py", "imports pickle"),
    ("tools/convert/core/untrusted.py", "calls torch.load"),
    ("tools/convert/megatron/write.py", "calls torch.save"),
}
# python -m megaprec: the one module that may import what stands above it
COMMAND = Path("megaprec/__main__.py")
Rule = Callable[[Path, ast.Module], Iterator[str]]


def modules() -> list[Path]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [file.relative_to(ROOT) for file in files]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@cache
def offences() -> dict[Rule, list[str]]:
    """What each rule finds: every file is parsed once, and no tree outlives it."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    for path in modules():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))
        for rule, lines in found.items():
            lines += [f"{path}:{offence}" for offence in rule(path, tree)]
    return found


def wrong_direction(path: Path, tree: ast.Module) -> Iterator[str]:
    if path == COMMAND:
        return
    later = PACKAGES[PACKAGES.index(path.parts[0]) + 1 :]
    yield from (
        f"{line} imports {name}" for line, name in imported(tree) if name.split(".")[0] in later
    )
    yield from (f"{line} imports {name}" for line, name in imported(tree) if name.startswith("."))


def hidden_imports(_: Path, tree: ast.Module) -> Iterator[str]:
    inside = {item for function in functions(tree) for item in imported(function)}
    yield from (
        f"{line} imports {name} inside a function"
        for line, name in inside
        if name.split(".")[0] in PACKAGES
    )


def code_from_data(path: Path, tree: ast.Module) -> Iterator[str]:
    """What runs code that a file holds: pickle, eval and exec. No module imports a program of its
    own."""
    yield from (
        f"{line} imports {name}"
        for line, name in imported(tree)
        if name == "tools.convert.core.untrusted"
    )
    yield from (o for o in _dangerous(tree) if (str(path), o.partition(" ")[2]) not in MAY)


def _dangerous(tree: ast.Module) -> Iterator[str]:
    yield from (
        f"{line} imports {name}"
        for line, name in imported(tree)
        if name.split(".")[0] in UNPICKLERS
    )
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        pickles = any(
            word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
            for word in node.keywords
        )
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        if name not in ("eval", "exec", "load", "save") and not pickles:
            continue
        called = ast.unparse(node.func)
        if called in ("eval", "exec", "torch.load", "torch.save") or pickles:
            yield f"{node.lineno} calls {called}"


def packed_assignments(_: Path, tree: ast.Module) -> Iterator[str]:
    """Several assignments in one: a tuple of values to a tuple of names, other than an exchange."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = [ast.unparse(value) for value in node.value.elts]
        for target in node.targets:
            if not isinstance(target, ast.Tuple):
                continue
            names = [ast.unparse(name) for name in target.elts]
            if len(names) == len(values) and not set(names) & set(values):
                yield f"{node.lineno} assigns {len(names)} values in one line"


RULES = (wrong_direction, hidden_imports, code_from_data, packed_assignments)


def test_packages_import_only_those_before_them() -> None:
    assert not offences()[wrong_direction]


def test_our_own_imports_stand_at_the_top() -> None:
    assert not offences()[hidden_imports]


def test_nothing_that_is_read_can_run_code() -> None:
    assert not offences()[code_from_data]


def test_a_line_assigns_one_value() -> None:
    assert not offences()[packed_assignments]


def test_every_folder_of_code_is_a_typed_package_that_pip_finds() -> None:
    untyped = [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()]
    folders = {path.parent for path in modules()}
    assert not untyped
    assert not [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file()]


def test_every_dependency_is_pinned_and_torch_to_the_version_tested_with() -> None:
    needed = set(re.findall(r'"([a-z-]+)>=', (ROOT / "setup.py").read_text()))
    pinned = dict(
        re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert needed >= {"torch", "numpy", "pytest"}
    assert needed <= pinned.keys()
    assert pinned["torch"] == "2.13.0"


def test_every_dependency_is_bounded_below_and_above_around_the_version_tested_with() -> None:
    listed = re.findall(r'"([\w-]+)(>=[^"]*)"', (ROOT / "setup.py").read_text())
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    rule = re.compile(r">=([\d.]+),<([\d.]+)(?:,!=[\d.]+)*")
    said = {name: rule.fullmatch(bounds) for name, bounds in listed if name != "setuptools"}
    assert {"torch", "numpy", "spmd_types", "tensorboard"} <= said.keys()

    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split("."))

    for name, bounds in said.items():
        assert bounds, name
        assert number(bounds[1]) <= number(pinned[name]) < number(bounds[2]), name


def test_advice_to_install_something_names_a_package_that_the_project_knows() -> None:
    known = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', (ROOT / "setup.py").read_text()))
    pages = [*(ROOT / "docs").glob("*.md"), *(path for path in map(ROOT.joinpath, modules()))]
    named = {
        word
        for page in pages
        for word in re.findall(r"pip install (?!-)'?([\w-]+)", page.read_text(encoding="utf-8"))
        if word != "pip"
    }
    assert {"pyarrow", "matplotlib", "transformers", "tokenizers"} <= named
    assert named <= known, "megaprec itself is on no index: name the packages"


def test_the_versions_of_python_are_the_same_to_pip_and_to_the_reader() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(r"Python ((?:3\.\d+, )*3\.\d+ or 3\.\d+)", readme)
    bounds = re.search(
        r'python_requires=">=3\.(\d+),<3\.(\d+)"', (ROOT / "setup.py").read_text(encoding="utf-8")
    )
    assert said and bounds
    assert [f"3.{n}" for n in range(int(bounds[1]), int(bounds[2]))] == re.findall(
        r"3\.\d+", said[1]
    )
    tried = re.findall(
        r"^\| Python (3\.\d+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(tried) == set(re.findall(r"3\.\d+", said[1]))


KEPT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", *PACKAGES)


def distribution(kind: str, folder: Path) -> Path:
    """Build a distribution of a copy of the code in `folder`, beside tests and folders that
    setuptools would take, and return its file."""
    for rival in ("tests", "website", "docs", "examples"):
        (folder / rival).mkdir()
        (folder / rival / "__init__.py").touch()
    for name in KEPT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    command = [sys.executable, "setup.py", "--quiet", kind]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (file,) = (folder / "dist").iterdir()
    return file


@pytest.mark.slow
def test_a_wheel_has_the_modules_of_four_packages_what_they_read_the_license_and_nothing_else(
    tmp_path: Path,
) -> None:
    with zipfile.ZipFile(distribution("bdist_wheel", tmp_path)) as archive:
        names = set(archive.namelist())
        (about,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{about}/METADATA").decode()
        entries = archive.read(f"{about}/entry_points.txt").decode()
    shipped = {str(path) for path in modules() if not path.is_relative_to("tools/bench")}
    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "tools/recipes").glob("*.toml")}
    read = {f"{package}/py.typed" for package in PACKAGES} | {"megaprec/messages.toml"} | recipes
    made = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    assert names == shipped | read | {f"{about}/{name}" for name in made}
    assert entries.split() == ["[console_scripts]", "megaprec", "=", "megaprec.__main__:main"]
    assert "License: Apache-2.0\n" in metadata
    assert (ROOT / "README.md").read_text(encoding="utf-8") in metadata


def test_a_source_distribution_has_the_code_and_nothing_that_does_not_run_without_the_repository(
    tmp_path: Path,
) -> None:
    with tarfile.open(distribution("sdist", tmp_path)) as archive:
        names = {Path(*Path(member.name).parts[1:]) for member in archive if member.isfile()}
    benchmarks = {path for path in modules() if path.is_relative_to("tools/bench")}
    shipped = set(modules()) - benchmarks | {Path("LICENSE")}
    assert shipped <= names and not benchmarks & names
    made = {"PKG-INFO", "setup.cfg", "megaprec.egg-info"}
    assert {path.parts[0] for path in names} <= {*KEPT, *made}


def test_the_repository_holds_no_package_archive_or_library_that_was_built_elsewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    built = {".whl", ".zip", ".gz", ".xz", ".tar", ".so", ".pyc", ".pt", ".pth"}
    names = listed.stdout.splitlines()
    assert len(names) > 1000
    assert [name for name in names if Path(name).suffix in built] == []
