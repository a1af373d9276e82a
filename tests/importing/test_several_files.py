"""A script that runs another, and YAML that goes on in other files, are followed as far as they are
there; arguments of other years and programs are read as these meant them."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from megaprec.errors import UserError
from tests.importing.test_answers import BASE, RUN, imported
from tests.importing.test_scripts import PRINT, START
from tools.config.run_file import load_run, read_run_settings
from tools.interop.importing.run import Imported, import_run
from tools.interop.importing.shell import read_script

PROGRAM = "torchrun --nproc-per-node 4 pretrain_gpt.py"
# the script that is started, and others by their names
RUNS = {
    "bash": ("export A=3\nB=4\nbash b.sh", {"b.sh": "RUN --a $A --b ${B:-2}"}),
    "arguments": ("bash b.sh x 'y z'", {"b.sh": 'RUN --a $1 --b "$2" --c ${3:-5} --n $#'}),
    "all arguments": ("bash b.sh --a '1 2'", {"b.sh": 'RUN "$@"'}),
    "cut arguments": ("bash b.sh --a '1 2'", {"b.sh": "RUN $@ --n $#"}),
    "no arguments": ("bash b.sh", {"b.sh": 'if [ $# -eq 0 ]; then X=1; fi\nRUN --a $X "$@"'}),
    "in a folder": ("bash ./sub/b.sh", {"sub/b.sh": "RUN --a 1"}),
    "of another": ("sh b.sh", {"b.sh": "export A=2\nbash c.sh", "c.sh": "RUN --a $A"}),
    "taken in": ("export A=2\n. ./b.sh\nbash c.sh", {"b.sh": "A=5", "c.sh": "RUN --a $A"}),
    "written": ("A=1\nbash b.sh\nRUN --a $A", {"b.sh": "A=2\nexit 3"}),
    "command": ("export C='RUN --a 1'\nbash b.sh", {"b.sh": 'srun -l bash -c "$C --b 2"'}),
}


def placed(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("RUN ", f"{PROGRAM} "))
    return folder / next(iter(files))


@pytest.mark.parametrize("name", RUNS)
def test_words_of_a_script_that_another_runs_are_those_that_bash_passes(
    name: str, tmp_path: Path
) -> None:
    text, others = RUNS[name]
    path = placed(tmp_path, {"a.sh": text, **others})
    for program, content in {"torchrun": PRINT, "srun": START}.items():
        file = tmp_path / program
        file.write_text(content)
        file.chmod(0o755)
    search = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "a.sh"], env={"PATH": search}, capture_output=True, text=True, cwd=tmp_path
    )
    found = read_script(path.read_text(), path, {})
    assert not [word for word in found.words if word.unknown]
    assert "|".join([*(word.text for word in found.words), ""]) == done.stdout


def test_a_script_whose_folder_is_not_known_is_the_one_there_and_a_note(tmp_path: Path) -> None:
    files = {"a.sh": "bash $SOME_DIR/tools/b.sh", "b.sh": f"{PROGRAM} {BASE}"}
    path = placed(tmp_path, files)
    made = import_run([str(path)], {}, {}, None)
    assert any("$SOME_DIR/tools/b.sh is taken as b.sh" in note for note in made.notes)
    placed(tmp_path, {"sub/b.sh": "python other.py --a 1"})
    with pytest.raises(UserError, match="0 commands"):
        import_run([str(path)], {}, {}, None)


@pytest.mark.parametrize("text", ["bash a.sh", "bash b.sh", "exec bash b.sh; bash b.sh"])
def test_scripts_that_run_each_other_end(text: str, tmp_path: Path) -> None:
    path = placed(tmp_path, {"a.sh": text, "b.sh": "bash a.sh\nbash b.sh"})
    with pytest.raises(UserError, match="0 commands"):
        read_script(path.read_text(), path, {})


@pytest.mark.parametrize(
    "text",
    ["bash $A/" + "x" * 300 + ".sh", 'bash "a\nb.sh" c', "&& true", "f() { && true; }\nf", "case"],
)
def test_a_line_that_is_no_command_ends_in_a_refusal(text: str, tmp_path: Path) -> None:
    path = placed(tmp_path, {"a.sh": f"A=$1\n{text}\n"})
    with pytest.raises(UserError, match="0 commands"):
        import_run([str(path)], {}, {}, None)


def test_an_end_of_the_script_that_is_passed_by_is_a_note(tmp_path: Path) -> None:
    for end in ("if [ $# -ne 2 ]; then\nexit 1\nfi", "[ -z $KEY ] && exit 1"):
        made = imported(f"{end}\n{RUN} {BASE}", tmp_path)
        (note,) = [note for note in made.notes if "passed by" in note]
        assert "train.sh, line 1" in note


def test_a_pattern_of_file_names_is_not_known_and_other_stars_are_words(tmp_path: Path) -> None:
    line = BASE.replace("tokens/mine", "$D/*_text")
    made = imported(f"D=/data\n{RUN} {line}", tmp_path)
    assert any("/*_text is not followed" in note for note in made.notes)
    script = f"{RUN} --a [0]*3+[1]*2 --b 'x/*' --c \"y/*\" --d z/?"
    words = read_script(script, tmp_path / "train.sh", {}).words
    assert [word.text for word in words if word.unknown] == ["z/?"]


def test_a_sum_of_expr_is_followed(tmp_path: Path) -> None:
    text = f"N=4\n{RUN} --a $(expr 64 / $N) --b $(expr $N \\* 2 + 1) --c $(expr length x)"
    words = read_script(text, tmp_path / "train.sh", {}).words
    assert [word.text for word in words if not word.unknown] == ["--a", "16", "--b", "9", "--c"]


def test_names_of_2020_are_read_as_they_were_meant(tmp_path: Path) -> None:
    new = (
        f"{BASE} --lr-warmup-fraction 0.1 --tensor-model-parallel-size 2 --global-batch-size 24 "
        "--micro-batch-size 4"
    )
    old = BASE.replace("--micro-batch-size 1 --global-batch-size 8", "")
    old += " --warmup 0.1 --model-parallel-size 2 --batch-size 4 --num-microbatches-in-minibatch 3"
    runs = []
    for line in (new, old):
        path = tmp_path / "run.toml"
        path.write_text(imported(f"torchrun --nproc-per-node 4 a.py {line}", tmp_path).text)
        runs.append(load_run(path))
    assert runs[0] == runs[1] and runs[0].train.global_batch == 24 and runs[0].lr.warmup == 10


@pytest.mark.parametrize(
    ("given", "cuts"),
    [
        ("--num-layers 10 --pp-partition-method type:transformer|embedding", "[2, 3, 3, 2]"),
        (
            "--num-layers 10 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            "[2, 3, 3, 2]",
        ),
        ("--num-layers 11 --account-for-loss-in-pipeline-split", "[3, 3, 3, 2]"),
        ("--num-layers 11 --account-for-embedding-in-pipeline-split", "[2, 3, 3, 3]"),
        ("--num-layers 8 --pp-partition-method type:transformer", "[2, 2, 2, 2]"),
    ],
)
def test_embedding_and_head_count_as_layers_where_they_are_said_to(
    given: str, cuts: str, tmp_path: Path
) -> None:
    line = BASE.replace("--num-layers 4", f"{given} --pipeline-model-parallel-size 4")
    words = line.replace("|", "\\|")
    assert f"\ncuts = {cuts} " in imported(f"python a.py {words}", tmp_path).text


def test_another_way_to_cut_stages_is_refused(tmp_path: Path) -> None:
    line = f"{BASE} --pipeline-model-parallel-size 2 --pp-partition-method parameters"
    with pytest.raises(UserError, match="--pp-partition-method parameters"):
        imported(f"python a.py {line}", tmp_path)


def test_arguments_of_forks_become_the_same_model(tmp_path: Path) -> None:
    made = imported(f"{RUN} {BASE} --attention-head-type multiquery --no-scaled-init", tmp_path)
    assert "\nkv_heads = 1 " in made.text and '\ninit = {shrink = "none"} ' in made.text
    with pytest.raises(UserError, match="--attention-head-type groupedquery"):
        imported(f"{RUN} {BASE} --attention-head-type groupedquery", tmp_path)


TABLE = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "lr": 3e-4,
    "max_position_embeddings": 64, "micro_batch_size": 1, "global_batch_size": 8,
    "train_iters": 100, "vocab_size": 500, "data_path": "tokens/mine",
}  # fmt: skip


def of_yaml(folder: Path, files: dict[str, object]) -> Imported:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    settled, _ = read_run_settings(None, [])
    return import_run([str(folder / next(iter(files)))], settled, {}, None)


def test_the_yaml_of_megatron_core_means_its_flags(tmp_path: Path) -> None:
    of_core = {"activation_func": "swiglu", "perform_initialization": True, "batch_p2p_comm": True}
    made = of_yaml(tmp_path, {"a.yaml": {"language_model": TABLE | of_core}})
    assert '\nmlp = "swiglu" ' in made.text
    for change in ({"perform_initialization": False}, {"activation_func": "xielu"}):
        with pytest.raises(UserError, match=r"initiali|activation"):
            of_yaml(tmp_path, {"a.yaml": {"language_model": TABLE | change}})


def primus(overrides: dict[str, object]) -> dict[str, object]:
    trainer = {"framework": "megatron", "config": "t.yaml", "model": "m.yaml"}
    trainer["overrides"] = overrides  # type: ignore[assignment]
    configs = "primus/configs"
    return {
        "examples/x/run.yaml": {
            "exp_name": "${EXP:mine}",
            "modules": {"pre_trainer": trainer},
        },
        f"{configs}/modules/megatron/t.yaml": {"extends": ["../base.yaml"], "lr": 3e-4},
        f"{configs}/modules/base.yaml": {"lr": 9.0, "min_lr": 1e-5, "own_kernel": 3},
        f"{configs}/models/megatron/m.yaml": TABLE | {"num_layers": 2},
    }


def test_files_that_extend_others_count_in_primus_order(tmp_path: Path) -> None:
    made = of_yaml(tmp_path, primus({"num_layers": 6, "seed": "${SEED:7}"}))
    for row in ("layers = 6 ", "peak = 0.0003 ", "final = 1e-05 ", "seed = 7 "):
        assert f"\n{row}" in made.text
    assert any("defaults is not read: own_kernel" in note for note in made.notes)
    assert any("taken as not set" in note and "$SEED" in note for note in made.notes)
    with pytest.raises(UserError, match="--own-loss"):
        of_yaml(tmp_path, primus({"own_loss": 2}))


@pytest.mark.parametrize("extends", ["../../../../out.yaml", "/etc/hostname", "t.yaml", "no.yaml"])
def test_a_file_that_extends_what_it_must_not_is_refused(extends: str, tmp_path: Path) -> None:
    (tmp_path / "out.yaml").write_text("lr: 1\n")
    files = primus({})
    files["primus/configs/modules/megatron/t.yaml"] = {"extends": [extends], "lr": 3e-4}
    with pytest.raises(UserError):
        of_yaml(tmp_path, files)


def flagscale(changes: dict[str, object], name: str = "7b") -> dict[str, object]:
    runner = {"nnodes": 2, "nproc_per_node": 4}
    first = {"defaults": [{"train": name}, "_self_"], "experiment": {"runner": runner}}
    model = {key: value for key, value in TABLE.items() if key != "data_path"} | changes
    parts = {"system": {"bf16": True}, "model": model, "data": {"data_path": "${d:??}"}}
    return {"train.yaml": first, "train/7b.yaml": parts}


def test_the_settings_that_a_list_of_defaults_names_are_read(tmp_path: Path) -> None:
    made = of_yaml(tmp_path, flagscale({"tensor_model_parallel_size": 2}))
    assert "\ndata = 4 " in made.text and '\nsource = "${d:??}" ' in made.text
    with pytest.raises(UserError, match=r"train/8b\.yaml"):
        of_yaml(tmp_path, flagscale({}, "8b"))
    with pytest.raises(UserError, match=r"7b\.yaml: data_path is"):
        of_yaml(tmp_path, flagscale({"data_path": "tokens/mine"}))
    with pytest.raises(UserError, match="--norm-init-weight"):
        of_yaml(tmp_path, flagscale({"norm_init_weight": 0.02}))
