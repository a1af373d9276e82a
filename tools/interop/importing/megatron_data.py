"""Data, tokenizer, evaluation, checkpoints and logs of Megatron-LM's arguments."""

import math
import re
from pathlib import Path

from megaprec.parsing import parse_json, read_text
from tools.config.data_settings import Data
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.draft import Draft

SENTENCEPIECE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
SIZES_OF_VOCABULARY = ("vocab_size", "padded_vocab_size")
TRACKERS = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}
MOST_BYTES = 64 * 2**20


def add_data(arguments: Arguments, draft: Draft) -> None:
    """Add [data]."""
    _add_paths(arguments, draft)
    parts = [float(part) for part in re.findall(r"\d*\.?\d+", arguments.get("split"))][:3]
    total = sum(parts)
    if total:
        held_out = round(1 - parts[0] / total, 12)
        draft.put("data.held_out", held_out, arguments.origin("split"))
    else:
        arguments.refuse("give the shares of training, validation and test, as 969,30,1", "split")
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if arguments.get(name):
            arguments.put(draft, f"data.{name}", name)
    if arguments.get("eod_mask_loss") and "calculate_per_token_loss" not in arguments.unused:
        draft.notes.append(
            "--eod-mask-loss without --calculate-per-token-loss: Megatron-LM averages the means of "
            "micro-batches, here all counted tokens of a step have the same weight"
        )
    _add_tokenizer(arguments, draft)
    vocab = draft.value("model.vocab")
    has_tokenizer = draft.value("data.tokenizer") is not None
    if not has_tokenizer and isinstance(vocab, int) and 0 < vocab < Data().vocab_size:
        draft.put("data.vocab_size", vocab, "as model.vocab")


def _add_paths(arguments: Arguments, draft: Draft) -> None:
    paths = arguments.get("data_path")
    origin = arguments.origin("data_path")
    if not paths:
        needed = draft.needs("data.source") and draft.needs("data.blend")
        if needed and arguments.tried.isdisjoint({"data_path", "mock_data", "train_data_path"}):
            draft.missing.append(
                "--data-path is missing: the prefix of a .bin and .idx pair, or data.source=... "
                "beside"
            )
        return
    if len(paths) == 1:
        draft.put("data.source", paths[0], origin)
        return
    weights = [_weight(text) for text in paths[::2]]
    if len(paths) % 2 == 0 and None not in weights:
        pairs = zip(weights, paths[1::2], strict=True)
        blend = [{"source": path, "weight": weight} for weight, path in pairs]
        draft.put("data.blend", blend, origin)
    elif draft.needs("data.blend"):
        arguments.refuse(
            "give the weight of each data set before its path (data.blend)", "data_path"
        )


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0 < weight < 1e300 else None


def _add_tokenizer(arguments: Arguments, draft: Draft) -> None:
    """Add the tokenizer, or the size of the vocabulary where Megatron-LM reads it from other
    files."""
    kind = arguments.get("tokenizer_type")
    path = arguments.get("tokenizer_model")
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
        file = path if path.endswith(".json") else f"{path.rstrip('/')}/tokenizer.json"
        draft.put("data.tokenizer", file, origin)
        if file != path:
            draft.notes.append(
                f"data.tokenizer = {file}: if {path} is a name on the hub, download it first"
            )
    else:
        _add_vocabulary(arguments, draft, kind)


def _add_vocabulary(arguments: Arguments, draft: Draft, kind: str | None) -> None:
    """Add the number of tokens. kind: that of a tokenizer that is not read."""
    size = arguments.get("vocab_size")
    if kind == "NullTokenizer" and size:
        origin = f"{arguments.origin('vocab_size')}, and one token that ends a document"
        draft.put("model.vocab", size + 1, origin)
        draft.notes.append(
            "NullTokenizer: Megatron-LM adds a token up to core_v0.16; for newer ones give "
            f"model.vocab={size}"
        )
    elif kind in (None, "GPT2BPETokenizer") and arguments.get("vocab_file"):
        if not size:
            _count_tokens(arguments, draft)
    elif any(map(arguments.get, SIZES_OF_VOCABULARY)):
        if kind is not None:
            draft.notes.append(
                f"{arguments.said['tokenizer_type']}: no tokenizer is read; token files need "
                "model.vocab alone"
            )
    elif kind is not None or arguments.tried.isdisjoint(
        {*SIZES_OF_VOCABULARY, "vocab_file", "tokenizer_model"}
    ):
        what = "the size of the vocabulary is not in the arguments"
        if kind not in (None, "HuggingFaceTokenizer", *SENTENCEPIECE):
            what = f"{arguments.said['tokenizer_type']}: there is no such tokenizer here"
        draft.missing.append(
            f"{what}: give data.tokenizer=FILE (a SentencePiece .model or a Hugging Face "
            "tokenizer.json) or, for tokens that are on disk, model.vocab=N beside them"
        )


def _count_tokens(arguments: Arguments, draft: Draft) -> None:
    path = Path(arguments.get("vocab_file"))
    try:
        words = parse_json(read_text(path, MOST_BYTES))
    except (OSError, ValueError):
        words = None
    if not isinstance(words, dict) or not words:
        arguments.refuse(
            "cannot be read here, and says how many tokens there are: give model.vocab=N (GPT-2's "
            "are 50257) or data.tokenizer=tokenizer.json beside the arguments",
            "vocab_file",
        )
        return
    draft.put("model.vocab", len(words), f"the tokens of {path}")
    draft.notes.append(
        f"model.vocab = {len(words)}, from {path}: token files need no tokenizer; for text, "
        "generation and export give a tokenizer.json (data.tokenizer)"
    )


def add_run(arguments: Arguments, draft: Draft) -> None:
    """Add evaluation, folder, checkpoints and log lines."""
    every = arguments.get("eval_interval")
    steps = draft.value("train.steps") or math.inf
    if not (arguments.get("eval_iters") and draft.value("data.held_out")):
        draft.put("train.eval_every", 0, arguments.origin("eval_interval", "eval_iters"))
    else:
        origin = arguments.origin("eval_interval")
        if every > steps:
            origin = "the end of the run, where Megatron-LM evaluates too"
        draft.put("train.eval_every", min(every, steps), origin)
        arguments.put(draft, "train.eval_batches", "eval_iters")
    arguments.put(draft, "log.every", "log_interval")
    if asked := list(filter(arguments.get, TRACKERS)):
        draft.put("log.to", [TRACKERS[name] for name in asked], arguments.origin(*asked))
    if arguments.get("save"):
        arguments.put(draft, "train.folder", "save")
        every = arguments.get("save_interval") or 0
        draft.put("checkpoint.every", every, arguments.origin("save_interval"))
        _add_keeping(arguments, draft)
    else:
        draft.notes.append("--save is not given: the run saves at its end only, in train.folder")
        draft.put("checkpoint.every", 0, "no --save")
    _add_load(arguments, draft)


def _add_keeping(arguments: Arguments, draft: Draft) -> None:
    """Add the checkpoints that are kept: all, or the newest and those of each multiple of an
    interval.

    Megatron-LM's save_checkpoint deletes the checkpoint before, unless its iteration is a multiple.
    """
    name = "save_retain_interval"
    interval = arguments.get(name)
    origin = arguments.origin(name)
    if interval is None:
        draft.put("checkpoint.keep", "all", origin)
    elif interval < 1:
        arguments.refuse("give a number of iterations from 1 on", name)
    else:
        draft.put("checkpoint.keep", 1, origin)
        draft.put("checkpoint.keep_every", interval, origin)


def _add_load(arguments: Arguments, draft: Draft) -> None:
    """Add the checkpoint that the first weights come from."""
    pretrained = arguments.get("pretrained_checkpoint")
    load = arguments.get("load")
    path = pretrained or load
    weights_only = arguments.get("finetune") or arguments.get("no_load_optim")
    if not path or not draft.needs("train.init_from"):
        return
    if load == arguments.get("save") and not pretrained:
        draft.notes.append(
            f"{arguments.origin('load')}: a run resumes from its own newest checkpoint there; "
            f"train.init_from={path} begins with the weights of one of Megatron-LM"
        )
    elif weights_only or pretrained:
        names = ("pretrained_checkpoint", "load", "finetune", "no_load_optim")
        draft.put("train.init_from", path, arguments.origin(*names))
    else:
        arguments.refuse(
            f"to begin with its weights give train.init_from={path} beside the arguments; to go on "
            "with its optimizer state too, convert it first (docs/converting.md)",
            "load",
        )
