"""Loading the weights of a model folder of any format as the first weights of a run, in any layout.

Every rank reads what it holds: rows of a tensor that is stored in megaprec's form, the whole tensor
if it must be rearranged or assembled first.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import INDEX, checkpoint_at, latest
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import Weights, load_weights
from megaprec.comm.gathered_texts import gather_entries
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.text.tokenizer import loaded_once
from models.config import ModelConfig
from tools.config.initial_model import InitialModel
from tools.convert.core.finite import NotFinite
from tools.convert.core.slices import Slices
from tools.convert.core.source import Source
from tools.convert.formats import format_of, open_source
from tools.convert.growth import GrownWeights, VocabularyGrowth
from tools.convert.hf.config import special_ids as hf_special_ids
from tools.convert.hf.folder import CONFIG, hf_model, hf_tokenizer, read_config
from tools.convert.hf.vocabulary import check_tokenizer, main_file, stated_ids
from tools.convert.kept_ids import first_ids, kept_ids
from tools.convert.native import native_model, open_native
from tools.convert.systems.dcp import config_file


def with_more_tokens(initial: InitialModel, tokenizer_file: Path | None) -> InitialModel:
    """Return the model of first weights with a vocabulary for all tokens of the run's tokenizer."""
    # one that cannot be read is reported with the sources of the data
    tokenizer = loaded_once(tokenizer_file) if tokenizer_file else None
    rows = initial.model.vocab
    vocab = max(rows, tokenizer.vocab_size) if tokenizer else rows
    return replace(initial, model=initial.model.with_vocab(vocab), rows=rows)


def model_of_branch(origin: Path, own_checkpoints: Path) -> InitialModel:
    """Return the model of a branch: that of its own newest checkpoint, otherwise that of the one in
    `origin`. Raises UserError.

    Tokenizer and begin token are those of the checkpoint as on a resume, not by a key.
    own_checkpoints: the folder of the branch's checkpoints.
    """
    checkpoint = latest(own_checkpoints) or checkpoint_at(origin)
    if checkpoint is None:
        raise UserError.of("training.no_branch_checkpoint", folder=origin)
    model, _ = native_model(checkpoint)
    return InitialModel(model, None, None, f"{checkpoint / INDEX}")


def leaves_model_open(folder: Path) -> bool:
    """Return True for weights that nothing beside them describes: a distributed checkpoint of
    PyTorch without a config.json. Raises UserError."""
    kind, checkpoint = format_of(folder)
    return kind == "dcp" and config_file(checkpoint) is None


def initial_model(folder: Path, own: ModelConfig | None = None) -> InitialModel:
    """Return what the folder of train.init_from says. Raises UserError.

    own: the model of the run file, which a folder has that leaves it open.
    """
    # Only what says the model is opened: weights are read much later, on every rank.
    kind, checkpoint = format_of(folder)
    if kind == "megaprec":
        model, tokenizer = native_model(checkpoint)
        special = kept_ids(Store(checkpoint)).special
        origin = f"{checkpoint / INDEX}"
    elif kind == "hf":
        model = hf_model(folder)
        tokenizer = main_file(hf_tokenizer(folder))
        special = hf_special_ids(read_config(folder))
        origin = f"{folder / CONFIG}"
    else:
        source = open_weights(folder, own)
        model = source.model
        tokenizer = main_file(source.tokenizer)
        special = source.facts.special
        origin = f"{checkpoint}"
    begins = stated_ids(special, "bos_token_id", model.vocab)
    return InitialModel(model, tokenizer, begins[0] if begins else None, origin)


def open_initial(folder: Path, own: ModelConfig | None = None) -> Source:
    """Open the folder of train.init_from and check everything except the values. Raises UserError.

    own: the model of the run file, which a folder has that leaves it open.
    """
    source = open_weights(folder, own)
    check_tokenizer(source.tokenizer, source.model.vocab)
    return source


def open_weights(folder: Path, own: ModelConfig | None = None) -> Source:
    """Open a folder without its optimizer state. Raises UserError.

    own: the model of the run file, which a folder has that leaves it open.
    """
    kind, checkpoint = format_of(folder)
    if kind == "megaprec" and own is not None and own.factory:
        return open_native(checkpoint, custom=True)
    if own is None or not leaves_model_open(folder):
        return open_source(folder, weights_only=kind == "megatron")
    if not own.vocab:
        raise UserError.of("convert.dcp_vocabulary_open", path=folder)
    # the checkpoint is read without these modules, and the run would look for them
    if own.mtp_layers:
        raise UserError.of("convert.dcp_mtp", mtp_layers=own.mtp_layers)
    return open_source(folder, model=own)


def start_from(
    folder: Path,
    optimizer: ParallelAMPOptimizer,
    growth: VocabularyGrowth | None = None,
    drawn: Weights | None = None,
    own: ModelConfig | None = None,
) -> dict[str, Any]:
    """Copy the weights of train.init_from into the optimizer and the layers; moments stay zero.
    Return the entries of the run's checkpoints that keep what else the folder says.

    growth: the rows of new tokens; None if there are none. drawn: initial weights, of which they
        are rows if growth says so. own: the model of the run file, which a folder has that leaves
        it open.

    Rank 0 prints the folder's notes, and a warning for tensors with numbers that are NaN or
    infinite. Collective over the world. Raises UserError, before anything is changed, if a file of
    the checkpoint is damaged.
    """
    # Checksums of files of ours are known; other formats are checked as they are read.
    if checkpoint := checkpoint_at(folder):
        store = Store(checkpoint)
        weight_files = store.files_of("weight")
        require_intact(store, weight_files, optimizer.world, optimizer.device)
    # Every rank opens the folder, and reads no more than it holds.
    slices = Slices(open_initial(folder, own))
    if growth:
        load_weights(GrownWeights(slices, growth, optimizer.plan, drawn), optimizer)
    else:
        load_weights(slices, optimizer)
    not_finite_counts = gather_entries(slices.not_finite, optimizer.world, optimizer.device)
    if optimizer.world.rank == 0:
        lines = [f"note: {note}\n" for note in slices.source.facts.notes]
        for line in _describe_not_finite(slices.source, not_finite_counts):
            lines.append(f"warning: {folder}: {line}\n")
        print(*lines, sep="", end="", flush=True)
    return first_ids(slices.source)


def _describe_not_finite(source: Source, counts: Mapping[str, int]) -> list[str]:
    """Return a line for each tensor with such numbers. counts: by slice, as of
    `Slices.not_finite`."""
    # Ranks count in slices of a tensor; people know the tensor.
    by_key = Counter[str]()
    for description, count in counts.items():
        tensor_key = description.partition(" ")[0]
        by_key[tensor_key] += count
    damage = NotFinite()
    for tensor_key, count in sorted(by_key.items()):
        damage.counts[tensor_key] = count, prod(source.shapes[tensor_key])
    return damage.lines(())
