"""torchtitan's own training of a small Llama, followed: its seed checkpoint is converted, and
`megaprec train` has its losses and gradient norms, step by step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaprec.tokens.indexed import IndexedWriter
from tools import cli
from tools.console.toml import toml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCHTITAN = Path(sys.prefix) / "torchtitan"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TORCHTITAN.is_dir(), reason="needs torchtitan (make oracles)"),
]
STEPS = 50
SAMPLES = 8
LENGTH = 32
BOUND = 1e-5  # of a loss, in fp32
SETTINGS = {
    "dim": 48,
    "vocab": 128,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
    "hidden_dim": 96,
    "length": LENGTH,
    "theta": 10000.0,
    "seed": 1,
    "lr": 1e-2,
    "warmup": 10,
    "clip": 1.0,
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": SETTINGS["vocab"],
    "hidden_size": SETTINGS["dim"],
    "num_hidden_layers": SETTINGS["layers"],
    "num_attention_heads": SETTINGS["heads"],
    "num_key_value_heads": SETTINGS["kv_heads"],
    "intermediate_size": SETTINGS["hidden_dim"],
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": SETTINGS["theta"],
    "tie_word_embeddings": False,
}
WARMUP = 10
# torchtitan's step n has peak * (n + 1) / WARMUP, then the peak once more, and then falls to a
# tenth; its decay reaches norms too
RUN = {
    "data": {"source": "text", "begin": "none", "shuffle": False, "held_out": 0.0},
    "precision": {"compute": "fp32"},
    "optimizer": {
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip": 1.0,
        "groups": [{"pattern": "*", "all_dims": True}],
    },
    "lr": {
        "peak": 1e-2,
        "initial": 1e-2 / WARMUP,
        "warmup": WARMUP - 1,
        "schedule": "wsd",
        "wsd_decay": "linear",
        "decay": STEPS - WARMUP,
        "final": 1e-3,
    },
    "train": {
        "init_from": "converted",
        "steps": STEPS,
        "global_batch": SAMPLES,
        "micro_batch": SAMPLES // 2,
        "seq_length": LENGTH,
        "threads": 1,
        "folder": "run",
    },
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torchtitan's losses, its seed checkpoint as converted, and tokens of a text."""
    folder = tmp_path_factory.mktemp("titan")
    text = (ROOT / "LICENSE").read_bytes()  # it is the same in a year: so are the losses
    tokens = [*text, *text][: STEPS * SAMPLES * LENGTH + 1]
    with IndexedWriter(folder / "text", 128) as writer:
        writer.add_document(tokens)
    windows = torch.tensor(tokens).unfold(0, LENGTH + 1, LENGTH)
    torch.save(windows.reshape(STEPS, SAMPLES, LENGTH + 1).clone(), folder / "ids.pt")
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    program = [sys.executable, str(HERE / "titan_program.py"), str(folder)]
    subprocess.run(program, check=True, env={**os.environ, "PYTHONPATH": str(TORCHTITAN)})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    seed = folder / "step-0"
    assert cli.main(["convert", str(seed), str(folder / "converted"), "--to", "megaprec"]) == 0
    return folder


@pytest.mark.parametrize("layout", ["", "parallel.tensor=2"], ids=["one process", "tensor 2"])
def test_the_losses_of_torchtitans_own_run_are_followed(
    layout: str, followed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(followed)
    lines: list[str] = []
    for table, keys in RUN.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {toml(value)}" for key, value in keys.items()]
    Path("run.toml").write_text("\n".join(lines))
    words = ["run.toml", f"train.folder=run{layout}", *layout.split()]
    subprocess.run([sys.executable, "-m", "tools.cli", "train", *words], check=True)
    metrics = Path(f"run{layout}") / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    theirs = json.loads(Path("losses.json").read_text())
    assert theirs["losses"][-1] < theirs["losses"][0] - 2
    assert [record["loss"] for record in records] == pytest.approx(theirs["losses"], abs=BOUND)
    assert [record["grad_norm"] for record in records] == pytest.approx(theirs["norms"], rel=1e-4)
