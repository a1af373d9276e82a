"""Notes on what a config.json says and this project does otherwise, or not at all."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.rope import RopeScaling, frequencies
from tools.convert.core.tensors import Stored
from tools.convert.hf.defaults import DEFAULTS
from tools.convert.hf.keys import Keys
from tools.convert.hf.kinds import IDS
from tools.convert.hf.rope import BY_LAYER

Json = Mapping[str, Any]
ANGLES = "rotary_emb.inv_freq"
KEPT = "which no token of vocab_size has: it is kept"


def notes(config: Json, architecture: str, read: bool) -> list[str]:
    """Return notes on settings of a config.json that are ignored though users may expect otherwise.

    read: the files hold the layers for multi-token prediction that it names.
    """
    said = config.get("architectures")
    family = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    if isinstance(said, list):
        others = [name for name in said if not str(name).lower().startswith(family)]
    else:
        others = []
    if others:
        found = [f"architectures = {others}: it is read as {architecture}, as model_type says"]
    else:
        found = []
    if config.get("auto_map"):
        found.append(f"auto_map: code of the folder's own is not run; it is read as {architecture}")
    found += [f"{key} = {config[key]}, {KEPT}" for key in _strange(config)]
    if unread := _untruncated(config):
        found.append(
            f"truncate = false in {unread}: transformers 5 does not read it in a "
            f"{config['model_type']} model, and so "
            "it is read here; transformers 4 does"
        )
    if config["model_type"] == "olmo3" and _sliding_base_is_open(config):
        found.append(
            f"rope_theta = {config['rope_theta']}, which transformers 5 takes for layers "
            "without the window alone, and "
            "so it is read here; transformers 4 takes it for all"
        )
    if (extra := further_layers(config)) and read:
        found.append(
            f"{extra} layers for multi-token prediction: they are read as model.mtp_layers, "
            "which only training uses"
        )
    elif extra:
        found.append(
            f"{extra} layers for multi-token prediction, of which the files hold no tensor: "
            "there are none"
        )
    return [f"config.json has {note}" for note in found]


def rotary_notes(model: ModelConfig, files: Mapping[str, Stored]) -> Iterator[str]:
    """Yield a note on angles of rotary positions in the files that are not those of config.json,
    which are followed.

    Older versions of transformers saved them, with rope_scaling or before it, and 16 bits round
    them.
    """
    saved = {name: stored for name, stored in files.items() if name.endswith(ANGLES)}
    for name, stored in saved.items():
        if stored.shape != (model.rotary_dims // 2,) or not _are_angles(
            stored.read().double(), model
        ):
            yield (
                f"{name} has other angles than config.json says, which is followed: rope_theta "
                "may be another there"
            )
            return


def _are_angles(said: Tensor, model: ModelConfig) -> bool:
    for base in (model.rope_base, model.window_rope_base or model.rope_base):
        for scaling in (model.rope_scaling, RopeScaling()):
            ours = frequencies(scaling, base, model.rotary_dims, model.max_positions)
            if torch.allclose(said, ours, rtol=0.02, atol=1e-6):
                return True
    return False


def _strange(config: Json) -> list[str]:
    """Return the keys of special tokens with ids that the vocabulary does not have. -1 stands for
    none."""
    size = Keys(config, config["model_type"])["vocab_size"]
    said = {
        key: config[key] if isinstance(config[key], list) else [config[key]]
        for key in IDS
        if key in config
    }
    return [key for key, ids in said.items() if any(one is not None and one >= size for one in ids)]


def _sliding_base_is_open(config: Json) -> bool:
    """Return True if an OLMo 3 has a base of its own, and nothing says which its layers with the
    window have."""
    usual = DEFAULTS["olmo3"]["rope_theta"]
    base = config.get("rope_theta")
    said = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return base not in (None, usual) and "rope_theta" not in said


def _untruncated(config: Json) -> str:
    """Return the key of rotary positions by layer that asks for YaRN's range in fractions of pairs;
    "" for none."""
    if config["model_type"] not in BY_LAYER:
        return ""
    tables = {"rope_scaling": config.get("rope_scaling")}
    tables |= config.get("rope_parameters") or {}
    asking = (key for key, table in tables.items() if table and not table.get("truncate", True))
    return next(asking, "")


def further_layers(config: Json) -> int:
    """Return the number of layers after the model's own, for multi-token prediction. They may be in
    its files."""
    keys = Keys(config, config["model_type"])
    if "num_mtp_layers" in DEFAULTS[keys.kind]:
        return int(keys["num_mtp_layers"] or 0)
    return 0
