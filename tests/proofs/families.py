"""How far the logits of each family are from those of transformers, in float64.

    python -m tests.proofs.families [KIND ...]

For each of the odd small configurations of tests/other_systems.py transformers draws a model and
saves it; megaprec reads the folder, and both compute the logits of 120 tokens. Exit code 1 if one
differs by more than 1e-10.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch

from tests.convert.test_transformers import theirs
from tests.models.test_families import float32_is_float64
from tests.other_systems import CONFIGS
from tools.convert.formats import open_source
from tools.convert.verify import load_stage

BOUND = 1e-10
WORDS = 131  # of the smallest vocabulary


def largest_difference(kind: str, folder: Path) -> tuple[int, float]:
    """Return the parameters of a model of transformers, and the largest difference of a logit."""
    ids = torch.randint(WORDS, (3, 40), generator=torch.Generator().manual_seed(1))
    with float32_is_float64():
        model = theirs(folder, kind, torch.float64)
        expected = model(ids).logits
    ours = load_stage(open_source(folder), "fp64")(ids.t()).transpose(0, 1)
    parameters = sum(values.numel() for values in model.parameters())
    return parameters, float((ours - expected).abs().max())


def main(kinds: list[str]) -> int:
    """Print a line for each kind of configuration, and return the exit code."""
    worst = 0.0
    for kind in kinds or list(CONFIGS):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parameters, difference = largest_difference(kind, Path(folder))
        print(
            f"{kind:<28}{parameters:>12,} parameters   logits within {difference:.1e}", flush=True
        )
        worst = max(worst, difference)
    print(f"largest difference: {worst:.1e}; bound: {BOUND:g}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
