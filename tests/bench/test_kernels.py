"""The kernels of a step are summed by name, and the time in which none ran is found."""

from types import SimpleNamespace

import pytest
import torch

from tools.bench.kernels import Kernel, kernel_record, kernels_among


def test_idle_time_is_that_in_which_no_stream_had_a_kernel() -> None:
    record = kernel_record(
        [
            Kernel("product", 0.0, 100.0),
            Kernel("sum", 50.0, 70.0),  # beside the product, on another stream
            Kernel("product", 150.0, 200.0),
        ]
    )
    assert record["idle_share"] == 0.25
    assert record["kernel_span_ms"] == 0.2
    assert record["kernels"] == 3
    assert record["kernel_table"] == [
        ["product", 2, 0.15, pytest.approx(0.8824)],
        ["sum", 1, 0.02, pytest.approx(0.1176)],
    ]


def test_what_takes_little_time_is_one_row() -> None:
    kernels = [Kernel(f"kernel {n}", 10.0 * n, 10.0 * n + n) for n in range(1, 9)]
    table = kernel_record(kernels, rows=2)["kernel_table"]
    assert [row[0] for row in table] == ["kernel 8", "kernel 7", "all others"]
    assert sum(row[1] for row in table) == 8
    assert sum(row[3] for row in table) == pytest.approx(1.0, abs=1e-3)


def test_calls_of_the_host_and_spans_that_a_program_names_are_no_kernels() -> None:
    on_gpu = torch.autograd.DeviceType.CUDA
    times = SimpleNamespace(start=1.0, end=3.0)
    events = [
        SimpleNamespace(name="aten::mm", device_type=torch.autograd.DeviceType.CPU),
        SimpleNamespace(name="step", device_type=on_gpu, is_user_annotation=True, time_range=times),
        SimpleNamespace(
            name="product", device_type=on_gpu, is_user_annotation=False, time_range=times
        ),
    ]
    assert kernels_among(events) == [Kernel("product", 1.0, 3.0)]
    assert kernel_record([]) == {"kernels": 0}
