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
    ("megaprec/checkpoint/shard_file.py", "PIECE = 1 << 20", "20", "21"): (
        "the bytes that are hashed and written at a time, which no file depends on"
    ),
    ("megaprec/optim/decision/one_pass.py", "LENGTHS = (1 << 24, 1 << 22, 1 << 20)", "1", "2"): (
        "the lengths of the runs that are compiled, which no bit of an update depends on"
    ),
    ("models/estimate/memory.py", "SAMPLED_DEPTHS = (2, 8, 32)", "2", "3"): (
        "a depth that is tried before a deeper one, until one more layer adds the same"
    ),
    ("models/estimate/memory.py", "SAMPLED_DEPTHS = (2, 8, 32)", "32", "33"): (
        "a depth that is tried before a deeper one, until one more layer adds the same"
    ),
    ("tools/training/hangs.py", "MAX_RANKS = 1_000_000", "1_000_000", "1000001"): (
        "a bound of damaged records, more than any run has ranks"
    ),
    (
        "models/attention/backends.py",
        'context = Context(replace(plan, fp8=None), Axis("tp", 0, tp), cp=Axis("cp", 0, cp))',
        "0",
        "1",
    ): "the rank, of which no choice of a kernel depends",
    (
        "parallel/joining.py",
        "if alone_line and waited > ALONE and len(missing) == size - 1:",
        ">",
        ">=",
    ): "a time that is measured, and never equal",
    ("parallel/hangs/watchdog.py", "self._clock = Clock(self._window / 2)", "2", "3"): (
        "what a pause counts for: any time between two looks and the silence that is acted on"
    ),
    (
        "megaprec/optim/state/update_tile.py",
        "return values if values.itemsize >= 4 else values.float()",
        ">=",
        ">",
    ): "FP32 that is widened to FP32 is the same tensor",
    (
        "tools/training/invariants.py",
        "if abs(by_engine - by_batches) > SAME_COUNT * max(1.0, by_batches):",
        ">",
        ">=",
    ): "a bound of rounding, which no difference meets but by chance",
    ("models/estimate/memory.py", "tp_rank: int = 0", "0", "1"): (
        "the rank that is run where nobody asks for its calls: all keep as many bytes"
    ),
    (
        "megaprec/optim/decision/grad_stats.py",
        "if squares.isfinite() and squares >= least_squares:",
        ">=",
        ">",
    ): "a bound at which either sum is right",
    (
        "megaprec/comm/virtual.py",
        "local = torch.cat([*leaves]) if len(leaves) > 1 else leaves[0]",
        ">",
        ">=",
    ): "a copy of a tensor that nobody writes to",
}


def reason_of(mutant: Mutant, root: Path) -> str:
    """Return why a mutant of the tree at `root` is equivalent to the code; "" if it is not known to
    be."""
    lines = (root / mutant.path).read_text().splitlines()
    written = lines[mutant.line - 1].partition("#")[0].strip()
    return EQUIVALENT.get((mutant.path, written, mutant.before, mutant.after), "")
