"""The notebook of examples/ runs from the first cell to the last."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat", reason="needs the extra notebook")
nbclient: Any = pytest.importorskip("nbclient", reason="needs the extra notebook")
jupyter_client: Any = pytest.importorskip("jupyter_client", reason="needs the extra notebook")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_model.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the Jupyter packages


def printed(cell: Any) -> str:
    """What a cell has printed and returned."""
    texts = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", [])
    ]
    return "".join(texts)


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a kernel of their own, in `folder`."""
    # what the kernel and its client say goes through files of this user
    kernel = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc")
    resources = {"metadata": {"path": str(folder)}}
    # limits of a hang, not of a busy machine
    limits = {"timeout": 12000, "startup_timeout": 600}
    nbclient.NotebookClient(notebook, km=kernel, resources=resources, **limits).execute()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join((here, os.environ["PATH"])))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.chdir(tmp_path)  # kernel and client meet at sockets of the folder that both are in
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook, tmp_path)
    # sockets that the packages leave open warn when they are collected: here, where it is ignored
    gc.collect()
    trained, *others = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "step 40/40" in trained and "TrainingResult(" in trained
    assert "\x1b[2K" not in "".join([trained, *others]), "a bar was drawn over itself in a cell"
    assert any("lr.peak" in text and "train.micro_batch" in text for text in others)
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in pictures)
