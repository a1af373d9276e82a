"""Real runs at a constant learning rate, by whose curves forecasts are made and tried.

`python -m tests.verdict.forecast_runs FIRST LAST [--text FILE]` trains the runs of these numbers, of
twelve families, some minutes for ten of them, and adds their curves to curves.json. Every fifth run
learns the text of --text, and is left out without it; those that are kept there have learned
Shakespeare's plays as char-rnn's repository has them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tools.journal.records import HELD_OUT_LOSS, read_metrics

CURVES = Path(__file__).parent / "curves.json"
WINDOW = ["model.window=32", "model.window_layers=[0]"]
FAMILIES: Mapping[str, list[str]] = {
    "llama": [],
    "gpt2": [],
    "gpt_neox": [],
    "mixtral": ["model.experts=4"],
    "qwen3": [],
    "olmo2": [],
    "gemma2": WINDOW,
    "gemma3": WINDOW,
    "qwen3_next": [
        "model.kv_heads=2",
        "model.delta_net={key_heads=2,value_heads=4,key_dim=16,value_dim=16}",
        "model.delta_layers=[0]",
    ],
    "deepseek_v2": ["model.latent={kv_rank=32,rope_dim=8,nope_dim=16,value_dim=16}"],
    "gpt_oss": ["model.experts=4", "model.experts_per_token=2", *WINDOW],
    "qwen2": [],
}
RUN = """
[model]
layers = 2
hidden = 64
heads = 4

[data]
source = "python"
max_chars = 3_000_000
vocab_size = 600

[lr]
peak = 2e-3
schedule = "constant"
warmup = 20

[train]
steps = 1200
global_batch = 8
micro_batch = 8
seq_length = 64
eval_every = 10
eval_samples = 64
"""


def texts(folder: Path, given: Path | None) -> list[str | None]:
    """Return the texts that the runs learn in turn; those that are made are written to a folder."""
    packages = Path(torch.__file__).parents[1]
    headers = sorted((packages / "torch" / "include").rglob("*.h"))[:1500]
    prose = [
        path
        for path in packages.rglob("*")
        if path.name == "METADATA" or path.suffix in (".md", ".rst")
    ]
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    made = {"cpp": headers, "prose": sorted(prose), "docs": pages}
    for name, files in made.items():
        content = b"".join(path.read_bytes() for path in files)
        (folder / f"{name}.txt").write_bytes(content)
    return [
        "python",
        *(str(folder / f"{name}.txt") for name in made),
        str(given) if given else None,
    ]


def settings(number: int) -> list[str]:
    """Return the keys of a run but for its text."""
    draw = random.Random(1000 + number)
    family = [*FAMILIES][number % len(FAMILIES)]
    batch_sizes = [4, 8, 8, 16]
    keys = [f'model.family="{family}"', *FAMILIES[family]]
    keys.append(f"model.hidden={draw.choice([32, 64, 96])}")
    keys.append(f"model.heads={draw.choice([2, 4])}")
    keys.append(f"model.layers={draw.choice([1, 2, 2, 3])}")
    keys.append(f"data.vocab_size={draw.choice([500, 800, 1200, 2500])}")
    rate = draw.choice([5e-4, 1e-3, 2e-3, 4e-3])
    batch = draw.choice(batch_sizes)
    keys += [f"train.global_batch={batch}", f"train.micro_batch={batch}"]
    keys.append(f"train.seq_length={draw.choice([48, 64, 96])}")
    keys.append(f'precision.compute="{draw.choice(["fp32", "fp32", "bf16"])}"')
    keys.append(f"train.steps={draw.choice([300, 400, 600, 800])}")
    warmup = draw.choice([0, 20, 100])
    keys.append(f"train.eval_samples={draw.choice([32, 64])}")
    if number % 4 != 3:
        keys += [f"lr.peak={rate}", f"lr.warmup={warmup}"]
    return keys


def train(number: int, text: str, folder: Path) -> dict[str, Any]:
    """Train a run and return its curve."""
    file = folder / "run.toml"
    file.write_text(RUN)
    run = folder / f"run{number}"
    keys = [*settings(number), f'data.source="{text}"', f'train.folder="{run}"']
    subprocess.run(
        [sys.executable, "-m", "megaprec", "train", str(file), *keys],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    evaluated = [record for record in read_metrics(run) if HELD_OUT_LOSS in record]
    return {
        "text": Path(text).stem,
        "settings": settings(number),
        "steps": [record["step"] for record in evaluated],
        "losses": [round(record[HELD_OUT_LOSS], 5) for record in evaluated],
    }


def curves() -> dict[int, dict[str, Any]]:
    """Return the curves that are kept, by the number of the run."""
    return {int(number): curve for number, curve in json.loads(CURVES.read_text()).items()}


def save(found: Mapping[int, dict[str, Any]]) -> None:
    """Keep curves, a line each."""
    lines = [f'"{number}": {json.dumps(curve)}' for number, curve in sorted(found.items())]
    CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Train the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    found = curves() if CURVES.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        sources = texts(Path(folder), args.text)
        for number in range(args.first, args.last + 1):
            text = sources[number % len(sources)]
            if text is None:
                continue
            found[number] = train(number, text, Path(folder))
            save(found)
            print(f"run {number}: {found[number]['losses'][-1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
