"""A file of another system is named as that system's, in one line with what to do, by every door
that takes a file."""

import json
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tools.config.run_file import known_keys, load_run
from tools.interop.arguments.megatron import READ, REFUSED, UNUSED
from tools.interop.foreign.read import read_foreign
from tools.interop.foreign.whose import KINDS, whose_file
from tools.interop.importing.run import import_run

HERE = Path(__file__).parents[2]
FILES = {
    "nemo.yaml": ("NeMo", "trainer:\n  devices: 8\n  max_steps: 10\nexp_manager: null\nmodel:\n  num_layers: 2\n"),
    "nemo2.yaml": ("NeMo 2", "_target_: nemo.collections.llm.api.pretrain\nmodel: null\n"),
    "bridge.yaml": ("Megatron-Bridge", "_target_: megatron.bridge.training.config.ConfigContainer\nmodel: null\n"),
    "config.json": ("Hugging Face", json.dumps({"model_type": "llama", "hidden_size": 64, "torch_dtype": "bfloat16"})),
    "args.yaml": ("Trainer", "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 5.0e-5\nbf16: true\n"),
    "args.json": ("Trainer", json.dumps({"output_dir": "out", "learning_rate": 5e-5, "num_train_epochs": 3})),
    "clm.sh": (
        "Trainer",
        ("python run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 8 "
            "--output_dir out\n"),
    ),
    "hf.py": ("Trainer", "from transformers import TrainingArguments\nargs = TrainingArguments(output_dir='x')\n"),
    "default_config.yaml": (
        "accelerate",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n",
    ),
    "shakespeare.py": ("nanoGPT", "out_dir = 'out'\nn_layer = 6\nblock_size = 256\nbatch_size = 64\n"),
    "nano.sh": ("nanoGPT", "python train.py config/a.py --block_size=64 --batch_size=12 --n_layer=4\n"),
    "llama3_8b.toml": ("torchtitan", "[job]\nx = 1\n[model]\nflavor = '8B'\n[training]\nsteps = 10\n"),
    "pythia.yaml": ("litgpt", "model_name: pythia-14m\nprecision: bf16-mixed\ntrain:\n  max_tokens: 100\n"),
    "lora.yml": ("Axolotl", "base_model: llama\ndatasets: []\nmodel_type: LlamaForCausalLM\nbf16: auto\n"),
    "pretraining.yml": ("Axolotl", "base_model: llama\npretraining_dataset:\n  - path: c4\nmax_steps: 5\n"),
    "dpo.yml": ("Axolotl", "base_model: llama\nrl: dpo\nval_set_size: 0\nmax_steps: 5\n"),
    "axolotl.py": ("Axolotl", "from axolotl.cli.train import do_train\ncfg = dict(base_model='llama')\n"),
    "hyperpod.yaml": (
        "HyperPod",
        ("run:\n  name: sft\n  model_type: llm_finetuning_aws\ntrainer:\n  devices: 8\n"
            "training_config:\n  training_args:\n    max_epochs: 3\n"),
    ),
    "launcher.yaml": ("HyperPod", "cluster_type: slurm\nbase_results_dir: results\nrecipes: llama\n"),
    "recipe.py": (
        "NeMo 2",
        ("from nemo.collections import llm\n\ndef mine():\n"
            "    return llm.llama3_8b.pretrain_recipe(num_nodes=1)\n"),
    ),
    "lightning.py": ("NeMo 2", "from nemo import lightning as nl\ntrainer = nl.Trainer(devices=8)\nmodel = None\n"),
    "nemorun.py": ("NeMo 2", "import nemo_run as run\nrun.run(recipe())\n"),
    "bridge.py": (
        "Megatron-Bridge",
        "from megatron.bridge.recipes.llama import llama3_8b\ncfg = llama3_8b()\ncfg.train.train_iters = 5\n",
    ),
    "sft.yaml": ("LLaMA-Factory", "model_name_or_path: llama\nstage: sft\nfinetuning_type: lora\n"),
    "neox.yml": ("GPT-NeoX", "pipe-parallel-size: 1\nnum-layers: 12\nzero_optimization:\n  stage: 1\n"),
    "mpt.yaml": ("Composer", "max_duration: 4800ba\nglobal_train_batch_size: 256\nprecision: amp_bf16\n"),
    "nano.yaml": ("nanotron", "tokens:\n  train_steps: 15\nparallelism:\n  dp: 2\n"),
    "tune.yaml": ("torchtune", "model:\n  _component_: torchtune.models.llama3.llama3_8b\ndtype: bf16\n"),
    "ds.yaml": ("DeepSpeed", "train_batch_size: 8\nzero_optimization:\n  stage: 1\n"),
    "tokenizer.json": ("tokenizer", json.dumps({"version": "1.0", "added_tokens": [], "model": {}})),
}  # fmt: skip


def written(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(FILES[name][1])
    return path


# what it reads: of the Trainer, GPT-NeoX, accelerate and torchtitan
IMPORTED = (
    "args.yaml",
    "clm.sh",
    "sft.yaml",
    "neox.yml",
    "default_config.yaml",
    "llama3_8b.toml",
)


@pytest.mark.parametrize("name", [name for name in FILES if name not in IMPORTED])
def test_import_args_names_whose_file_it_is_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        import_run([str(written(tmp_path, name))], {}, {}, None)
    (line,) = caught.value.problems
    assert FILES[name][0] in line and name in line and "did you mean" not in line


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".sh")])
def test_precision_show_reads_a_file_or_names_whose_it_is(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    try:
        read_foreign(path)
    except UserError as error:
        assert FILES[name][0] in error.problems[0], error.problems  # noqa: PT017
    else:
        assert name in ("nemo.yaml", "recipe.py")


@pytest.mark.parametrize("name", [*FILES, "ds.json", "megatron.sh"])
def test_a_command_that_takes_a_run_file_names_whose_file_it_was_given(
    name: str, tmp_path: Path
) -> None:
    if name == "ds.json":
        path = tmp_path / name
        path.write_text(json.dumps({"train_batch_size": 8}))
    elif name == "megatron.sh":
        path = tmp_path / name
        path.write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    else:
        path = written(tmp_path, name)
    with pytest.raises(UserError) as caught:
        load_run(path)
    (line,) = caught.value.problems
    assert FILES.get(name, ("import-args",))[0] in line or "import-args" in line


def test_a_run_file_is_sent_to_train_by_import_args(tmp_path: Path) -> None:
    for path in sorted((HERE / "examples").glob("*.toml")):
        with pytest.raises(UserError) as caught:
            import_run([str(path)], {}, {}, None)
        assert caught.value.problems == (
            f"{path}: a run file of megaprec: megaprec train {path} runs it",
        )


def test_no_mark_of_another_system_is_made_of_megatrons_arguments() -> None:
    theirs = {
        *READ,
        *UNUSED,
        *REFUSED,
        *(row.kept for row in READ.values()),
    }
    for kind in KINDS:
        assert not [mark for mark in kind.marks if set(mark.split()) <= theirs], kind.whose


def test_every_key_of_ours_that_a_line_names_is_there() -> None:
    for kind in KINDS:
        ours = [
            pair.rpartition(" is ")[2].rstrip(";")
            for pair in kind.way.split(", ")
            if " is " in pair
        ]
        for key in ours:
            tables = ("[parallel]", "[model]", "the product of [parallel]")
            assert key in (*known_keys(), "model.preset", *tables), key


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("odd.yaml", "alpha: 1\nbeta: 2\ngamma: 3\nlr: 4\n"),
        ("hydra.sh", "python main.py recipes=llama cluster=slurm recipes.run.name=a +x=1\n"),
        ("odd.json", '{"alpha": 1, "beta": 2, "gamma": 3}'),
        ("odd.sh", "python other.py --alpha 1 --beta 2 --gamma 3 --lr 1\n"),
        ("config.sh", "python train.py config/train_gpt2.py --batch_size=12 --compile=False\n"),
        (
            "named.sh",
            "torchrun --nproc-per-node 8 run_train.py --config-file examples/config.yaml\n",
        ),
        (
            "dotted.sh",
            "torchrun -m torchtitan.train --job.config_file ./llama3.toml --training.steps 5\n",
        ),
        ("odd.toml", "alpha = 1\n"),
        ("odd.py", "alpha = 1\n"),
    ],
)
def test_a_file_of_no_known_system_is_one_line_without_guesses(
    name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert whose_file(path, text) is None
    with pytest.raises(UserError) as caught:
        import_run([str(path)], {}, {}, None)
    (line,) = caught.value.problems
    assert name in line and "did you mean" not in line


def test_arguments_of_megatron_as_json_are_read_as_those_of_yaml(tmp_path: Path) -> None:
    content = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "lr": 1e-3,
    }
    content |= {
        "max_position_embeddings": 32,
        "micro_batch_size": 1,
        "train_iters": 10,
        "vocab_size": 512,
    }
    content |= {"data_path": "tokens/mine"}
    texts = list[str]()
    for name in ("args.json", "args.yaml"):
        (tmp_path / name).write_text(json.dumps(content))
        texts.append(import_run([str(tmp_path / name)], {}, {}, 1).text)
    lines = [text.replace(".json", ".yaml") for text in texts]
    assert "layers = 2" in texts[0] and lines[0] == lines[1]


def test_a_variable_in_a_yaml_file_is_given_by_assume_as_its_line_says(tmp_path: Path) -> None:
    content = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "lr": 1e-3,
    }
    content |= {
        "max_position_embeddings": 32,
        "micro_batch_size": 1,
        "train_iters": 10,
        "vocab_size": 512,
    }
    content |= {"data_path": "${DATA}/mine"}
    path = tmp_path / "args.yaml"
    path.write_text(json.dumps(content))
    made = import_run([str(path)], {}, {}, 1)
    assert any(
        "--data-path" in note and "--assume DATA=VALUE gives it" in note for note in made.notes
    )
    path.write_text(json.dumps(content | {"seed": "${SEED}"}))
    with pytest.raises(UserError) as caught:
        import_run([str(path)], {}, {}, 1)
    (line,) = caught.value.problems
    assert line.startswith("seed") and line.endswith("--assume SEED=VALUE gives it")
    path.write_text(json.dumps(content))
    assert 'source = "tokens/mine"' in import_run([str(path)], {}, {"DATA": "tokens"}, 1).text
