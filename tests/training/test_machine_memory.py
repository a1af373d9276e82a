"""A start is refused for too little memory by what the ranks hold together at least."""

import pytest

from megaprec.errors import UserError
from tools.config.run_file import load_run
from tools.training import machine

RUN = (
    'model.family="llama"',
    "model.layers=8",
    "model.hidden=256",
    "model.heads=8",
    "model.ffn=1024",
    "model.vocab=512",
    "data.vocab_size=512",
    "precision.compute=bf16",
    "train.steps=10",
    "train.global_batch=8",
    "train.micro_batch=1",
    "train.seq_length=32",
    "parallel.data=8",
)


def refusals(monkeypatch: pytest.MonkeyPatch, zero: str, gigabytes: float) -> set[str]:
    """The codes of what keeps a machine of so much memory from the run."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: int(gigabytes * 10**9))
    monkeypatch.setattr(machine, "most_processes", lambda: 8)
    config = load_run(None, [*RUN, f"parallel.zero={zero}"])
    try:
        machine.check_machine(config, ranks=8, device="cpu")
    except UserError as error:
        return set(error.codes)
    return set()


def test_what_replicas_share_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8.7 million parameters on 8 replicas: bytes of each on every rank, and once."""
    parameters = 8.66e6
    too_little = {"training.too_little_memory"}
    for zero, on_every_rank, once in (
        ("false", 18, 0),
        ("true", 6, 12),
        ("2", 2, 16),
        ("3", 0, 18),
    ):
        least = parameters * (8 * on_every_rank + once) / 1e9
        assert refusals(monkeypatch, zero, 0.9 * least) == too_little, zero
        assert refusals(monkeypatch, zero, 1.1 * least) == set(), zero


def refusals_of_host_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, gigabytes: float
) -> set[str]:
    """The codes of what keeps a machine of so much host memory from the run with state there."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: int(gigabytes * 10**9))
    monkeypatch.setattr(machine, "most_processes", lambda: 8)
    config = load_run(None, [*RUN, "parallel.zero=true", "optimizer.offload=host"])
    monkeypatch.setattr(machine, "_available_bytes", lambda device, ranks: 10**12)
    try:
        machine.check_machine(config, ranks=8, device=device)
    except UserError as error:
        return set(error.codes)
    return set()


def test_state_in_host_memory_must_fit_there_and_not_be_there_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = 12 * 8.66e6 / 1e9  # masters and two moments
    too_little = {"training.too_little_host_memory"}
    assert refusals_of_host_memory(monkeypatch, "cuda", 0.9 * least) == too_little
    assert refusals_of_host_memory(monkeypatch, "cuda", 1.1 * least) == set()
    assert refusals_of_host_memory(monkeypatch, "cpu", 1000.0) == {"training.offload_on_cpu"}
