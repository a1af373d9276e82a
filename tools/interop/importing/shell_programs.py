"""The programs that a shell script runs: the commands that may be the training, and the one of them
that is."""

import re
from collections.abc import Sequence

from megaprec.errors import UserError
from tools.interop.importing.shell_files import SCRIPT
from tools.interop.importing.shell_words import Word

PROGRAM = re.compile(r"[\w.-]+\.py")
# programs that are installed as commands, with those of their commands that train; modules
COMMANDS = {"swift": ("pt", "sft"), "megatron": ("pt", "sft"), "-m": ("torchtitan.train",)}
RUNS = re.compile(r"\.py[\"']*\s+[\"']*(?:--|\$|\ue000)")
SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
OF_A_TEXT = re.compile(r"-\w*c")  # bash -c TEXT
SUBMITS = ("sbatch", "qsub", "bsub", "bash", "sh")
OF_A_TRAINING = {"--num-layers", "--micro-batch-size", "--train-iters", "--train-samples"}


def seems_to_run(text: str) -> bool:
    """Return True for a text that seems to run a program with arguments."""
    is_shown = text.startswith("echo ")
    return not is_shown and RUNS.search(text) is not None


def end_of_program(words: Sequence[Word]) -> int:
    """Return the index behind the program among the words of a command, if arguments follow it;
    otherwise 0."""
    end = 0
    before = ""
    for number, word in enumerate(words, 1):
        _, _, file = word.text.strip("\"'").rpartition("/")
        is_command = word.text in COMMANDS.get(before, ())
        is_program = is_command or PROGRAM.fullmatch(file)
        is_argument = word.unknown or word.text.startswith("--")
        before = file
        if is_program and not end:
            end = number
        elif end and is_argument:
            return end
    return 0


def index_of_text(words: Sequence[Word]) -> int:
    """Return the index of the text in `bash -c TEXT`; 0 if a command has none."""
    for number, word in enumerate(words[:-1]):
        before = words[number - 1].text if number else ""
        is_shell = SHELLS.fullmatch(before) or before.startswith("-")
        if is_shell and OF_A_TEXT.fullmatch(word.text):
            return number + 1
    return 0


def index_of_script(words: Sequence[Word]) -> int | None:
    """Return the index of the script that a command may run: its first word, or one behind `bash`
    or `sbatch`; None if these have none."""
    files = [word.text.rpartition("/")[2] for word in words]
    if files[0] not in SUBMITS:
        return 0
    for number, file in enumerate(files):
        if number and SCRIPT.fullmatch(file):
            return number
    return None


def the_training(
    commands: Sequence[list[Word]], is_script: bool, name: str, seen: str
) -> list[Word]:
    """Return the words of the one command that trains.

    is_script: the commands stand in a script, which may run others beside it. name: of what they
    stand in. seen: the last command that runs no program. Raises UserError if there are none or
    several.
    """
    runs = list[list[Word]]()
    for words in commands:
        if end_of_program(words) and words not in runs:
            runs.append(words)
    if not runs and not is_script:
        runs = [*commands]
    if len(runs) > 1:  # others prepare the data or the environment
        runs = [words for words in runs if _has_arguments_of_a_training(words)] or runs
    if len(runs) == 1:
        return runs[0]
    shown = f" (the last other command is {seen})" if seen and not runs else ""
    raise UserError.of("import.not_one_program", source=name, num_found=len(runs), seen=shown)


def _has_arguments_of_a_training(words: Sequence[Word]) -> bool:
    texts = {word.text for word in words}
    return not texts.isdisjoint(OF_A_TRAINING)
