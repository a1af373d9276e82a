"""The tables of docs/parallelism.md on activations are what is counted; the first one is a closed
formula.

Counted is what the second of two layers of a stage adds. Numbers of tests/models/test_memory.py are
measured.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import pytest
import torch

from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.stages import Cut
from models.engine.options import EngineOptions
from parallel.activation_checkpoint import KEEP, MODULES, Recompute
from tests.activation_bytes import kept_bytes
from tests.project.test_readme import ROOT

SIZES: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 101, "max_positions": 512}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"family": "llama", "ffn": 350, **SIZES},
    "Llama, fewer key heads": {"family": "llama", "kv_heads": 2, "ffn": 350, **SIZES},
    "GPT-2": {"family": "gpt2", **SIZES},
}
GPT3 = ModelConfig(
    family="gpt2", layers=96, hidden=12288, heads=96, vocab=50257, max_positions=2048, dropout=0.1
)
LENGTH = 128


def table(first: str) -> list[dict[str, str]]:
    """Rows of the page's table whose first column is called so, by column."""
    lines = (ROOT / "docs" / "parallelism.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def value(cell: str, sizes: Mapping[str, float]) -> float:
    """Of a sum like "4 h / t + 8"."""
    total = 0.0
    for term in cell.split(" + "):
        above, _, below = term.partition(" / ")
        total += factors(above, sizes) / factors(below, sizes)
    return total


def factors(text: str, sizes: Mapping[str, float]) -> float:
    return prod(sizes[word] if word in sizes else int(word) for word in text.split())


@pytest.fixture(params=[False, True], ids=["fused", "bf16 products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether attention of bf16 is made of matrix products, as on a CPU with instructions for
    them."""
    attention_by_products(request.param, monkeypatch)
    return request.param


def attention_by_products(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: wanted)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def counted(
    config: ModelConfig,
    length: int,
    batch: int,
    tp: int = 1,
    sequence: bool = False,
    recompute: Recompute = KEEP,
) -> int:
    """Bytes that a layer keeps of a micro-batch in bf16."""
    stages = [Cut(1, range(1, 1 + layers), False, False) for layers in (1, 2)]
    options = EngineOptions(batch, length, sequence, recompute=recompute)
    one, two = kept_bytes(config, plan("bf16"), stages, options, tp)
    return two.activations - one.activations


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", MODELS)
def test_a_layer_keeps_the_sum_of_its_tensors(family: str, dropout: float, products: bool) -> None:
    """To one per cent: vectors that are widened to FP32 are not in the table."""
    config = ModelConfig(**MODELS[family], dropout=dropout)
    rows = [row for row in table("kept") if dropout or "`dropout`" not in row["kept"]]
    other = ("logarithm", "for the fused kernel") if products else ("for bf16 products",)
    rows = [row for row in rows if not any(word in row["kept"] for word in other)]
    for tp, sequence in ((1, False), (2, False), (2, True)):
        sizes = {"h": config.hidden, "f": config.ffn, "a": config.heads, "t": 1 if sequence else tp}
        sizes["k"] = config.kv_heads * config.head_dim
        expected = sum(value(row[family], sizes) for row in rows) / (tp if sequence else 1)
        assert counted(config, LENGTH, 1, tp, sequence) == pytest.approx(
            LENGTH * expected, rel=0.01
        )


def test_the_table_of_tensors_has_every_model_and_row() -> None:
    rows = table("kept")
    assert [*rows[0]][1:] == [*MODELS]
    assert (
        sum("`dropout`" in row["kept"] for row in rows)
        == sum("logarithm" in row["kept"] for row in rows)
        == 1
    )


Formula = Callable[[float, float, float, float, float], float]  # of s, b, h, a and t
LITERATURE: Mapping[str, Formula] = {
    "s b h (34 + 5 a s / h)": lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h),
    "s b h (10 + 24 / t + 5 a s / (h t))": lambda s, b, h, a, t: (
        s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    ),
    "s b h (34 + 5 a s / h) / t": lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h) / t,
    "34 s b h / t": lambda s, b, h, a, t: 34 * s * b * h / t,
    "2 s b h": lambda s, b, h, a, t: 2 * s * b * h,
}
OURS: Mapping[str, tuple[int, bool, Recompute]] = {
    "one tensor rank": (1, False, KEEP),
    "`tensor = 8`": (8, False, KEEP),
    '`tensor = 8`, `recompute = "full"`': (8, False, Recompute(fraction=1.0)),
    "with `sequence`": (8, True, KEEP),
    'with `sequence`, `recompute = "selective"`': (8, True, Recompute(("attention",))),
    "with `sequence`, selective: all three modules": (8, True, Recompute(MODULES)),
    'with `sequence`, `recompute = "full"`': (8, True, Recompute(fraction=1.0)),
}


def in_table() -> Iterator[tuple[str, str, str, str]]:
    for row in table("layout"):
        yield row["layout"], row["Korthikanti et al."], row["MB"], row["ours, MB"]


@pytest.mark.slow
def test_a_layer_of_gpt3_keeps_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_by_products(False, monkeypatch)
    assert [layout for layout, *_ in in_table()] == [*OURS]
    for layout, *_, ours in in_table():
        tp, sequence, recompute = OURS[layout]
        assert f"{counted(GPT3, 2048, 1, tp, sequence, recompute) / 1e6:.0f}" == ours, layout


def test_beside_it_stands_what_the_literature_says() -> None:
    given = [(formula, number) for _, formula, number, _ in in_table() if formula]
    assert sorted(formula for formula, _ in given) == sorted(LITERATURE)
    for formula, number in given:
        assert f"{LITERATURE[formula](2048, 1, GPT3.hidden, GPT3.heads, 8) / 1e6:.0f}" == number, (
            formula
        )


@pytest.mark.slow
def test_written_out_attention_keeps_its_weights_too() -> None:
    """9 a s bytes a token: what twice as long a sequence adds to a token, but for one mask of all
    pairs."""
    page = (ROOT / "docs" / "parallelism.md").read_text()
    (said,) = re.findall(r"keeps (\d+) a s / t bytes a token", page)
    config = ModelConfig(**MODELS["GPT-2"], attention_dropout=0.1)
    for tp in (1, 2):
        short, long = (counted(config, length, 2, tp) / (length * 2) for length in (256, 512))
        assert long - short == pytest.approx(int(said) * config.heads / tp * 256, rel=0.05)
