"""The check of a conversion: both folders compute the same logits for the same tokens.

A rearrangement in the wrong order keeps shapes, norms and much of the behaviour, so only FP32
logits within a tight bound prove a conversion. A Hugging Face folder is run by transformers, code
that is independent of megaprec; any other checkpoint by megaprec's model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context
from tools.convert.averaged import averaged
from tools.convert.core.slices import Slices
from tools.convert.core.source import Source
from tools.convert.core.tensors import torch_name
from tools.convert.formats import WITH_CONFIG, format_of, open_intact
from tools.convert.hf.folder import in_fp8
from tools.convert.transformers_package import if_untested, quiet_transformers, why_missing

# of the largest difference, for logits of size 1; relative to the largest logit where that is more
BOUND = 1e-5
TOKENS = 64
SAMPLES = 2
MOST_REASON = 300  # characters of an error of transformers that are shown

Forward = Callable[[Tensor], Tensor]  # int64 ids [b, s] -> logits [b, s, vocab]


def compare_logits(
    first: Path,
    second: Path,
    vocab: int | None = None,
    model: ModelConfig | None = None,
    ema: bool = False,
) -> str:
    """Return a line on the difference of the logits of two folders. Raises UserError if the models
    differ.

    vocab, model: of the first folder, if it does not say them. ema: the weights of the first model
        are the average that its folder keeps.
    """
    source = open_intact(first, vocab, model=model)
    generator = torch.Generator().manual_seed(0)
    length = min(TOKENS, source.model.max_positions)
    token_ids = torch.randint(source.model.vocab, (SAMPLES, length), generator=generator)
    first_logits = logits(first, token_ids, torch.float32, vocab, model, ema)
    second_logits = logits(second, token_ids, torch.float32, vocab)
    for folder, values in ((first, first_logits), (second, second_logits)):
        if not values.isfinite().all():
            raise UserError.of("convert.verify_not_finite", path=folder)
    difference = (first_logits - second_logits).abs().max().item()
    largest = first_logits.abs().max().item()
    # `not <=` is true of NaN too
    if not difference <= BOUND * max(1.0, largest):
        by_transformers = any(map(_is_run_by_transformers, (first, second)))
        raise UserError.of(
            "convert.verify_differs",
            first=first,
            second=second,
            difference=difference,
            largest=largest,
            bound=BOUND,
            if_untested=if_untested() if by_transformers else "",
        )
    # In bf16 both round, each in an order of its own: only the choice is compared.
    first_tokens = logits(first, token_ids, torch.bfloat16, vocab, model, ema).argmax(-1)
    second_tokens = logits(second, token_ids, torch.bfloat16, vocab).argmax(-1)
    agree = first_tokens == second_tokens
    agreement = agree.double().mean().item()
    remarks = []
    for folder in (first, second):
        if in_fp8(folder):
            remarks.append(
                f"; {folder} is in FP8, which transformers rounds otherwise: megaprec ran it"
            )
    return (
        f"logits of {token_ids.numel()} tokens: FP32 differ by at most {difference:.3g} (largest "
        f"{largest:.3g}, bound {BOUND:g}), in bf16 {agreement:.1%} of the likeliest tokens "
        f"agree{''.join(remarks)}"
    )


def require_comparable(source: Source, dtype: torch.dtype | None) -> None:
    """Raise UserError if a conversion to `dtype` rounds weights, so that logits cannot be the
    same."""
    for key in source.keys("weight"):
        before = source.dtype(key)
        after = source.dtype_in(key, dtype)
        if torch.promote_types(before, after) != after:
            raise UserError.of(
                "convert.verify_dtype",
                key=key,
                stored=torch_name(before),
                dtype=torch_name(after),
            )


@torch.no_grad()
def logits(
    path: Path,
    token_ids: Tensor,
    dtype: torch.dtype,
    vocab: int | None = None,
    model: ModelConfig | None = None,
    ema: bool = False,
) -> Tensor:
    """Return FP32 logits [b, s, vocab], computed in `dtype`. vocab, model: of `path`, if it does
    not say them. ema: of the average of the weights."""
    if _is_run_by_transformers(path):
        _, folder = format_of(path)
        forward = _forward_of_transformers(folder, dtype)
    else:
        source = open_intact(path, vocab, model=model)
        forward = _forward_of_megaprec(averaged(source) if ema else source, dtype)
    return forward(token_ids).float()


def _is_run_by_transformers(path: Path) -> bool:
    """Return True if transformers computes the logits of a checkpoint."""
    kind, folder = format_of(path)
    return kind in WITH_CONFIG and not in_fp8(folder)


def _forward_of_transformers(folder: Path, dtype: torch.dtype) -> Forward:
    """Return the model of a folder as transformers computes it. Raises UserError."""
    try:
        with quiet_transformers() as transformers:
            return _load_with_transformers(transformers, folder, dtype)
    except ImportError as problem:
        raise UserError.of(
            "convert.verify_transformers", why_missing=why_missing(problem)
        ) from problem


def _load_with_transformers(transformers: Any, folder: Path, dtype: torch.dtype) -> Forward:
    """Return the model that transformers loads. Raises UserError if it cannot, whatever the
    reason."""
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        # torch's grouped products know only widths of 16 bytes
        settings._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=settings, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    except ImportError:
        raise
    except Exception as error:  # a library that reads the files of others has many kinds
        reason = " ".join(str(error).split())[:MOST_REASON]
        raise UserError.of(
            "convert.verify_not_loaded",
            path=folder,
            kind=type(error).__name__,
            reason=reason,
            if_untested=if_untested(),
        ) from error
    model.eval()
    return lambda token_ids: model(token_ids).logits


def _forward_of_megaprec(source: Source, dtype: torch.dtype) -> Forward:
    stage = load_stage(source, "fp32" if dtype == torch.float32 else "bf16")
    return lambda token_ids: stage(token_ids.t()).transpose(0, 1)


def load_stage(source: Source, compute: str = "fp32") -> Stage:
    """Return the whole model on this process, with the weights of `source`."""
    config = source.model.without_mtp.with_zero_weights
    (whole,) = cuts(config, 1, config.max_positions)
    stage = Stage(config, Context(plan(compute)), whole)
    read_weights(stage, source)
    return stage


@torch.no_grad()
def read_weights(stage: Stage, source: Source) -> None:
    """Copy the weights of `source` into a stage, in the dtype that its plan has for them. It reads
    what it holds."""
    slices = Slices(source)
    precision = stage.context.plan
    for parameter in stage.parameters():
        # A router's correction balances loads, and is not rounded as weights are.
        is_correction = layout_of(parameter).balancing is not None
        dtype = precision.sensitive if is_correction else precision.parameters
        parameter.data = parameter.data.to(dtype)
        flat = parameter.view(-1)
        for part, first, last in layout_of(parameter).spans():
            flat[first:last] = slices.read_range("weight", part, 0, last - first)
