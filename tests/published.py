"""Tiny models with tokenizers, as transformers saves them, and runs that begin with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.tokens.samples import Batch
from tests.families import CASES, THEIRS
from tests.models.test_families import float32_is_float64
from tests.runs import RUN, WORDS

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs transformers: the extra hf"
)
tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: the extra hf")

PAD = 0
EOS = 1
BOS = 2
SPECIAL = ["<pad>", "<eos>", "<bos>"]
IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
TEXTS = [" ".join(WORDS[n:] + WORDS[:n]) for n in range(12)]


def folder_of(name: str, place: Path, **ids: int | None) -> Path:
    """A tiny model of a family with a tokenizer, as transformers saves them."""
    case = CASES[name]
    known = transformers.AutoConfig.for_model(case.kind)
    # others are refused by name
    shared = {key: value for key, value in THEIRS.items() if hasattr(known, key)}
    keys = shared | case.theirs | {"vocab_size": 300} | IDS | ids
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.kind, **keys)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(place)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(place)
    return place


def written(place: Path, init_from: Path, *lines: str) -> Path:
    """A run file of one step without learning, from a folder and on a text of some documents."""
    text = place / "texts.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS), encoding="utf-8")
    own = (
        RUN[RUN.index("[data]") :]
        .replace("{folder}", str(place))
        .replace("text.txt", "texts.jsonl")
    )
    own = (
        own.replace("vocab_size = 330\n", "")
        .replace("peak = 1e-2", "peak = 1e-30")
        .replace("steps = 6", "steps = 1")
    )
    own = own.replace("seq_length = 16", "seq_length = 8").replace(
        "global_batch = 8", "global_batch = 2"
    )
    file = place / "run.toml"
    file.write_text(
        "\n".join([own.replace("[train]", f'[train]\ninit_from = "{init_from}"'), *lines])
    )
    return file


def model_of(folder: Path, **keys: Any) -> Any:
    """The model of a folder as transformers computes it in float64, with other keys of its
    config.json."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in keys.items():
        setattr(config, key, value)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
    # made anew, for the angles of positions are computed as a model is made
    with float32_is_float64():
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        model = model.double().eval()
    model.load_state_dict(loaded.double().state_dict())
    return model


@torch.no_grad()
def logits_of(model: Any, batch: Batch) -> Tensor:
    """The logits of a batch, [samples x tokens, vocabulary]."""
    with float32_is_float64():
        return model(torch.as_tensor(batch.tokens)).logits.flatten(0, 1)


def loss_of(model: Any, batch: Batch) -> float:
    """The mean loss of a batch."""
    targets = torch.as_tensor(batch.targets).flatten()
    return nn.functional.cross_entropy(logits_of(model, batch), targets).item()
