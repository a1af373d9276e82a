"""The table of all commands, which the parser, completion, help and tests read.

A command's module is imported when the command is called: `megaprec keys` loads no trainer.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

START = "start a run"
RUN = "look at a run"
MODEL = "use a model"
PROOF = "prove"
MACHINE = "machine and shell"
GROUPS = (START, RUN, MODEL, PROOF, MACHINE)


@dataclass(frozen=True)
class Command:
    """One command.

    module: has `add_arguments(parser)`, which also sets the function that runs the command. help:
        one line. examples: command lines without `megaprec`, one for each command within the
        command. repeatable: it changes nothing in the run that it reads, and so may be run again.
    """

    module: str
    group: str
    help: str
    examples: tuple[str, ...]
    repeatable: bool = False

    def load(self) -> ModuleType:
        """Return the module of the command."""
        return import_module(self.module)


COMMANDS = {
    "train": Command(
        "tools.commands.train", START, "pretrain a model", ("train run.toml train.steps=2000",)
    ),
    "init": Command(
        "tools.commands.init",
        START,
        "write a run file to start from",
        ("init my_text/ -o run.toml",),
    ),
    "keys": Command(
        "tools.commands.keys",
        START,
        "list the keys of a run file with their defaults",
        ("keys lr",),
    ),
    "import-args": Command(
        "tools.commands.import_args",
        START,
        "make a run file from Megatron-LM's arguments or DeepSpeed's configuration",
        ("import-args pretrain_gpt.sh data.source=tokens/mine",),
    ),
    "data": Command(
        "tools.commands.data",
        START,
        "build and inspect tokenized data",
        (
            "data build my_text/ tokens/mine --vocab-size 4096",
            "data inspect tokens/mine",
            "data verify tokens/mine",
            "data tokenizer my_text/ tokenizer.json --vocab-size 4096",
            "data plan run.toml",
        ),
    ),
    "plan": Command(
        "tools.commands.plan",
        START,
        "predict memory and speed of a run",
        ("plan run.toml --gpu H100",),
    ),
    "schedule": Command(
        "tools.commands.schedule",
        START,
        "predict and draw a pipeline schedule",
        ("schedule --kind zb-v --pipeline 4 --microbatches 8",),
    ),
    "precision": Command(
        "tools.commands.precision",
        START,
        "show or translate the precision of a configuration",
        ("precision show run.toml", "precision translate run.toml --to nemo"),
    ),
    "fp8-advice": Command(
        "tools.commands.fp8_advice",
        START,
        "list the matrix products that gain from FP8",
        ("fp8-advice run.toml",),
    ),
    "report": Command(
        "tools.commands.report",
        RUN,
        "write a page about a run",
        ("report runs/mine -o report.html",),
        repeatable=True,
    ),
    "compare": Command(
        "tools.commands.compare",
        RUN,
        "compare the losses of several runs",
        ("compare runs/mine",),
        repeatable=True,
    ),
    "explain-overflow": Command(
        "tools.commands.explain_overflow",
        RUN,
        "show what broke the last skipped steps of a run",
        ("explain-overflow runs/mine",),
    ),
    "explain-spike": Command(
        "tools.commands.explain_spike",
        RUN,
        "name the steps whose loss jumped, and the likely cause",
        ("explain-spike runs/mine",),
    ),
    "diagnose": Command(
        "tools.commands.diagnose",
        RUN,
        "print what each rank was doing when a run ended abnormally",
        ("diagnose runs/mine",),
    ),
    "generate": Command(
        "tools.commands.generate",
        MODEL,
        "continue a text with a trained model",
        ('generate runs/mine --prompt "def main"',),
        repeatable=True,
    ),
    "evaluate": Command(
        "tools.commands.evaluate",
        MODEL,
        "loss and bits per byte of a model on texts",
        ("evaluate runs/mine --data my_text/ --max-chars 20000",),
        repeatable=True,
    ),
    "convert": Command(
        "tools.commands.convert",
        MODEL,
        "convert models between formats",
        ("convert runs/mine exported --to hf",),
        repeatable=True,
    ),
    "inspect": Command(
        "tools.commands.inspect",
        MODEL,
        "print the contents of a model folder",
        ("inspect runs/mine",),
        repeatable=True,
    ),
    "diff": Command(
        "tools.commands.diff",
        MODEL,
        "compare two models tensor by tensor",
        ("diff runs/mine exported",),
        repeatable=True,
    ),
    "merge": Command(
        "tools.commands.merge",
        MODEL,
        "average the weights of checkpoints",
        ("merge runs/mine exported -o merged",),
        repeatable=True,
    ),
    "parity": Command(
        "tools.commands.parity",
        PROOF,
        "prove that layouts train the same model as one process",
        ("parity run.toml --layouts dp=2 --steps 1",),
    ),
    "prove": Command(
        "tools.commands.prove",
        PROOF,
        "prove that a run repeats and resumes bit for bit",
        ("prove run.toml --layout dp=2 --steps 2",),
    ),
    "bisect": Command(
        "tools.commands.bisect",
        PROOF,
        "find where two runs that ought to agree part",
        ("bisect runs/mine runs/other",),
    ),
    "mup-check": Command(
        "tools.commands.mup_check",
        PROOF,
        "check that updates reach equally far at all widths",
        ("mup-check run.toml --widths 64,128,256",),
    ),
    "doctor": Command(
        "tools.commands.doctor",
        MACHINE,
        "check machines, links, disks and the layout before a run",
        ("doctor --no-parity",),
    ),
    "calibrate": Command(
        "tools.commands.calibrate",
        MACHINE,
        "measure this machine for predictions",
        ("calibrate --dtype bf16",),
    ),
    "completion": Command(
        "tools.commands.completion",
        MACHINE,
        "print a script that completes the commands in a shell",
        ("completion bash",),
    ),
}
