"""A launch script is read as text: plain assignments give its variables, and whatever else may set
one leaves it unknown."""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tests.importing.scripts import ASSUMED, CONDITION, SCRIPTS
from tests.refusals import raises
from tools.interop.importing.shell import CommandLine, Word, read_script, split_words
from tools.interop.importing.shell_sums import holds

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
        (f"A=2\nif [ $((A*B)) -ne 8 ]; then\n  echo A is B\n  exit 1\nfi\n{RUN} --a $A", "--a|2"),
        (f"A=2; B=$((A * 4)) C=$(($A+1))\n{RUN} --a $A", "--a|2"),
    ],
)  # fmt: skip
def test_the_words_are_those_that_a_shell_would_pass(text: str, expected: str) -> None:
    assert texts(text) == expected.split("|")


PRINT = """#!/bin/bash
while [ "${1%.py}" = "$1" ]; do shift; done
shift
printf "%s|" "$@"
"""
START = """#!/bin/bash
while [ "$1" != bash ] && [ "$1" != torchrun ]; do shift; done
"$@"
"""
# scripts as clusters run them, each of which bash itself runs here
FOLLOWED = (
    "TP=${TP:-8}\n@ --a $TP", "TP=${TP:-8} PP=${1:-$TP}\n@ --a ${TP} --b $PP", ': "${TP:=4}"\n@ --a $TP',
    ": ${TP:=4}; : ${PP=$TP}\n@ --a $TP --b $PP", "A=x\n@ --a ${A:+--bf16} ${B:+--fp16}", "A=${A:-${B:-3}}\n@ --a $A",
    'D=${1:-"a b"}\n@ --a "$D" --b $D', "N=4\nW=$((N * (2 + 6) / 3))\n@ --a $W --b $((W % 7 - 9))", "A+=3; A+=4\n@ --a $A",
    "T=2_000\nT=${T//_}\n@ --a $T", "A=(1 2)\n@ --a $A x${A[@]}y \"${A[*]}\" ${A[0]:-}".replace(" ${A[0]:-}", ""),
    "B=' b  c '\n@ --a x${B}y$B", 'E=\n@ --a $E "$E" --b "$@" $*', "declare -x A=4\nreadonly -a B=(5 6)\n@ --a $A ${B[@]}",
    "if [ -z \"$TP\" ]; then\n  TP=2\nelif [ $TP -gt 1 ]; then\n  TP=3\nelse\n  TP=4\nfi\n@ --a $TP",
    "M=7\nif [[ $M == 7 && $M -lt 9 ]]; then A=--swiglu; else A=--bf16; fi\n@ $A", "if [ ! -n \"$X\" ]\nthen\n A=1\nfi\n@ --a $A",
    "X=true\nif [ \"$X\" = true ] ; then\n  if [ \"$X\" != true ]; then A=1; else A=2; fi\n  B=3\nfi\n@ --a $A$B",
    "if true; then\n  @ --a 1\nfi", '[ -z "$X" ] && X=5\n[ "$X" = 5 ] || X=6\n@ --a $X', "while [ $# -gt 0 ]; do A=$1; shift; done\nA=2\n@ --a 2",
    "A=3\nfor X in \"$@\"; do A=$X; done\n@ --a $A", "@ --a 1 \\\n  --b 2", "C=\"@ --a 1\"\nC=\"$C --b '2 3'\"\neval $C", 'C="@ --a 1"\nbash -c "$C --b"',
    'C="torchrun x.py --a 1"\nexport C\nsrun -l bash -c \'$C --b 2\'', "A=(--a 1)\nA+=(--b '2 3')\nsrun --wait=60 bash -c \"@ ${A[*]}\"",
    "A=(--a 1)\nC=\"${A[@]} --b\"\neval \"@ $C\"", "O=\"\\\n --a 1 \\\n --b 2\"\n@ $O", "sh -c '@ --a 1'", "bash <<E\n@ --a 1\nE",
    "A=5\nbash -c 'A=6'\n@ --a $A", "S=sh\nif [ $S = bash ]; then\nexit 1\nfi\n@ --a $S", "A='x y'; B=\"$A z\"\n@ --a \"$B\" '$B' \\$B",
    "K=b\ncase $K in\na) A=1 ;;\nb|c) A=2\n ;;\n*) A=3 ;;\nesac\n@ --a $A", "case $K in 1) A=2;; *) A=5;; esac\n@ --a $A",
    "K=llama-7b\ncase \"$K\" in\n  (gpt*) A=1;;\n  llama-?b)\n    A=2\n    B=3;;\nesac\n@ --a $A --b $B", "K=z\nA=4\ncase $K in a) A=1;; esac\n@ --a $A",
    "K=b\ncase $K in\na)\n  echo usage\n  exit 1;;\nb)\n  if [ $K = b ]; then A=7; fi;;\nesac\n@ --a $A",
    "s() { A=$1; }\ns 4 5\n@ --a $A", "A=2\ns() { local A=8; B=$A; }\ns\n@ --a $A --b $B", "A=2\nbig() { A=8; }\n@ --a $A",
    "function big {\n  A=8\n}\nbig\n@ --a $A", "main() { @ --a \"$1\" \"$@\" --n $#; }\nmain x 'y z'", 'run() { "$@" --b; }\nrun @ --a 1', "main() { @ --a $1; }\nmain 1 | cat",
    "f() { if [ -z \"$1\" ]; then return; fi; A=7; }\nA=1\nf\n@ --a $A", "f() {\n  A=1\n  return\n  A=2\n}\nf\nB=3\n@ --a $A --b $B",
    "g() { A=$1; }\nf() { g \"$1-$2\"; C=$#; }\nf 1 2\n@ --a $A --c $C ${1:-none}", "A=1\nf() { A+=2; }\nf\nf\n@ --a $A",
    "f() { A=(--x \"$@\"); }\nf 1 '2 3'\n@ \"${A[@]}\"",
)  # fmt: skip


@pytest.mark.parametrize("script", FOLLOWED)
def test_the_words_are_those_that_bash_passes(script: str, tmp_path: Path) -> None:
    script = script.replace("@ ", "torchrun --nproc-per-node 4 pretrain_gpt.py ", 1)
    for name, content in {"torchrun": PRINT, "srun": START}.items():
        program = tmp_path / name
        program.write_text(content)
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert "|".join([*texts(script), ""]) == done.stdout


def test_what_was_taken_as_not_set_is_named() -> None:
    found = read(f"A=${{TP:-8}} B=${{1:-2}}\n[ -z $K ] && C=1\n{RUN} --a $A $B $C")
    assert found.absent == ["TP", "1", "K"]
    assert read(f"A=${{TP:-8}}\n{RUN} --a $A", {"TP": "2"}).absent == []


def test_a_branch_that_ends_the_script_was_not_taken() -> None:
    script = f'if [ -z "$KEY" ]; then\n  echo usage\n  exit 1\nfi\n{RUN} --a 1 --b $KEY'
    assert [word.text for word in read(script).words] == ["--a", "1", "--b", "$KEY"]


def test_the_name_that_is_asked_for_and_its_line_are_those_of_what_is_open() -> None:
    for script, name, line in (
        ("TP=$(nproc)\nPP=$TP\n@ --a $PP", "TP", 1),
        ("PP=1\nTP=${TP:-$(nproc)}\n@ --a $TP", "TP", 2),
        ('\n\nC="@ --a 1"\nD=$(date)\nC="$C --b $D"\neval $C', "D", 4),
        ("D=$1\nA=(--a 1 --b $D/x)\n@ ${A[@]}", "D", 1),
        # bash keeps the first value and goes on, other shells end
        ("readonly TP=2\nTP=4\n@ --a $TP", "TP", 2),
        ("TP=2\nreadonly TP\nTP+=4\n@ --a $TP", "TP", 3),
        ("declare -xr TP=2\nexport TP=4\n@ --a $TP", "TP", 2),
    ):
        word = unknown(script.replace("@ ", f"{RUN} "))
        assert word.unknown is not None
        assert word.unknown.fields == {"name": name, "place": f"train.sh, line {line}"}


@pytest.mark.parametrize(
    ("script", "written"),
    [
        ("D=<Specify path>\n@ --a 1 --b $D", "<Specify path>"),
        ('D="<PATH TO DATA>_text"\nC="--a 1 --b $D"\n@ $C', "<PATH TO DATA>_text"),
        (
            "export D=<Specify path and file prefix>_text_document\n@ --a 1 --b $D",
            "<Specify path and",
        ),
    ],
)
def test_a_place_of_an_example_that_is_to_be_filled_in_is_asked_for_by_its_name(
    script: str, written: str
) -> None:
    word = unknown(script.replace("@ ", f"{RUN} "))
    assert word.unknown is not None and word.unknown.code == "import.placeholder"
    assert word.unknown.fields["name"] == "D" and written in word.unknown.fields["written"]


@pytest.mark.parametrize("given", ["set --", "set -- a b"])
def test_the_name_of_the_script_is_no_argument(given: str) -> None:
    words = [word.text for word in read(f"{given}\nA=${{0:-x}}\n{RUN} --a $A").words]
    assert "b" not in words


def test_no_command_is_told_with_the_last_that_was_seen() -> None:
    with raises("import.not_one_program", num_found=0) as caught:
        read("A=1\nsbatch other.sh $A\necho done")
    assert "`sbatch other.sh 1` in train.sh, line 2" in caught.value.problems[0]


def test_a_training_is_told_from_programs_that_prepare_it() -> None:
    script = f"python weights.py --out x\n{RUN} --num-layers 2\npython upload.py --from x"
    assert texts(script) == ["--num-layers", "2"]


# What a shell would do to A, or to how it is read, which is not followed.
OPEN = (
    *('if [ -n "$K" ]; then A=1; fi', "for i in 1 2; do A=$i; done", "for A in 4 8; do echo; done"),
    *("K=$(date)\nA=1\ncase $K in 1) A=2;; esac", "A=1\ncase $USER in\n1)\n  A=2\n  ;;\nesac\nB=2"),
    *("K=x\nA=1\ncase $K in x) A=2 ;& y) A=3;; esac", "K='a*'\nA=1\ncase $K in 'a*') A=2;; esac"),
    *("A=1; while true; do\nbreak; A=2; done", "A=1\n(A=2)", "A=1\n(\nA=2\n)", "echo | A=3", "A=2 &"),
    *("A=1 && A=2", "A=1\n[ -d foo ] && A=2", "A=2\n! [ 1 = 2 ] && A=4", "A=2\n{ A=4; }"),
    *("A=1\nunset A", 'A=1\nunset "A"', "A=4\nread A < file", "A=2\nIFS=, read -r A B < f"),
    *("A=2\nif read A; then echo; fi", "A=2\nwhile IFS= read -r A; do echo; done < f"),
    *('A=1\nprintf -v "A" 2', "A=4\n((A=A*2))", "A=4\nlet A++", "echo $((A++))", "A=1; B=$((A--))"),
    *("A=2\nfor ((A=4; A<8; A++)); do echo; done", "A=2; B=${A=4} true", "A=2\nA[0]=9"),
    *("A=2\ns() { eval A=4; }\nA=2\ns", "s() { A=2; }\nA=1\nfor x in 1 2; do s; done"),
    *("s() { A=2; }\nA=1\ns | cat", "s() { A=2; }\nA=1\n[ -f x ] && s", "s() { A=2; }\nA=1\ntrap s EXIT"),
    *("s() { A=2; }\nt() { s; }\nA=1\nwhile read x; do t; done", "s() { A=2; }\nA=1\nif [ -f x ]; then s; fi"),
    *("s() { A=2; s; }\nA=1\ns", "s() { for x in 1; do A=2; done; }\nA=1\ns", "s() { A=2; }\nA=1\necho $(s)"),
    *("A=2\ndeclare -n X=A\nX=4", "A=2\ndeclare -n X=A\nA=3\nX=4", "local A=3"),
    *("A=2\nexport 'A=4'", 'A=2\nN=A\ndeclare "$N=4"', "A=2\neval A=4"),
    *("A=2\nA=4 command export A", 'A=2\neval "$(python sizes.py)"', "A=2\nexport $(cat .env)"),
    *("A=2\nmapfile -t A < f", "A=2\ngetopts x A", "A=(1 2)\nA=3", "A=(1 2)\nunset 'A[0]'"),
    *("A='1,2'\nIFS=,", "A='1,2'\nfor x in 1; do IFS=,; done", "A=$1", "A=$(nproc)", "A=`hostname`"),
    *("A=2\nset -- 3\nA=${1:-4}", "A=$((2 ** 3))", "A=${B%x}", "A=$'x\\ty'", "A=<(echo 1)"),
    *('A="$(cd "$(dirname "$0")" && echo ")")"', "A=$(dirname $(realpath $0))/data", "A={1,2}"),
    *("A=2\nsource env.sh", "A=2\n. ../other.sh", "A=2\n[ -f env.sh ] && . env.sh", "A=$A"),
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
        ("$1", "import.variable_unset", "1"),
        ("${1:?}", "import.variable_unset", "1"),
        ("${TP:?must be set}", "import.variable_unset", "TP"),
        ("$((TP * 2))", "import.variable_unset", "TP"),
        ("${A%x}", "import.not_followed", "${A%x}"),
        ('$(dirname "$0")/data', "import.not_followed", '$(dirname "$0")'),
        ("{1,2}", "import.not_followed", "{"),
    ],
)
def test_what_a_shell_would_make_of_a_word_is_named(written: str, code: str, field: str) -> None:
    word = unknown(f"A=(1 2); B='a b' E=\n{RUN} --a {written}")
    shown = "$TP" if "TP:" in written else written
    assert word.text in (written, shown) and word.place == "train.sh, line 2"
    assert word.unknown is not None and word.unknown.code == code
    assert field in word.unknown.fields.values()


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (f"if [ -f x ]; then\n  {RUN} --a 1\nfi", 2),
        (
            f"A='eval {RUN} --a 1'\nB='eval $A'\nrun() {{ eval $B; }}\nrun; while :; do {RUN} --a 1; done",
            4,
        ),
        (f"for x in 1 2; do\n{RUN} --a 1; done", 2),
        (f'run() {{ "$@" --b; }}\nfor x in 1; do run {RUN} --a 1; done', 2),
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


def test_a_condition_of_megatrons_examples_counts_as_without_the_environment() -> None:
    script = SCRIPTS["gpt"].replace('echo "starting', CONDITION + 'echo "starting')
    found = read(script, ASSUMED)
    assert not [word for word in found.words if word.unknown] and "WANDB_API_KEY" in found.absent
    assert "--wandb-project" not in {word.text for word in found.words}
    found = read(script, ASSUMED | {"WANDB_API_KEY": "mine"})
    assert [word.text for word in found.words[-2:]] == ["--wandb-project", "mine"]


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
        *("source env.sh | cat", "[ -f env.sh ] && . env.sh", "if [ -d x ]; then . env.sh; fi"),
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


@pytest.mark.parametrize(
    ("asked", "options", "ranks"),
    [
        ("--nodes=2", "--ntasks-per-node=4", 8),
        ("--nodes=2 --gres=gpu:4", "--ntasks-per-node 4", 8),
        # srun takes both as given, whatever was asked for before
        ("--nodes=4", "--nodes=2 --ntasks-per-node=4", 8),
        # the tasks of the allocation count more than those of a node
        ("--nodes=2 --ntasks=6", "--ntasks-per-node=4", 6),
        ("--gres=gpu:4", "--ntasks-per-node=4", None),
    ],
)
def test_tasks_of_a_node_that_srun_is_given_count_on_the_nodes_asked_for(
    asked: str, options: str, ranks: int | None
) -> None:
    text = f"#!/bin/bash\n#SBATCH {asked}\nsrun {options} python pretrain_gpt.py --a 1\n"
    assert read(text).ranks == ranks


def test_the_ranks_are_those_that_the_launcher_starts() -> None:
    assert read(SCRIPTS["gpt"], ASSUMED).ranks == 16
    assert read("deepspeed --num_gpus 4 --num_nodes=2 pretrain_gpt.py --a 1").ranks == 8
    assert read("python pretrain_gpt.py --a 1").ranks is None
    assert read("torchrun --nproc-per-node 8 --nnodes $N pretrain_gpt.py --a 1").ranks is None
    assert read("torchrun --nproc-per-node 8 $MORE pretrain_gpt.py --a 1").ranks is None
    assert read("torchrun --nproc-per-node 8 --nnodes 1:4 pretrain_gpt.py --a 1").ranks is None
    assert split_words("--a 1 --b 'c d'", {}).ranks is None
    node = "--nproc_per_node 8 --nnodes 8 --node_rank $SLURM_NODEID --master_addr $MASTER_ADDR"
    assert read(f"torchrun {node} pretrain_gpt.py --a 1").ranks == 64
    assert read(f"C='torchrun {node} pretrain_gpt.py --a 1'\nsrun bash -c \"$C\"").ranks == 64
    assert (
        read("torchrun --nproc-per-node 8 --standalone $MORE pretrain_gpt.py --a 1").ranks is None
    )


def test_the_ranks_are_those_that_a_script_asks_slurm_for() -> None:
    asked = "#!/bin/bash\n#SBATCH --nodes=16 --gpus-per-node=8\n#SBATCH --ntasks-per-node=8 # all\n"
    assert read(f"{asked}srun python pretrain_gpt.py --a 1").ranks == 128
    assert read(f"{asked}srun -n 8 python pretrain_gpt.py --a 1").ranks == 8
    assert read(f"{asked}python pretrain_gpt.py --a 1").ranks is None
    launch = "torchrun --nproc-per-node $SLURM_GPUS_ON_NODE --nnodes $SLURM_NNODES pretrain_gpt.py"
    assert read(f"{asked}{launch} --a 1").ranks == 128
    assert read(f"#SBATCH -N 4\n#SBATCH --gres=gpu:a100:4\n{launch} --a 1").ranks == 16
    assert read(f"{launch} --a 1").ranks is None
    assert read("mpirun -np 32 python pretrain_gpt.py --a 1").ranks == 32


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


def test_a_number_with_a_zero_before_it_decides_no_condition() -> None:
    """It is octal in [[ ]], and decimal in [ ]."""
    assert holds(["10", "-eq", "10"]) is True
    assert holds(["0", "-lt", "8"]) is True
    assert holds(["010", "-eq", "8"]) is None
