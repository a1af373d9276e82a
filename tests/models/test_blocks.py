"""Attention sees what it should, whichever way it is computed."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megaprec.comm.axis import Axis
from megaprec.precision.plan import plan
from models.attention import bf16_products, flash_windows, kernels
from models.attention.attention import Attention
from models.attention.flash_windows import Documents
from models.attention.kernels import KERNELS, AttentionCall, Kernel, choose_kernel
from models.attention.rope import rotary_tables
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo


def attend(window: int, dropout: float, x: torch.Tensor) -> torch.Tensor:
    config = ModelConfig(
        layers=1, hidden=8, heads=2, kv_heads=1, window=window, attention_dropout=dropout
    )
    return Attention(config, Context(plan("fp64")), "attention")(
        x, None, MicrobatchInfo(0, torch.arange(x.shape[1]))
    )


@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
def test_a_token_attends_to_the_last_of_its_window_and_to_no_other(window: int) -> None:
    x = torch.randn(7, 2, 8, dtype=torch.float64, requires_grad=True)
    (seen,) = torch.autograd.grad(attend(window, 0.0, x)[5].sum(), x)
    expected = [token <= 5 and (window == 0 or token > 5 - window) for token in range(7)]
    assert seen.flatten(1).any(1).tolist() == expected


def test_no_part_of_a_projection_keeps_all_of_it_where_heads_are_rotated() -> None:
    """Query, key and value are one product. As large as the query is no other tensor that is kept
    for the backward pass, but for the weights."""
    config = ModelConfig(layers=1, hidden=32, heads=4, kv_heads=4)
    attention = Attention(config, Context(plan("fp32")), "attention")
    weights = {parameter.data_ptr() for parameter in attention.parameters()}
    x = torch.randn(64, 2, 32, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        rotary = rotary_tables(config.rope_scaling, 1e4, config.head_dim, 64, torch.float32)
        y = attention(x, rotary, MicrobatchInfo(0, torch.arange(2)))
    assert y.requires_grad
    assert max(kept.values()) == x.nbytes


@pytest.mark.parametrize("window", [0, 3])
def test_attention_with_a_dropout_that_drops_nothing_is_attention_without(window: int) -> None:
    x = torch.randn(7, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(
        attend(window, 1e-17, x), attend(window, 0.0, x), rtol=1e-12, atol=1e-15
    )


CHOICES = [
    ("", Kernel.TORCH_FUSED),
    ("slow_bf16", Kernel.FP32_ON_CPU),
    ("bf16_products", Kernel.BF16_PRODUCTS),
    ("bf16_products slow_bf16", Kernel.BF16_PRODUCTS),
    ("flash_windows", Kernel.FLASH_WINDOWS),
    ("flash_windows bf16_products", Kernel.FLASH_WINDOWS),
    ("sinks sinks_fuse", Kernel.SINKS),
    ("sinks sinks_fuse flash_windows", Kernel.SINKS),
    ("sinks sinks_fuse bf16_products", Kernel.SINKS),
    ("sinks sinks_fuse slow_bf16", Kernel.SINKS),
    ("sinks", Kernel.UNFUSED),
    ("sinks bf16_products", Kernel.UNFUSED),
    ("sinks flash_windows", Kernel.UNFUSED),
    ("rounded_scores", Kernel.UNFUSED),
    ("rounded_scores slow_bf16", Kernel.UNFUSED),
    ("rounded_scores flash_windows", Kernel.UNFUSED),
    ("rounded_scores bf16_products", Kernel.BF16_PRODUCTS),
    ("rounded_scores sinks sinks_fuse", Kernel.UNFUSED),
    ("rounded_scores sinks sinks_fuse bf16_products", Kernel.UNFUSED),
    ("softcap", Kernel.UNFUSED),
    ("softcap bf16_products", Kernel.UNFUSED),
    ("softcap flash_windows", Kernel.UNFUSED),
    ("softcap sinks sinks_fuse", Kernel.UNFUSED),
    ("dropout", Kernel.UNFUSED),
    ("dropout bf16_products", Kernel.UNFUSED),
    ("dropout flash_windows", Kernel.UNFUSED),
    ("dropout sinks sinks_fuse", Kernel.UNFUSED),
    ("over_ranks", Kernel.OVER_RANKS),
    ("over_ranks softcap dropout sinks rounded_scores", Kernel.OVER_RANKS),
    ("over_ranks flash_windows bf16_products slow_bf16", Kernel.OVER_RANKS),
    ("over_ranks parts_fuse", Kernel.FUSED_OVER_RANKS),
    ("over_ranks parts_fuse sinks", Kernel.FUSED_OVER_RANKS),
    ("over_ranks parts_fuse softcap", Kernel.OVER_RANKS),
    ("over_ranks parts_fuse dropout", Kernel.OVER_RANKS),
    ("over_ranks parts_fuse restricted", Kernel.OVER_RANKS),
]


@pytest.mark.parametrize(("facts", "kernel"), CHOICES)
def test_the_kernel_of_a_call_follows_from_its_facts(facts: str, kernel: Kernel) -> None:
    assert choose_kernel(AttentionCall(**dict.fromkeys(facts.split(), True))) is kernel


DOCUMENTS = Documents(torch.zeros(2, 7, dtype=torch.int64), 2)
CALLS: list[tuple[str, dict[str, Any], str, Any, Kernel]] = [
    ("fp32", {}, "", None, Kernel.TORCH_FUSED),
    ("fp16", {}, "", None, Kernel.TORCH_FUSED),
    ("fp32", {"window": 3}, "", None, Kernel.TORCH_FUSED),
    ("bf16", {}, "bf16 products", None, Kernel.BF16_PRODUCTS),
    ("bf16", {}, "slow bf16", None, Kernel.FP32_ON_CPU),
    ("bf16", {"window": 3}, "flash", None, Kernel.FLASH_WINDOWS),
    ("bf16", {"window": 7}, "flash", None, Kernel.TORCH_FUSED),
    ("bf16", {}, "flash", DOCUMENTS, Kernel.FLASH_WINDOWS),
    ("bf16", {"window": 3}, "flash", torch.ones(7, 7).tril().bool(), Kernel.TORCH_FUSED),
    ("fp32", {"attention_sinks": True}, "", None, Kernel.SINKS),
    ("fp32", {"attention_sinks": True}, "", DOCUMENTS, Kernel.SINKS),
    ("fp32", {"attention_softcap": 9.0}, "", None, Kernel.UNFUSED),
    ("fp32", {"attention_dropout": 0.5}, "", None, Kernel.UNFUSED),
    ("bf16", {}, "flash, cut", None, Kernel.FUSED_OVER_RANKS),
    ("bf16", {"window": 14}, "flash, cut", None, Kernel.FUSED_OVER_RANKS),
    ("bf16", {"window": 13}, "flash, cut", None, Kernel.OVER_RANKS),
    ("bf16", {"attention_sinks": True}, "flash, cut", None, Kernel.FUSED_OVER_RANKS),
    ("bf16", {"attention_softcap": 9.0}, "flash, cut", None, Kernel.OVER_RANKS),
    ("bf16", {"attention_dropout": 0.5}, "flash, cut", None, Kernel.OVER_RANKS),
    ("bf16", {}, "flash, cut", DOCUMENTS.numbers, Kernel.OVER_RANKS),
    ("fp64", {}, "flash, cut", None, Kernel.OVER_RANKS),
    ("bf16", {}, "cut", None, Kernel.OVER_RANKS),
]


@pytest.mark.parametrize(("compute", "fields", "machine", "mask", "kernel"), CALLS)
def test_attention_calls_the_kernel_that_plan_model_mask_and_machine_allow(
    monkeypatch: pytest.MonkeyPatch,
    compute: str,
    fields: dict[str, Any],
    machine: str,
    mask: Any,
    kernel: Kernel,
) -> None:
    def products(query: torch.Tensor, rounded: bool) -> bool:
        return machine == "bf16 products"

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        return machine.startswith("flash")

    def slow(query: torch.Tensor) -> bool:
        return machine == "slow bf16"

    called: list[Kernel] = []
    for each in Kernel:

        def record(query: torch.Tensor, *more: Any, each: Kernel = each) -> torch.Tensor:
            called.append(each)
            return query

        monkeypatch.setitem(KERNELS, each, record)
    monkeypatch.setattr(bf16_products, "is_faster", products)
    monkeypatch.setattr(flash_windows, "can_attend", flash)
    monkeypatch.setattr(kernels, "slow_bf16", slow)
    config = ModelConfig(layers=1, hidden=8, heads=2, **fields)
    cp = Axis("cp", 0, 2) if machine.endswith("cut") else Axis("cp")
    attention = Attention(config, Context(plan(compute), cp=cp), "attention")
    x = torch.zeros(7, 2, 8, dtype=attention.context.plan.compute)
    attention(x, None, MicrobatchInfo(0, torch.arange(2)), mask)
    assert called == [kernel]
