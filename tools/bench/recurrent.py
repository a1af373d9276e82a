"""Time and memory of the recurrences of a gated delta net, of Kimi Delta Attention and of Mamba-2,
forward and backward.

Sizes of a head are those of Qwen3-Next, Kimi Linear and Nemotron-H, in FP32, one record each. The
forms are timed in turn, on a CPU by its time, and the least time counts:

    chunks        ours, in chunks of tokens
    tokens        ours, token by token
    transformers  the plain torch of transformers' models, in chunks too
    kernel        that of the package that a run would take, on a GPU that has it

The memory is that of a step beyond what stays, inputs and their gradients.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.recurrent import delta_rule, kernel_calls, kernel_choice, state_space
from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.kernel_choice import (
    DELTA_RULE,
    ROW_DECAY_RULE,
    STATE_SPACE,
    KernelSetting,
    Package,
)
from models.recurrent.state_space import StateSpaceInputs
from tools.bench.measurement import (
    Step,
    add_device,
    add_integers,
    extra_bytes,
    print_profile,
    print_record,
    require_gpu,
    seconds_of,
)

SUBJECT = "time and memory of recurrences, beside transformers'"
Form = Callable[..., Tensor]
MODELS = "transformers.models"
QWEN3_NEXT = (f"{MODELS}.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
KIMI = (f"{MODELS}.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention")
# of a head of Qwen3-Next and Kimi Linear; transformers' chunks have 64 tokens there too
KEY_DIM = 128
VALUE_DIM = 128
# of a head of Nemotron-H
MAMBA_STATE_DIM = 128
MAMBA_HEAD_DIM = 64
HEADS_OF_GROUP = 8
THEIR_MAMBA_CHUNK = 128


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_integers(
        parser,
        {
            "tokens": (1024, "of a sample"),
            "samples": (1, "at once"),
            "heads": (8, f"of values; of Mamba-2 a multiple of {HEADS_OF_GROUP}"),
            "threads": (1, "of the process"),
            "rounds": (3, "timed steps of each form"),
        },
    )
    add_device(parser, "cpu")
    parser.add_argument(
        "--profile", action="store_true", help="print the operators of a step in chunks by time"
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench recurrent`; return the exit code."""
    require_gpu(args.device)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    sizes = (args.samples, args.tokens, args.heads)
    with device:
        of_delta_rule = _delta_rule_leaves(*sizes)
        of_row_decays = _delta_rule_leaves(*sizes, by_row=True)
        of_state_space = _state_space_leaves(*sizes)
    measured: dict[str, tuple[Sequence[Tensor], Mapping[str, Form]]] = {
        "delta rule": (of_delta_rule, _delta_rule_forms(device, QWEN3_NEXT, DELTA_RULE)),
        "delta rule by row": (of_row_decays, _delta_rule_forms(device, KIMI, ROW_DECAY_RULE)),
        "state space": (of_state_space, _state_space_forms(device)),
    }
    for recurrence, (leaves, forms) in measured.items():
        steps = {name: _step(form, leaves) for name, form in forms.items()}
        seconds_by_form = _least_seconds(steps, args.rounds, device)
        record: dict[str, Any] = {
            "recurrence": recurrence,
            "samples": args.samples,
            "tokens": args.tokens,
            "heads": args.heads,
            "device": args.device,
            "threads": args.threads,
        }
        for name, seconds in seconds_by_form.items():
            record[f"{name}_ms"] = round(seconds * 1e3, 1)
        for name, step in steps.items():
            extra = extra_bytes(step, device)
            record[f"{name}_mb"] = None if extra is None else round(extra / 1e6, 1)
        print_record(record)
        if args.profile:
            print_profile(steps["chunks"], rows=20)
    return 0


def _least_seconds(
    steps: Mapping[str, Step], rounds: int, device: torch.device
) -> dict[str, float]:
    """Return the least seconds of each step, after a round that warms up. On a CPU they are
    processor time of this process, to which other processes add little."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            before = time.process_time()
            seconds = seconds_of(step, device)
            if device.type == "cpu":
                seconds = time.process_time() - before
            times[name].append(seconds)
    return {name: min(of_step[1:]) for name, of_step in times.items()}


def _step(form: Form, leaves: Sequence[Tensor]) -> Step:
    """Return a step that computes a form and the gradients of what it reads."""

    def step() -> None:
        torch.autograd.grad(form(*leaves).sum(), leaves)

    return step


def _delta_rule_leaves(samples: int, tokens: int, heads: int, by_row: bool = False) -> list[Tensor]:
    """Return queries, keys and values [b, s, n, features], logarithms of decays [b, s, n], by row
    [b, s, n, features], and strengths [b, s, n]."""
    of_heads = (samples, tokens, heads)
    of_decays = (*of_heads, KEY_DIM) if by_row else of_heads
    leaves = [
        F.normalize(torch.randn(*of_heads, KEY_DIM), dim=-1),
        F.normalize(torch.randn(*of_heads, KEY_DIM), dim=-1),
        torch.randn(*of_heads, VALUE_DIM),
        -torch.rand(of_decays),
        torch.rand(of_heads),
    ]
    return [leaf.requires_grad_() for leaf in leaves]


def _delta_rule_forms(
    device: torch.device, theirs: tuple[str, str], package: Package
) -> dict[str, Form]:
    """Return the forms of the delta rule. theirs: module and function of transformers."""

    def inputs(*leaves: Tensor) -> DeltaInputs:
        return DeltaInputs(*(leaf.transpose(1, 2) for leaf in leaves))

    module_name, function_name = theirs
    their_function = getattr(importlib.import_module(module_name), function_name)
    forms: dict[str, Form] = {
        "chunks": lambda *leaves: delta_rule.chunked(inputs(*leaves))[0],
        "tokens": lambda *leaves: delta_rule.recurrent(inputs(*leaves))[0],
        "transformers": lambda *leaves: their_function(*leaves)[0],
    }
    if kernel := _kernel(package, device):
        forms["kernel"] = lambda *leaves: kernel_calls.delta_rule(
            kernel, inputs(*leaves), None, torch.bfloat16
        )[0]
    return forms


def _state_space_leaves(samples: int, tokens: int, heads: int) -> list[Tensor]:
    """Return queries, keys and values [b, s, groups or n, features], time steps [b, s, n] and rates
    [n]."""
    of_groups = (samples, tokens, heads // HEADS_OF_GROUP)
    of_heads = (samples, tokens, heads)
    leaves = [
        torch.randn(*of_groups, MAMBA_STATE_DIM),
        torch.randn(*of_groups, MAMBA_STATE_DIM),
        torch.randn(*of_heads, MAMBA_HEAD_DIM),
        torch.rand(of_heads),
        torch.rand(heads),
    ]
    return [leaf.requires_grad_() for leaf in leaves]


def _state_space_forms(device: torch.device) -> dict[str, Form]:
    """Return the forms of Mamba-2's state space, of tensors as `_state_space_leaves` has them."""

    def inputs(*leaves: Tensor) -> StateSpaceInputs:
        *of_tokens, rate = leaves
        query, key, value, step = (leaf.transpose(1, 2) for leaf in of_tokens)
        return StateSpaceInputs(query, key, value, step, rate)

    module: Any = importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")

    def theirs(query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor) -> Tensor:
        return module.mamba2_chunk_scan(value, step, -rate, key, query, THEIR_MAMBA_CHUNK)

    forms: dict[str, Form] = {
        "chunks": lambda *leaves: state_space.chunked(inputs(*leaves))[0],
        "tokens": lambda *leaves: state_space.recurrent(inputs(*leaves))[0],
        "transformers": theirs,
    }
    if kernel := _kernel(STATE_SPACE, device):
        forms["kernel"] = lambda *leaves: kernel_calls.state_space(
            kernel, inputs(*leaves), None, torch.bfloat16
        )[0]
    return forms


def _kernel(package: Package, device: torch.device) -> Callable[..., Any] | None:
    """Return the kernel that a run in bf16 tries, and takes if it is right; None: plain torch."""
    setting = KernelSetting(device.type, torch.bfloat16, canonical=False, deterministic=False)
    return kernel_choice.choose(package, setting).kernel
