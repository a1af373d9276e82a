"""Notes on what a config.json says and this project does otherwise, or not at all."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from models.attention.rope import frequencies
from models.config import ModelConfig
from models.mamba import Mamba
from models.rope_scaling import RopeScaling
from tools.convert.core.tensors import Stored
from tools.convert.hf.families import FAMILIES, keys_of
from tools.convert.hf.keys import IDS
from tools.convert.hf.rope import BY_LAYER

Json = Mapping[str, Any]
KEPT = "which no token of vocab_size has: it is kept"
SAVED_FREQUENCIES = "rotary_emb.inv_freq"
# By how much these may differ: bf16 rounds to 0.4 %, and another rope_theta is far more.
FREQUENCY_RTOL = 0.02
FREQUENCY_ATOL = 1e-6


def notes(
    config: Json, architecture: str, has_modules: bool, has_unread_modules: bool = False
) -> list[str]:
    """Return notes on settings of a config.json that are ignored though users may expect otherwise.

    architecture: the class of transformers that it is read as.
    has_modules: the files hold the layers for multi-token prediction that it names.
    has_unread_modules: they do, and these are not read.
    """
    remarks = [*_notes_on_code(config, architecture)]
    remarks += [f"{key} = {config[key]}, {KEPT}" for key in _ids_beyond_vocabulary(config)]
    remarks += _notes_on_versions(config)
    # transformers leaves these layers out when it saves, but not their number.
    layers = further_layers(config)
    if layers and has_modules:
        remarks.append(
            f"{layers} layers for multi-token prediction: they are read as model.mtp_layers, "
            "which only training uses"
        )
    elif layers and not has_unread_modules:
        remarks.append(
            f"{layers} layers for multi-token prediction, of which the files hold no tensor: "
            "there are none"
        )
    return [f"config.json has {remark}" for remark in remarks]


def _notes_on_code(config: Json, architecture: str) -> Iterator[str]:
    """Yield remarks on a class or on code that a config.json names and that is not run."""
    architectures = config.get("architectures")
    # By their beginning: a class for another task has the same layers.
    beginning = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    family = beginning.lower()
    if isinstance(architectures, list):
        others = [name for name in architectures if not str(name).lower().startswith(family)]
        if others:
            yield f"architectures = {others}: it is read as {architecture}, as model_type says"
    if config.get("auto_map"):
        yield f"auto_map: code of the folder's own is not run; it is read as {architecture}"


def _notes_on_versions(config: Json) -> Iterator[str]:
    """Yield remarks on what versions of transformers read differently."""
    if key := _key_with_untruncated(config):
        yield (
            f"truncate = false in {key}: transformers 5 does not read it in a "
            f"{config['model_type']} model, and so it is read here; transformers 4 does"
        )
    if config["model_type"] == "nemotron_h":
        least_step = keys_of(config)["time_step_min"]
        # The default limits no step, so that both readers compute the same.
        if least_step != Mamba.model_fields["least_step"].default:
            yield (
                f"time_step_min = {least_step}: transformers takes it for the shortest time step, "
                "and so it is read here (model.mamba.least_step); NVIDIA's own file of the model "
                "draws first weights by it alone, and as to that model.mamba.least_step = 1e-9 is "
                "right"
            )
    if config["model_type"] == "olmo3" and _sliding_base_is_open(config):
        yield (
            f"rope_theta = {config['rope_theta']}, which transformers 5 takes for layers without "
            "the window alone, and so it is read here; transformers 4 takes it for all"
        )


def rotary_notes(model: ModelConfig, files: Mapping[str, Stored]) -> Iterator[str]:
    """Yield a note if the files have frequencies of rotary positions (`inv_freq`, radians per
    position of each pair of features) that are not those of config.json, which are followed.

    Older versions of transformers saved them, some as rope_scaling makes them and others unscaled,
    and in 16 bits, which round them: both are taken as those of config.json.
    """
    for name, stored in files.items():
        # Only old versions of transformers saved this buffer.
        if not name.endswith(SAVED_FREQUENCIES):
            continue
        has_shape = stored.shape == (model.rotary_dims // 2,)
        if not has_shape or not _are_frequencies(stored.read().double(), model):
            yield (
                f"{name} has other angles than config.json says, which is followed: rope_theta "
                "may be another there"
            )
            return


def _are_frequencies(saved: Tensor, model: ModelConfig) -> bool:
    """Return True if saved frequencies, float64 [pairs], are those of some layers of a model,
    scaled or not."""
    # Some saved those of one type of layer, others those before they are scaled.
    window_base = model.window_rope_base or model.rope_base
    for base in (model.rope_base, window_base):
        for scaling in (model.rope_scaling, RopeScaling()):
            expected = frequencies(scaling, base, model.rotary_dims, model.max_positions)
            if torch.allclose(saved, expected, rtol=FREQUENCY_RTOL, atol=FREQUENCY_ATOL):
                return True
    return False


def _ids_beyond_vocabulary(config: Json) -> Iterator[str]:
    """Yield the keys of special tokens with ids that the vocabulary does not have. -1 stands for
    none."""
    vocab_size = keys_of(config)["vocab_size"]
    for key in IDS:
        ids = config.get(key)
        if not isinstance(ids, list):
            ids = [ids]
        if any(token is not None and token >= vocab_size for token in ids):
            yield key


def _sliding_base_is_open(config: Json) -> bool:
    """Return True if an OLMo 3 has a base of its own, and nothing says which its layers with the
    window have."""
    # transformers 4 took this base for all layers, 5 takes it for some.
    base = config.get("rope_theta")
    tables = config.get("rope_parameters") or {}
    window_parameters = tables.get("sliding_attention") or {}
    has_own_base = base not in (None, FAMILIES["olmo3"].defaults["rope_theta"])
    return has_own_base and "rope_theta" not in window_parameters


def _key_with_untruncated(config: Json) -> str:
    """Return the key of rotary positions by layer that asks for YaRN's range in fractions of pairs;
    "" for none."""
    if config["model_type"] not in BY_LAYER:
        return ""
    tables = {"rope_scaling": config.get("rope_scaling")}
    tables |= config.get("rope_parameters") or {}
    for key, table in tables.items():
        if table and not table.get("truncate", True):
            return key
    return ""


def further_layers(config: Json) -> int:
    """Return the number of layers after the model's own, for multi-token prediction. They may be in
    its files."""
    config_keys = keys_of(config)
    for key in ("num_mtp_layers", "mtp_num_hidden_layers"):
        if key in config_keys.family.defaults:
            return int(config_keys[key] or 0)
    return 0
