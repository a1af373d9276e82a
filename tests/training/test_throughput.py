"""Model TFLOP/s and MFU of a run: from its tokens a second, and the peak that is given or known."""

import json
from pathlib import Path

import pytest
import torch

from models.estimate.flops import training_flops
from tests.runs import train, write_run
from tools.config.run_file import load_run
from tools.training.step_records import Throughput, peak_tflops

CPU = torch.device("cpu")


def test_each_record_has_the_flops_of_its_tokens_and_mfu_of_the_given_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    assert train(file, "train.steps=2", "log.peak_tflops=0.5") == 0
    config = load_run(file)
    each = training_flops(config.sized_model.with_vocab(330), config.train.seq_length)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["tflops"] == pytest.approx(record["tokens_per_s"] * each / 1e12)
        assert record["mfu"] == pytest.approx(record["tflops"] / 0.5)
    assert "FLOP/s  MFU " in capsys.readouterr().out


def test_a_rank_has_its_share_of_the_flops_and_a_custom_model_none(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    one, four = (load_run(file, [f"parallel.data={data}"]) for data in (1, 4))
    model = one.sized_model
    length = one.train.seq_length
    of_one, of_four = (Throughput.of(config, model, CPU).token_flops for config in (one, four))
    assert of_four == {length: of_one[length] / 4}
    custom = model.model_copy(update={"factory": "a.py:b"})
    assert Throughput.of(one, custom, CPU).fields(10.0, length) == {}


def test_the_flops_of_a_step_are_those_of_the_length_of_its_sequences(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    assert train(file, "train.steps=2", "train.seq_schedule=[[0,4],[8,16]]") == 0
    model = load_run(file).sized_model.with_vocab(330)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for record, length in zip(records, (4, 16), strict=True):
        each = training_flops(model, length)
        assert record["tflops"] == pytest.approx(record["tokens_per_s"] * each / 1e12)


def test_without_a_known_peak_there_is_no_mfu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run(write_run(tmp_path), ["precision.compute=bf16"])
    assert peak_tflops(config, CPU) == 0
    assert "mfu" not in Throughput.of(config, config.sized_model, CPU).fields(10.0, 16)
    for name, peak in (("NVIDIA H200", 989), ("a GPU of tomorrow", 0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(config, torch.device("cuda", 0)) == peak
