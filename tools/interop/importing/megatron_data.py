"""Data, tokenizer, evaluation, checkpoints and logs of Megatron-LM's arguments."""

import math
import re
from collections.abc import Sequence
from typing import Any

from tools.config.tables.data_settings import Data
from tools.interop.importing.arguments import Arguments

SENTENCEPIECE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
SIZES_OF_VOCABULARY = ("vocab_size", "padded_vocab_size")
GPT2_NAME = "gpt2-vocab.json"
GPT2_FILE = re.compile(r"[ =/]gpt2-vocab\.json$")
GPT2_VOCABULARY = 50257  # tokens
SHARE = re.compile(r"\d+\.?\d*|\.\d+")  # of --split
SHARES = 3
PATHS = ("data_path", "train_data_path")
# arguments that say where tokens come from without naming token files
WITHOUT_PATHS = {
    "mock_data": "data is not made up here",
    "data_args_path": "lists of data in a file are not read",
    "per_split_data_args_path": "lists of data in a file are not read",
}
NO_PATH = "no token files are known"
# files that the user puts in
OPEN_SOURCE = "FILL-IN/tokens"
OPEN_TOKENIZER = "FILL-IN/tokenizer.json"
MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
TRACKERS = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}


def add_data(arguments: Arguments) -> None:
    """Add [data]."""
    draft = arguments.draft
    _add_paths(arguments)
    if arguments.has("train_data_path"):  # all of it is for training
        arguments.put("data.held_out", 0.0, "train_data_path")
    else:
        _add_split(arguments)
    for name in filter(arguments.get, MASKS):
        arguments.copy(f"data.{name}", name)
    if arguments.get("eod_mask_loss") and "calculate_per_token_loss" not in arguments.unused:
        draft.notes.append(
            "--eod-mask-loss without --calculate-per-token-loss: Megatron-LM averages the means of "
            "micro-batches, here all counted tokens of a step have the same weight"
        )
    _add_tokenizer(arguments)
    vocab = draft.value("model.vocab")
    has_tokenizer = draft.value("data.tokenizer") is not None
    if not has_tokenizer and isinstance(vocab, int) and 0 < vocab < Data().vocab_size:
        draft.put("data.vocab_size", vocab, "as model.vocab")


def _add_split(arguments: Arguments) -> None:
    """Add the part that is held out: all but the first of up to three shares."""
    written = arguments.get("split").strip(" []()")
    words = [word.strip(" '\"") for word in written.split(",")]
    is_split = len(words) <= SHARES and all(map(SHARE.fullmatch, words))
    shares = [float(word) for word in words] if is_split else []
    total = sum(shares)
    if not total:
        arguments.refuse("give the shares of training, validation and test, as 969,30,1", "split")
        return
    held_out = round(1 - shares[0] / total, 12)
    arguments.put("data.held_out", held_out, "split")
    if held_out:
        arguments.put("data.held_out_from", "end", "split")


def _add_paths(arguments: Arguments) -> None:
    """Add the token files. Those that are not known, or not named, are left to fill in."""
    draft = arguments.draft
    paths = arguments.get("data_path") or arguments.get("train_data_path") or ()
    given = [*filter(arguments.has, PATHS)]
    origin = arguments.origin(*given)
    if not (draft.needs("data.source") and draft.needs("data.blend")):
        return
    blend = _blend(paths)
    reasons = [arguments.open_files[name] for name in given if name in arguments.open_files]
    if len(paths) == 1:
        draft.put("data.source", paths[0], origin)
    elif blend:
        draft.put("data.blend", blend, origin)
    elif paths and not reasons:
        why = "give the weight of each data set before its path (data.blend)"
        arguments.refuse(why, *given)
    else:
        _leave_data_open(arguments)
        return
    if reasons:
        draft.notes.append(f"{origin}: {reasons[0]}. The run file has the path as it is written")


def _blend(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the data sets of words that are a weight and a path in turn; none of others."""
    weights = [_weight(text) for text in paths[::2]]
    if len(paths) % 2 or None in weights:
        return []
    pairs = zip(weights, paths[1::2], strict=True)
    return [{"source": path, "weight": weight} for weight, path in pairs]


def _leave_data_open(arguments: Arguments) -> None:
    """Add a path to fill in, and say why."""
    draft = arguments.draft
    given = [*filter(arguments.has, (*PATHS, *WITHOUT_PATHS))]
    said = arguments.origin(*given) if given else "--data-path is not given"
    why = next((why for name, why in WITHOUT_PATHS.items() if arguments.get(name)), NO_PATH)
    draft.put("data.source", OPEN_SOURCE, said)
    draft.notes.append(
        f"{said}: {why}. Instead of {OPEN_SOURCE} give the prefix of a .bin and .idx pair "
        "(data.source) or several (data.blend)"
    )


def _weight(text: str) -> float | None:
    """Return the weight of a data set; None for a text that is none."""
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0 < weight < 1e300 else None


def _add_tokenizer(arguments: Arguments) -> None:
    """Add the tokenizer, or the size of the vocabulary where Megatron-LM reads it from other
    files."""
    draft = arguments.draft
    kind = arguments.get("tokenizer_type")
    path = arguments.get("tokenizer_model")
    reason = arguments.open_files.get("tokenizer_model")
    origin = arguments.origin("tokenizer_model")
    if not draft.needs("data.tokenizer"):
        return
    if not draft.needs("model.vocab"):
        if path:
            draft.notes.append(
                f"{origin}: not read, for model.vocab is given; data.tokenizer reads it"
            )
    elif kind in SENTENCEPIECE and path:
        draft.put("data.tokenizer", path, origin)
    elif kind == "HuggingFaceTokenizer" and path:
        is_file = path.endswith(".json")
        file = path if is_file else f"{path.rstrip('/')}/tokenizer.json"
        draft.put("data.tokenizer", file, origin)
        if not is_file:
            draft.notes.append(
                f"data.tokenizer = {file}: if {path} is a name on the hub, download it first"
            )
    else:
        _add_vocabulary(arguments, kind)
        return
    if reason:
        draft.notes.append(f"{origin}: {reason}. The run file has the path as it is written")


def _add_vocabulary(arguments: Arguments, kind: str | None) -> None:
    """Add the number of tokens. kind: that of a tokenizer that is not read."""
    draft = arguments.draft
    said = arguments.origin("tokenizer_type")
    size = arguments.get("vocab_size")
    is_readable = kind in (None, "HuggingFaceTokenizer", *SENTENCEPIECE)
    if kind == "NullTokenizer" and size:
        origin = f"{arguments.origin('vocab_size')}, and one token that ends a document"
        draft.put("model.vocab", size + 1, origin)
        draft.notes.append(
            "NullTokenizer: Megatron-LM adds a token up to core_v0.16; for newer ones give "
            f"model.vocab={size}"
        )
    elif not size and _is_gpt2s(arguments, kind):
        origin = arguments.origin("tokenizer_type")
        draft.put("model.vocab", GPT2_VOCABULARY, arguments.unused.get("vocab_file", origin))
        draft.notes.append(
            f"model.vocab = {GPT2_VOCABULARY}: the number of tokens in GPT-2's {GPT2_NAME}, which "
            "is not read; model.vocab=N gives another"
        )
    elif any(map(arguments.get, SIZES_OF_VOCABULARY)):
        if kind is not None:
            draft.notes.append(f"{said}: no tokenizer is read; token files need model.vocab alone")
    else:
        missing = "the size of the vocabulary is not in the arguments (--vocab-size)"
        what = missing if is_readable else f"{said}: there is no such tokenizer here"
        draft.put("data.tokenizer", OPEN_TOKENIZER, what)
        draft.notes.append(
            f"{what}. Instead of data.tokenizer = {OPEN_TOKENIZER} give a SentencePiece .model or "
            "a Hugging Face tokenizer.json or, for tokens that are on disk, model.vocab=N (50257 "
            "for GPT-2's) alone"
        )


def _is_gpt2s(arguments: Arguments, kind: str | None) -> bool:
    """Return True for the vocabulary of GPT-2, by the tokenizer or by the name of its file."""
    has_size = arguments.has("padded_vocab_size")
    is_named = GPT2_FILE.search(arguments.unused.get("vocab_file", "")) is not None
    return not has_size and (kind == "GPT2BPETokenizer" or is_named)


def add_run(arguments: Arguments) -> None:
    """Add evaluation, folder, checkpoints and log lines."""
    _add_evaluation(arguments)
    arguments.copy("log.every", "log_interval")
    if asked := list(filter(arguments.get, TRACKERS)):
        arguments.put("log.to", [TRACKERS[name] for name in asked], *asked)
    _add_checkpoints(arguments)
    _add_load(arguments)


def _add_evaluation(arguments: Arguments) -> None:
    """Add how often the run is evaluated, at its end at the latest, and on how many batches."""
    draft = arguments.draft
    # Megatron-LM evaluates if there are more than 0
    if not (arguments.get("eval_iters") > 0 and draft.value("data.held_out")):
        arguments.put("train.eval_every", 0, "eval_interval", "eval_iters")
        return
    every = arguments.get("eval_interval")
    steps = draft.value("train.steps") or math.inf
    origin = arguments.origin("eval_interval")
    if every > steps:
        origin = "the end of the run, where Megatron-LM evaluates too"
    draft.put("train.eval_every", min(every, steps), origin)
    arguments.copy("train.eval_batches", "eval_iters")


def _add_checkpoints(arguments: Arguments) -> None:
    """Add the folder of the run, and how often it saves there."""
    draft = arguments.draft
    if arguments.get("save"):
        arguments.copy("train.folder", "save")
    elif "save" in arguments.open_places:
        draft.notes.append(
            f"{arguments.origin('save')}: this folder is not known, so it is that of megaprec: "
            "train.folder=FOLDER gives another"
        )
    else:
        draft.notes.append("--save is not given: the run saves at its end only, in train.folder")
        draft.put("checkpoint.every", 0, "no --save")
        return
    arguments.put("checkpoint.every", arguments.get("save_interval") or 0, "save_interval")
    _add_keeping(arguments)


def _add_keeping(arguments: Arguments) -> None:
    """Add the checkpoints that are kept: all, or the newest and those of each multiple of an
    interval.

    Megatron-LM's save_checkpoint deletes the checkpoint before, unless its iteration is a multiple.
    """
    name = "save_retain_interval"
    interval = arguments.get(name)
    if interval is None:
        arguments.draft.put("checkpoint.keep", "all", "as Megatron-LM, which keeps them")
    elif interval < 1:
        arguments.refuse("give a number of iterations from 1 on", name)
    else:
        arguments.put("checkpoint.keep", 1, name)
        arguments.put("checkpoint.keep_every", interval, name)


def _resumes_from_open_place(arguments: Arguments) -> bool:
    """Note that a run resumes from its own folder, or add the problem of another that is not known.
    Returns False if other weights are given too."""
    places = arguments.open_places
    place = places["load"]
    saved = places.get("save")
    if arguments.get("pretrained_checkpoint") and not saved:
        return False
    draft = arguments.draft
    if not (draft.needs("train.init_from") and draft.needs("train.branch_from")):
        return True
    if saved and saved.text == place.text:
        draft.notes.append(
            f"{arguments.origin('load')}: a run resumes from its own newest checkpoint"
        )
    elif place.unknown:
        arguments.refuse(place.unknown, "load")
    return True


def _add_load(arguments: Arguments) -> None:
    """Add the checkpoint that the first weights, or the whole state, come from. If that is the
    folder that the run saves to, a note is all: a run resumes from there by itself."""
    draft = arguments.draft
    pretrained = arguments.get("pretrained_checkpoint")
    load = arguments.get("load")
    path = pretrained or load
    # an open place is a folder whose name is not known
    if "load" in arguments.open_places and _resumes_from_open_place(arguments):
        return
    weights_only = arguments.get("finetune") or arguments.get("no_load_optim")
    is_open = draft.needs("train.init_from") and draft.needs("train.branch_from")
    if not path or not is_open:
        return
    if load == arguments.get("save") and not pretrained:
        draft.notes.append(
            f"{arguments.origin('load')}: a run resumes from its own newest checkpoint there; "
            f"train.init_from={path} begins with the weights of one of Megatron-LM"
        )
    elif weights_only or pretrained:
        names = ("pretrained_checkpoint", "load", "finetune", "no_load_optim")
        arguments.put("train.init_from", path, *names)
    else:
        # loaded with its optimizer state and iteration, and saved elsewhere
        arguments.put("train.branch_from", path, "load")
        draft.notes.append(
            f"{arguments.origin('load')}: train.branch_from goes on from a checkpoint of megaprec: "
            "convert one of Megatron-LM with its optimizer state first (docs/converting.md), and "
            "name what was written"
        )
