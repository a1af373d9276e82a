"""Good files of every kind that the command reads, small, in one folder; each case changes a copy
of them."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch

from tests.fuzz.server import Command, Server
from tests.runs import RUN, write_run
from tools.convert.core.tensors import safetensors_in


def make(server: Server, folder: Path) -> None:
    """Fills `folder`: a run of four steps with its data and checkpoints, its weights in other
    formats, texts."""
    write_run(folder)
    shutil.rmtree(folder / "data")  # it names the text by its whole path
    (folder / "my.toml").write_text(
        RUN.format(folder=".").replace("steps = 6", "steps = 4\ndevice = 'cpu'")
    )
    _do(server, folder, "train", "my.toml", "checkpoint.every=2")
    _do(server, folder, "convert", "run", "hf", "--to", "hf", "--no-verify")
    _do(server, folder, "convert", "hf", "megatron", "--to", "megatron", "--tp", "2", "--no-verify")
    weights = {
        name: stored.read()
        for name, stored in safetensors_in(folder / "hf" / "model.safetensors").items()
    }
    old = shutil.copytree(folder / "hf", folder / "bin")
    (old / "model.safetensors").unlink()
    torch.save(weights, old / "pytorch_model.bin")
    outputs = ["-o", "own.txt", "-o", "timeline.json"]
    _do(server, folder, "schedule", "--pipeline=2", "--microbatches=4", *outputs)
    _put_texts(folder)
    _put_precision(folder)


def _put_texts(folder: Path) -> None:
    lines = [
        json.dumps({"text": line}) + "\n"
        for line in (folder / "text.txt").read_text("utf-8").splitlines()[:60]
    ]
    (folder / "text.jsonl").write_text("".join(lines), "utf-8")
    (folder / "text.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (folder / "text.jsonl.zst").write_bytes(
        pyarrow.compress("".join(lines).encode(), codec="zstd", asbytes=True)
    )
    table = pyarrow.table({"text": [json.loads(line)["text"] for line in lines]})
    pyarrow.parquet.write_table(table, folder / "text.parquet")
    (folder / "short.txt").write_text("".join(lines), "utf-8")


def _put_precision(folder: Path) -> None:
    (folder / "deepspeed.json").write_text('{"bf16": {"enabled": true}, "gradient_clipping": 1.0}')
    (folder / "nemo.yaml").write_text(
        "trainer:\n  precision: bf16-mixed\nmodel:\n  grad_allreduce_chunk_size_mb: 125\n"
    )
    (folder / "colossalai.py").write_text(
        "from colossalai.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.NAIVE, "
        "initial_scale=2**10)\n"
    )
    (folder / "plan.toml").write_text('[precision]\ncompute = "bf16"\nmasters = "split"\n')


def _do(server: Server, folder: Path, *argv: str) -> None:
    ended = server.run(Command(argv, str(folder), seconds=60))
    assert ended.code == 0, ended
