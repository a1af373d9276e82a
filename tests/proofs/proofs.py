"""The table of proofs: the promise of each, and the commands that prove it."""

from dataclasses import dataclass

FOLDER = "build/proofs"  # of what the commands write


@dataclass(frozen=True)
class Proof:
    """One proof.

    promise: a sentence that the README makes. oracle: what the numbers are compared with.
    commands: lines for a shell in the root of a clone, with .venv/bin on the path; the promise is
        proven if all end with exit code 0. sample: shorter ones, which CI runs.
    lines: of each command's output, those that the card shows, counted from the end.
    """

    name: str
    title: str
    promise: str
    oracle: str
    commands: tuple[str, ...]
    sample: tuple[str, ...]
    lines: int = 24


_DEMO = "examples/demo.toml"
PROOFS = (
    Proof(
        name="layouts",
        title="Every layout trains the same model",
        promise="Loss, every gradient and every weight are those of one process, in float64.",
        oracle="the same run on one process, made small",
        commands=(f"megaprec parity {_DEMO} train.folder={FOLDER}/layouts",),
        sample=(f"megaprec parity {_DEMO} train.folder={FOLDER}/layouts --layouts dp=2 --steps 1",),
    ),
    Proof(
        name="same-bits",
        title="The same bits in every layout",
        promise='With train.numerics = "canonical" no bit of a weight, moment or loss depends on '
        "the layout, in the run's own FP16.",
        oracle="the same run on one process, made small",
        commands=(
            f"megaprec parity {_DEMO} train.numerics=canonical train.threads=1 train.folder={FOLDER}/same-bits "
            "--precision configured",
        ),
        sample=(
            f"megaprec parity {_DEMO} train.numerics=canonical train.threads=1 train.folder={FOLDER}/same-bits "
            "--precision configured --layouts tp=2 --steps 1",
        ),
    ),
    Proof(
        name="oracle",
        title="The same training as transformers and torch",
        promise="Every layout trains what transformers' model and torch's AdamW train.",
        oracle="a model of transformers, trained by torch's optimizer and clipping",
        commands=(f"megaprec parity {_DEMO} train.folder={FOLDER}/oracle --oracle transformers",),
        sample=(
            f"megaprec parity {_DEMO} train.folder={FOLDER}/oracle --oracle transformers "
            "--layouts dp=2 --steps 1",
        ),
    ),
    Proof(
        name="families",
        title="Families of Hugging Face compute the same",
        promise="A folder that transformers wrote has the same logits here.",
        oracle="transformers' own class of each family, in float64",
        commands=("python -m tests.proofs.families",),
        sample=("python -m tests.proofs.families gpt2 llama",),
        lines=80,
    ),
    Proof(
        name="resume",
        title="A resume changes nothing",
        promise="A run that was stopped and resumed has the bits of one that was not; a resume that "
        "is broken on purpose is caught.",
        oracle="the same steps without a stop",
        commands=(
            f"megaprec train {_DEMO} train.steps=12 lr.warmup=2 checkpoint.every=4 log.plot=false log.sample='' "
            f"train.folder={FOLDER}/resume > /dev/null",
            f"megaprec prove {FOLDER}/resume --steps 4",
        ),
        sample=(
            f"megaprec train {_DEMO} train.steps=4 lr.warmup=1 checkpoint.every=2 log.plot=false log.sample='' "
            f"train.eval_every=0 parallel.tensor=1 parallel.pipeline=1 model.layers=2 "
            f"train.folder={FOLDER}/resume > /dev/null",
            f"megaprec prove {FOLDER}/resume --steps 2",
        ),
        lines=30,
    ),
    Proof(
        name="deaths",
        title="A lost rank ends nothing",
        promise="A run whose rank is killed goes on by itself, and ends with the same bits.",
        oracle="the same run undisturbed",
        commands=("python -m pytest -q -m 'not campaign' tests/training/test_restarts.py",),
        sample=("python -m pytest -q tests/training/test_restarts.py",),
        lines=8,
    ),
    Proof(
        name="scale",
        title="What thousands of ranks cost each of them",
        promise="What a rank does at its start grows little with the number of ranks.",
        oracle="counts and CPU seconds in a world of 16,384 ranks that is not there",
        commands=("python -m tools.bench scale",),
        sample=("python -m tools.bench scale --pipeline 2 --data 8 --tensor 2 --tokens 100000000",),
        lines=40,
    ),
)
