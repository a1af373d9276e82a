"""Arguments of Hugging Face's Trainer, LLaMA-Factory and ms-swift become the run that they meant, or
are refused by name."""

import inspect
import json
from pathlib import Path

import pytest
import torch
import yaml

from megaprec.errors import UserError
from tools.config.rules.derived import lr_schedule
from tools.config.run_file import load_run, read_run_settings
from tools.interop.importing import trainer
from tools.interop.importing.run import Imported, import_run

SWIFT = """NPROC_PER_NODE=4 swift pt --model some/model --tuner_type full --dataset a/b --torch_dtype bfloat16 \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps $(expr 16 / 4) --max_steps 1001 \\
  --warmup_ratio 0.05 --max_length 64 --deepspeed zero3 --output_dir out --save_steps 50 --packing true
"""
FACTORY = {
    "model_name_or_path": "some/model", "stage": "pt", "finetuning_type": "full", "cutoff_len": 64,
    "dataset": "c4", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
    "learning_rate": 1e-4, "max_steps": 100, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1,
    "bf16": True, "deepspeed": "conf/ds.json", "resume_from_checkpoint": None,
}  # fmt: skip
AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}  # fmt: skip


def imported(path: Path, ranks: int | None = None, keys: list[str] | None = None) -> Imported:
    settled, _ = read_run_settings(None, keys or [])
    return import_run([str(path)], settled, {}, ranks)


def written(folder: Path, changes: dict[str, object]) -> Path:
    config = folder / "conf" / "ds.json"
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps(AUTO))
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(FACTORY | changes))
    return path


def test_a_script_of_swift_becomes_its_run(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SWIFT)
    made = imported(path)
    for row in (
        'init_from = "some/model" ', "global_batch = 32 ", "micro_batch = 2 ", "steps = 1001 ",
        "seq_length = 64 ", "data = 4 ", "zero = 3 ", "warmup = 51 ", 'schedule = "cosine" ',
        "peak = 1e-05 ", "weight_decay = 0.1 ", "betas = [0.9, 0.95] ", 'compute = "bf16" ',
        'source = "FILL-IN/tokens" ', 'folder = "out" ', "every = 50 ",
    ):  # fmt: skip
        assert f"\n{row}" in made.text, row
    for said in ("--dataset a/b", "train.init_from takes a folder"):
        assert any(said in note for note in made.notes), said
    assert "# default of ms-swift" in made.text


def test_yaml_of_llama_factory_and_its_deepspeed_become_their_run(tmp_path: Path) -> None:
    made = imported(written(tmp_path, {}), ranks=4)
    for row in (
        "global_batch = 24 ", "warmup = 10 ", "peak = 0.0001 ", "zero = 2 ", "weight_decay = 0.0 ",
        "betas = [0.9, 0.999] ", "clip = 1.0 ",
    ):  # fmt: skip
        assert f"\n{row}" in made.text, row


@pytest.mark.parametrize(
    ("change", "every"),
    [
        ({}, "every = 500 "),
        ({"save_steps": 20}, "every = 20 "),
        ({"save_strategy": "steps", "save_steps": 20}, "every = 20 "),
        ({"save_strategy": "no"}, "every = 0 "),
        # what YAML makes of no
        ({"save_strategy": False, "save_steps": 20}, "every = 0 "),
    ],
)
def test_checkpoints_are_saved_as_the_strategy_says(
    change: dict[str, object], every: str, tmp_path: Path
) -> None:
    assert f"\n{every}" in imported(written(tmp_path, change), ranks=4).text


def test_no_argument_that_is_read_is_among_those_that_have_no_meaning_here() -> None:
    read = {*trainer.NUMBERS, *trainer.TEXTS, *trainer.FLAGS, *trainer.FIXED, *trainer.SAME}
    assert not [name for name in read if trainer.is_unused(name)]


def test_steps_between_saves_and_lines_may_be_a_fraction_of_the_run(tmp_path: Path) -> None:
    change = {"max_steps": 101, "save_steps": 0.1, "logging_steps": 0.05}
    made = imported(written(tmp_path, change), ranks=4)
    assert "\n[checkpoint]\nevery = 11 " in made.text and "\n[log]\nevery = 6 " in made.text
    made = imported(written(tmp_path, {"save_steps": 7.0, "logging_steps": "3"}), ranks=4)
    assert "\n[checkpoint]\nevery = 7 " in made.text and "\n[log]\nevery = 3 " in made.text
    open_steps = written(tmp_path, {"max_steps": -1, "save_steps": 0.1})
    with pytest.raises(UserError) as refused:
        imported(open_steps, ranks=4)
    (problem,) = refused.value.problems
    assert "train.steps=N" in problem


@pytest.mark.parametrize("value", ["inf", "nan", "1e999", "9" * 400, "ten"])
@pytest.mark.parametrize("name", ["save_steps", "logging_steps", "learning_rate", "max_steps"])
def test_a_number_that_is_none_is_refused_by_name(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        imported(written(tmp_path, {name: value}), ranks=4)
    assert [problem for problem in refused.value.problems if name in problem]


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_the_dtype_of_weights_has_two_names(name: str, tmp_path: Path) -> None:
    made = imported(written(tmp_path, {"bf16": False, name: "bfloat16"}), ranks=4)
    assert '\ncompute = "bf16" ' in made.text


def test_a_model_beside_needs_no_folder_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    line = "torchrun --nproc_per_node 2 run_clm.py --max_steps 9 --block_size 64 --train_file a.txt"
    path.write_text(
        f"{line} --learning_rate 1e-4 --per_device_train_batch_size 2 "
        "--config_name gpt2 --config_overrides n_layer=2\n"
    )
    with pytest.raises(UserError) as refused:
        imported(path)
    assert all("model.preset=" in problem for problem in refused.value.problems)
    made = imported(path, keys=["model.preset=gpt2"])
    assert "init_from" not in made.text
    assert any("--config_name gpt2" in note for note in made.notes)


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_a_strategy_that_no_run_has_here_asks_for_the_steps(strategy: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"save_strategy": strategy})
    with pytest.raises(UserError) as refused:
        imported(path, ranks=4)
    (problem,) = refused.value.problems
    assert strategy in problem and "checkpoint.every=N" in problem
    assert "\nevery = 7 " in imported(path, ranks=4, keys=["checkpoint.every=7"]).text


@pytest.mark.parametrize(
    ("change", "keys", "warmup"),
    [
        ({"warmup_steps": 7, "warmup_ratio": None}, [], 7),
        ({"warmup_steps": 7}, [], 7),
        ({"warmup_steps": 0}, [], 10),
        ({"warmup_steps": 0.25, "warmup_ratio": None}, [], 25),
        ({"warmup_ratio": 0.011}, [], 2),
        ({"max_steps": -1, "num_train_epochs": 3}, ["train.steps=1000"], 100),
    ],
)
def test_a_warm_up_is_a_number_of_steps_or_a_fraction_of_the_run(
    change: dict[str, object], keys: list[str], warmup: int, tmp_path: Path
) -> None:
    made = imported(written(tmp_path, change), 4, keys)
    assert f"\nwarmup = {warmup} " in made.text
    overruled = change.get("warmup_steps") == 7 and "warmup_ratio" not in change
    assert any("overrules it" in note for note in made.notes) == overruled


def test_a_fraction_of_a_run_of_unknown_length_asks_for_its_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, {"max_steps": -1, "num_train_epochs": 3}), 4)
    (problem,) = caught.value.problems
    assert "train.steps=N" in problem


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_each_step_has_the_rate_that_transformers_computes(kind: str, tmp_path: Path) -> None:
    """Its schedule "constant" leaves a warm-up out."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "run.toml"
    change = {"lr_scheduler_type": kind, "warmup_ratio": None, "warmup_steps": 7}
    made = imported(written(tmp_path, change), 4, ["data.source=python"])
    path.write_text(made.text)
    run = load_run(path, ["model.preset=llama-demo", "train.init_from="])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-4)
    theirs = transformers.get_scheduler(kind, optimizer, 7, 100)
    schedule = lr_schedule(run.lr, run.train)
    for step in range(100):
        assert schedule.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()
    said = [note for note in made.notes if note.startswith("--warmup_steps 7")]
    assert len(said) == (kind == "constant")


@pytest.mark.parametrize(
    ("change", "held_out"),
    [
        ({"val_size": 0.25}, 0.25),
        ({"split_dataset_ratio": 0.25}, 0.25),
        ({"validation_split_percentage": 5}, 0.05),
        ({"val_size": 0.0}, 0.0),
        ({}, 0.0),
    ],
)
def test_what_is_held_out_of_the_texts_is_held_out_here(
    change: dict[str, object], held_out: float, tmp_path: Path
) -> None:
    for keys in ([], ["data.source=tokens/mine"]):
        made = imported(written(tmp_path, change), 4, keys)
        assert f"\nheld_out = {held_out} " in made.text
    with pytest.raises(UserError, match=r"^--val_size 500: give data\.held_out=0\.1 "):
        imported(written(tmp_path, {"val_size": 500}), 4)


def test_data_that_others_replace_are_told(tmp_path: Path) -> None:
    change: dict[str, object] = {"max_samples": 100}
    for keys in ([], ["data.source=tokens/mine"]):
        made = imported(written(tmp_path, change), 4, keys)
        assert any("--dataset c4" in note and "--max_samples 100" in note for note in made.notes)


@pytest.mark.parametrize(("typed", "compute"), [("yes", "bf16"), ("1", "bf16"), ("0", "fp32")])
def test_a_switch_is_what_transformers_takes_it_for(
    typed: str, compute: str, tmp_path: Path
) -> None:
    made = imported(written(tmp_path, {"bf16": typed, "deepspeed": None}), 4)
    assert f'\ncompute = "{compute}" ' in made.text


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"logging_steps": 7}, "every = 7 "),
        ({"bf16": None, "deepspeed": None, "dtype": "bfloat16"}, 'compute = "bf16" '),
        ({"bf16": None, "deepspeed": None, "tf32": True}, "tf32 = true "),
    ],
)
def test_what_is_read_is_not_listed_as_unused(
    change: dict[str, object], row: str, tmp_path: Path
) -> None:
    made = imported(written(tmp_path, change), 4)
    assert f"\n{row}" in made.text
    read = {*trainer.NUMBERS, *trainer.FLAGS, *trainer.TEXTS, *trainer.FIXED}
    for name in read | trainer.SAME.keys():
        assert name not in trainer.UNUSED_NAMES and not name.startswith(trainer.UNUSED_SUBJECTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bf16": "perhaps"}, "--bf16 perhaps"),
        ({"max_seq_length": 32}, "--max_seq_length 32"),
        ({"finetuning_type": "lora"}, "--finetuning_type lora"),
        ({"stage": "sft"}, "--stage sft"),
        ({"optim": "adafactor"}, "--optim adafactor"),
        ({"use_muon": True}, "--use_muon True"),
        ({"neftune_noise_alpha": 5}, "--neftune_noise_alpha 5"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "--resume_from_checkpoint"),
        ({"lr_scheduler_type": "polynomial"}, "--lr_scheduler_type polynomial"),
        ({"learning_rate": "fast"}, "--learning_rate fast"),
        ({"max_steps": -1, "num_train_epochs": 3}, "--num_train_epochs 3"),
        ({"deepspeed": "conf/none.json"}, "--deepspeed conf/none.json"),
        ({"deepspeed": "../outside.json"}, "--deepspeed ../outside.json"),
    ],
)
def test_what_changes_the_numbers_is_refused_by_name(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path.parent / "outside.json").write_text(json.dumps(AUTO))
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, change), ranks=4)
    (line,) = caught.value.problems
    assert line.startswith(said)


@pytest.mark.parametrize("place", ["/workspace/conf/ds.json", "../conf/ds.json"])
def test_a_file_that_lay_elsewhere_is_found_beside_by_its_name(place: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"deepspeed": place})
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    assert "zero = " in imported(path, ranks=4).text


def _unwrapped(text: str) -> str:
    """A run file whose comments stand on one line each."""
    return text.replace("\n#   ", " ")


@pytest.mark.parametrize(
    ("fsdp", "config", "zero"),
    [
        ("full_shard auto_wrap", None, "3"),
        (["full_shard", "auto_wrap"], None, "3"),
        (True, None, "3"),
        ("shard_grad_op", None, "2"),
        ("no_shard", None, "false"),
        (True, {"reshard_after_forward": False, "state_dict_type": "SHARDED_STATE_DICT"}, "2"),
        (True, {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "2"),
        (
            True,
            {"sharding_strategy": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            "3",
        ),
        ("hybrid_shard", None, "3"),
        ("hybrid_shard_zero2 auto_wrap", {"backward_prefetch": "backward_pre"}, "2"),
    ],
)
@pytest.mark.parametrize("inline", [True, False])
def test_what_fsdp_shards_is_the_stage_of_zero(
    fsdp: object, config: dict[str, object] | None, zero: str, inline: bool, tmp_path: Path
) -> None:
    """By options, by FSDP2's configuration and by FSDP1's, in a file or in place."""
    changes: dict[str, object] = {"deepspeed": None, "fsdp": fsdp}
    if config is not None:
        changes["fsdp_config"] = config if inline else "fsdp.json"
        (tmp_path / "fsdp.json").write_text(json.dumps(config))
    keys = ["parallel.zero_size=2"] if "hybrid" in str(fsdp) else []
    made = imported(written(tmp_path, changes), 4, keys)
    assert f"\nzero = {zero} " in made.text
    for key in config or {}:
        settled = ("reshard_after_forward", "sharding_strategy")
        name = key.removeprefix("fsdp_")
        assert (f"fsdp_config: {name} = " in _unwrapped(made.text)) == (name not in settled)


def test_fsdp_that_recomputes_layers_recomputes_them(tmp_path: Path) -> None:
    config = {"activation_checkpointing": True}
    changes = {"deepspeed": None, "fsdp": "full_shard", "fsdp_config": config}
    assert '\nrecompute = "full" ' in imported(written(tmp_path, changes), 4).text


def test_fsdp_that_is_off_shards_nothing(tmp_path: Path) -> None:
    changes = {"deepspeed": None, "fsdp": "", "fsdp_config": {"reshard_after_forward": True}}
    made = imported(written(tmp_path, changes), 4)
    assert "\nzero = " not in made.text
    assert "--fsdp_config" in _unwrapped(made.text)


@pytest.mark.parametrize(
    ("fsdp", "config", "said"),
    [
        ("full_shard offload", {}, "weights stay on the device here"),
        (True, {"cpu_offload": True}, "cpu_offload = True: weights stay on the device here"),
        ("hybrid_shard", {}, "parallel.zero_size=N"),
        ("fully_shard", {}, "fully_shard: no such option of FSDP is known here"),
        (True, {"xla": True}, "xla = True"),
        (True, {"reshard": True}, "reshard = True: no such key of FSDP is known here"),
        (True, {"fsdp_reshard": 1}, ": fsdp_reshard = 1: no such key of FSDP is known here"),
        (True, {"sharding_strategy": "HALF"}, "half is not one of full_shard"),
    ],
)
def test_what_fsdp_does_not_share_with_zero_is_refused_by_name(
    fsdp: object, config: dict[str, object], said: str, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"deepspeed": None, "fsdp": fsdp, "fsdp_config": config}
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, changes), ranks=4)
    (line,) = caught.value.problems
    assert line.startswith("--fsdp") and said in line


def test_ranks_and_steps_are_asked_for_once(tmp_path: Path) -> None:
    path = written(tmp_path, {"max_steps": -1})
    with pytest.raises(UserError) as caught:
        imported(path)
    steps, ranks = caught.value.problems
    assert "train.steps=N" in steps and "--ranks N" in ranks
    assert "\nsteps = 7 " in imported(path, 4, ["train.steps=7"]).text


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {
        name: field.default
        for name, field in inspect.signature(transformers.TrainingArguments).parameters.items()
    }
    ours = trainer.DEFAULTS.items()
    for name, value in ours:
        default = getattr(theirs[name], "value", theirs[name])
        # an optional one that is left out is none
        assert default in (value, None), name
    names = {*trainer.NUMBERS, *trainer.FLAGS, "optim", "lr_scheduler_type", "output_dir"}
    assert names - {"max_length", "warmup_ratio", *trainer.HOLD_OUTS} <= theirs.keys()


@pytest.mark.parametrize(("micro", "ranks", "batch"), [(1, 4, 16), (3, 4, 24), (8, 4, 32)])
def test_swift_accumulates_to_sixteen_samples(
    micro: int, ranks: int, batch: int, tmp_path: Path
) -> None:
    """ceil(16 / micro / ranks) micro-batches, where no argument says how many."""
    path = tmp_path / "train.sh"
    text = SWIFT.replace("--gradient_accumulation_steps $(expr 16 / 4)", "")
    path.write_text(text.replace("batch_size 2", f"batch_size {micro}"))
    made = imported(path, ranks)
    assert f"\nglobal_batch = {batch} " in made.text


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("sharded", ["deepspeed", "named", "fsdp", "replicas"])
def test_gradients_have_the_dtypes_of_what_the_trainer_starts(
    sharded: str, half: str, tmp_path: Path
) -> None:
    """DeepSpeed's, FSDP's of accelerate, or those of FP32 weights under autocast."""
    change: dict[str, object] = {"bf16": half == "bf16", "fp16": half == "fp16"}
    auto = {"enabled": "auto"}
    path = written(tmp_path, change)
    (tmp_path / "conf" / "ds.json").write_text(json.dumps(AUTO | {"fp16": auto}))
    if sharded != "deepspeed":
        change["deepspeed"] = "zero2" if sharded == "named" else None
        change["fsdp"] = "full_shard" if sharded == "fsdp" else None
        path.write_text(yaml.safe_dump(FACTORY | change))
    run = tmp_path / "run.toml"
    made = imported(path, 4, ["model.preset=llama-demo"])
    run.write_text("\n".join(_lines_without(made.text, "init_from")))
    precision = load_run(run).precision
    by_deepspeed = sharded in ("deepspeed", "named")
    assert precision.compute == half
    assert precision.gradients == (half if by_deepspeed else "fp32")
    assert precision.reduce == ("fp32" if sharded == "replicas" else half)
    if half == "fp16":
        scale = (precision.growth_interval, precision.hysteresis)
        assert scale == ((1000, 2) if by_deepspeed else (2000, 1))


def _lines_without(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(f"{name} = ")]


def test_a_problem_with_arguments_of_the_trainer_is_the_only_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        imported(written(tmp_path, {"weight_decay": -1.0}), ranks=4)
    (line,) = caught.value.problems
    assert line.startswith("--weight_decay -1.0: ")
