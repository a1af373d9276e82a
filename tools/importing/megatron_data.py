"""Data, tokenizer, evaluation, checkpoints and logs of Megatron-LM's arguments."""

import math
import re
from pathlib import Path

from megaprec.parsing import parse_json, read_text
from tools.config.data_settings import Data
from tools.importing.draft import Draft
from tools.importing.arguments import Arguments

SENTENCEPIECE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
MOST_BYTES = 64 * 2**20


def add_data(a: Arguments, draft: Draft) -> None:
    """Add [data]."""
    _add_paths(a, draft)
    parts = [float(part) for part in re.findall(r"\d*\.?\d+", a.get("split"))][:3]
    total = sum(parts)
    if not total or len(parts) > 3:
        a.refuse("give the shares of training, validation and test, as 969,30,1", "split")
    else:
        draft.put("data.held_out", round(1 - parts[0] / total, 12), a.origin("split"))
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if a.get(name):
            draft.put(f"data.{name}", True, a.origin(name))
    if a.get("eod_mask_loss") and "calculate_per_token_loss" not in a.unused:
        draft.notes.append(
            "--eod-mask-loss without --calculate-per-token-loss: Megatron-LM averages the "
            "means of micro-batches, here "
            "all counted tokens of a step have the same weight"
        )
    _add_tokenizer(a, draft)
    vocab = draft.value("model.vocab")
    if (
        draft.value("data.tokenizer") is None
        and isinstance(vocab, int)
        and 0 < vocab < Data().vocab_size
    ):
        draft.put("data.vocab_size", vocab, "as model.vocab")


def _add_paths(a: Arguments, draft: Draft) -> None:
    paths = a.get("data_path")
    if not paths:
        needed = draft.needs("data.source") and draft.needs("data.blend")
        if needed and not {"data_path", "mock_data", "train_data_path"} & a.tried:
            draft.missing.append(
                "--data-path is missing: the prefix of a .bin and .idx pair, or "
                "data.source=... beside"
            )
        return
    if len(paths) == 1:
        draft.put("data.source", paths[0], a.origin("data_path"))
        return
    weights = [_weight(text) for text in paths[::2]]
    if len(paths) % 2 or None in weights:
        if draft.needs("data.blend"):
            a.refuse("give the weight of each data set before its path (data.blend)", "data_path")
        return
    blend = [
        {"source": path, "weight": weight}
        for weight, path in zip(weights, paths[1::2], strict=True)
    ]
    draft.put("data.blend", blend, a.origin("data_path"))


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0 < weight < 1e300 else None


def _add_tokenizer(a: Arguments, draft: Draft) -> None:
    """Add the tokenizer, or the size of the vocabulary where Megatron-LM reads it from other
    files."""
    kind = a.get("tokenizer_type")
    path = a.get("tokenizer_model")
    if not draft.needs("data.tokenizer"):
        return
    if not draft.needs("model.vocab"):
        if path:
            draft.notes.append(
                f"{a.said['tokenizer_model']}: not read, for model.vocab is given; "
                "data.tokenizer reads it"
            )
        return
    if kind in SENTENCEPIECE and path:
        draft.put("data.tokenizer", path, a.origin("tokenizer_model"))
    elif kind == "HuggingFaceTokenizer" and path:
        file = path if path.endswith(".json") else f"{path.rstrip('/')}/tokenizer.json"
        draft.put("data.tokenizer", file, a.origin("tokenizer_model"))
        if file != path:
            draft.notes.append(
                f"data.tokenizer = {file}: if {path} is a name on the hub, download it first"
            )
    elif kind == "NullTokenizer" and a.get("vocab_size"):
        vocab = a.get("vocab_size")
        draft.put(
            "model.vocab",
            vocab + 1,
            f"{a.origin('vocab_size')}, and one token that ends a document",
        )
        draft.notes.append(
            "NullTokenizer: Megatron-LM adds a token up to core_v0.16; for newer ones give "
            f"model.vocab={vocab}"
        )
    elif kind in (None, "GPT2BPETokenizer") and a.get("vocab_file"):
        _add_vocabulary(a, draft)
    elif a.get("vocab_size") or a.get("padded_vocab_size"):
        if kind is not None:
            draft.notes.append(
                f"{a.said['tokenizer_type']}: no tokenizer is read; token files need "
                "model.vocab alone"
            )
    elif (
        not {"vocab_size", "padded_vocab_size", "vocab_file", "tokenizer_model"} & a.tried
        or kind is not None
    ):
        _refuse_vocabulary(a, draft)


def _refuse_vocabulary(a: Arguments, draft: Draft) -> None:
    """Add the problem that nothing says how many tokens there are."""
    if "tokenizer_type" in a.said and a.get("tokenizer_type") not in (
        "HuggingFaceTokenizer",
        *SENTENCEPIECE,
    ):
        what = f"{a.said['tokenizer_type']}: there is no such tokenizer here"
    else:
        what = "the size of the vocabulary is not in the arguments"
    draft.missing.append(
        f"{what}: give data.tokenizer=FILE (a SentencePiece .model or a Hugging Face "
        "tokenizer.json) or, for tokens "
        "that are on disk, model.vocab=N beside them"
    )


def _add_vocabulary(a: Arguments, draft: Draft) -> None:
    path = Path(a.get("vocab_file"))
    try:
        words = parse_json(read_text(path, MOST_BYTES))
    except (OSError, ValueError):
        words = None
    if a.get("vocab_size"):
        return
    if not isinstance(words, dict) or not words:
        a.refuse(
            "cannot be read here, and says how many tokens there are: give model.vocab=N "
            "(GPT-2's are 50257) or "
            "data.tokenizer=tokenizer.json beside the arguments",
            "vocab_file",
        )
        return
    draft.put("model.vocab", len(words), f"the tokens of {path}")
    draft.notes.append(
        f"model.vocab = {len(words)}, from {path}: token files need no tokenizer; for text, "
        "generation and export "
        "give a tokenizer.json (data.tokenizer)"
    )


def add_run(a: Arguments, draft: Draft) -> None:
    """Add evaluation, folder, checkpoints and log lines."""
    evaluates = a.get("eval_iters") and draft.value("data.held_out")
    every = a.get("eval_interval")
    steps = draft.value("train.steps") or math.inf
    if not evaluates:
        draft.put("train.eval_every", 0, a.origin("eval_interval", "eval_iters"))
    elif every > steps:
        draft.put("train.eval_every", steps, "the end of the run, where Megatron-LM evaluates too")
    else:
        draft.put("train.eval_every", every, a.origin("eval_interval"))
    if evaluates:
        draft.put("train.eval_batches", a.get("eval_iters"), a.origin("eval_iters"))
    draft.put("log.every", a.get("log_interval"), a.origin("log_interval"))
    trackers = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}
    if asked := [name for name in trackers if a.get(name)]:
        draft.put("log.to", [trackers[name] for name in asked], a.origin(*asked))
    if a.get("save"):
        draft.put("train.folder", a.get("save"), a.origin("save"))
        draft.put("checkpoint.every", a.get("save_interval") or 0, a.origin("save_interval"))
        _add_keeping(a, draft)
    else:
        draft.notes.append("--save is not given: the run saves at its end only, in train.folder")
        draft.put("checkpoint.every", 0, "no --save")
    _add_load(a, draft)


def _add_keeping(a: Arguments, draft: Draft) -> None:
    """Add the checkpoints that are kept: all, or the newest and those of each multiple of an
    interval.

    Megatron-LM's save_checkpoint deletes the checkpoint before, unless its iteration is a multiple.
    """
    interval = a.get("save_retain_interval")
    origin = a.origin("save_retain_interval")
    if interval is None:
        draft.put("checkpoint.keep", "all", origin)
    elif interval < 1:
        a.refuse("give a number of iterations from 1 on", "save_retain_interval")
    else:
        draft.put("checkpoint.keep", 1, origin)
        draft.put("checkpoint.keep_every", interval, origin)


def _add_load(a: Arguments, draft: Draft) -> None:
    """Add the checkpoint that the first weights come from."""
    path = a.get("pretrained_checkpoint") or a.get("load")
    if not path or not draft.needs("train.init_from"):
        return
    if a.get("load") == a.get("save") and not a.get("pretrained_checkpoint"):
        draft.notes.append(
            f"{a.said['load']}: a run resumes from its own newest checkpoint there; "
            f"train.init_from={path} "
            "begins with the weights of one of Megatron-LM"
        )
    elif a.get("finetune") or a.get("no_load_optim") or a.get("pretrained_checkpoint"):
        draft.put(
            "train.init_from",
            path,
            a.origin("pretrained_checkpoint", "load", "finetune", "no_load_optim"),
        )
    else:
        a.refuse(
            f"to begin with its weights give train.init_from={path} beside the arguments; to "
            "go on with its optimizer "
            "state too, convert it first (docs/converting.md)",
            "load",
        )
