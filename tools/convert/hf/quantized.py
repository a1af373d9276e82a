"""Quantized weights of a Hugging Face folder: those that are read, and a way out for all others.

`quantization_config` of config.json says how weights are stored. Read are FP8 in blocks
(`fp8_blocks`), and MXFP4 of gpt-oss (`mxfp4`). Whatever else there is, is refused by its name:
nothing can tell what such tensors mean.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored
from tools.convert.hf import fp8_blocks, mxfp4
from tools.convert.hf.keys import ConfigKeys, short

KEY = "quantization_config"
# Files in which other programs say that weights are quantized, with or without a key of
# config.json.
FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_FROM = "convert the folder of 16-bit weights that they were made from"
_SAVED = f"{_FROM}, or one that transformers saves after model.dequantize()"
WAYS = {"bitsandbytes": _SAVED, "higgs": _SAVED}
NOTES = {
    "fp8": (
        "weights are in FP8 blocks; they are read as bf16: FP8 times the scale of the block in "
        "FP32, rounded"
    ),
    "mxfp4": "weights of experts are in MXFP4; they are read as bf16, which holds them exactly",
}


def require_readable(keys: ConfigKeys) -> None:
    """Raise UserError unless the weights of a config.json are not quantized, or in a way that is
    read."""
    keys.mark_read(KEY)
    quantization = keys.stated.get(KEY)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if keys.model_type == "gpt_oss":
        mxfp4.require_known(quantization)
    elif isinstance(quantization, Mapping) and method == "fp8":
        fp8_blocks.require_known_blocks(quantization)
    elif quantization is not None:
        description = f"= {short(quantization)}"
        if isinstance(method, str):
            description = f"with quant_method = {short(method)}"
        raise UserError.of(
            "convert.quantized_unreadable",
            key=KEY,
            description=description,
            remedy=WAYS.get(str(method), _FROM),
        )


def with_quantized(
    stored: Mapping[str, Stored], config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return the tensors of a folder, with the parts of each quantized one as one tensor. Raises
    UserError."""
    quantization = config.get(KEY)
    if quantization is None:
        for file_name in FILES:
            if (folder / file_name).is_file():
                raise UserError.of(
                    "convert.quantized_by_config", path=folder / file_name, remedy=_FROM
                )
    if config["model_type"] == "gpt_oss":
        plain = fp8_blocks.with_blocks(stored, None, folder)
        return mxfp4.with_quantized(plain, quantization, folder)
    return fp8_blocks.with_blocks(stored, quantization, folder)


def quantized_notes(config: Mapping[str, Any]) -> list[str]:
    """Return the note on weights that are dequantized as they are read; empty if there are none."""
    quantization = config.get(KEY)
    if quantization:
        note = NOTES[quantization["quant_method"]]
        return [f"{note}; a folder that is written has no {KEY}"]
    return []
