"""The software and the processor that the bits of a run depend on, besides its keys.

Another version of torch or another instruction set computes products and functions by other code,
and the last bits of the results differ. A checkpoint records both, and a resume elsewhere says that
it is not bit for bit.
"""

from collections.abc import Iterator

import torch

from megaprec.checkpoint.reader import Store


def arithmetic() -> dict[str, str]:
    """Return the version of torch, and the processor on which this process trains."""
    return {"torch": torch.__version__, "processor": processor()}


def processor() -> str:
    """Return the GPU, if this process uses one; otherwise the CPU's instruction set for torch."""
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    instructions = [torch.backends.cpu.get_cpu_capability()]
    if torch.cpu._is_avx512_bf16_supported():
        instructions.append("AVX512_BF16")
    if torch.cpu._is_amx_tile_supported():
        instructions.append("AMX")
    return ", ".join(instructions)


def arithmetic_changes(checkpoint: Store) -> Iterator[str]:
    """Yield a line for each of these that differs from the checkpoint.

    Those that it does not record are omitted.
    """
    for name, now in arithmetic().items():
        before = checkpoint.index.get(name, now)
        if before != now:
            yield f"{name}: {before} -> {now}"
