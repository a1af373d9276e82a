"""A launch script is read as text: plain assignments give its variables, and whatever else may set
one leaves it unknown."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tests.importing.scripts import ASSUMED, CONDITION, SCRIPTS
from tests.refusals import raises
from tools.interop.importing.shell import CommandLine, Word, read_script, split_words

RUN = "torchrun --nproc-per-node 4 pretrain_gpt.py"


def read(
    text: str, assumed: Mapping[str, str] | None = None, folder: str = "nowhere"
) -> CommandLine:
    return read_script(text, Path(folder) / "train.sh", assumed or {})


def texts(text: str, folder: str = "nowhere", **assumed: str) -> list[str]:
    words = read(text, assumed, folder).words
    assert not [word for word in words if word.unknown]
    return [word.text for word in words]


def unknown(text: str, folder: str = "nowhere") -> Word:
    """The one word of a command line that is not known."""
    (word,) = [word for word in read(text, None, folder).words if word.unknown]
    return word


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{RUN} --a 1 --b=2", "--a|1|--b=2"),
        (f"{RUN} --a 1 \\\n  --b 2 # no --c\n# nor --d", "--a|1|--b|2"),
        (f"{RUN} --a 1\\\n2 --b x#y", "--a|12|--b|x#y"),
        (f"X=3; Y='a b'\n{RUN} --a $X --b \"$Y\"", "--a|3|--b|a b"),
        (f"Y='a b'\n{RUN} --a $Y", "--a|a|b"),
        (f"ARGS=(--a 1\n  --b \"c d\")\nARGS+=(--e)\n{RUN} \"${{ARGS[@]}}\"", "--a|1|--b|c d|--e"),
        (f"ARGS=(\"--a 1\")\n{RUN} ${{ARGS[@]}}", "--a|1"),
        (f"A='--a 1'\nA=\"$A --b 2\"\n{RUN} $A", "--a|1|--b|2"),
        (f"A='--a 1\n --b 2'\n{RUN} ${{A[@]}}", "--a|1|--b|2"),
        (f"A=x\nA+=y\n{RUN} --a $A-${{A}}z", "--a|xy-xyz"),
        (f"srun --ntasks 8 {RUN} --a 1", "--a|1"),
        (f"A=1 # '\nB=(2 # it's (two)\n 3)\n{RUN} --a $A ${{B[@]}}", "--a|1|2|3"),
        (f"A=(1 'b c' \"\")\n{RUN} \"${{A[@]}}\" --b \"\"", "1|b c||--b|"),
        (f"E=()\nexport B=2 C; A=$B D=$A\n{RUN} --a $D \"${{E[@]}}\"", "--a|2"),
        (f"if [ -z \"$X\" ]; then Y=1; fi\nZ=2\n{RUN} --a $Z", "--a|2"),
        (f"{RUN} --a 'x'\\''y' \"\\$A\" \\$B 2>&1 | tee log", "--a|x'y|$A|$B"),
        (f"cat <<EOF\n{RUN} --x 1\nEOF\n{RUN} --a 1", "--a|1"),
        (f"NCCL_DEBUG=1 {RUN} --a 1 && echo done", "--a|1"),
        (f"python tools/make.py\n{RUN} --a 1 > log.txt 2>&1", "--a|1"),
        (f"{RUN} --a 1 > log.txt --b 2", "--a|1|--b|2"),
        (f"C='{RUN} --a 1'\necho \"runs $C\"\n$C --b", "--a|1|--b"),
        (f"if [ $# -lt 1 ]; then\n  echo usage\n  exit 1\nfi\nA=2\n{RUN} --a $A", "--a|2"),
        (f"usage() {{ exit 1; }}\nA=2\n{RUN} --a $A", "--a|2"),
        (f"eval \"$(conda shell.bash hook)\"\nA=2\n{RUN} --a $A", "--a|2"),
        (f". ~/venv/bin/activate\nset -euo pipefail; set -x\nA=2\n{RUN} --a $A", "--a|2"),
        (f"A=2\nmodule load cuda && mkdir -p $A || exit 1\n{RUN} --a $A", "--a|2"),
        (f"A=2\necho \"A=5 or export A\"\n{RUN} --a $A", "--a|2"),
        (f"A=2; B=$((A * 4)) C=$(($A+1))\n{RUN} --a $A", "--a|2"),
    ],
)  # fmt: skip
def test_the_words_are_those_that_a_shell_would_pass(text: str, expected: str) -> None:
    assert texts(text) == expected.split("|")


# What a shell would do to A, or to how it is read, which is not followed.
OPEN = (
    *('if [ -n "$K" ]; then A=1; fi', "for i in 1 2; do A=$i; done", "for A in 4 8; do echo; done"),
    *("A=1\ncase $K in 1) A=2;; esac", "A=1\ncase $K in\n1)\n  A=2\n  ;;\nesac\nB=2"),
    *("A=1; while true; do\nbreak; A=2; done", "A=1\n(A=2)", "A=1\n(\nA=2\n)", "echo | A=3", "A=2 &"),
    *("A=1 && A=2", "A=1\n[ -d foo ] && A=2", "A=2\n! [ 1 = 2 ] && A=4", "A=2\n{ A=4; }"),
    *("A=1\nunset A", 'A=1\nunset "A"', "A=4\nread A < file", "A=2\nIFS=, read -r A B < f"),
    *("A=2\nif read A; then echo; fi", "A=2\nwhile IFS= read -r A; do echo; done < f"),
    *('A=1\nprintf -v "A" 2', "A=4\n((A=A*2))", "A=4\nlet A++", "echo $((A++))", "A=1; B=$((A--))"),
    *("A=2\nfor ((A=4; A<8; A++)); do echo; done", ": ${A:=4}", "A=2; B=${A=4}", "A=2\nA[0]=9"),
    *("A=2\nbig() { A=8; }", "A=2\nfunction big { A=8; }", "A=2\nbig()\n{\n  A=8\n}\nbig"),
    *("s() { A=$1; }\ns 4 5", "A=2\ns() { local A=8; }\ns", "A=2\ns() { eval A=4; }\nA=2\ns"),
    *("declare -x A=4", "A=2\ndeclare -n X=A\nX=4", "A=2\ndeclare -n X=A\nA=3\nX=4", "local A=3"),
    *("A=2\nreadonly -a A=(4)", "A=2\nexport 'A=4'", 'A=2\nN=A\ndeclare "$N=4"', "A=2\neval A=4"),
    *("A=2\nA=4 command export A", 'A=2\neval "$(python sizes.py)"', "A=2\nexport $(cat .env)"),
    *("A=2\nmapfile -t A < f", "A=2\ngetopts x A", "A=(1 2)\nA=3", "A=(1 2)\nunset 'A[0]'", "A+=3"),
    *("A='1,2'\nIFS=,", "A='1,2'\nfor x in 1; do IFS=,; done", "A=$1", "A=$(nproc)", "A=`hostname`"),
    *("A=${B:-2}", "A=2\nA=${A:-3}", "A=$((2 * (3 + 4)))", "A=${B%x}", "A=$'x\\ty'", "A=<(echo 1)"),
    *('A="$(cd "$(dirname "$0")" && echo ")")"', "A=$(dirname $(realpath $0))/data", "A={1,2}"),
    *("A=2\nsource env.sh", "A=2\n. ../other.sh", "A=2\n[ -f env.sh ] && . env.sh", "A=$B", "A=$A$A"),
    *("A=2\ncat <<E\n${A:=4}\nE", "A=1\nB=$(cat <<E\n) \nA=2\nE\n)", "coproc A { cat; }"),
)  # fmt: skip


@pytest.mark.parametrize("begin", OPEN)
def test_what_is_no_plain_assignment_leaves_a_variable_unknown(begin: str) -> None:
    word = unknown(f"{begin}\n{RUN} --a $A")
    assert word.text == "$A" and word.unknown is not None
    assert word.unknown.code in ("import.variable_open", "import.variable_unset")
    assert word.unknown.fields["name"] == "A"
    assert texts(f"{begin}\n{RUN} --a $A", A="7") == ["--a", "7"]


@pytest.mark.parametrize(
    ("written", "code", "field"),
    [
        ("$PATH_OF_DATA", "import.variable_unset", "PATH_OF_DATA"),
        ("$(nproc)", "import.not_followed", "$(nproc)"),
        ("`hostname`", "import.not_followed", "`hostname`"),
        ("$1", "import.not_followed", "$1"),
        ("$@", "import.not_followed", "$@"),
        ("${A%x}", "import.not_followed", "${A%x}"),
        ("${A:?must be set}", "import.not_followed", "${A:?must be set}"),
        ('"${A[*]}"', "import.not_followed", "${A[*]}"),
        ("x${A[@]}", "import.not_followed", "${A[@]}"),
        ("$A", "import.not_followed", "$A"),
        ("x$B", "import.not_followed", "x$B"),
        ("$E$E", "import.not_followed", "$E$E"),
        ('"$(dirname "$0")/data"', "import.not_followed", '$(dirname "$0")'),
        ("$((2 * (3 + 4)))", "import.not_followed", "$((2 * (3 + 4)))"),
        ("{1,2}", "import.not_followed", "{"),
    ],
)
def test_what_a_shell_would_make_of_a_word_is_named(written: str, code: str, field: str) -> None:
    word = unknown(f"A=(1 2); B='a b' E=\n{RUN} --a {written}")
    assert word.text == written and word.place == "train.sh, line 2"
    assert word.unknown is not None and word.unknown.code == code
    assert field in word.unknown.fields.values()


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (f'main() {{ {RUN} --a $1; }}\nmain "$@"', 1),
        (f"for x in 1 2; do\n{RUN} --a 1; done", 2),
        (f"if true; then\n  {RUN} --a 1\nfi", 2),
        (f'run() {{ "$@" --b; }}\nrun {RUN} --a 1', 2),
        (f"eval {RUN} --a 1", 1),
        (f'C="{RUN} --a 1"\necho $C\neval $C', 3),
        (f"srun bash -c '{RUN} --a 1'", 1),
        (f"{RUN} --a <(echo 1) --b 2", 1),
        (f"{RUN} --a $'x\\ty'", 1),
    ],
)
def test_a_program_that_a_script_runs_in_another_form_is_refused(script: str, line: int) -> None:
    with raises("import.program_hidden", place=f"train.sh, line {line}"):
        read(script)


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("echo 1", "import.not_one_program", {"num_found": 0}),
        (f"A=2\nexit\n{RUN} --a $A", "import.not_one_program", {"num_found": 0}),
        (f"{RUN} --a 1\n{RUN} --a 2", "import.not_one_program", {"num_found": 2}),
        (f'A="x\n{RUN} --a 1', "import.open_block", {"place": "train.sh, line 1", "sign": '"'}),
        (f"{RUN} --a 'x", "import.open_block", {"sign": "'"}),
        (f"cat <<EOF\n{RUN} --a 'x", "import.open_block", {"sign": "<"}),
        (f"cat <<A <<B\nA\nC=1\nB\n{RUN} --a 1", "import.open_block", {"sign": "<<A <<B"}),
        (f"{RUN} --a ${{X", "import.program_hidden", {"place": "train.sh, line 1"}),
        (f"A=(1 2\n{RUN} --a 1", "import.program_hidden", {"place": "train.sh, line 2"}),
    ],
)
def test_a_script_that_cannot_be_read_is_one_line(
    text: str, code: str, fields: dict[str, object]
) -> None:
    with raises(code, **fields) as caught:
        read(text)
    assert len(caught.value.problems) == 1


def test_a_condition_of_megatrons_examples_is_refused_by_its_line_and_given_by_assume() -> None:
    script = SCRIPTS["gpt"].replace('echo "starting', CONDITION + 'echo "starting')
    number = script.splitlines().index("    EVAL_AND_LOGGING_ARGS+=(") + 1
    (word,) = [word for word in read(script, ASSUMED).words if word.unknown]
    assert word.unknown is not None and word.unknown.fields == {
        "name": "EVAL_AND_LOGGING_ARGS",
        "place": f"train.sh, line {number}",
    }
    given = {"EVAL_AND_LOGGING_ARGS": "--log-interval 5 --save x"}
    words = read(script, ASSUMED | given).words
    assert [word.text for word in words[-4:]] == ["--log-interval", "5", "--save", "x"]


@pytest.mark.parametrize("line", ["source env.sh", ". ./env.sh", "set -a; source env.sh; set +a"])
def test_what_a_file_beside_the_script_sets_counts_as_if_it_stood_in_the_script(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "env.sh").write_text(
        "# sizes\nexport TP=4\nHEADS=8; ARGS=(--b $HEADS)\nreturn\nTP=5"
    )
    found = read(f"TP=2\n{line}\n{RUN} --a $TP ${{ARGS[@]}}", None, str(tmp_path))
    assert [word.text for word in found.words] == ["--a", "4", "--b", "8"]
    assert [word.place for word in found.words[2:]] == ["env.sh, line 3"] * 2
    assert found.taken_in == ["env.sh"]


@pytest.mark.parametrize(
    "line",
    [
        *("source env.sh | cat", "[ -f env.sh ] && . env.sh", "if true; then . env.sh; fi"),
        *("cd other\nsource env.sh", "source absent.sh", "source ../env.sh", ". $SOME/env.sh"),
        *("source latin.sh", "source loop.sh", "source env.sh 5"),
    ],
)
def test_a_file_that_is_not_taken_in_leaves_unknown_what_was_set_before(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "env.sh").write_text("TP=4\n")
    (tmp_path.parent / "env.sh").write_text("TP=4\n")
    (tmp_path / "loop.sh").write_text("TP=4\nsource loop.sh\n")
    (tmp_path / "latin.sh").write_bytes(b"TP=4 # \xff\n")
    word = unknown(f"TP=2\n{line}\n{RUN} --a $TP", str(tmp_path))
    assert word.unknown is not None and word.unknown.fields["name"] == "TP"
    if "if" not in line:
        assert texts(f"{line}\nPP=2\n{RUN} --a $PP", str(tmp_path)) == ["--a", "2"]


def test_the_ranks_are_those_that_the_launcher_starts() -> None:
    assert read(SCRIPTS["gpt"], ASSUMED).ranks == 16
    assert read("deepspeed --num_gpus 4 --num_nodes=2 pretrain_gpt.py --a 1").ranks == 8
    assert read("python pretrain_gpt.py --a 1").ranks is None
    assert read("torchrun --nproc-per-node 8 --nnodes $N pretrain_gpt.py --a 1").ranks is None
    assert read("torchrun --nproc-per-node 8 $MORE pretrain_gpt.py --a 1").ranks is None
    assert read("torchrun --nproc-per-node 8 --nnodes 1:4 pretrain_gpt.py --a 1").ranks is None
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
        "A=(" + "x " * 50_000 + f"\n{RUN} --a 1",
        "<<E " * 5000 + f"\n{RUN} --a 1",
    ],
    ids=range(10),
)
def test_a_hostile_script_ends_soon_with_a_line_or_with_words(text: str) -> None:
    began = time.process_time()
    try:
        read(text)
    except UserError as error:
        assert all(len(problem.splitlines()) == 1 for problem in error.problems)  # noqa: PT017
    assert time.process_time() - began < 60, (
        "what grows without bound takes for ever, whatever the machine"
    )
