"""The model that docs/own-model.md prints, run as it stands on one process and on two
tensor-parallel ranks."""

from pathlib import Path

import pytest

from tests.optim.test_own_loops import launched_by, run
from tests.project.test_docs import blocks
from tests.project.test_readme import ROOT


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_the_model_of_the_page_trains_the_same_on_two_tensor_ranks(tmp_path: Path) -> None:
    code, _ = blocks(ROOT / "docs" / "own-model.md", "python")  # a model, and a loader of weights
    (tmp_path / "block.py").write_text(code)
    one, two = (
        [
            line.split()
            for line in run([*launched_by(ranks), "block.py"], tmp_path)
            if line.startswith("applied")
        ]
        for ranks in (1, 2)
    )
    losses = [float(loss) for _, loss in one]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert [float(loss) for _, loss in two] == pytest.approx(losses, abs=1e-5)
