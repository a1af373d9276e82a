"""What a refusal of import-args asks for can be given as it says, in one round, and what changes no
number of a run needs no answer."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megaprec.errors import Problem, UserError
from tests.importing.public_scripts import answers_of
from tests.importing.scripts import SCRIPTS
from tools.cli import main
from tools.commands.import_answers import Asked, command_with_answers
from tools.config.run_file import load_run, read_run_settings
from tools.interop.arguments.megatron import REFUSED
from tools.interop.importing.run import Imported, import_run

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --lr 3e-4 "
    "--train-iters 100 --data-path tokens/mine --vocab-size 500"
)
OF_ANOTHER_MODEL = {name for name, refused in REFUSED.items() if "another model" in refused.why}
RUN = "torchrun --nproc-per-node 8 pretrain_gpt.py"


def imported(text: str, folder: Path, keys: Sequence[str] = ()) -> Imported:
    path = folder / "train.sh"
    path.write_text(text)
    settled, _ = read_run_settings(None, [*keys])
    return import_run([str(path)], settled, {}, None)


def problems(text: str, folder: Path) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        imported(text, folder)
    return caught.value.problems


@pytest.mark.parametrize(
    "given",
    [
        ["--drop", "skip-train", "--drop", "fim-rate"],
        ["--drop", "skip_train,fim_rate"],
        ["--drop", "--skip-train", "--drop", "--fim-rate"],
        ["--drop=--skip-train,fim-rate"],
    ],
)
def test_a_name_is_dropped_as_it_is_printed_and_as_megatron_keeps_it(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{BASE} --skip-train --fim-rate 0.25"
    assert main(["import-args", line, *given]) == 0
    assert "left out, as --drop says: --fim-rate 0.25" in capsys.readouterr().err


def test_the_command_that_a_refusal_ends_with_has_all_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = BASE.replace("--vocab-size 500", "").replace("--lr 3e-4", "--lr $LR")
    script = (
        f"DATA=$1\n{RUN} {line.replace('tokens/mine', '$DATA')} --sft --fim-rate 0.25 --no-such 3"
    )
    Path("my train.sh").write_text(f"{script}\n")
    assert main(["import-args", "my train.sh"]) == 2
    (told,) = re.findall("all answers at once.*: megaprec (.*)", capsys.readouterr().err)
    assert told == (
        "import-args 'my train.sh' --assume LR=VALUE --drop sft,fim-rate,no-such -o run.toml"
    )
    assert main([*shlex.split(told.replace("LR=VALUE", "LR=1e-4")), "model.vocab=500"]) == 0
    assert load_run(Path("run.toml")).lr.peak == 1e-4


@pytest.mark.parametrize(
    ("remedy", "answer"),
    [
        ("give model.preset=llama-3.1-8b (or llama-3-8b)", "model.preset=llama-3.1-8b"),
        ("give model.vocab=512.", "model.vocab=512"),
        ('give optimizer.name="muon", for example', 'optimizer.name="muon"'),
        ("give data.source=", "data.source=VALUE"),
    ],
)
def test_the_proposed_command_has_the_whole_value_of_a_key(remedy: str, answer: str) -> None:
    proposed = command_with_answers(Asked(["run.toml"]), [Problem(f"it is not known: {remedy}")])
    assert proposed.endswith(f": megaprec import-args run.toml {answer} -o run.toml")


def test_the_proposed_command_keeps_what_was_given_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = BASE.replace("--lr 3e-4", "--lr $LR --seed $SEED")
    Path("a.sh").write_text(f"{RUN} {line} --sft --fim-rate 0.25\n")
    given = ["--ranks", "4", "--assume", "SEED=7", "--drop", "sft", "-o", "to here.toml"]
    assert main(["import-args", "a.sh", *given]) == 2
    (told,) = re.findall("all answers at once.*: megaprec (.*)", capsys.readouterr().err)
    assert main(shlex.split(told.replace("LR=VALUE", "LR=1e-4"))) == 0
    run = load_run(Path("to here.toml"))
    assert (run.lr.peak, run.train.seed, run.parallel.data) == (1e-4, 7, 4)


def test_the_proposed_command_is_without_a_drop_of_what_is_not_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.sh").write_text(f"{RUN} {BASE} --sft --fim-rate 0.25\n")
    assert main(["import-args", "a.sh", "--drop", "no-such,sft", "--drop", "nothing"]) == 2
    said = capsys.readouterr().err
    assert "--drop nothing: no such argument is given" in said
    (told,) = re.findall("all answers at once.*: megaprec (.*)", said)
    assert told == "import-args a.sh --drop sft,fim-rate -o run.toml"
    assert main(shlex.split(told)) == 0
    assert main(["import-args", "a.sh", "--drop", "sft,fim-rate,nothing"]) == 2
    assert "import-args a.sh --drop sft,fim-rate -o run.toml" in capsys.readouterr().err


def test_the_proposed_command_names_what_is_missing_beside_deepspeed_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}')
    words = ["import-args", "ds.json", "model.preset=llama-demo", "--ranks", "2"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "llama-2-7b" not in said and "train.seq_length=4096" in said
    (told,) = re.findall("all answers at once.*: megaprec (.*)", said)
    assert "train.steps=" in told and "train.seq_length=" in told
    assert main(shlex.split(re.sub("(?<==)VALUE", "64", told))) == 0


def test_what_only_names_a_place_of_this_run_needs_no_answer(tmp_path: Path) -> None:
    places = '--save "$OUT/a" --load "$OUT/a" --tensorboard-dir $LOGS --vocab-file $1 --wandb-exp-name $(date)'
    made = imported(f"{RUN} {BASE} {places} --save-interval 10", tmp_path)
    assert "every = 10" in made.text and '"tensorboard"' in made.text and "$OUT" in made.text
    assert any("this folder is not known" in note for note in made.notes)
    assert not re.search(r"^(folder|init_from|branch_from) = ", made.text, re.MULTILINE)
    (line,) = problems(f"{RUN} {BASE} --save $OUT --load $OTHER", tmp_path)
    assert "--assume OTHER=VALUE" in line


@pytest.mark.parametrize(
    ("data", "row"),
    [
        ("", 'source = "FILL-IN/tokens"'),
        ("--mock-data", 'source = "FILL-IN/tokens"'),
        ("--data-args-path $A", 'source = "FILL-IN/tokens"'),
        ("--per-split-data-args-path list.json", 'source = "FILL-IN/tokens"'),
        ("--data-path $A/x", 'source = "$A/x"'),
        ("--data-path $(mix 3 $A/x) $(mix 1 $B/y)", 'source = "FILL-IN/tokens"'),
        ("--data-path 0.5 $A/x 0.5 $B/y", '{source = "$A/x", weight = 0.5}'),
        ("--train-data-path 3 $A/x 1 b", '{source = "$A/x", weight = 3.0}'),
        ("--data-path /data/*_document", 'source = "/data/*_document"'),
    ],
)
def test_files_of_data_are_no_question_and_a_run_without_them_does_not_start(
    data: str, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = BASE.replace("--data-path tokens/mine", data)
    made = imported(f"{RUN} {line} --split 1,0,0", tmp_path)
    assert row in made.text
    said = data.split(" ")[0] or "--data-path is not given"
    assert any(note.startswith(said) for note in made.notes)
    run = tmp_path / "run.toml"
    run.write_text(made.text)
    place = f"train.folder={tmp_path / 'run'}"
    assert main(["train", str(run), "train.steps=1", "parallel.data=1", place]) == 2
    assert "FILL-IN" in (err := capsys.readouterr().err) or "$A" in err or "/data/" in err


@pytest.mark.parametrize(
    ("tokenizer", "row"),
    [
        ("--tokenizer-type Mystery", "FILL-IN/tokenizer.json"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $T", "$T"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $T/x", "$T/x/tokenizer.json"),
    ],
)
def test_a_tokenizer_that_is_not_here_is_no_question(
    tokenizer: str, row: str, tmp_path: Path
) -> None:
    made = imported(f"{RUN} {BASE.replace('--vocab-size 500', tokenizer)}", tmp_path)
    assert f'tokenizer = "{row}"' in made.text
    assert any("tokenizer" in note and ("FILL-IN" in note or "$T" in note) for note in made.notes)


def test_a_seed_that_the_shell_draws_is_no_question(tmp_path: Path) -> None:
    made = imported(f"{RUN} {BASE} --seed $RANDOM", tmp_path)
    assert "\nseed = 1234 " in made.text
    assert any(note.startswith("--seed $RANDOM: drawn anew") for note in made.notes)


def test_words_of_validation_data_that_are_not_known_begin_no_argument(tmp_path: Path) -> None:
    made = imported(f"{RUN} {BASE} --valid-data-path 1 $A/x --swiglu", tmp_path)
    assert 'mlp = "swiglu"' in made.text and "--valid-data-path 1 $A/x" in made.text


def test_a_key_beside_counts_instead_of_data_that_is_not_known(tmp_path: Path) -> None:
    line = BASE.replace("--data-path tokens/mine", "")
    for data in ("--mock-data", "--data-path 0.5 $A/x 0.5 $B/y", "--data-args-path $A"):
        made = imported(f"{RUN} {line} {data}", tmp_path, ("data.source=tokens/mine",))
        assert 'source = "tokens/mine"' in made.text
    made = imported(f"{RUN} {line} --train-data-path 3 a 1 b --valid-data-path c", tmp_path)
    assert "held_out = 0.0" in made.text and "blend = " in made.text


def test_what_is_missing_and_what_is_refused_are_asked_for_together(tmp_path: Path) -> None:
    line = BASE.replace("--seq-length 32", "").replace("--lr 3e-4", "")
    said = problems(f"{RUN} {line} --fim-rate 0.25", tmp_path)
    assert [problem.split()[0] for problem in said] == ["--fim-rate", "--seq-length", "--lr"]


@pytest.mark.parametrize(
    "given",
    [
        "--decoupled-lr 5e-4 --decoupled-min-lr 4e-5",
        "--start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style cosine",
    ],
)
def test_arguments_that_mean_one_thing_together_are_one_question(
    given: str, tmp_path: Path
) -> None:
    (line,) = problems(f"{RUN} {BASE} {given}", tmp_path)
    assert line.startswith(given)
    path = tmp_path / "train.sh"
    assert answers_of(path) == (1, "")


def test_ranks_of_experts_are_asked_for_and_never_left_out(tmp_path: Path) -> None:
    experts = f"{BASE} --disable-bias-linear --num-experts 8 --expert-model-parallel-size 8"
    (line,) = problems(f"python pretrain_gpt.py {experts}", tmp_path)
    assert line.startswith("--expert-model-parallel-size 8") and "--ranks N" in line
    node = "--nproc_per_node 8 --nnodes 1 --node_rank $SLURM_NODEID"
    assert "\nexpert = 8 " in imported(f"torchrun {node} pretrain_gpt.py {experts}", tmp_path).text


def test_the_defaults_that_count_are_a_note(tmp_path: Path) -> None:
    made = imported(f"TP=${{TP:-2}}\n{RUN} {BASE} --tensor-model-parallel-size $TP", tmp_path)
    assert "\ntensor = 2 " in made.text
    assert any("taken as not set" in note and "$TP" in note for note in made.notes)


def test_a_spec_is_the_same_as_words_and_as_a_list(tmp_path: Path) -> None:
    words = ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")
    others = f"{BASE} --hybrid-override-pattern M-M- --mamba-num-groups 2 --mamba-head-dim 16 --position-embedding-type none"
    typed = import_run([f"{others} --spec {' '.join(words)}"], {}, {}, 1)
    path = tmp_path / "spec.yaml"
    for spec in (f"--spec: [{', '.join(words)}]", f"spec:\n- {words[0]}\n- {words[1]}"):
        path.write_text(f"{spec}\n")
        listed = import_run([str(path), others], {}, {}, 1)
        assert (
            listed.text.split("[model]")[1].split("#")[0]
            == typed.text.split("[model]")[1].split("#")[0]
        )


# parts of names of arguments, and how a reason says them
IN_WORDS = {
    "lr": "learning rate", "wd": "weight decay", "ckpt": "checkpoint", "entropy": "loss", "qk": "queries",
    "dataloader": "data loader", "mock": "made up", "iterations": "iterations", "skip": "ends", "param": "[fp8]",
    "upcycling": "initial weights", "phase": "phase", "embedding": "layers", "pipeline": "stage", "batch": "micro-batch",
}  # fmt: skip
GENERAL = ("use", "num", "no", "size", "type", "args", "path", "layers", "step", "file")


@pytest.mark.parametrize("name", sorted({*REFUSED} - OF_ANOTHER_MODEL))
def test_the_reason_of_an_argument_is_about_it(name: str) -> None:
    why = REFUSED[name].why.lower()
    parts = [part for part in name.split("_") if part not in GENERAL]
    # five letters are enough of a word, for it may have another ending
    assert any(IN_WORDS.get(part, part[:5]) in why for part in parts), why


DS = """cat <<EOT > $CONFIG
{"train_batch_size": $GLOBAL, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10,
 "gradient_clipping": 1.0, "zero_optimization": {"stage": $STAGE}, "bf16": {"enabled": true}}
EOT
"""
ENGINE = "--deepspeed --deepspeed_config $CONFIG --zero-stage $STAGE --no-pipeline-parallel"


def test_a_configuration_that_a_script_writes_is_read_with_it(tmp_path: Path) -> None:
    line = f"{RUN} {BASE} --bf16 {ENGINE} --num-key-value-heads 2 --normalization rmsnorm"
    made = imported(f"CONFIG=out/ds.json\nGLOBAL=8\nSTAGE=1\n{DS}{line}", tmp_path)
    for row in ("zero = true ", 'norm = "rms"', "kv_heads = 2 ", "global_batch = 8 "):
        assert f"\n{row}" in made.text
    said = problems(f"CONFIG=out/ds.json\nGLOBAL=16\nSTAGE=1\n{DS}{line}", tmp_path)
    assert any("16" in problem and "keep one" in problem for problem in said)
    said = problems(f"CONFIG=ds.json\nSTAGE=1\n{line}", tmp_path)
    assert said[0].startswith("--deepspeed_config ds.json") and "beside" in said[0]
    (tmp_path / "ds.json").write_text('{"train_batch_size": GBSIZE}')
    said = problems(f"CONFIG=ds.json\nSTAGE=1\n{line}", tmp_path)
    assert "GBSIZE" in said[0]


FSDP = "--use-megatron-fsdp"
SHARDS = "--data-parallel-sharding-strategy"


@pytest.mark.parametrize(
    ("arguments", "zero"),
    [
        (f"{FSDP} {SHARDS} no_shard", "false"),
        (f"{FSDP} {SHARDS} optim", "true"),
        (f"{FSDP} {SHARDS} optim_grads", "2"),
        (f"{FSDP} {SHARDS} optim_grads_params --use-distributed-optimizer", "3"),
        (f"--use-custom-fsdp {SHARDS} optim_grads_params", "3"),
        (FSDP, "3"),
        ("--use-torch-fsdp2", "3"),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "2"),
        # without FSDP what it shards is nothing
        (f"{SHARDS} optim_grads --use-distributed-optimizer", "true"),
        ("--torch-fsdp2-no-reshard-after-forward", "false"),
    ],
)
def test_what_megatrons_fsdp_shards_is_the_stage_of_zero(
    arguments: str, zero: str, tmp_path: Path
) -> None:
    made = imported(f"{RUN} {BASE} --bf16 {arguments}", tmp_path)
    assert f"\nzero = {zero} " in made.text
    assert any("without --data-parallel-shard" in note for note in made.notes) == (
        arguments == FSDP
    )
    first, *_ = arguments.split()
    unused = made.text.partition("# Not used here: ")[2]
    assert (first in unused) == (not first.startswith("--use-"))


@pytest.mark.parametrize(("stage", "zero"), [("1", "true"), ("2", "2"), ("3", "3")])
def test_a_stage_of_megatron_deepspeed_is_that_of_zero(
    stage: str, zero: str, tmp_path: Path
) -> None:
    made = imported(f"{RUN} {BASE} --bf16 --deepspeed --zero-stage {stage}", tmp_path)
    assert f"\nzero = {zero} " in made.text


def test_auto_is_what_the_trainer_of_hugging_face_fills_in(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}')
    with pytest.raises(UserError) as caught:
        import_run([str(path)], {}, {}, None)
    first, second = caught.value.problems[:2]
    assert "--per_device_train_batch_size: give train.micro_batch=" in first
    assert "--max_grad_norm: give optimizer.clip=" in second


@pytest.mark.parametrize(("name", "most"), [("gpt", 3), ("llama", 2), ("mixtral", 2)])
def test_a_script_of_megatrons_kind_needs_few_answers(name: str, most: int, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPTS[name])
    count, why = answers_of(path)
    assert count is not None and count <= most, why


def test_settings_of_another_program_that_a_line_quotes_are_no_answer() -> None:
    problem = Problem("a.sh: no command (the last is `nemo llm pretrain trainer.max_steps=9`)")
    assert not command_with_answers(Asked(["a.sh"]), [problem])
