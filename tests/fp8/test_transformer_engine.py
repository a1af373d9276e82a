"""FP8 by Transformer Engine, against a stand-in of it on the CPU: the same training as by torch,
bit for bit, in every layout; and a line for whoever asks for it where it is missing, unknown or
wrong."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.fp8 import transformer_engine
from megaprec.fp8.formats import Role
from megaprec.fp8.matmul import PRODUCTS, add_product_, choose_kernel, describe_kernels, multiply
from megaprec.fp8.quantize import Codes, quantize_both
from megaprec.fp8.state import FP8State
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import Backend, FP8Recipe, Kind
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.engine.options import EngineOptions
from parallel.activation_checkpoint import Recompute
from tests import transformer_engine as stand_in
from tests.activation_bytes import kept_bytes
from tests.fp8.test_products import SHAPES, bound, matrix
from tests.fp8.test_state import grads, pair
from tests.fp8.test_training import EXPERTS, MODEL, alone, fp8, run, states
from tests.layouts import Run, train_all
from tests.refusals import raises, sentence
from tests.runs import train, write_run
from tests.training.test_precision_run import MINIMAL
from tools.config.run_file import load_run

CPU = torch.device("cpu")
INSTALL = r"pip install --no-build-isolation 'transformer_engine\[pytorch\]>=2.11,<2.21', or use backend \"torch\""


def by(backend: Backend, **fields: Any) -> FP8Recipe:
    return FP8Recipe(backend=backend, **fields)


def casts(
    recipe: FP8Recipe, m: int, k: int, n: int, dtype: torch.dtype
) -> list[tuple[Codes, Codes]]:
    """Of the input, the weight and the gradient of a layer."""
    scale = torch.tensor(0.37) if recipe.kind == "delayed" else None
    roles: dict[Role, tuple[int, int]] = {"input": (m, k), "weight": (n, k), "gradient": (m, n)}
    return [
        quantize_both((matrix(*shape) / 100).to(dtype), recipe, role, scale)
        for role, shape in roles.items()
    ]


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reads_columns", [False, True])
def test_casts_are_those_of_torch_and_products_those_of_their_numbers(
    kind: Kind, form: Any, dtype: torch.dtype, reads_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in.Float8Quantizer, "reads_columns", reads_columns)
    recipe = FP8Recipe(kind, form, power_2_scales=form == "e4m3", backend="transformer_engine")
    with stand_in.installed():
        for shape in SHAPES:
            layer = casts(recipe, *shape, dtype)
            for both, others in zip(
                layer, casts(replace(recipe, backend="torch"), *shape, dtype), strict=True
            ):
                for ours, theirs in zip(both, others, strict=True):
                    assert (
                        torch.equal(ours.values.float(), theirs.values.float())
                        and ours.block == theirs.block
                    )
                    assert torch.equal(ours.inverse, theirs.inverse)
            (x, x_t), (w, w_t), (g, g_t) = layer
            for a, b in ((x, w), (g, w_t), (g_t, x_t)):
                off = (
                    multiply(a, b, torch.float32, backend="transformer_engine")
                    - a.wide().double() @ b.wide().double().t()
                )
                assert (off.abs() <= bound(a, b)).all(), shape
            total = torch.ones(g_t.values.shape[0], x_t.values.shape[0])
            add_product_(total, g_t, x_t, "transformer_engine")
            assert torch.equal(
                total, 1 + multiply(g_t, x_t, torch.float32, backend="transformer_engine")
            )


def test_all_of_a_layer_goes_through_it() -> None:
    with stand_in.installed() as calls:
        assert set(
            describe_kernels(by("transformer_engine"), CPU, torch.bfloat16, torch.float32).values()
        ) == {"transformer_engine_gemm kernel"}
        model, _, x = pair(backend="transformer_engine")
        calls.clear()
        with model.fp8.autocast():
            model(x).sum().backward()
        assert calls == {"quantize": 2 * 3, "fast": 2, "split": 2 * 2}


def test_an_empty_matrix_has_empty_products() -> None:
    recipe = by("transformer_engine")
    with stand_in.installed():
        empty, _ = quantize_both(torch.ones(0, 64), recipe, "input", torch.ones(()))
        other, _ = quantize_both(torch.ones(16, 64), recipe, "input", torch.ones(()))
        assert multiply(empty, other, torch.float32, backend="transformer_engine").shape == (0, 16)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_an_overflow_is_not_hidden(kind: Kind, bad: float) -> None:
    """Its casts saturate an infinity: what is multiplied by the codes must not be finite all the
    same."""
    with stand_in.installed():
        for seed, factor in enumerate(("input", "gradient")):
            model, _, x = pair(kind, backend="transformer_engine")
            values = torch.ones(8, 2, 32)
            (x.data if factor == "input" else values)[3, 1, 2 + seed] = bad
            with model.fp8.autocast():
                model(x).backward(values.to(x.dtype))
            assert not grads(model)[-2].isfinite().all(), factor
    with stand_in.installed():
        made = transformer_engine.encode(
            torch.tensor([[1.0, bad]]), torch.float8_e4m3fn, torch.ones(())
        )
        assert not Codes(made[0], made[2], (1, 2)).wide().isfinite().all()


def test_an_overflow_moves_no_scale_and_leaves_nothing_in_the_window() -> None:
    def after(backend: Backend) -> Tensor:
        model, _, x = pair(backend=backend, history_length=2)
        for value in (3.0, torch.inf, 5.0):
            x.data[0, 0, 0] = value
            with model.fp8.autocast():
                model(x).sum().backward()
        model.fp8.roll()
        return torch.cat([model.fp8.bank.scale, model.fp8.bank.history.view(-1)])

    with stand_in.installed():
        ours = after("transformer_engine")
    assert torch.equal(ours, after("torch"))


RUNS = [
    run(fp8("delayed"), "bf16", steps=3),
    run(fp8("current", power_2_scales=True), "bf16", steps=2, micro_batch=4, sequence=True),
    run(fp8("delayed", parameters=True, pad=True), "bf16", steps=2),
    run(
        fp8("current"),
        "bf16",
        model=EXPERTS,
        steps=2,
        micro_batch=4,
        recompute=Recompute(fraction=1.0),
    ),
    run(
        fp8("delayed"),
        "fp16",
        steps=3,
        micro_batch=4,
        scaling=LossScaling("dynamic", 2.0**40),
        zero_size=1,
    ),
]


def own_products() -> None:
    """From now on bf16 products are torch's own, also on a CPU where FP32 ones are faster and add
    in another order."""
    gemm._has_bf16_products = lambda: True


def through(one: Run) -> Run:
    """The same by Transformer Engine."""
    recipe = replace(one.changes["fp8"], backend="transformer_engine")
    return replace(one, changes={**one.changes, "fp8": recipe}, before=stand_in.install)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_training_is_bit_for_bit_that_of_torch(axes: dict[str, int]) -> None:
    results = train_all(
        [replace(RUNS[0], before=own_products), *RUNS[1:], *map(through, RUNS)], **axes
    )
    for one, theirs, ours in zip(RUNS, results[: len(RUNS)], results[len(RUNS) :], strict=True):
        assert [str(report) for report in ours.reports] == [
            str(report) for report in theirs.reports
        ], one
        assert ours.after.keys() == theirs.after.keys()
        assert all(
            torch.equal(values, theirs.after[name]) for name, values in ours.after.items()
        ), one
    assert any(report.outcome == "skipped_overflow" for report in results[-1].reports), (
        "no step had to be skipped"
    )


@pytest.mark.slow
def test_scales_are_those_of_one_process_by_torch() -> None:
    one = run(fp8(power_2_scales=True), steps=3)
    whole = alone(one)
    for rank in states([through(one)], tp=2)[0]:
        assert all(torch.equal(scale, whole.scale[name]) for name, scale in rank.scale.items())


@pytest.mark.slow
def test_memory_is_told_without_it() -> None:
    choose_kernel.cache_clear()  # what is tried in between is not counted
    model = ModelConfig(**MODEL)
    kept = [
        kept_bytes(model, plan("bf16", fp8=by(backend)), cuts(model, 1, 8), EngineOptions(2, 8))
        for backend in ("torch", "transformer_engine")
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (stand_in.missing, r"it is not installed \(no module transformer_engine\)"),
        (lambda: stand_in.installed("2.10.1"), "its release is 2.10.1"),
        (lambda: stand_in.installed("2.21.0.dev0"), "its release is 2.21.0.dev0"),
        (lambda: stand_in.installed("3.0"), "its release is 3.0"),
    ],
)
def test_who_asks_for_it_where_it_is_not_is_told_what_to_install(
    there: Callable[[], AbstractContextManager[object]], why: str
) -> None:
    with (
        there(),
        pytest.raises(UserError, match=f'^fp8.backend = "transformer_engine": {why}: {INSTALL}$'),
    ):
        FP8State.over(None, by("transformer_engine"), 2)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ('raise OSError("no libcublas.so.12\\nat all")', "no libcublas.so.12"),
        ("assert False", "AssertionError"),
    ],
)
def test_one_that_cannot_be_imported_is_told(
    raised: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"{raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=rf"it cannot be imported \({told}\): pip install"):
        transformer_engine.require()


@pytest.mark.parametrize("version", ["2.11.0", "2.20.2", "2.15.0+cu12"])
def test_a_known_release_will_do(version: str) -> None:
    with stand_in.installed(version):
        FP8State.over(None, by("transformer_engine"), 2)


def test_its_scales_are_of_whole_tensors() -> None:
    for kind in ("rowwise", "blockwise", "mx"):
        with pytest.raises(
            UserError,
            match=(sentence("fp8.backend_kind", backend="transformer_engine", kind=kind)),
        ):
            by("transformer_engine", kind=kind)


def refuses(*args: Any, **others: Any) -> Any:
    raise RuntimeError("no FP8 on this device. At line 7\nof some file")


def swaps(a: Any, b: Any, **others: Any) -> Any:
    return stand_in.general_gemm(b, a, **others)


class RoundsTwice(stand_in.Float8Quantizer):
    def quantize(self, tensor: Tensor, **others: Any) -> stand_in.Float8Tensor:
        return super().quantize(tensor.bfloat16(), **others)


class TurnsNothing(stand_in.Float8Quantizer):
    def quantize(self, tensor: Tensor, **others: Any) -> stand_in.Float8Tensor:
        made = super().quantize(tensor, **others)
        assert made.transpose is not None
        made.transpose = made.data.view(made.transpose.shape)
        return made


@pytest.mark.parametrize(
    ("name", "bug", "why"),
    [
        ("general_gemm", refuses, 'transformer_engine says "no FP8 on this device"'),
        ("general_gemm", swaps, "its transformer_engine_gemm kernel is wrong by"),
        ("Float8Quantizer", refuses, 'transformer_engine says "no FP8 on this device"'),
        ("Float8Quantizer", RoundsTwice, "its casts are not those of torch"),
        ("Float8Quantizer", TurnsNothing, "its casts are not those of torch"),
    ],
)
def test_one_that_errs_is_not_used(name: str, bug: Any, why: str) -> None:
    with stand_in.installed(), pytest.MonkeyPatch.context() as patch:
        module = stand_in.sys.modules[
            "transformer_engine.pytorch" + (".cpp_extensions" if name[0] == "g" else "")
        ]
        patch.setattr(module, name, bug)
        with raises(
            "fp8.fp8_backend_unavailable",
            backend="transformer_engine",
            device="cpu",
            why=re.compile(f"^{why}"),
        ):
            describe_kernels(by("transformer_engine"), CPU, torch.bfloat16, torch.float32)
        with pytest.raises(UserError, match=why):
            choose_kernel(
                "current", torch.float8_e4m3fn, False, torch.bfloat16, CPU, "transformer_engine"
            )
    assert set(describe_kernels(by("torch"), CPU, torch.bfloat16, torch.float32)) == set(PRODUCTS)


@pytest.mark.parametrize(
    ("there", "line"),
    [
        (
            stand_in.missing,
            re.escape(
                'fp8.backend = "transformer_engine": it is not installed '
                "(no module transformer_engine): pip install"
            ),
        ),
        (
            stand_in.installed,
            sentence("training.fp8_backend_device", reason='train.device is "cpu"'),
        ),
    ],
    ids=["missing", "no GPU"],
)
def test_a_run_that_asks_for_it_in_vain_ends_in_one_line_before_launch(
    there: Callable[[], AbstractContextManager[object]],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_run(tmp_path)
    capsys.readouterr()
    with there():
        assert (
            train(file, "fp8.kind=delayed", "fp8.backend=transformer_engine", "train.device=cpu")
            == 2
        )
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(line, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "table", ['[precision.nemo]\nrecipe = "bf16_with_fp8_mixed"', "[precision.smp.fp8_autocast]"]
)
def test_a_recipe_in_another_systems_words_can_be_left_to_it(table: str, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(f"{table}\n")
    told = load_run(file, MINIMAL).plan.fp8
    assert told is not None and told.backend == "torch"
    made = load_run(file, [*MINIMAL, "fp8.backend=transformer_engine"]).plan.fp8
    assert made == replace(told, backend="transformer_engine")
