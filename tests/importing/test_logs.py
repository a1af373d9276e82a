"""The arguments that Megatron-LM prints into its log, and keeps in a checkpoint, are the run of its
command line."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from tests.importing.test_arguments import FACTS
from tests.importing.test_import import BASE, CHANGES
from tests.refusals import raises
from tools.cli import main
from tools.interop.arguments.megatron import DEFAULTS, READ, REFUSED, is_unused
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.megatron_model import completed
from tools.interop.importing.read_arguments import read_words
from tools.interop.importing.run import Imported, import_run
from tools.interop.importing.shell import split_words

WORDS = (
    "",
    *CHANGES[:12],
    "--bf16 --use-distributed-optimizer",
    "--fp16 --optimizer sgd --split 98,1,1",
)


def kept(line: str, ranks: int = 1) -> dict[str, Any]:
    """The arguments of a command line as Megatron-LM keeps them, completed as by its checks."""
    arguments = Arguments()
    read_words(split_words(line, {}).words, arguments)
    assert not arguments.draft.problems
    args = dict[str, Any]()
    for typed, form, _ in FACTS:
        name = typed.removeprefix("--").replace("-", "_")
        kept = name.removeprefix("no_").removeprefix("disable_")
        if is_unused(name) and form in ("true", "false"):
            args[kept] = kept != name
        elif is_unused(name):
            args[name] = None
    args |= {name: refused.permitted for name, refused in REFUSED.items() if refused.form != "flag"}
    args |= {name: False for name, refused in REFUSED.items() if refused.form == "flag"}
    for name in ("no_initialization", "no_data_sharding"):
        del args[name]
    args |= {"perform_initialization": True, "data_sharding": True}
    args |= dict(DEFAULTS) | arguments.values
    args["ffn_hidden_size"] = completed(arguments)["ffn_hidden_size"]
    args |= dict.fromkeys(("start_weight_decay", "end_weight_decay"), args["weight_decay"])
    args |= {
        "world_size": ranks,
        "rank": 0,
        "params_dtype": "torch.float32",
        "virtual_stages": None,
    }
    return args


def log_of(args: dict[str, Any], prefix: str = "") -> str:
    """What training.arguments._print_args prints."""
    rows = [f"{prefix}  {name} {'.' * (48 - len(name))} {value}" for name, value in args.items()]
    dashes = "-" * 20
    return "\n".join(
        [
            "using world size: 1",
            f"{prefix}{dashes}---- arguments ----{dashes}",
            *sorted(rows),
            f"{prefix}{dashes} end of arguments -{dashes}",
            " [2026-08-01 10:00:00] iteration 1/ 100 | lm loss: 10.8 | ...",
        ]
    )


def keys(made: Imported) -> list[str]:
    """The keys of the run file, but for a width that Megatron-LM has completed."""
    lines = [line.partition("  #")[0].rstrip() for line in made.text.splitlines()]
    given = [line for line in lines if " = " in line and not line.startswith("#")]
    return [line for line in given if not line.startswith("ffn = ")]


def imported(path: Path) -> Imported:
    return import_run([str(path)], {}, {}, None)


def test_every_argument_has_a_default_in_a_log() -> None:
    assert len(kept(BASE)) > 0.95 * len({name for name, _, _ in FACTS})
    assert set(kept(BASE)) >= {row.kept for row in READ.values()}


@pytest.mark.parametrize("prefix", ["", "0: ", "[default7]:"])
@pytest.mark.parametrize("change", WORDS)
def test_a_log_is_the_run_of_its_command_line(change: str, prefix: str, tmp_path: Path) -> None:
    line = f"{BASE} {change}"
    log = tmp_path / "train.log"
    log.write_text(log_of(kept(line), prefix))
    made = imported(log)
    assert keys(made) == keys(import_run([line], {}, {}, 1))
    assert f"ffn = {kept(line)['ffn_hidden_size']}" in made.text
    assert not [note for note in made.notes if "left open" in note or "not known" in note]
    assert "# Not used here: " in made.text and "further arguments of train.log" in made.text


def test_what_changes_numbers_is_refused_in_a_log_too(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    args = kept(BASE)
    for name, value, said in (
        (
            "phase_transition_iterations",
            "[10]",
            "give the weights of all phases by samples in data.blend",
        ),
        ("perform_initialization", False, "initial weights are normal"),
        ("qk_l2_norm", True, "it makes another model"),
        ("decoupled_lr", 0.5, "the learning rate is one schedule"),
    ):
        log.write_text(log_of(args | {name: value}))
        with pytest.raises(UserError, match=said):
            imported(log)
    log.write_text(log_of(args | {"my_own_loss": 0.5, "my_other": None}))
    (note,) = [note for note in imported(log).notes if "my_own_loss" in note]
    assert "my_own_loss = 0.5" in note and "my_other" not in note


def test_a_log_that_says_two_things_is_refused_and_a_long_one_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    one = log_of(kept(BASE))
    log.write_text(one + "\n" + one + "\n" + "iteration 2\n" * 100_000)
    made = imported(log)
    assert keys(made) == keys(import_run([BASE], {}, {}, 1))
    log.write_text(one + "\n" + log_of(kept(BASE.replace("--lr 1e-3", "--lr 2e-3"))))
    with raises("import.several_printed", count=2):
        imported(log)
    rows = [row for row in one.splitlines() if " ...." in row]
    log.write_text("\n".join(rows))  # without the lines around them
    assert keys(imported(log)) == keys(made)


@pytest.mark.slow
def test_a_checkpoint_is_the_run_of_its_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    line = f"{BASE} --bf16 --swiglu"
    args = kept(line) | {"iteration": 7, "padded_vocab_size": 512}
    content = {"args": args, "iteration": 7, "checkpoint_version": 3.0, "model": {}}
    torch.save(content, folder / "model_optim_rng.pt")
    assert keys(imported(tmp_path)) == keys(import_run([line], {}, {}, 1))
    assert main(["import-args", str(tmp_path / "iter_0000007")]) == 0
    capsys.readouterr()
    with raises("import.no_checkpoint"):
        imported(folder)
