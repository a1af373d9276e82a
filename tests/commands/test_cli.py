"""The command line as a whole: its version, and that every command and option of it is
explained."""

import argparse
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.cli import main, parser_of_all
from tools.commands import keys
from tools.commands.completion import SHELLS, completion_script
from tools.commands.keys import describe_keys

ROOT = Path(__file__).parents[2]


def parsers(
    parser: argparse.ArgumentParser, name: str = "megaprec"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of every command, and of commands within commands."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from parsers(inner, f"{name} {word}")


def helps() -> dict[str, str]:
    """Return the help of every option, argument and command."""
    found: dict[str, str] = {}
    for name, parser in parsers(parser_of_all()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                told = {choice.dest: choice.help for choice in action._choices_actions}
                found |= {f"{name} {word}": told.get(word) or "" for word in action.choices}
            else:
                found[f"{name} {'/'.join(action.option_strings) or action.dest}"] = (
                    action.help or ""
                )
    return {name: text for name, text in found.items() if text != argparse.SUPPRESS}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    said = capsys.readouterr().out.strip()
    assert left.value.code == 0 and said.startswith("megaprec ")
    assert said.endswith(f"torch {version('torch')}, Python {platform.python_version()}")


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (2, "")
    for command in ("train", "generate", "evaluate", "doctor"):
        assert re.search(rf"^ +{command} +\w+", said.err, re.MULTILINE)


def test_every_command_and_option_has_a_help_that_stands_alone() -> None:
    begins = re.compile(
        r"(what|whose|of|whether|who|those|the same|which|how|where|so|as) ", re.IGNORECASE
    )
    assert len(helps()) > 80
    assert {
        name: text for name, text in helps().items() if len(text.split()) < 2 or begins.match(text)
    } == {}


def test_an_option_like_none_of_a_command_names_where_these_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (["generate", "run"], ["data", "inspect", "tokens"]):
        with pytest.raises(SystemExit) as left:
            main([*command, "--zzzzzz", "3"])
        assert left.value.code == 2
        names = " ".join(command[:-1])
        listed = f"unrecognized arguments: --zzzzzz 3; megaprec {names} --help lists the options"
        assert capsys.readouterr().err.rstrip().endswith(listed)


def test_a_misspelt_command_or_option_is_answered_with_the_closest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, meant in (
        (["trian"], "train"),
        (["data", "bild"], "build"),
        (["convert", "x", "y", "--to", "hff"], "hf"),
        (["train", "run.toml", "--strct"], "--strict"),
        (["generate", "run", "--toknes=3"], "--tokens"),
        (["data", "inspect", "tokens", "--jsn"], "--json"),
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
        assert capsys.readouterr().err.rstrip().endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["plan", "run.toml", "--gpu", ""], '--gpu ""'),
        (["plan", "run.toml", "--gpu="], "--gpu="),
        (["report", "run", "-o", ""], '-o ""'),
        (["inspect", ""], 'the argument behind "inspect"'),
        (["diff", "a", ""], 'the argument behind "a"'),
        (["import-args", ""], 'the argument behind "import-args"'),
        ([""], 'the argument behind "megaprec"'),
    ],
)
def test_an_argument_that_is_empty_is_refused_and_not_taken_for_none_or_for_this_folder(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert f"error: {named} is empty: give a value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan run.toml --gpu-memory -5GB", "--gpu-memory -5GB: give a size such as 80GB"),
        ("plan run.toml --ranks -3", "--ranks -3: give a number from 1"),
        ("generate model --prompt -hello", 'begins with "-" is written --prompt=VALUE'),
        ("plan run.toml --output -o.toml", 'begins with "-" is written --output=VALUE'),
    ],
)
def test_a_value_that_begins_with_a_dash_is_read_or_told_how_to_write(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = Path(__file__).parents[2] / "examples" / "demo.toml"
    Path("run.toml").write_text(demo.read_text())
    try:
        code = main(line.split())
    except SystemExit as end:  # argparse's own errors
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        (["lr"], {"lr.peak", "lr.unit"}, {"train.steps", "precision.reduce"}),
        (["warmup"], {"lr.warmup"}, {"lr.peak"}),
        (["data"], {"data.source", "parallel.data"}, {"train.steps"}),
        (["lr.peak", "[log]"], {"lr.peak", "log.every"}, {"lr.warmup"}),
        ([], {"lr.peak", "model.preset", "log.every"}, set()),
    ],
)
def test_keys_are_listed_by_table_or_by_a_part_of_the_name(
    words: list[str], there: set[str], not_there: set[str]
) -> None:
    listed = {line.split()[0] for line in describe_keys(words).splitlines() if line}
    assert there <= listed
    assert not not_there & listed


def test_a_word_that_no_key_has_is_refused_with_the_closest_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["keys", "warmpu", "lr"]) == 2
    assert (
        capsys.readouterr().err
        == '"warmpu": no table and no key has this in its name; did you mean lr.warmup?\n'
    )


@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_help_of_keys_fits_the_terminal_and_says_the_same(width: int) -> None:
    wrapped = describe_keys(width=width)
    whole = describe_keys()
    assert max(map(len, wrapped.splitlines())) <= width
    keys = [line.split()[0] for line in whole.splitlines() if "." in line.partition(" ")[0]]
    assert [
        line.split(" = ")[0] for line in wrapped.splitlines() if re.match(r"\w+\.\w+ = ", line)
    ] == keys
    told = " ".join(wrapped.split())
    assert not [line for line in whole.splitlines() if " ".join(line[50:].split()) not in told]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["da"], {"data"}),
        (["data", "bu"], {"build"}),
        (["train", "run.toml", "lr.wa"], {"lr.warmup="}),
        (["data", "build", "x", "--ov"], {"--overwrite"}),
        (["keys", "opt"], {"optimizer"}),
        (["convert", "a", "b", "--to", "me"], {"megaprec", "megatron"}),
    ],
)
def test_bash_completes_commands_options_and_keys(
    words: list[str], completed: set[str], tmp_path: Path
) -> None:
    (tmp_path / "script").write_text(completion_script(parser_of_all(), "bash"))
    command = (
        f"source ./script; COMP_WORDS=(megaprec {' '.join(words)}); COMP_CWORD={len(words)}; "
        "function=$(complete -p megaprec | sed -E 's/.*-F ([^ ]+).*/\\1/'); "
        f'$function megaprec "{words[-1]}" ""; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == completed


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_is_one_that_the_shell_reads(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(capsys.readouterr().out)
    done = subprocess.run(
        [shell, "-n", tmp_path / "script"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("megaprec prec", "precision"),
        ("megaprec data bu", "build"),
        ("megaprec plan --gpu-", "--gpu-memory"),
        ("megaprec train run.toml lr.wa", "lr.warmup="),
    ],
)
def test_fish_completes_commands_and_options(line: str, completed: str, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs fish")
    (tmp_path / "script").write_text(completion_script(parser_of_all(), "fish"))
    said = f'source ./script; complete -C "{line}"'
    done = subprocess.run(
        ["fish", "-c", said], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == [completed]


@pytest.mark.parametrize(
    "start", [["-c", "from tools.start import main; main(['keys'])"], ["-m", "megaprec", "keys"]]
)
def test_ctrl_c_while_modules_are_read_leaves_no_traceback(
    start: list[str], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    command = [sys.executable, *start]
    ended = subprocess.run(
        command, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


LEAVES_A_CIRCLE = """
import gc, sys
from tools.start import main
from tools.commands import keys

class Circle:
    def __init__(self):
        self.own = self
    def __del__(self):
        print("let go")

def run(_):
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
    Circle()
    return 0

keys.main = run
sys.exit(main(["keys"]))
"""


@pytest.mark.slow
def test_garbage_collection_leaves_out_modules_and_lets_go_of_what_a_command_made() -> None:
    command = [sys.executable, "-c", LEAVES_A_CIRCLE]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "let go\n")


def test_ctrl_c_outside_of_a_step_is_answered_in_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(keys, "main", interrupted)
    assert main(["keys"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_overrides_are_not_said_to_be_required(capsys: pytest.CaptureFixture[str]) -> None:
    for name, parser in parsers(parser_of_all()):
        required = [action.dest for action in parser._actions if action.required]
        assert "overrides" not in required, name
        if "file" in required:
            with pytest.raises(SystemExit):
                main(name.split()[1:])
            assert "table.key=value" not in capsys.readouterr().err.splitlines()[-1], name


def test_an_override_that_is_written_as_an_option_is_told_its_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--train.steps=14"], ["--train.steps", "14"]):
        with pytest.raises(SystemExit) as left:
            main(["train", "run.toml", *words])
        assert left.value.code == 2
        assert "an override has no dashes: train.steps=14" in capsys.readouterr().err


def test_every_command_takes_a_folder_with_a_tokenizer_for_its_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    taken: dict[str, object] = {}
    for name, parser in parsers(parser_of_all()):
        for action in parser._actions:
            if "--tokenizer" in action.option_strings and callable(action.type):
                taken[name] = action.type(str(tmp_path))
    assert len(taken) >= 6
    assert set(taken.values()) == {file}


@pytest.mark.parametrize(
    "command", ["diagnose", "report", "compare", "explain-overflow", "explain-spike"]
)
def test_a_run_folder_that_is_missing_is_told_in_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    output = ["-o", str(tmp_path / "page.html")] if command == "report" else []
    assert main([command, str(missing), *output]) == 2
    assert capsys.readouterr().err == f"{missing} does not exist: give the folder of a run\n"


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["convert"], ["diff"], ["merge", "-o", "merged"], ["generate", "--prompt", "a"]],
    ids=lambda words: words[0],
)
def test_a_model_whose_name_the_system_does_not_take_is_told_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The system refuses to look, as it does in a folder that this user may not enter."""
    name = "x" * 300
    with pytest.raises(SystemExit) as left:
        main([*words, name, "other"])
    assert left.value.code == 2
    assert f"{name}: File name too long (ENAMETOOLONG)" in capsys.readouterr().err
