"""Run files: what is read, what is refused and in which words, and that a saved run is the same
run."""

import inspect
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.diagnose.spike_monitor import SpikeMonitor
from megaprec.errors import Problem, UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.lr import SCHEDULES
from megaprec.optim.rules.rule_table import RULES, rule
from megaprec.optim.rules.update_rules import AdamW
from megaprec.precision.fp8_recipe import SCALE_KINDS, FP8Recipe
from megaprec.precision.plan import LossScaling, PrecisionPlan
from models.activations import ACTIVATIONS
from models.presets import preset
from parallel.pipeline.kinds import KINDS
from tests.refusals import raises, sentence, shows
from tools.commands.keys import describe_keys
from tools.config.key_help import key_tables
from tools.config.key_suggestions import ELSEWHERE
from tools.config.layouts import check_world
from tools.config.removed_keys import REMOVED_KEYS
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig, is_resolved, known_keys, load_run
from tools.config.tables.data_settings import Data
from tools.config.tables.native_keys import FP8_KEYS, SCALING, loss_scaling
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.settings import LR, Log, Optimizer, Parallel, Train

RUN = """
[model]
preset = "llama-demo"
heads = 8
[parallel]
tensor = 2
pipeline = 2
[train]
steps = 10
global_batch = 8
micro_batch = 2
seq_length = 64
"""
REQUIRED = ["train.steps=10", "train.global_batch=8", "train.micro_batch=2", "train.seq_length=64"]
MINIMAL = ["model.preset=llama-demo", *REQUIRED]
ASYNC = ["parallel.tensor=2", "parallel.sequence=true", "parallel.async_tensor=true"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(RUN)
    return path


def problems(*overrides: str, path: Path | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_run(path, overrides)
    return list(caught.value.problems)


def test_the_command_line_wins_over_the_file_over_the_preset_over_defaults(run_file: Path) -> None:
    config = load_run(run_file, ["train.steps=20", "train.steps=30"])
    assert (config.train.steps, config.model.heads, config.model.layers, config.train.seed) == (
        30,
        8,
        6,
        1234,
    )
    origins = [
        config.origin(key) for key in ("train.steps", "model.heads", "model.layers", "train.seed")
    ]
    assert origins == ["command line", f"file {run_file}", "preset llama-demo", "default"]


def test_what_a_preset_leaves_open_follows_from_the_keys_that_change_it() -> None:
    assert load_run(None, [*MINIMAL, "model.hidden=512"]).model.ffn == 1408


def test_the_longest_sequence_is_the_one_trained_on_unless_said_otherwise() -> None:
    assert load_run(None, MINIMAL).model.max_positions == 64
    assert load_run(None, [*REQUIRED, "model.preset=gpt2"]).model.max_positions == 1024


def test_numbers_of_a_step(run_file: Path) -> None:
    config = load_run(run_file, ["parallel.data=2"])
    assert (config.world_size, config.num_microbatches, config.tokens_per_step) == (8, 2, 8 * 64)


@pytest.mark.parametrize(("unit", "total"), [("steps", 10), ("samples", 80)])
def test_the_learning_rate_counts_in_its_unit(unit: str, total: int) -> None:
    schedule = load_run(
        None, [*MINIMAL, f"lr.unit={unit}", "lr.warmup=10", "lr.decay=3", "lr.final=1e-5"]
    ).lr_schedule
    assert (schedule.total, schedule.warmup, schedule.decay, schedule.final) == (total, 10, 3, 1e-5)
    assert schedule.peak == LR().peak


@pytest.mark.parametrize(
    ("keys", "warmup"),
    [
        (["lr.warmup=0.1"], 1),
        (["lr.warmup=0.11"], 2),
        (["lr.warmup=0.25", "lr.length=1000"], 250),
        (["lr.warmup=0.07", "train.steps=100"], 7),
        (["lr.warmup=0.25", "lr.unit=samples"], 20),
        (["lr.warmup=0.25", "lr.unit=samples", "lr.length=40"], 10),
        (
            [
                "lr.warmup=0.5",
                "lr.unit=samples",
                "lr.length=40",
                "train.batch_schedule=[[0, 4], [8, 8]]",
            ],
            20,
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else str(x),
)
def test_a_warm_up_may_be_a_fraction_of_the_schedule(keys: list[str], warmup: int) -> None:
    config = load_run(None, [*MINIMAL, *keys])
    assert config.lr.warmup == warmup
    assert config.origin("lr.warmup") == "command line"


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    changing = ["lr.unit=samples", "train.batch_schedule=[[0, 4], [8, 8]]"]
    (one,) = problems(*MINIMAL, *changing, "lr.warmup=0.5")
    assert shows(one, "config.warmup_fraction", value=0.5, origin="command line")


def test_the_key_of_the_tokenizer_takes_a_folder_with_one(tmp_path: Path) -> None:
    assert load_run(None, [*MINIMAL, f"data.tokenizer={tmp_path}"]).data.tokenizer == f"{tmp_path}"
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    assert load_run(None, [*MINIMAL, f"data.tokenizer={tmp_path}"]).data.tokenizer == f"{file}"
    assert not load_run(None, MINIMAL).data.tokenizer


def test_a_schedule_may_be_shorter_or_longer_than_its_run() -> None:
    run = [*MINIMAL, "lr.schedule=linear", "lr.peak=1.0", "lr.final=0.5"]
    short, long = (load_run(None, [*run, f"lr.length={n}"]).lr_schedule for n in (4, 20))
    assert [short.at(n) for n in (0, 2, 4, 9)] == [1.0, 0.75, 0.5, 0.5]
    assert [long.at(n) for n in (0, 10)] == [1.0, 0.75]
    assert any(
        re.match("lr." + sentence("optimizer.schedule_warmup", warmup=5, total=4), one)
        for one in problems(*run, "lr.length=4", "lr.warmup=5")
    )


@pytest.mark.parametrize("length", ["train.steps=4", "train.steps=1", "lr.length=4"])
@pytest.mark.parametrize(
    "phases",
    [
        ["lr.warmup=9"],
        ["lr.warmup=40", "lr.unit=samples"],
        ["lr.warmup=9", "lr.schedule=wsd", "lr.decay=1"],
        ["lr.schedule=wsd", "lr.decay=9"],
    ],
)
def test_phases_that_a_changed_length_has_no_room_for_are_answered_by_arguments_that_work(
    length: str, phases: list[str]
) -> None:
    (problem,) = problems(*MINIMAL, *phases, length)
    given, _, others = problem.partition("; with ")[2].partition(" give ")
    assert given == length
    others = others.removesuffix(", for example")
    assert load_run(None, [*MINIMAL, *phases, given, *others.split()])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.betas=[0.8, 0.99]", (0.8, 0.99)),
        ("parallel.sequence=true", True),
        ("optimizer.clip = 2", 2.0),
        ("precision.compute=bf16", "bf16"),
        ("train.folder=runs/a b", "runs/a b"),
        ('train.folder="runs/a=b"', "runs/a=b"),
        ("log.sample=true", "true"),  # text stays text
        ("data.source=2024", "2024"),
        ('log.sample="1"\n[train]\nsteps = 1', '"1"\n[train]\nsteps = 1'),  # one value, not a file
        ("data.tokenizer=", ""),
    ],
)
def test_override_values_are_toml_and_text_needs_no_quotes(override: str, value: object) -> None:
    table, key = override.partition("=")[0].strip().split(".")
    assert getattr(getattr(load_run(None, [*MINIMAL, override]), table), key) == value


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (
            "train.stpes=3",
            re.escape("train.stpes = 3 (command line): no such key; did you mean train.steps?"),
        ),
        ("train.tensor=2", re.escape("did you mean parallel.tensor?")),
        ("tensor=2", re.escape("did you mean parallel.tensor?")),
        ("optimizer.lr=3", re.escape("did you mean lr.peak?")),
        ("parallel.tensor_model_parallel_size=2", re.escape("did you mean parallel.tensor?")),
        ("fp8.recipe=delayed", re.escape("did you mean fp8.kind?")),
        ("tp=2", re.escape("did you mean parallel.tensor?")),
        ("lr.min=1e-5", re.escape("did you mean lr.final?")),
        ("lr.mni=1e-5", re.escape("lr.mni = 1e-05 (command line): no such key") + "$"),
        ("train.epochs=3", "no such key: a run is given in steps: one epoch is"),
        ("train.accumulate_grad_batches=3", r"no such key: it follows from the batches"),
        ("train.out_dir=x", re.escape("did you mean train.folder?")),
        ("model.activation=gelu", re.escape("did you mean model.mlp?")),
        ("train.device=gpu", re.escape("did you mean cuda?")),
        ("precision.compute=bfloat16", re.escape("did you mean bf16?")),
        (
            "lr=3",
            re.escape("lr = 3 (command line): a table, not a key; give keys of it, as lr.peak"),
        ),
        (
            "modle.layers=2",
            re.escape("[modle] (command line): no such table; did you mean [model]?"),
        ),
        ("model.preset=llama-dem", re.escape("did you mean llama-demo?")),
        ("parallel.schedule=1fb1", re.escape("'zb-v' or 'dualpipe-v'; did you mean 1f1b?")),
        ("nothing", sentence("config.override_form", override="nothing")),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(wrong: str, hint: str) -> None:
    (problem,) = problems(*REQUIRED, "model.layers=2", "model.hidden=64", "model.heads=2", wrong)
    assert re.search(hint, problem)


def test_words_of_other_trainers_stand_for_keys_that_are_and_are_none_of_ours() -> None:
    words = [word for there in ELSEWHERE.values() for word in there]
    assert set(ELSEWHERE) <= known_keys() and len(words) == len(set(words))
    assert not set(words) & {key.partition(".")[2] for key in known_keys()}


def test_unknown_names_in_a_file_say_which_file_and_a_table_is_named_once(run_file: Path) -> None:
    run_file.write_text(RUN + "stpes = 3\n[optimiser]\nclip = 1.0\neps = 1e-6\n")
    key, table = problems(path=run_file)
    assert key == f"train.stpes = 3 (file {run_file}): no such key; did you mean train.steps?"
    assert table == f"[optimiser] (file {run_file}): no such table; did you mean [optimizer]?"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("train.steps=8.0", "must be a valid integer"),
        ("train.steps=0", "must be greater than 0"),
        ("train.steps=true", "must be a valid integer"),
        ("lr.peak=high", re.escape('lr.peak = "high" (command line): must be a valid number')),
        ("lr.peak=nan", "must be a finite number"),
        ("parallel.zero=True", "must be true or false"),
        ("parallel.zero=4", "must be true or false or 2 or 3"),
        ("optimizer.betas=[0.9, 1.0]", "value 2 must be less than 1"),
        ("optimizer.betas=[0.9]", "too few values"),
        ("precision.compute=fp8", sentence("config.compute_fp8")),
        ("optimizer.betas=0.9", re.escape("must be a list in brackets, like [0.9, 0.95]")),
        (
            "data.validation=a.txt",
            sentence(
                "config.wrong_value",
                requirement=re.compile(
                    r'must be a list in brackets, like \[\{name = "wiki", source = "wiki\.txt"\}, '
                ),
            ),
        ),
        (
            'data.validation=["a.txt"]',
            sentence(
                "config.wrong_value",
                requirement=re.compile(
                    r'must be a table, like \[\{name = "wiki", source = "wiki\.txt"\}, '
                ),
            ),
        ),
        (
            'data.validation=[{name = "a", source = ""}]',
            "value 1 source must be text that is not empty or a list in brackets$",
        ),
        (
            "data.blend=[{weight = 1, source = [1]}]",
            "value 1 source must be text in quotes or a list that is not empty$",
        ),
        ("data.held_out=1.0", "must be less than 1"),
        ("parallel.overlap=on", "must be true or false or 'auto'"),
        ('train.folder=""', "must be text that is not empty$"),
        ("data.source=", "must be text that is not empty or a list in brackets$"),
        ("data.source=[]", "must be text in quotes or a list that is not empty$"),
        ("data.source=[1]", r"\): must be text in quotes or a list that is not empty$"),
        ('data.blend={"" = 1, "a b" = 2}', re.escape('data.blend = {"" = 1, "a b" = 2} (')),
        ("optimizer.options={momentum=1}", "no option is called momentum; there are betas, eps"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_was_expected(wrong: str, expected: str) -> None:
    (problem,) = problems(*MINIMAL, wrong)
    assert re.search(expected, problem)
    assert problem.startswith(wrong.partition("=")[0])


def test_an_option_of_a_rule_is_named_with_its_table() -> None:
    (problem,) = problems(*MINIMAL, "optimizer.name=sgd", "optimizer.options={momentum=nan}")
    assert problem.startswith("optimizer.options.momentum = nan must lie from 0")


def test_a_rule_that_no_run_can_have_is_told_in_a_sentence_of_its_own() -> None:
    (problem,) = problems(*MINIMAL, "optimizer.name=LBFGS")
    title = "optimizer torch.optim.lbfgs.LBFGS"
    said = sentence("optimizer.torch_rule_flat", title=title)
    assert re.fullmatch(f'optimizer.name = "LBFGS": {said}', problem)


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("Adam", "betas = [2, 3]", "torch_rule_options"),
        ("RAdam", "eps = -1", "torch_rule_options"),
        ("RMSprop", "momentum = -1", "torch_rule_options"),
        ("Adagrad", 'lr_decay = "x"', "torch_rule_options"),
        ("NAdam", "lr = 1.0", "torch_rule_step_option"),
        ("Adam", "capturable = true", "torch_rule_flat"),
    ],
)
def test_what_torch_says_of_options_is_told_with_their_keys(
    name: str, options: str, code: str
) -> None:
    given = [f"optimizer.name={name}", f"optimizer.options={{{options}}}"]
    (problem,) = problems(*MINIMAL, *given)
    keys = f'optimizer.name = "{name}", optimizer.options = {{{options}}}'
    assert re.fullmatch(f"{re.escape(keys)}: {sentence(f'optimizer.{code}')}", problem)


def test_muon_lists_the_options_that_a_run_file_may_give_it() -> None:
    (problem,) = problems(*MINIMAL, "optimizer.name=muon", "optimizer.options={adamw=1}")
    (_, listed) = problem.split("; there are ")
    for option in listed.split(", "):
        found = problems(*MINIMAL, "optimizer.name=muon", f"optimizer.options={{{option}=nan}}")
        assert found
        assert not any(shows(line, "config.own_key_of_rule") for line in found)
        assert not any(shows(line, "optimizer.rule_options") for line in found)


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].own_keys])
def test_an_option_with_a_key_of_its_own_is_refused_as_an_option(name: str) -> None:
    for key in RULES[name].own_keys:
        given = [f"optimizer.name={name}", f"optimizer.options={{{key}=0.5}}"]
        (problem,) = problems(*MINIMAL, *given)
        assert shows(problem, "config.own_key_of_rule", key=key)


@pytest.mark.parametrize("key", ["optimizer.name", "lr.schedule", "parallel.schedule", "model.mlp"])
def test_a_name_that_its_table_lacks_is_refused_with_the_names_of_the_table(key: str) -> None:
    tables = {
        "optimizer.name": RULES,
        "lr.schedule": SCHEDULES,
        "parallel.schedule": KINDS,
        "model.mlp": ACTIVATIONS,
    }
    (problem,) = problems(*MINIMAL, f"{key}=no-such-name")
    assert all(name in problem for name in tables[key])


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("optimizer.name", RULES),
        ("lr.schedule", SCHEDULES),
        ("parallel.schedule", KINDS),
        ("model.mlp", ACTIVATIONS),
        ("fp8.kind", SCALE_KINDS),
    ],
)
def test_the_help_of_a_key_has_each_name_of_its_table(key: str, table: Mapping[str, Any]) -> None:
    keys = {entry.name: entry for rows in key_tables() for entry in rows.keys}
    words = re.findall(r"[\w-]+", keys[key].help)
    assert [name for name in table if name not in words] == []


@pytest.mark.parametrize("name", RULES)
def test_the_rule_of_a_run_has_the_defaults_of_the_rule_itself(name: str) -> None:
    assert make_rule(Optimizer(name=name)) == rule(name)


def test_importers_have_a_branch_for_each_rule_that_is_known_elsewhere() -> None:
    """Those of Megatron-LM's and DeepSpeed's `add_optimizer`."""
    assert {name for name, kind in RULES.items() if kind.elsewhere} == {"adamw", "lion", "sgd"}


@pytest.mark.parametrize("warmup", ["1.5", "0.0", "-0.1", "1.0"])
def test_a_warm_up_is_a_whole_number_or_a_fraction(warmup: str) -> None:
    (problem,) = problems(*MINIMAL, f"lr.warmup={warmup}")
    assert shows(problem, "config.warmup_no_fraction", value=float(warmup), origin="command line")


def test_a_number_where_text_belongs_in_a_file_is_refused(run_file: Path) -> None:
    run_file.write_text(RUN + "folder = 3\n")
    assert problems(path=run_file) == [
        f"train.folder = 3 (file {run_file}): must be text in quotes"
    ]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (
            ["parallel.tensor=3"],
            sentence(
                "config.tensor_sizes",
                tensor=3,
                sizes="model.heads 4, model.kv_heads 2 and model.ffn 704",
            ),
        ),
        (["parallel.tensor=3"], sentence("config.tensor_sizes", possible="1, 2, 4")),
        (
            ["model.ffn=705", "parallel.tensor=2"],
            sentence("config.tensor_sizes", sizes=re.compile(r"and model\.ffn 705"), possible=1),
        ),
        (
            ["model.heads=12", "model.kv_heads=3", "parallel.tensor=2", "model.head_dim=8"],
            sentence("config.tensor_sizes", possible=1),
        ),
        (
            ["parallel.tensor=4", "parallel.sequence=true", "train.seq_length=66"],
            sentence("config.sequence_length", possible="64 or 68"),
        ),
        (
            ["parallel.pipeline=7"],
            sentence("config.too_many_stages", pipeline="parallel.pipeline 7", layers=6),
        ),
        (
            ["train.micro_batch=3"],
            sentence("config.global_batch", micro_batch=3, data=1, product=3, possible="6 or 9"),
        ),
        (
            ["parallel.data=8"],
            sentence("config.global_batch", micro_batch=2, data=8, product=16, possible=16),
        ),
        (["model.max_positions=63"], sentence("config.too_long", seq_length=64, max_positions=63)),
        (["model.vocab=100"], sentence("config.small_vocab", vocab=100, vocab_size=4096)),
        (["train.eval_every=5", "data.held_out=0"], sentence("config.eval_without_text")),
        (["lr.warmup=11"], "lr." + sentence("optimizer.schedule_warmup", warmup=11, total=10)),
        (
            ["lr.warmup=81", "lr.unit=samples"],
            sentence("optimizer.schedule_warmup", total=80) + re.escape(" (in samples)"),
        ),
        (["lr.schedule=wsd"], "lr." + sentence("optimizer.schedule_decay", decay=0, longest=10)),
        (["lr.final=1.0"], "lr." + sentence("optimizer.schedule_final", final=1, peak=0.0003)),
        (
            ["precision.min_scale=4.0", "precision.initial_scale=2.0"],
            sentence("config.low_first_scale", min_scale=4.0, initial_scale=2.0),
        ),
        (["model.heads=5"], "model." + sentence("model.hidden_not_multiple", hidden=256, heads=5)),
        (
            ["model.kv_heads=3"],
            "model."
            + sentence("model.kv_heads_not_divisor", kv_heads=3, heads=4, divisors="1, 2, 4"),
        ),
        (
            ["parallel.zero=2", "train.numerics=canonical"],
            sentence("config.zero_canonical", zero=2),
        ),
        (
            ["parallel.zero=3", "train.sentinel=5"],
            sentence("config.zero_sentinel", zero=3, sentinel=5),
        ),
        (
            ["parallel.zero=2", "parallel.zero_keep=1"],
            sentence("config.zero_keep", keep=1, zero=2),
        ),
        (
            ["parallel.zero=2", "parallel.zero_keep=2GB"],
            sentence("config.zero_keep", keep='"2GB"', zero=2),
        ),
        (
            ["parallel.zero=3", "parallel.zero_keep='80'"],
            sentence(
                "config.wrong_value",
                key="parallel.zero_keep",
                value='"80"',
                origin="command line",
                requirement='must be a valid integer or a size such as "2GB" (10^9 bytes) or '
                '"1.5GiB" (2^30)',
            ),
        ),
        (
            ["parallel.zero=2", "train.sentinel=5"],
            sentence("config.zero_sentinel", zero=2, sentinel=5),
        ),
        ([*ASYNC, "parallel.tensor=1"], sentence("parallel.async_tensor_alone")),
        ([*ASYNC, "parallel.sequence=false"], sentence("parallel.async_tensor_sequence")),
        ([*ASYNC, "fp8.kind=mx"], sentence("parallel.async_tensor_fp8", kind="mx")),
        (
            [*ASYNC, "train.numerics=canonical", "train.threads=1"],
            sentence("parallel.async_tensor_canonical"),
        ),
        (
            ["parallel.zero=2", "fp8.kind=current", "fp8.shadow_every=5"],
            sentence("config.zero_shadow", zero=2, shadow_every=5),
        ),
        (
            ["parallel.zero=2", "parallel.pipeline=2", "parallel.schedule=zb-h1"],
            sentence("config.zero_schedule", zero=2, key="schedule", schedule="zb-h1"),
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused_with_what_would(
    wrong: list[str], expected: str
) -> None:
    assert any(re.search(expected, problem) for problem in problems(*MINIMAL, *wrong))


@pytest.mark.parametrize(
    ("written", "read", "shards_gradients"),
    [
        ("true", True, False),
        ("1", True, False),
        ("false", False, False),
        ("0", False, False),
        ("2", 2, True),
    ],
)
def test_stages_of_zero_are_numbers_or_true_and_false(
    written: str, read: bool | int, shards_gradients: bool, tmp_path: Path
) -> None:
    arguments = [*MINIMAL, "train.micro_batch=1", "parallel.data=2", f"parallel.zero={written}"]
    run = load_run(None, arguments)
    assert run.parallel.zero is read
    assert run.parallel.shards_gradients == shards_gradients
    assert not load_run(None, [*arguments, "parallel.data=1"]).parallel.shards_gradients
    assert load_run(run.save_resolved(tmp_path)).parallel.zero is read


def test_what_fits_is_accepted() -> None:
    few_kv_heads = [
        "model.heads=8",
        "model.kv_heads=2",
        "parallel.tensor=8",
        "parallel.sequence=true",
    ]
    edges = [
        "parallel.pipeline=6",
        "train.micro_batch=4",
        "parallel.data=2",
        "lr.warmup=10",
        "model.max_positions=64",
    ]
    load_run(None, [*MINIMAL, *few_kv_heads, *edges, "model.vocab=4096"])
    load_run(None, [*MINIMAL, *ASYNC, "precision.compute=bf16"])
    # only the tokenizer can tell
    load_run(None, [*MINIMAL, "model.vocab=100", "data.tokenizer=t.model"])


def test_an_engine_fuses_products_with_transfers_only_if_asked_to() -> None:
    assert load_run(None, [*MINIMAL, *ASYNC]).engine_options.async_tensor
    assert not load_run(None, [*MINIMAL, *ASYNC[:2]]).engine_options.async_tensor


def test_all_problems_of_every_kind_are_reported_at_once() -> None:
    found = problems(
        *MINIMAL, "lr.peak=x", "train.sede=1", "parallel.tensor=3", "train.micro_batch=3", "oops"
    )
    for part in ('"oops"', "train.sede", "lr.peak", "parallel.tensor 3", "train.micro_batch 3"):
        assert sum(part in problem for problem in found) == 1, (part, found)
    assert len(found) == 5


def test_what_has_no_default_must_be_given() -> None:
    found = problems()
    missing = [
        "model.layers",
        "model.hidden",
        "model.heads",
        *(r.partition("=")[0] for r in REQUIRED),
    ]
    assert [problem.partition(" ")[0] for problem in found] == missing
    assert "or choose a model.preset" in found[0]


def test_a_file_that_cannot_be_read_is_a_users_mistake(tmp_path: Path) -> None:
    (bad := tmp_path / "bad.toml").write_text("[train\n")
    (binary := tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path, reason in [
        (bad, sentence("config.not_toml", path=bad)),
        (binary, "not UTF-8"),
        (tmp_path / "none.toml", "No such file"),
    ]:
        (problem,) = problems(path=path)
        assert str(path) in problem
        assert re.search(reason, problem)


def test_a_folder_in_place_of_a_run_file_is_told_the_way(tmp_path: Path) -> None:
    assert problems(path=tmp_path) == [
        Problem.of(
            "config.run_file_is_folder",
            path=tmp_path,
            hint=f"`megaprec init {tmp_path}` writes a run file for a folder of text",
        )
    ]
    (tmp_path / "run.toml").write_text("")
    assert problems(path=tmp_path) == [
        Problem.of("config.run_file_is_folder", path=tmp_path, hint=f"give {tmp_path}/run.toml")
    ]


def test_tables_built_in_python_obey_the_same_laws(run_file: Path) -> None:
    config = load_run(run_file)
    train = Train(steps=1, global_batch=3, micro_batch=2, seq_length=64)
    with pytest.raises(ValueError, match=sentence("config.global_batch", global_batch=3)):
        RunConfig(model=config.model, train=train)


def test_a_world_of_another_size_is_refused_with_what_would_do(run_file: Path) -> None:
    config = load_run(run_file)
    check_world(config, 4)
    with raises(
        "config.world_size",
        world_size=6,
        keys="parallel.tensor 2 x parallel.pipeline 2 x parallel.data 1",
        ranks_of_layout=4,
    ):
        check_world(config, 6)
    with raises(
        "config.world_size", ranks_of_layout=4, advice="start 4 ranks or set parallel.data = 2"
    ):
        check_world(config, 8)


def test_a_saved_run_is_the_same_run_with_its_origins_written_down(
    run_file: Path, tmp_path: Path
) -> None:
    config = load_run(run_file, ['log.sample=say "x"\t\x7f\\ é'])
    saved = config.save_resolved(tmp_path / "new" / "folder")
    assert saved == tmp_path / "new" / "folder" / "run.toml"
    assert load_run(saved).model_dump() == config.model_dump()
    lines = saved.read_text().splitlines()
    assert f"heads = 8  # file {run_file}" in lines
    assert "layers = 6  # preset llama-demo" in lines
    assert "seed = 1234  # default" in lines


def test_a_table_within_a_table_is_read_saved_and_checked_like_any_key(tmp_path: Path) -> None:
    config = load_run(None, [*MINIMAL, 'model.rope_scaling={kind = "linear", factor = 4.0}'])
    saved = config.save_resolved(tmp_path)
    assert (
        'rope_scaling = {kind = "linear", factor = 4.0}  # command line'
        in saved.read_text().splitlines()
    )
    assert load_run(saved).model_dump() == config.model_dump()
    assert (
        "rope_scaling = {}  # default"
        in load_run(None, MINIMAL).save_resolved(tmp_path).read_text()
    )
    for value, problem in {
        '{kind = "linear", facter = 4.0}': "facter is not a key of this table",
        '{kind = "linaer"}': "kind must be 'none', 'linear', .*did you mean linear",
        '{kind = "linear", factor = "4"}': "factor must be a valid number",
        "4": 'must be a table, like {kind = "linear", factor = 2.0}',
    }.items():
        with pytest.raises(
            UserError, match=f"model.rope_scaling = .* \\(command line\\): {problem}"
        ):
            load_run(None, [*MINIMAL, f"model.rope_scaling={value}"])
    for key, like in {"router": '{score = "sigmoid", ', "latent": "{kv_rank = 512, "}.items():
        with pytest.raises(UserError, match=f"model.{key} = 4 .*: must be a table, like {like}"):
            load_run(None, [*MINIMAL, f"model.{key}=4"])
    with pytest.raises(
        UserError, match=r"model.router = {scale = 2.0} \(command line\): it lacks score$"
    ):
        load_run(None, [*MINIMAL, "model.experts=4", "model.router={scale = 2.0}"])
    with pytest.raises(
        UserError,
        match=r"model.router.score .*: model.router is given as a whole, like 'model.router=",
    ):
        load_run(None, [*MINIMAL, "model.router.score=sigmoid"])
    with pytest.raises(
        UserError,
        match=sentence(
            "model.rope_key_missing", name="original_max_position_embeddings", kind="yarn"
        ),
    ):
        load_run(None, [*MINIMAL, 'model.rope_scaling={kind = "yarn", factor = 2.0}'])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            "data.validation.v=a.txt",
            'data.validation is a list, given as a whole, like \'data.validation=[{name = "wiki"',
        ),
        (
            "optimizer.betas.x=3",
            "optimizer.betas is a list, given as a whole, like 'optimizer.betas=[0.9, 0.95]'",
        ),
        ("log.to.x=3", 'log.to is a list, given as a whole, like \'log.to=["tensorboard", '),
        (
            "optimizer.options.x=3",
            "optimizer.options is given as a whole, like 'optimizer.options={x = 3, ...}'",
        ),
        ("train.steps.x=3", "train.steps has no keys of its own: give train.steps=VALUE"),
    ],
)
def test_a_part_of_a_key_is_answered_with_a_form_that_the_key_takes(part: str, said: str) -> None:
    (problem,) = [
        line for line in problems(*MINIMAL, part) if line.startswith(part.partition("=")[0])
    ]
    assert f"(command line): {said}" in problem


def test_saving_replaces_what_was_saved_but_never_a_file_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "run.toml"
    own.write_text(RUN)
    saved = load_run(own).save_resolved(tmp_path)
    assert own.read_text() == RUN
    assert load_run(saved).model_dump() == load_run(own).model_dump()
    folder = tmp_path / "other"
    assert load_run(own, ["train.steps=1"]).save_resolved(folder) == load_run(own).save_resolved(
        folder
    )
    assert load_run(folder / "run.toml").train.steps == 10


text = st.text(st.characters(exclude_categories=["Cs"]))
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@pytest.mark.slow
@given(
    sample=text,
    eps=positive,
    clip=positive,
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    origin=text,
)
def test_any_value_survives_saving(tmp_path_factory: Any, origin: str, **values: Any) -> None:
    tables = {
        "log": Log(sample=values["sample"]),
        "optimizer": Optimizer(eps=values["eps"], clip=values["clip"]),
        "train": Train(steps=1, global_batch=1, micro_batch=1, seq_length=8, seed=values["seed"]),
        "data": Data(shuffle=values["shuffle"]),
        "parallel": Parallel(),
        "precision": Precision(),
    }
    config = RunConfig(model=load_run(None, MINIMAL).model, **tables)
    config._origins = {"train.steps": origin}
    saved = config.save_resolved(tmp_path_factory.getbasetemp())
    assert load_run(saved).model_dump() == config.model_dump()


def test_the_scaler_has_the_same_defaults_in_a_run_file_and_in_the_library() -> None:
    ours = Precision()
    library = LossScaling()
    assert (ours.initial_scale, ours.min_scale, ours.hysteresis) == (
        library.initial,
        library.minimum,
        library.hysteresis,
    )
    for name in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis_refill"):
        assert getattr(ours, name) == getattr(library, name)
    assert library.maximum is None


def test_the_scaler_of_a_run_file_reaches_the_library_whole() -> None:
    keys = {
        "compute": "fp16",
        "initial_scale": 16.0,
        "min_scale": 2.0,
        "max_scale": 64.0,
        "growth_factor": 4.0,
    }
    rest = {
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "hysteresis": 3,
        "hysteresis_refill": "good_step",
    }
    made = loss_scaling(Precision.model_validate(keys | rest))
    assert made == LossScaling("dynamic", 16.0, 2.0, 4.0, 0.25, 7, 3, 64.0, "good_step")


def test_a_scale_that_starts_above_its_maximum_is_refused_before_launch() -> None:
    low = ["precision.compute=fp16", "precision.max_scale=8.0"]
    with pytest.raises(UserError, match=sentence("optimizer.scaler_range")):
        load_run(None, [*MINIMAL, *low])


def test_every_key_is_described_in_a_line_with_its_default() -> None:
    lines = {line.partition(" ")[0]: line for line in describe_keys().splitlines()}
    keys = [
        f"{t}.{k}"
        for t, table in RunConfig.model_fields.items()
        for k in table.annotation.model_fields  # type: ignore[union-attr]
    ]
    assert sorted(keys) == sorted(key for key in lines if "." in key and key != "model.preset")
    assert not [key for key in lines if "." in key and len(lines[key].split()) < 4]
    assert "required" in lines["train.steps"]
    assert "0.0003" in lines["lr.peak"]
    assert "llama-demo" in lines["model.preset"]
    assert tomllib.loads(f"x = {lines['train.folder'].split()[1]}") == {"x": "runs/default"}


def test_the_help_of_a_key_is_a_sentence() -> None:
    told = [
        line[50:].strip() for line in describe_keys().splitlines() if "." in line.partition(" ")[0]
    ]
    assert [text for text in told if not (text[0].isupper() and text.endswith("."))] == []


TE = ["fp8.kind=delayed", "fp8.history=te"]
CANONICAL = ["train.numerics=canonical"]
TASKS = ['data.lm_eval=["arc_easy"]']
BROKEN = {
    "model": "model.heads=many",
    "data": "data.held_out=some",
    "parallel": "parallel.tensor=two",
    "precision": "precision.compute=float",
    "fp8": "fp8.margin=wide",
    "train": "train.seed=none",
}
NEEDED = [
    ("config.history_recomputed", [*TE, "parallel.recompute_fraction=0.5"], "model precision"),
    ("config.history_sentinel", [*TE, "train.sentinel=2"], "model precision parallel"),
    ("config.history_shadow", [*TE, "fp8.shadow_every=2"], "model precision parallel train"),
    ("config.context_sentinel", ["parallel.context=2", "train.sentinel=2"], "model fp8 data"),
    ("config.context_lm_eval", ["parallel.context=2", *TASKS], "model fp8 train"),
    ("config.too_many_stages", ["parallel.pipeline=64"], "train"),
    ("config.validation_name", ['data.validation=[{name = "/", source = "x"}]'], "train"),
    ("config.lm_eval_key", ["data.lm_eval_limit=2"], "model train fp8"),
    ("config.lm_eval_never", TASKS, "model fp8"),
    ("config.lm_eval_fp8", [*TASKS, "fp8.kind=current"], "model train"),
    ("precision.pattern_unmatched", ['precision.keep_fp32=["none.*"]'], "data"),
    ("config.experts_amaxes", ["parallel.expert=2", *TE, "fp8.reduce_amax=false"], "train"),
    ("config.experts_canonical", ["parallel.expert=2", *CANONICAL], "fp8"),
    ("config.canonical_compile", [*CANONICAL, "train.compile=block"], "model data precision fp8"),
    ("config.canonical_mtp", [*CANONICAL, "model.mtp_layers=1"], "data precision fp8"),
    ("config.canonical_lm_eval", [*CANONICAL, *TASKS], "model precision fp8"),
    ("config.canonical_history", [*CANONICAL, *TE], "model data precision"),
    (
        "config.canonical_pipeline",
        [*CANONICAL, "precision.pipeline=bf16"],
        "model data fp8",
    ),
]


@pytest.mark.parametrize(
    ("code", "keys", "table"),
    [(code, keys, table) for code, keys, tables in NEEDED for table in tables.split()],
)
def test_a_broken_table_hides_no_problem_of_others(code: str, keys: list[str], table: str) -> None:
    with raises(code):
        load_run(None, [*MINIMAL, *keys, BROKEN[table]])


@pytest.mark.parametrize("key", REMOVED_KEYS)
@pytest.mark.parametrize("value", ["false", '"stage"'])
def test_a_key_that_no_run_computes_with_is_refused_by_name(key: str, value: str) -> None:
    (problem,) = problems(*MINIMAL, f"{key}={value}")
    assert problem == Problem.of(
        "config.key_removed",
        key=key,
        value=value,
        origin="command line",
        reason=REMOVED_KEYS[key],
    )
    assert key not in known_keys() and key not in describe_keys()


def test_a_run_that_an_earlier_megaprec_wrote_down_is_still_read(tmp_path: Path) -> None:
    """It has all keys, also those that are gone."""
    run = load_run(None, MINIMAL)
    run.save_resolved(tmp_path)
    saved = tmp_path / "run.toml"
    text = saved.read_text().replace("[optimizer]\n", '[optimizer]\nvalidation = "before"\n')
    saved.write_text(text.replace("[fp8]\n", '[fp8]\nreduce_over = "world"\n'))
    assert dict(load_run(saved)) == dict(run) and not load_run(saved).notes


def test_a_run_that_was_written_down_is_refused_if_it_is_cut_short_and_may_be_edited(
    tmp_path: Path,
) -> None:
    """Most of its halves are TOML, and would be another run, in another folder."""
    run = load_run(None, MINIMAL)
    saved = run.save_resolved(tmp_path)
    lines = saved.read_text().splitlines(keepends=True)
    heads = [lines[0][:length] for length in range(1, len(lines[0]))]
    halves = ["".join(lines[:number]) for number in range(1, len(lines))]
    for text in (*heads, *halves):
        saved.write_text(text)
        with raises("config.run_file_cut", path=saved):
            load_run(saved, MINIMAL)
    saved.write_text("".join(lines).replace("seed = 1234", "seed = 5") + "\n# of my own\n")
    assert load_run(saved).train.seed == 5
    # one of an earlier version, which had no such end
    first, *others, _, _ = lines
    earlier = first.replace(', to the line "# end"', "")
    assert earlier != first
    saved.write_text("".join([earlier, *others]))
    assert dict(load_run(saved)) == dict(run) and is_resolved(saved)


def test_what_a_run_that_was_written_down_did_and_does_no_more_is_noted(tmp_path: Path) -> None:
    load_run(None, MINIMAL).save_resolved(tmp_path)
    saved = tmp_path / "run.toml"
    saved.write_text(saved.read_text().replace("[optimizer]\n", "[optimizer]\nnative = true\n"))
    reason = REMOVED_KEYS["optimizer.native"]
    for name in (saved, f"{tmp_path}/./run.toml"):
        assert load_run(name).notes == (
            f"optimizer.native = true (file {saved}): without effect, for {reason}",
        )


def test_a_removed_key_of_the_command_line_is_refused_beside_a_run_that_was_written_down(
    tmp_path: Path,
) -> None:
    load_run(None, MINIMAL).save_resolved(tmp_path)
    with raises("config.key_removed", key="optimizer.native", origin="command line"):
        load_run(tmp_path / "run.toml", ["optimizer.native=true"])


def test_a_key_without_effect_is_noted_however_the_file_is_named(run_file: Path) -> None:
    run_file.write_text(RUN + '\n[optimizer]\nname = "sgd"\nbetas = [0.9, 0.9]\n')
    notes = load_run(run_file).notes
    assert notes
    assert load_run(f"{run_file.parent}/./{run_file.name}").notes == notes


def test_a_run_file_is_read_without_opening_the_weights_that_it_names(tmp_path: Path) -> None:
    assert load_run(None, [*MINIMAL, f"train.init_from={tmp_path}/none"]).model.layers == 6
    (missing, *_) = problems(*REQUIRED, f"train.init_from={tmp_path}/none")
    assert shows(missing, "config.key_missing", table="model", name="layers")


STATED = [
    (FP8, FP8Recipe, {name: name for name in FP8_KEYS if name != "kind"}),
    (
        Precision,
        LossScaling,
        {k: field for k, field in SCALING.items() if k not in ("scaling", "max_scale")},
    ),
    (
        Precision,
        PrecisionPlan,
        dict.fromkeys(("on_nonfinite", "masters_in_checkpoint", "tf32", "rounding")),
    ),
    (Optimizer, AdamW, dict.fromkeys(("betas", "eps"))),
    (
        Optimizer,
        ParallelAMPOptimizer,
        dict.fromkeys(("weight_decay", "groups", "clip", "norm")),
    ),
    (Parallel, ParallelAMPOptimizer, dict.fromkeys(("bucket", "zero_size"))),
    (Precision, OverflowMonitor, dict.fromkeys(("patience",))),
    (Train, SpikeMonitor, {"spike_patience": "patience"}),
]


@pytest.mark.parametrize(
    ("one", "other", "names"), STATED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_default_is_the_same_wherever_it_is_stated(
    one: type, other: type, names: dict[str, str | None]
) -> None:
    """The run file reads most defaults from the libraries; the others, and those of two libraries,
    must agree."""

    def default(kind: type, name: str) -> Any:
        if issubclass(kind, BaseModel):
            return kind.model_fields[name].default
        return inspect.signature(kind).parameters[name].default

    for name, there in names.items():
        assert default(one, name) == default(other, there or name), name


def test_a_part_to_keep_in_fp32_that_matches_no_parameter_is_found_before_launch(
    run_file: Path,
) -> None:
    def kept(*patterns: str) -> list[str]:
        return [f"precision.keep_fp32={list(patterns)}".replace("'", '"')]

    load_run(run_file, kept("embedding.*", "layers.1.attention.query.weight", "*norm.weight"))
    with pytest.raises(UserError) as found:
        load_run(run_file, kept("*norm.weight", "layer.0.mlp.gate.weight", "head"))
    first, second = found.value.problems
    assert shows(
        first,
        "precision.pattern_unmatched",
        key="precision.keep_fp32",
        pattern="layer.0.mlp.gate.weight",
        examples=re.compile("^; names are like"),
        hint=re.compile(r"did you mean layers\.0\.mlp\.gate\.weight\?$"),
    )
    assert shows(second, "precision.pattern_unmatched", key="precision.keep_fp32", pattern="head")
    # its names are not known yet
    load_run(run_file, [*kept("mine.*"), "model.factory=my.py:build", "log.sample="])


def test_the_two_patterns_of_norms_are_one_for_norms_without_biases(run_file: Path) -> None:
    """Dialects and their translations say both of them, whatever norms a model has."""
    load_run(run_file, ['precision.keep_fp32=["*norm.weight", "*norm.bias"]'])
    load_run(
        run_file,
        ["precision.internevo.dtype=torch.bfloat16", "precision.internevo.use_fp32_norm=true"],
    )
    with pytest.raises(
        UserError, match=sentence("precision.pattern_unmatched", pattern="*norm.bias")
    ):
        load_run(run_file, ['precision.keep_fp32=["*norm.bias"]'])


def test_a_group_that_matches_no_parameter_is_found_before_launch(run_file: Path) -> None:
    def groups(*patterns: str) -> list[str]:
        return [
            "optimizer.groups=["
            + ", ".join(f'{{pattern = "{p}", lr = 2.0}}' for p in patterns)
            + "]"
        ]

    load_run(run_file, groups("embedding.*", "layers.1.attention.query.weight", "*norm.weight"))
    with pytest.raises(UserError) as found:
        load_run(run_file, groups("*norm.weight", "embeding.weight", "layers.99.*"))
    first, second = found.value.problems
    assert shows(
        first,
        "precision.pattern_unmatched",
        key="optimizer.groups",
        pattern="embeding.weight",
        examples=re.compile("^; names are like embedding"),
        hint=re.compile(r"did you mean embedding\.weight\?$"),
    )
    assert shows(
        second, "precision.pattern_unmatched", key="optimizer.groups", pattern="layers.99.*"
    )
    # its names are not known yet
    load_run(run_file, [*groups("mine.*"), "model.factory=my.py:build", "log.sample="])


def test_a_preset_of_the_command_line_takes_the_place_of_the_file_s_model(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nlayers = 2\nhidden = 64\nheads = 4\nexperts = 4\ndropout = 0.25\n"
        "[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nseq_length = 16\n"
    )
    run = load_run(file, ["model.preset=llama-3-8b"])
    free = {"dropout", "embedding_dropout"}
    assert run.model.model_dump(exclude=free) == preset("llama-3-8b").model_dump(exclude=free)
    assert run.model.dropout == 0.25
    (note,) = run.notes
    assert note == (
        'model.preset = "llama-3-8b" (command line) is the model; left aside: model.layers = '
        "2, model.hidden = 64, "
        "model.heads = 4, model.experts = 4"
    )
    assert load_run(file, ["model.preset=llama-3-8b", "model.layers=3"]).model.layers == 3
    file.write_text(file.read_text().replace("[model]", '[model]\npreset = "llama-demo"'))
    own = load_run(file)
    assert (own.model.layers, own.notes) == (2, ()), "within a file single keys change its preset"
    again = tmp_path / "again.toml"
    again.write_text(
        run.as_toml(
            "# Written by megaprec: the resolved run. Comments say where a value came from."
        )
    )
    assert load_run(again).model == run.model


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            ["parallel.recompute=full", "parallel.recompute_layers=9"],
            Problem.of(
                "config.recompute_layers",
                recompute_layers=9,
                layers="model.layers = 4",
                most_layers=4,
            ),
        ),
        (
            ["parallel.recompute=full", "parallel.recompute_layers=4", "parallel.pipeline=2"],
            Problem.of(
                "config.recompute_layers",
                recompute_layers=4,
                layers="model.layers = 4 in 2 stages",
                most_layers=3,
            ),
        ),
        (
            ["model.mtp_layers=3", "train.seq_length=3"],
            Problem.of("config.mtp_too_far", mtp_layers=3, seq_length=3),
        ),
        (
            ["model.experts=2", "model.experts_per_token=3"],
            f"model.{Problem.of('model.experts_per_token', experts_per_token=3, experts=2)}",
        ),
    ],
)
def test_a_count_above_what_is_there_is_refused(keys: list[str], line: str) -> None:
    with pytest.raises(UserError) as refused:
        load_run(None, [*MINIMAL, "model.layers=4", *keys])
    assert [*refused.value.problems] == [line]


def test_training_data_of_the_command_line_beside_a_blend_of_the_file_are_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\nblend = [{source = "a.txt", weight = 1.0}]\n')
    with pytest.raises(UserError, match=sentence("config.source_beside_blend")):
        load_run(file, [*MINIMAL, "data.source=python"])
    assert load_run(file, [*MINIMAL, "data.source=python", "data.blend=[]"]).data.source == "python"


@pytest.mark.parametrize("value", ["false", "-0.0"])
def test_a_width_of_a_head_is_a_whole_number_also_where_0_is_the_default(value: str) -> None:
    with pytest.raises(UserError, match=r"model\.head_dim = "):
        load_run(None, [*MINIMAL, f"model.head_dim={value}"])
    assert load_run(None, [*MINIMAL, "model.head_dim=0"]).model.head_dim > 0
