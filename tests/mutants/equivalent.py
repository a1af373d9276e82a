"""Mutants that change nothing that anybody could see, each with the reason; they are not tried."""

from pathlib import Path

from tests.mutants.changes import Mutant

# path, line of the source, before and after
Change = tuple[str, str, str, str]
EQUIVALENT: dict[Change, str] = {
    ("megaprec/tokens/index_check.py", "CHUNK = 1 << 20", "1", "2"): (
        "the elements that are read at a time, which no check depends on"
    ),
    ("parallel/fused_products.py", "_FEATURES = 16", "16", "17"): (
        "the size of a product that is tried before a run, where any size shows whether it works"
    ),
}


def reason_of(mutant: Mutant, root: Path) -> str:
    """Return why a mutant of the tree at `root` is equivalent to the code; "" if it is not known to
    be."""
    lines = (root / mutant.path).read_text().splitlines()
    written = lines[mutant.line - 1].partition("#")[0].strip()
    return EQUIVALENT.get((mutant.path, written, mutant.before, mutant.after), "")
