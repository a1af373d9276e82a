"""`megaprec generate MODEL --prompt "def main"`: continue texts with a trained model, on one
process.

MODEL is a run folder, a checkpoint of any layout, a Hugging Face folder, or a folder of any other
format that megaprec reads. The text appears as it is generated. The same seed gives the same text,
whatever other prompts there are.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megaprec.durable import why_no_file
from megaprec.errors import UserError
from megaprec.parsing import read_text
from megaprec.precision.gemm import fp32_sums
from models.attention.backends import gpu_kernels
from models.decoder.kv_cache import CachedStage
from tools.commands.options import add_device, add_ema, device_of_option, model_place
from tools.commands.text_options import tokenizer_path
from tools.console.progress_bar import tokens_progress
from tools.inference.generation import Generation, escape_control_characters
from tools.inference.load import LoadedModel, load_model
from tools.inference.sampling import Sampling

# of one text: as many as the longest contexts of published models have
MOST_TOKENS = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.description = __doc__
    usual = Sampling()
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=model_place,
        help="run folder, checkpoint, also at a URL, or Hugging Face folder",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; - reads it from standard input",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="text file with a prompt in each line"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=100,
        metavar="N",
        help=f"most tokens to add (default: 100; at most {MOST_TOKENS:,})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=usual.temperature,
        metavar="T",
        help=f"0: always the most likely token (default: {usual.temperature})",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=usual.top_k,
        metavar="K",
        help=f"sample from the K most likely tokens; 0: from all (default: {usual.top_k})",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=usual.top_p,
        metavar="P",
        help=(
            "sample from the fewest most likely tokens that have probability P together "
            "(default: 1, all)"
        ),
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=usual.min_p,
        metavar="P",
        help="leave out tokens of less than P times the highest probability (default: 0, none)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of the sampling (default: 0)"
    )
    parser.add_argument(
        "--tokenizer", type=tokenizer_path, metavar="FILE", help="tokenizer, if MODEL has none"
    )
    add_ema(parser, "generate with")
    add_device(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for each prompt, in a line of its own",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec generate`; return the exit code."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    if problems := [*_option_problems(args), *sampling.problems()]:
        raise UserError(*problems)
    prompts = [*_prompts(args)]
    device = device_of_option(args.device, ranks=1)
    with gpu_kernels(device), fp32_sums():
        return _generate(args, prompts, sampling, torch.device(device))


def _generate(
    args: argparse.Namespace, prompts: list[str], sampling: Sampling, device: torch.device
) -> int:
    """Print the continuations of the prompts."""
    model = load_model(
        args.model, CachedStage, tokenizer=args.tokenizer, ema=args.ema, device=device
    )
    # on stderr, for stdout is the text alone
    for note in (*model.notes, *_unfollowed_notes(args.model, sampling, model)):
        print(f"note: {note}", file=sys.stderr)
    # nothing is computed yet: a generation runs while its pieces are taken
    generations = [
        Generation(model, prompt, args.tokens, sampling, args.seed, args.stop) for prompt in prompts
    ]
    for number, (prompt, generation) in enumerate(zip(prompts, generations, strict=True), 1):
        if args.json:
            _print_json(prompt, generation, f"generating text {number} of {len(prompts)}")
            continue
        if len(prompts) > 1:
            blank_line = "\n" if number > 1 else ""
            print(f"{blank_line}--- prompt {number} of {len(prompts)}")
        _stream(prompt, generation)
    _note_slid_windows(model, generations)
    return 0


def _option_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of options but those of sampling."""
    if not 0 <= args.tokens <= MOST_TOKENS:
        yield f"--tokens {args.tokens}: give 0 to {MOST_TOKENS}"
    if not args.prompt and args.prompts is None:
        yield "give --prompt TEXT, --prompt - for standard input, or --prompts FILE"
    if args.prompts is not None and not args.prompts.is_file():
        yield f"--prompts {args.prompts}{why_no_file(args.prompts)}"
    if args.prompt.count("-") > 1:
        yield "--prompt -: standard input can be read once; give it once"
    if "" in args.stop:
        yield '--stop "": an empty text is everywhere; leave it out'
    if args.temperature == 0:
        yield from _idle_options(args)
    # what torch's generators take
    if not -(2**63) <= args.seed < 2**64:
        yield f"--seed {args.seed}: give a number of at most 64 bits"


def _idle_options(args: argparse.Namespace) -> Iterator[str]:
    """Yield a problem for each option of sampling where nothing is drawn."""
    usual = Sampling()
    defaults = {"top_k": usual.top_k, "top_p": usual.top_p, "min_p": usual.min_p, "seed": 0}
    for name, default in defaults.items():
        value = getattr(args, name)
        # as if it were left out
        if value == default:
            continue
        option = "--" + name.replace("_", "-")
        yield f"{option} {value}: --temperature 0 draws nothing; leave one of them out"


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    """Yield the prompts of --prompt, then those of the file --prompts, one a line."""
    for text in args.prompt:
        if text == "-":
            yield _read_utf8("--prompt -", sys.stdin.read).removesuffix("\n")
        else:
            yield text
    if args.prompts is not None:
        option = f"--prompts {args.prompts}"
        lines = _read_utf8(option, lambda: read_text(args.prompts)).split("\n")
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise UserError.of("command.no_prompt", option=option)
        yield from prompts


def _read_utf8(option: str, read: Callable[[], str]) -> str:
    """Return a text as `data build` reads one: UTF-8, without the byte order mark that it may begin
    with."""
    try:
        text = read()
        text.encode()  # standard input may hold halves of surrogates in place of bytes
    except UnicodeError as error:
        raise UserError.of("command.prompts_unreadable", option=option, error=error) from error
    if "\0" in text:
        raise UserError.of("command.prompts_zero_bytes", option=option)
    return text.removeprefix("\ufeff")


def _unfollowed_notes(
    path: Path, sampling: Sampling, model: LoadedModel[CachedStage]
) -> Iterator[str]:
    """Yield a note on settings of generation_config.json that the options do not follow."""
    if unfollowed := sampling.not_followed(model.generation):
        settings = ", ".join(
            f"{key} = {json.dumps(value)[:60]}" for key, value in unfollowed.items()
        )
        yield (
            f"{path}: {settings} of generation_config.json: not followed; tokens are chosen as the "
            "options say"
        )


def _stream(prompt: str, generation: Generation) -> None:
    """Print a prompt and its continuation, piece by piece as it is generated."""
    # the text goes on where the prompt ends
    print(prompt, end="", flush=True)
    # a text from anywhere must not steer the terminal
    escapes = sys.stdout.isatty()
    for piece in generation:
        shown = escape_control_characters(piece) if escapes else piece
        print(shown, end="", flush=True)
    print()


def _print_json(prompt: str, generation: Generation, title: str) -> None:
    """Print a prompt and its continuation as a JSON object; until it is whole, progress on stderr.

    title: of the progress.
    """
    pieces = list[str]()
    with tokens_progress(title) as report:
        tokens = 0
        for piece in generation:
            pieces.append(piece)
            report(generation.tokens - tokens)
            tokens = generation.tokens
    text = "".join(pieces)
    fields = {
        "prompt": prompt,
        "text": text,
        "tokens": generation.tokens,
        "finish": generation.finish,
    }
    print(json.dumps(fields), flush=True)


def _note_slid_windows(model: LoadedModel[CachedStage], generations: list[Generation]) -> None:
    """Say on stderr if texts were longer than the model's positions, as nothing in a text shows
    it."""
    if not any(generation.slid for generation in generations):
        return
    positions = model.stage.config.max_positions
    # else the note could stand above the text
    sys.stdout.flush()
    print(
        f"note: the model has {positions} positions (model.max_positions): beyond them, each "
        f"token was chosen from the newest {positions} tokens alone",
        file=sys.stderr,
    )
