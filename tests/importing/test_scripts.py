"""A launch script is read as text: its variables, arrays and plain conditions; what it leaves open
is named."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tests.importing.scripts import ASSUMED, CONDITION, SCRIPTS
from tests.refusals import raises, sentence, shows
from tools.interop.importing.shell import CommandLine, read_script, split_words

RUN = "torchrun --nproc-per-node 4 pretrain_gpt.py"


def read(text: str, assumed: Mapping[str, str] | None = None) -> CommandLine:
    return read_script(text, Path("nowhere/train.sh"), assumed or {})


def texts(text: str, **assumed: str) -> list[str]:
    return [word.text for word in read(text, assumed).words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{RUN} --a 1 --b=2", "--a|1|--b=2"),
        (f"{RUN} --a 1 \\\n  --b 2 # no --c\n# nor --d", "--a|1|--b|2"),
        (f"X=3; Y='a b'\n{RUN} --a $X --b \"$Y\"", "--a|3|--b|a b"),
        (f"Y='a b'\n{RUN} --a $Y", "--a|a|b"),
        (f"ARGS=(--a 1\n  --b \"c d\")\nARGS+=(--e)\n{RUN} \"${{ARGS[@]}}\"", "--a|1|--b|c d|--e"),
        (f"ARGS=(\"--a 1\")\n{RUN} ${{ARGS[@]}}", "--a|1"),
        (f"A='--a 1'\nA=\"$A --b 2\"\n{RUN} $A", "--a|1|--b|2"),
        (f"A=x\nA+=y\n{RUN} --a $A-${{A}}z", "--a|xy-xyz"),
        (f"{RUN} --a ${{N:-7}} --b ${{M-8}}", "--a|7|--b|8"),
        (f"srun --ntasks 8 {RUN} --a 1", "--a|1"),
        (f"A=1 # '\nB=(2 # it's (two)\n 3)\n{RUN} --a $A ${{B[@]}}", "--a|1|2|3"),
        (f"A=(1 'b c' \"\")\n{RUN} \"${{A[@]}}\" --b \"${{NONE[@]:-}}\"", "1|b c||--b|"),
        (f"E=()\nexport B=2 C; A=$B D=$A\n{RUN} --a $D \"${{E[@]}}\" $E", "--a|2"),
        (f"if [ -z \"$X\" ]; then Y=1; fi\nZ=2\n{RUN} --a $Z", "--a|2"),
        (f"{RUN} --a 'x'\\''y' \"\\$A\" \\$B 2>&1 | tee log", "--a|x'y|$A|$B"),
        (f"cat <<EOF\n{RUN} --x 1\nEOF\n{RUN} --a 1", "--a|1"),
        (f"NCCL_DEBUG=1 {RUN} --a 1 && echo done", "--a|1"),
        (f"python tools/make.py\n{RUN} --a 1 > log.txt 2>&1", "--a|1"),
    ],
)  # fmt: skip
def test_the_words_are_those_that_a_shell_would_pass(text: str, expected: str) -> None:
    assert texts(text) == expected.split("|")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{RUN} --a $1", "$1 has no value in the script: --assume 1=VALUE gives it"),
        (f"{RUN} --a $PATH_OF_DATA", "--assume PATH_OF_DATA=VALUE"),
        (f"{RUN} --a $(nproc)", "$(nproc) would have to be run"),
        (f"{RUN} --a `hostname`", "would have to be run"),
        (f"{RUN} --a 1 $@", "$@ has no value in the script: --assume '@=...' gives it"),
        (
            f'if [ -n "$K" ]; then A=1; fi\n{RUN} --a $A',
            "$A is set in line 1 by what is not followed",
        ),
        (
            f"for i in 1 2; do A=$i; done\n{RUN} --a $A",
            "$A is set in line 1 by what is not followed",
        ),
        (
            f"A=1\ncase $K in 1) A=2;; esac\n{RUN} --a $A",
            "$A is set in line 2 by what is not followed",
        ),
        (
            f"A=1; while true; do\nbreak; A=2; done\n{RUN} --a $A",
            "$A is set in line 2 by what is not",
        ),
        (f"A=1\n(A=2)\n{RUN} --a $A", "$A is set in line 2 by what is not followed"),
        (f"echo | A=3\n{RUN} --a $A", "$A is set in line 1 by what is not followed"),
        (f"A=2 &\n{RUN} --a $A", "$A is set in line 1 by what is not followed"),
        (f"A=1 && B=2\n{RUN} --a $B", "$B is set in line 1 by what is not followed"),
        (f"A=(1 2)\nA=3\n{RUN} --a ${{A[@]}}", "$A is set in line 2 by what is not followed"),
        (f"A+=3\n{RUN} --a $A", "$A has no value in the script: --assume A=VALUE gives it"),
        (f"A='1,2'\nIFS=,\n{RUN} --a $A", "$A may be cut otherwise, for line 2 sets IFS"),
        (f"shift\n{RUN} --a $1", "$1 is set in line 1 by what is not followed"),
        (f"set -- 1 2\n{RUN} --a $1", "$1 is set in line 1 by what is not followed"),
        (f"{RUN} --a $((2 * (3 + 4)))", "$((2 * (3 + 4))) would have to be run: write its value"),
        (f"{RUN} --a ${{A%x}}", "${A%x} would have to be run: write its value"),
        (f"echo $((A++))\n{RUN} --a $A", "$A is set in line 1 by what is not followed"),
        (
            f"D=$(dirname $(realpath $0))\n{RUN} --a $D/data",
            "$(dirname $(realpath $0)) would have to be run",
        ),
        (
            f'D="$(cd "$(dirname "$0")" && echo ")")"\n{RUN} --a $D',
            '$(cd "$(dirname "$0")" && echo ")") would have',
        ),
        (
            f"{RUN} --a ${{X:?must be set}}",
            "$X has no value in the script: --assume X=VALUE gives it",
        ),
        (f"{RUN} $ARGS", "$ARGS has no value in the script"),
        (f"A=1\n[ -d foo ] && A=2\n{RUN} --a $A", "$A is set in line 2 by what is not followed"),
        (f"A=4\n((A=A*2))\n{RUN} --a $A", "$A is set in line 2 by what is not followed"),
        (f"A=4\nlet A++\n{RUN} --a $A", "$A is set in line 2 by what is not followed"),
        (f"A=4\nread A < file\n{RUN} --a $A", "$A is set in line 2 by what is not followed"),
        (f"A=(1 2)\nA[0]=9\n{RUN} --a ${{A[@]}}", "$A is set in line 2 by what is not followed"),
        (
            f"A=(1 2)\nunset 'A[0]'\n{RUN} --a ${{A[@]}}",
            "$A is set in line 2 by what is not followed",
        ),
        (
            f'A=(1 2)\nread "A[0]" < file\n{RUN} --a ${{A[@]}}',
            "$A is set in line 2 by what is not followed",
        ),
        (f'A=1\nunset "A"\n{RUN} --a ${{A:-2}}', "$A is set in line 2 by what is not followed"),
        (f'A=1\nprintf -v "A" 2\n{RUN} --a $A', "$A is set in line 2 by what is not followed"),
        (f"{RUN} --a {{1,2}}", "{1,2} would have to be run: write its value"),
        (f"{RUN} --a <(echo 1) --b 2", "<(echo 1) would have to be run"),
        (f"{RUN} --a $'x\\ty'", "would have to be run"),
    ],
)
def test_what_a_script_leaves_open_is_named_with_the_way_to_give_it(text: str, line: str) -> None:
    unknown = [word.unknown for word in read(text).words if word.unknown]
    assert len(unknown) == 1 and line in unknown[0]


@pytest.mark.parametrize(
    "begin",
    [
        "A=2\nbig() { A=8; }",
        "A=2\nfunction big { A=8; }",
        "A=2\nbig()\n{\n  A=8\n}",
        "s() { A=$1; }\ns 4 5",
        "A=2\ns() { local A=8; }\ns",
        "A=2\ndeclare -x A=4",
        "A=2\nreadonly -a A=(4)",
        "A=2\nexport 'A=4'",
        'A=2\nN=A\ndeclare "$N=4"',
        ": ${A:=4}",
        "A=2\n! [ 1 = 2 ] && A=4",
        "A=2\n{ A=4; }",
        "A=2\nA=4 command export A",
        "A=2\neval A=4",
        "A=2\ns() { eval A=4; }\nA=2\ns",
    ],
)
def test_what_is_no_plain_assignment_leaves_a_variable_open(begin: str) -> None:
    (_, word) = read(f"{begin}\n{RUN} --a $A").words
    assert word.text == "$A" and "--assume A=VALUE gives it" in word.unknown
    assert texts(f"{begin}\n{RUN} --a $A", A="7") == ["--a", "7"]


@pytest.mark.parametrize(
    ("begin", "value"),
    [
        ("A=2\nexport A=4 B", "4"),
        ("usage() { exit 1; }\nA=2", "2"),
        ('A=2\neval "$(conda shell.bash hook)"', "2"),
        ("A=2\nset -euo pipefail; set -x", "2"),
        ("A=2\nexit\nA=3", "2"),
        ("module load cuda && mkdir -p x || exit 1\nA=2", "2"),
        ('echo "A=5 or export A"\nprintf "%s" A\nA=2', "2"),
    ],
)
def test_what_sets_nothing_leaves_what_is_plain(begin: str, value: str) -> None:
    if "exit\n" in begin:
        with raises("import.no_program"):
            read(f"{begin}\n{RUN} --a $A")
        return
    assert texts(f"{begin}\n{RUN} --a $A") == ["--a", value]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            f'main() {{ {RUN} --a $1; }}\nmain "$@"',
            sentence("import.program_in_block", line=1),
        ),
        (
            f"for x in 1 2; do\n{RUN} --a 1; done",
            sentence("import.program_in_block", line=2),
        ),
        (f'run() {{ "$@" --b; }}\nrun {RUN} --a 1', sentence("import.program_in_function", line=2)),
        (f"eval {RUN} --a 1", sentence("import.program_in_text", line=1)),
        (f'C="{RUN} --a 1"\necho $C\neval $C', sentence("import.program_in_text", line=3)),
        (f"srun bash -c '{RUN} --a 1'", sentence("import.program_in_text", line=1)),
    ],
)
def test_a_program_that_a_script_runs_in_another_way_is_refused_with_its_line(
    script: str, line: str
) -> None:
    with pytest.raises(UserError, match=line):
        read(script)


def test_a_condition_of_megatrons_examples_is_refused_by_its_line_and_given_by_assume() -> None:
    script = SCRIPTS["gpt"].replace('echo "starting', CONDITION + 'echo "starting')
    number = script.splitlines().index("    EVAL_AND_LOGGING_ARGS+=(") + 1
    (word,) = [word for word in read(script, ASSUMED).words if word.unknown]
    assert f"$EVAL_AND_LOGGING_ARGS is set in line {number} by what is not" in word.unknown
    given = read(script, ASSUMED | {"EVAL_AND_LOGGING_ARGS": "--log-interval 5 --save x"}).words
    assert [word.text for word in given[-4:]] == ["--log-interval", "5", "--save", "x"]


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        ("for A in 4 8; do echo; done", "$A is set in line 2 by what is not followed"),
        ("for ((A=4; A<8; A++)); do echo; done", "$A is set in line 2 by what is not followed"),
        ("while IFS= read -r A; do echo; done < f", "$A is set in line 2 by what is not followed"),
        ("IFS=, read -r A B < f", "$A is set in line 2 by what is not followed"),
        ("if read A; then echo; fi", "$A is set in line 2 by what is not followed"),
        ("declare -i A=4", "$A is set in line 2 by what is not followed"),
        ("declare -n X=A\nX=4", "$A is set in line 2 by what is not followed"),
        (
            'eval "$(python sizes.py)"',
            "$A may be set in line 2 by eval $(python sizes.py), which is not run",
        ),
        ("export $(cat .env)", "$A may be set in line 2 by export $(cat .env), which is not run"),
    ],
)
def test_what_may_set_a_variable_anew_leaves_it_open(begin: str, line: str) -> None:
    (word,) = [word for word in read(f"A=2\n{begin}\n{RUN} --a $A").words if word.unknown]
    assert line in word.unknown and "--assume A=VALUE gives it" in word.unknown


def test_what_a_file_does_not_reach_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("A=4\nreturn\nA=8\n")
    found = read_script(f"source env.sh\n{RUN} --a $A", tmp_path / "train.sh", {})
    assert [word.text for word in found.words] == ["--a", "4"]
    for unsure in (
        "source env.sh | cat",
        "[ -f env.sh ] && . env.sh",
        "if true; then . env.sh; fi",
    ):
        words = read_script(f"A=2\n{unsure}\n{RUN} --a $A", tmp_path / "train.sh", {}).words
        assert shows(words[1].unknown, "import.source_not_certain")
    moved = read_script(f"A=2\ncd other\nsource env.sh\n{RUN} --a $A", tmp_path / "train.sh", {})
    assert "line 2 moves to another folder" in moved.words[1].unknown


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("echo 1", sentence("import.no_program")),
        (
            f"{RUN} --a 1\n{RUN} --a 2",
            sentence("import.several_programs", num_found=2, lines="1, 2"),
        ),
        (f'A="x\n{RUN} --a 1', sentence("import.open_block", name="train.sh", line=1, sign='"')),
        (f"{RUN} --a ${{X", sentence("import.open_block", sign="${")),
        (f"{RUN} --a 'x", sentence("import.open_block")),
        (f"A=(1 2\n{RUN} --a", sentence("import.open_block", sign="(")),
    ],
)
def test_a_script_that_cannot_be_read_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        read(text)
    assert len(caught.value.problems) == 1 and re.search(line, caught.value.problems[0])


def test_a_default_of_a_variable_is_told_where_the_arguments_need_it() -> None:
    found = read(
        f"N=${{NODES:-2}}\nA=${{HOST:-x}}\n{RUN} --master $A.\n".replace("--master $A.", "--a $N")
    )
    assert found.notes == [
        "$NODES is taken as its default, '2': --assume NODES=VALUE gives another"
    ]
    assert not read(
        f"N=${{NODES:-2}}\n{RUN} --a $N", {"N": "4"}
    ).notes  # what is assumed needs no default


TAKES_IN = [
    "source env.sh",
    ". ./env.sh",
    'source "$(dirname "$0")/env.sh"',
    'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nset -a; source $D/env.sh; set +a',
]


@pytest.mark.parametrize("line", TAKES_IN)
def test_what_a_file_beside_the_script_sets_counts_as_if_it_stood_in_the_script(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "env.sh").write_text("# sizes\nexport TP=4\nHEADS=8; ARGS=(--b $HEADS)\n")
    script = f"{line}\nTP=${{TP:-2}}\n{RUN} --a $TP ${{ARGS[@]}}"
    found = read_script(script, tmp_path / "train.sh", {})
    assert [word.text for word in found.words] == ["--a", "4", "--b", "8"]
    assert len(found.taken_in) == 1 and found.taken_in[0].endswith("env.sh") and not found.notes


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("source env.sh", "No such file or directory"),
        ("source ../env.sh", sentence("import.source_outside")),
        ("source /somewhere/env.sh", sentence("import.source_outside")),
        (". $SOME/env.sh", sentence("import.source_unknown")),
        ("source latin.sh", "not UTF-8 text"),
    ],
)
def test_what_an_unread_file_may_set_is_left_open_by_name_and_line(
    line: str, why: str, tmp_path: Path
) -> None:
    (tmp_path.parent / "env.sh").write_text("TP=4\n")
    (tmp_path / "latin.sh").write_bytes(b"TP=4 # \xff\n")
    script = f"PP=3\n{line}\nTP=${{TP:-2}}\nDP=5\n{RUN} --a $TP --b $PP --c $DP"
    words = read_script(script, tmp_path / "train.sh", {}).words
    assert [bool(word.unknown) for word in words] == [False, True, False, True, False, False]
    for word in words[1], words[3]:
        assert (
            "line 2" in word.unknown
            and re.search(why, word.unknown)
            and f"--assume {word.text[1:]}=VALUE" in word.unknown
        )
    assumed = read_script(script, tmp_path / "train.sh", {"TP": "4", "PP": "3"}).words
    assert [word.text for word in assumed] == ["--a", "4", "--b", "3", "--c", "5"]


def test_an_environment_of_programs_leaves_no_variable_open(tmp_path: Path) -> None:
    script = f"source ~/venv/bin/activate\n. /opt/conda/etc/profile.d/conda.sh\n{RUN} --a ${{N:-2}}"
    found = read_script(script, tmp_path / "train.sh", {})
    assert [word.text for word in found.words] == ["--a", "2"]
    assert sum("environment of programs" in note for note in found.notes) == 2


def test_files_that_take_in_each_other_end_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("TP=4\nsource env.sh\nsource env.sh\n")
    (_, word) = read_script(f"source env.sh\n{RUN} --a $TP", tmp_path / "train.sh", {}).words
    assert shows(word.unknown, "import.too_many_sources", most_sourced=20)


def test_options_of_the_shell_leave_the_scripts_own_arguments() -> None:
    for options in ("set -euo pipefail", "set -e; set -x", "set -o errexit", "set +x"):
        assert texts(f"{options}\n{RUN} --a $1", **{"1": "x"}) == ["--a", "x"]
    for options in ("set -e -- y", "set y", "set -- y", "shift", "shift 2"):
        assert texts(f"{options}\n{RUN} --a $1", **{"1": "x"}) == ["--a", "$1"]


def test_the_ranks_are_those_that_the_launcher_starts() -> None:
    assert read(SCRIPTS["gpt"], ASSUMED).ranks == 16
    assert read("deepspeed --num_gpus 4 --num_nodes=2 pretrain_gpt.py --a 1").ranks == 8
    assert read("python pretrain_gpt.py --a 1").ranks is None
    assert split_words("--a 1 --b 'c d'", {}).ranks is None


def test_nothing_of_a_script_is_run_and_every_word_has_its_line(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    words = read(
        f"A=$(touch {mark})\ntouch {mark}\n{RUN} \\\n --a 1 --b "
        f"$((__import__('os').mkdir('{mark}')))"
    ).words
    assert not mark.exists()
    assert [word.place for word in words[:2]] == ["train.sh, line 4"] * 2


@pytest.mark.parametrize(
    "text",
    [
        "A=x\n" + "A=$A$A\n" * 60 + f"{RUN} --a $A",
        "A=(x x)\n" + "A=(${A[@]} ${A[@]})\n" * 60 + f"{RUN} --a $A",
        "eval " * 3000 + f"{RUN} --a 1",
        "A='eval $A'\neval $A\n" + f"{RUN} --a 1",
        "if [ 1 = 1 ]; then\n" * 3000 + f"{RUN} --a 1",
        f"{RUN} --a " + "$(" * 3000 + ")" * 3000,
        f"{RUN} --a " + "${A:-" * 3000 + "}" * 3000,
        f"{RUN} --a $((" + "(" * 90 + "1" + ")" * 90 + "))",
    ],
    ids=range(8),
)
def test_a_hostile_script_ends_soon_with_a_line_or_with_words(text: str) -> None:
    began = time.process_time()
    try:
        read(text)
    except UserError as error:
        assert all(len(problem.splitlines()) == 1 for problem in error.problems)  # noqa: PT017
    assert time.process_time() - began < 30, (
        "what grows without bound takes for ever, whatever the machine"
    )


def test_a_character_that_marks_what_is_unknown_is_refused_in_a_script() -> None:
    with raises("import.private_character"):
        read(f"X=\ue0000\ue001\n{RUN} --a $X")
