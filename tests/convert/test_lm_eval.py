"""lm-evaluation-harness takes an exported model, without a network, and measures the loss that
`evaluate` does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_readme import ROOT
from tests.runs import checkpoint, train_on, write_run

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'lm-eval[hf]'")
pytestmark = pytest.mark.slow

TEXTS = [
    "the model learns\n",
    "über Öl — 数",
    "to say what it has seen in this text and 123 other 45 texts " * 3,
]
CHOICES = [
    {"question": "the model", "choices": [" learns", "9"], "answer": 0},
    {"question": "what", "choices": ["7", " it"], "answer": 1},
]
ROLLING = """
task: my_text
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
MULTIPLE = """
task: my_choices
dataset_path: json
dataset_kwargs: {data_files: {test: CHOICES}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
HARNESS = ["lm_eval", "--model", "hf", "--tasks", "my_text,my_choices", "--include_path", "tasks"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.usefixtures("forked_python")
def test_bits_per_byte_and_choices_of_an_exported_model(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        **OFFLINE,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }

    def said(*words: object) -> str:
        command = [sys.executable, "-m", *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, stdout=-1, text=True
        ).stdout

    file = write_run(tmp_path)
    train_on(file, "train.steps=30", "model.dropout=0", "lr.peak=2e-2")
    said("megaprec", "convert", checkpoint(tmp_path / "run", 30), "exported")
    texts = tmp_path / "texts.jsonl"
    choices = tmp_path / "choices.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    choices.write_text("".join(json.dumps(choice) + "\n" for choice in CHOICES))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "my_text.yaml").write_text(ROLLING.replace("TEXTS", str(texts)))
    (tmp_path / "tasks" / "my_choices.yaml").write_text(MULTIPLE.replace("CHOICES", str(choices)))
    model = [
        "--model_args",
        "pretrained=exported,dtype=float32",
        "--device",
        "cpu",
        "--output_path",
        "out.json",
    ]
    said(*HARNESS, *model)
    (found,) = tmp_path.glob("out_*.json")
    results = json.loads(found.read_text())["results"]
    for folder in ("exported", "run"):
        (ours,) = json.loads(said("megaprec", "evaluate", folder, "--data", texts, "--json"))[
            "sets"
        ]
        assert ours["bits_per_byte"] == pytest.approx(
            results["my_text"]["bits_per_byte,none"], rel=1e-6
        )
    assert results["my_choices"]["acc,none"] == 1
