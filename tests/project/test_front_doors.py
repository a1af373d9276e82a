"""What a library user imports is documented where it is defined, and `python -m megaprec` is the
command anywhere."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import megaprec
import models
import parallel
import parallel.pipeline
from megaprec.front_door import exports_of
from tests.project.test_readme import ROOT
from tests.runs import write_run

DOORS = (megaprec, parallel, parallel.pipeline, models)


def exported(door: ModuleType) -> dict[str, Any]:
    return {name: getattr(door, name) for name in door.__all__}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_exported_class_and_function_is_documented(door: ModuleType) -> None:
    assert "smallest whole use" in (door.__doc__ or "") or door is parallel.pipeline
    callables = {
        name: one
        for name, one in exported(door).items()
        if inspect.isclass(one) or inspect.isfunction(one)
    }
    assert len(callables) >= 9
    assert not [name for name, one in callables.items() if not inspect.getdoc(one)]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_a_door_lists_what_it_exports(door: ModuleType) -> None:
    assert sorted(exports_of(Path(str(door.__file__)))) == sorted(door.__all__)
    assert set(door.__all__) <= set(dir(door))


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_a_door_has_no_name_that_it_does_not_export(door: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{door.__name__}' has no attribute 'other'"):
        door.other  # noqa: B018


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_exported_name_hides_a_module(door: ModuleType) -> None:
    assert not {
        name
        for name in door.__all__
        for folder in door.__path__
        if (Path(folder) / f"{name}.py").exists()
    }


def test_the_example_of_the_first_door_trains() -> None:
    code = re.search(
        r"^    import megaprec\n(.*?)\n\n`parallel`",
        megaprec.__doc__ or "",
        re.DOTALL | re.MULTILINE,
    )
    assert code
    x = torch.ones(3, 8)
    names: dict[str, Any] = {
        "torch": torch,
        "megaprec": megaprec,
        "batches": [(x, x.sum(1, keepdim=True))] * 3,
    }
    exec(compile(inspect.cleandoc(code[1]), "docstring", "exec"), names)
    assert names["report"].outcome == "applied"
    assert float(names["optimizer"].applied_steps) == 3


def test_the_example_of_the_models_trains() -> None:
    code = re.search(
        r"^    from megaprec.*\n    report = .*?$", models.__doc__ or "", re.DOTALL | re.MULTILINE
    )
    assert code
    tokens = torch.arange(4 * 64).view(4, 64)
    names: dict[str, Any] = {"tokens": tokens, "targets": tokens + 1}
    exec(compile(inspect.cleandoc(code[0]), "docstring", "exec"), names)
    assert names["report"].outcome == "applied"


RIVALS = (
    "torch.py",
    "tools/__init__.py",
    "numpy.py",
    "models/__init__.py",
    "parallel/__init__.py",
    "random.py",
)
SCRIPT = (
    "import sys; sys.argv[0] = 'megaprec'; from megaprec.__main__ import main; sys.exit(main())"
)
STARTS = {
    "module": ["-m", "megaprec"],
    "module in one word": ["-mmegaprec"],
    "safe path": ["-P", "-m", "megaprec"],
    "script": ["-P", "-c", SCRIPT],
}


def rival_of(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("raise SystemExit('the wrong one')")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("path", ["{ours}", ":{ours}", "{here}:{ours}"])
def test_the_command_works_where_the_user_has_files_of_the_names_that_it_imports(
    path: str, start: str, rival: str, tmp_path: Path
) -> None:
    rival_of(tmp_path, rival)
    environment = {"PYTHONPATH": path.format(ours=ROOT, here=tmp_path)}
    command = [sys.executable, *STARTS[start], "keys"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "[precision]" in done.stdout


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "launcher", [[], ["-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]]
)
def test_so_do_ranks(launcher: list[str], tmp_path: Path) -> None:
    for rival in RIVALS:
        rival_of(tmp_path, rival)
    command = [
        sys.executable,
        *launcher,
        "-m",
        "megaprec",
        "train",
        str(write_run(tmp_path)),
        "parallel.data=2",
    ]
    # an empty part would hide torch from torchrun itself
    path = str(ROOT) if launcher else f":{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_another_program_that_imports_megaprec_keeps_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__main__.py").write_text("import megaprec, beside")
    (tmp_path / "beside.py").write_text("print('found')")
    command = [sys.executable, "-m", "mine", "megaprec"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "found\n", done.stderr


@pytest.mark.parametrize("rival", ["parallel/__init__.py", "parallel.py"])
def test_a_door_names_a_file_of_the_user_that_stands_in_the_place_of_a_package(
    rival: str, tmp_path: Path
) -> None:
    (tmp_path / rival).parent.mkdir(exist_ok=True)
    (tmp_path / rival).touch()
    (tmp_path / "mine.py").write_text("import models\nmodels.Engine\n")
    environment = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert str(tmp_path / rival) in last and "rename" in last, done.stderr


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    gone = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["sh", "-c", gone, "sh", sys.executable, "-m", "megaprec", "keys"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (
        2,
        "the working directory is gone: change to one that is there\n",
    )
