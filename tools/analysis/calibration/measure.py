"""Products, attention, layers and memory of a device, timed on one rank.

Each is repeated and the fastest try counts: it says least of other work that the machine has.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.precision.gemm import Gemm, slow_half
from megaprec.precision.plan import dtype_name
from megaprec.resources import peak_memory
from models.decoder.stages import Cut, Stage
from models.estimate.storage import Device
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.loss import cross_entropy_and_log_sum
from tools.analysis.calibration.record import AttentionRow, LayerRow, LossRow, MemoryRow, ProductRow
from tools.analysis.planning.fp8_timing import synchronize
from tools.config.run_file import load_run

LEAST_TRIES = 5
LEAST_SECONDS = 1e-9  # that a clock tells apart from none
TRY_SECONDS = 0.2  # of all tries of one measurement, if they are short
# tokens, inputs and outputs of products: of small models on a CPU, of large ones on a GPU
CPU_SHAPES = (
    (64, 64, 256),
    (256, 128, 128),
    (256, 256, 1024),
    (256, 1024, 256),
    (512, 512, 512),
    (512, 256, 4096),
    (1024, 512, 2048),
    (2048, 1024, 1024),
)
GPU_SHAPES = (
    (1024, 1024, 4096),
    (4096, 2048, 2048),
    (4096, 4096, 4096),
    (4096, 4096, 14336),
    (8192, 4096, 4096),
    (8192, 8192, 8192),
)
# Tokens, heads and features of a head. A CPU's kernel takes more queries at once of long sequences:
# its FLOP/s with 1,024 tokens are nearly twice those with 512.
CPU_ATTENTION = ((128, 4, 32), (512, 8, 64), (1024, 4, 64))
GPU_ATTENTION = ((2048, 16, 128), (8192, 16, 128))
# tokens, hidden, heads and ffn of layers: the first has next to no work
CPU_LAYERS = ((16, 16, 2, 32), (512, 128, 4, 352), (512, 512, 8, 1376))
GPU_LAYERS = ((16, 64, 2, 128), (4096, 2048, 16, 8192), (4096, 4096, 32, 14336))
# tokens and words of the vocabulary
CPU_LOSS = ((512, 4096),)
GPU_LOSS = ((4096, 32768),)
CPU_MEMORY = (2**18, 2**24)  # bytes of a tensor
GPU_MEMORY = (2**24, 2**28)
LAYERS_TIMED = 4  # of one stage, so that its first and last operator count little


def fastest(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest try of a step.

    With one thread on a CPU they are those of the process: a product longer than the slice that the
    system gives to a thread would otherwise be measured with whatever else runs. What several
    threads take cannot be told from the process's own time, for libraries leave some of them idle.
    """
    step()  # the first takes longer
    synchronize(device)
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_alone else time.perf_counter
    end = time.perf_counter() + TRY_SECONDS
    best = float("inf")
    tries = 0
    while tries < LEAST_TRIES or time.perf_counter() < end:
        start = clock()
        step()
        synchronize(device)
        best = min(best, clock() - start)
        tries += 1
    return max(best, LEAST_SECONDS)


def process_bytes(device: Device, dtype: torch.dtype) -> int:
    """Return the bytes of memory of this process after its first forward and backward pass.

    The layer takes next to none itself: what counts is what torch loads and allocates at the first
    pass.
    """
    where = torch.device(device)
    narrow, *_ = CPU_LAYERS
    stage, x = _stage(where, dtype_name(dtype), *narrow)
    microbatch = MicrobatchInfo(0, torch.arange(1, device=where), torch.ones((), device=where))
    output = stage(x, microbatch)
    output.backward(torch.ones_like(output))
    return peak_memory()


def products(device: Device, dtype: torch.dtype, threads: int) -> Iterator[ProductRow]:
    """Yield the times of the products of linear layers."""
    where = torch.device(device)
    gemm = Gemm(dtype, dtype)
    shapes = CPU_SHAPES if device == "cpu" else GPU_SHAPES
    for tokens, inputs, outputs in shapes:
        x = torch.ones(tokens, inputs, dtype=dtype, device=where)
        weight = torch.ones(outputs, inputs, dtype=dtype, device=where)
        grad = torch.ones(tokens, outputs, dtype=dtype, device=where)
        total = torch.zeros(outputs, inputs, device=where)

        def forward(x: Tensor = x, weight: Tensor = weight) -> None:
            gemm.forward(x, weight)

        def input_gradient(grad: Tensor = grad, weight: Tensor = weight) -> None:
            gemm.input_gradient((grad,), weight, dtype)

        def weight_gradient(total: Tensor = total, grad: Tensor = grad, x: Tensor = x) -> None:
            gemm.add_weight_gradient_(total, (grad,), (x,), first=False)

        yield ProductRow(
            dtype=dtype_name(dtype),
            threads=threads,
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            forward=fastest(forward, where),
            input=fastest(input_gradient, where),
            weight=fastest(weight_gradient, where),
        )


def attention(device: Device, dtype: torch.dtype, threads: int) -> Iterator[AttentionRow]:
    """Yield the times of causal attention, forward and backward."""
    where = torch.device(device)
    shapes = CPU_ATTENTION if device == "cpu" else GPU_ATTENTION
    for tokens, heads, head_dim in shapes:
        shape = (1, heads, tokens, head_dim)
        query, key, value = (
            torch.ones(shape, dtype=dtype, device=where, requires_grad=True) for _ in range(3)
        )
        # as in a layer: a CPU's kernel in 16 bits may be many times slower
        if slow_half(query):
            query = query.float()
            key = key.float()
            value = value.float()
        forward, backward = _passes(
            lambda q=query, k=key, v=value: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            where,
        )
        yield AttentionRow(
            dtype=dtype_name(dtype),
            threads=threads,
            tokens=tokens,
            heads=heads,
            head_dim=head_dim,
            forward=forward,
            backward=backward,
        )


def layers(device: Device, dtype: torch.dtype, threads: int) -> Iterator[LayerRow]:
    """Yield the times of whole decoder layers."""
    where = torch.device(device)
    name = dtype_name(dtype)
    sizes = CPU_LAYERS if device == "cpu" else GPU_LAYERS
    for tokens, hidden, heads, ffn in sizes:
        stage, x = _stage(where, name, tokens, hidden, heads, ffn)
        microbatch = MicrobatchInfo(0, torch.arange(1, device=where), torch.ones((), device=where))
        forward, backward = _passes(
            lambda stage=stage, x=x, microbatch=microbatch: stage(x, microbatch), where
        )
        yield LayerRow(
            dtype=name,
            threads=threads,
            tokens=tokens,
            hidden=hidden,
            heads=heads,
            ffn=ffn,
            forward=forward / LAYERS_TIMED,
            backward=backward / LAYERS_TIMED,
        )


def _stage(
    where: torch.device, dtype: str, tokens: int, hidden: int, heads: int, ffn: int
) -> tuple[Stage, Tensor]:
    """Return a stage of some layers in the middle of a model, and its input."""
    keys = (
        'model.family="llama"',
        f"model.layers={LAYERS_TIMED}",
        f"model.hidden={hidden}",
        f"model.heads={heads}",
        f"model.ffn={ffn}",
        "model.vocab=256",
        "data.vocab_size=256",
        f'precision.compute="{dtype}"',
        "train.steps=1",
        "train.global_batch=1",
        "train.micro_batch=1",
        f"train.seq_length={tokens}",
    )
    config = load_run(None, keys)
    plan = config.plan
    cut = Cut(1, range(LAYERS_TIMED), first=False, last=False)
    stage = Stage(config.sized_model, Context(plan), cut)
    stage.to(device=where)
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(plan.parameters)
        main_grad = torch.zeros(parameter.shape, dtype=plan.gradients, device=where)
        parameter.main_grad = main_grad  # type: ignore[attr-defined]
    x = torch.ones(tokens, 1, hidden, dtype=plan.residual, device=where, requires_grad=True)
    return stage, x


def loss(device: Device, dtype: torch.dtype, threads: int) -> Iterator[LossRow]:
    """Yield the times of the loss."""
    where = torch.device(device)
    tp = Axis("tp")
    sizes = CPU_LOSS if device == "cpu" else GPU_LOSS
    for tokens, vocab in sizes:
        head = Part.cut("head.weight", (vocab, 1), 0, tp)
        logits = torch.zeros(tokens, 1, vocab, dtype=dtype, device=where)
        targets = torch.zeros(tokens, 1, dtype=torch.int64, device=where)

        def losses(logits: Tensor = logits, targets: Tensor = targets, head: Part = head) -> Tensor:
            # the backward pass writes the gradient over them
            own_logits = logits.clone().requires_grad_()
            token_losses, _ = cross_entropy_and_log_sum(
                own_logits, targets, head, tp, torch.float32, consume=True
            )
            return token_losses

        forward, backward = _passes(losses, where)
        yield LossRow(
            dtype=dtype_name(dtype),
            threads=threads,
            tokens=tokens,
            vocab=vocab,
            forward=forward,
            backward=backward,
        )


def _passes(forward: Callable[[], Tensor], where: torch.device) -> tuple[float, float]:
    """Return the seconds of a forward pass, and of the backward pass after it."""
    gradient = torch.ones_like(forward())
    forward_seconds = fastest(forward, where)
    both_seconds = fastest(lambda: forward().backward(gradient), where)
    # never 0: the clock's own noise may exceed a short pass
    return forward_seconds, max(both_seconds - forward_seconds, 0.1 * forward_seconds)


def memory(device: Device, threads: int) -> Iterator[MemoryRow]:
    """Yield the times of sums of two tensors in FP32."""
    where = torch.device(device)
    sizes = CPU_MEMORY if device == "cpu" else GPU_MEMORY
    for nbytes in sizes:
        first, second, out = (torch.zeros(nbytes // 4, device=where) for _ in range(3))

        def add(first: Tensor = first, second: Tensor = second, out: Tensor = out) -> None:
            torch.add(first, second, out=out)

        yield MemoryRow(threads=threads, bytes=3 * nbytes, seconds=fastest(add, where))


def all_rows(
    device: Device, dtypes: Sequence[torch.dtype], threads: int, tell: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of all kinds but collectives, as plain values. tell: is told what
    comes next."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for dtype in dtypes:
        for kind, measured in (
            ("products", products),
            ("attention", attention),
            ("layers", layers),
            ("loss", loss),
        ):
            tell(f"{kind} in {dtype_name(dtype)}, threads {threads}")
            rows_of_kind = [dict(row) for row in measured(device, dtype, threads)]
            rows.setdefault(kind, []).extend(rows_of_kind)
    tell("memory")
    rows["memory"] = [dict(row) for row in memory(device, threads)]
    return rows
