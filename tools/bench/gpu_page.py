"""The page docs/gpu.md: what was seen on a GPU, or that nothing was."""

from collections import Counter
from collections.abc import Iterator, Mapping

from tools.bench.llama_layers import Workload

HEAD = """# On a GPU

`make gpu` runs all that needs a GPU, and writes this page: the tests with the marker `gpu`, and \
training steps beside
plain torch and, where they are installed, Megatron-core and Transformer Engine. Whoever has a \
GPU runs this command;
without one it says so in a line, and the page stays as it is.

```console
make gpu
python -m tools.bench gpu --no-tests --layers 4     # the table alone, of a smaller stack
```
"""
NOTHING = """
## What has been seen

**Nothing on this page has been run on a GPU.** There was none. The table and the results of the \
tests are written
here by the first `make gpu`.

| what | state |
|---|---|
| laws of `tests/gpu` on a CPU | run by `make test`, as every test |
| the same laws on a GPU | collected and skipped by name: never run |
| steps of megaprec and of plain torch | tried on a CPU with small sizes: no speed is known |
| steps of Megatron-core and of Transformer Engine | written from their interfaces, never run |
| NCCL between several GPUs | never run |
"""
TAIL = """
## What the tests hold

Each law is a test for both devices. On the CPU it compares the run with itself through the same \
code.

| law | file |
|---|---|
| every family trains in float64 as on a CPU, to nine digits | `tests/gpu/test_training.py` |
| fp32, bf16, fp16, split masters and FP8 train as on a CPU as far as their digits go | \
`tests/gpu/test_training.py` |
| an overflow is skipped, and its tensor is named as on a CPU | `tests/gpu/test_training.py` |
| a checkpoint of a GPU goes on on a CPU, and the other way round; a text is made of it | \
`tests/gpu/test_training.py` |
| attention within windows and documents, which has no mask there, is that of the mask | \
`tests/gpu/test_windows.py` |
| attention with sinks and its gradients are those of the formula | `tests/gpu/test_sinks.py` |
| grouped products and products added to FP32 totals are right, long sums too | \
`tests/gpu/test_products.py` |
| kernels are right, and there from the generation on that has them | `tests/gpu/test_kernels.py` |
| every kind of FP8 is computed by a kernel, or emulated for a reason that is said | \
`tests/gpu/test_kernels.py` |
| two GPUs train over NCCL in float64 what one process trains; their links are in order | \
`tests/gpu/test_several.py` |

## Without a GPU

torch's build for CUDA can be imported, and compiles, where there is no driver. `make \
offline-gpu` installs it in a folder of
its own, `.venv-cuda` (some gigabytes), and checks there what can be known of the code for GPUs \
without one. It is no part of
`make test`; in other environments its tests are skipped for a reason that is said.

```console
make offline-gpu
make offline-gpu CUDA_TORCH=2.13.0      # another release of torch: the tests name private parts \
of 2.11
```

| law | file |
|---|---|
| every operator that a training step issues, in all families, precisions and layouts that are \
tried on a device of the tests, has a kernel for CUDA | `tests/offline_gpu/test_operators.py` |
| every leaf, region and FP8 cast of a model of Llama-3 8B's size becomes machine code of an \
H100, in a number of kernels that is written down | `tests/offline_gpu/test_machine_code.py` |
| the compiled loss reads the logits in one kernel, once, and overwrites them in another | the \
same |
| these kernels, run by Triton's interpreter on sizes that are no multiple of a block, are as \
near to float64 as operators | `tests/offline_gpu/test_interpreted.py` |
| FP8 casts have the bits of operators there; infinities, NaNs and targets that are no words pass \
through the loss | the same |

torch is told that there is an H100 (`tests/offline_gpu/pretended_h100.py`). Inductor then writes \
the Triton that it would
write on one, with each choice of blocks, and NVIDIA's assembler translates it. What this does \
not show: speed, the choice
among blocks, races between threads, how a GPU rounds `exp` and divisions, and products and \
attention, whose kernels are
libraries.
"""


def page(
    machine: Mapping[str, str] | None = None,
    workload: Workload | None = None,
    rows: Mapping[str, Mapping[str, float] | str] | None = None,
    tests: Mapping[str, str] | None = None,
) -> str:
    """Return the page. machine: None if nothing was run."""
    if machine is None or workload is None:
        return HEAD + NOTHING + TAIL
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [HEAD.rstrip(), "", "## What has been seen", "", f"{facts}."]
    lines += _table(workload, rows or {})
    lines += _tests(tests or {})
    return "\n".join(lines) + "\n" + TAIL


def _table(workload: Workload, rows: Mapping[str, Mapping[str, float] | str]) -> Iterator[str]:
    """Yield the table of training steps."""
    yield ""
    yield (
        f"Training steps in bf16 with FP32 masters: {workload.layers} layers of hidden "
        f"{workload.hidden}, {workload.heads} heads, {workload.kv_heads} key and value heads, "
        f"feed-forward {workload.ffn}, vocabulary {workload.vocab}; {workload.microbatches} "
        f"micro-batches of {workload.micro_batch} x {workload.tokens} tokens. MFU counts attention "
        "as if it were not causal."
    )
    yield from ("", "| | tokens/s | step | TFLOP/s | MFU | memory |", "|---|---|---|---|---|---|")
    for name, row in rows.items():
        if isinstance(row, str):
            yield f"| {name} | not measured: {row} | | | | |"
            continue
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else "not known"
        memory = f"{row['gib']:.1f} GiB" if row.get("gib") else "not known"
        yield (
            f"| {name} | {row['tokens_per_s']:,.0f} | {row['step_s'] * 1e3:.1f} ms | "
            f"{row['tflops']:.1f} | {mfu} | {memory} |"
        )


def _tests(tests: Mapping[str, str]) -> Iterator[str]:
    """Yield how many tests passed, and the others by name."""
    if not tests:
        yield from ("", "The tests were not run (`--no-tests`).")
        return
    counts = Counter(outcome.partition(":")[0] for outcome in tests.values())
    totals = [f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
    yield from ("", f"Tests: {', '.join(totals)}.", "")
    for name, outcome in tests.items():
        if outcome != "passed":
            yield f"- `{name}` {outcome}"
