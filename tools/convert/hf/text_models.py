"""Text models inside models of several kinds of input: Gemma 3 and 4 and Qwen3.5 with images.

A config.json of such a model has a config.json of the text model in `text_config`. These are read:
their tensors are `model.language_model.*`, in published files of Gemma 3 `language_model.*`, and
text alone passes through them as through a `gemma3_text`, `gemma4_text`, `qwen3_5_text` or
`qwen3_5_moe_text` model. Tensors for images and sound are left out. Other such models are refused
by one line.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megaprec.errors import UserError
from tools.convert.hf.keys import FREE, IDS, short, wrong_value

Json = Mapping[str, Any]


class Wrapper(NamedTuple):
    """A model of several kinds of input. Its other parts are left out.

    text: the model_type of its text model.
    keys: keys beside text_config that say nothing of texts.
    tensors: beginnings of names of tensors that texts do not pass through.
    inputs: what these tensors are for.
    """

    text: str
    keys: tuple[str, ...]
    tensors: tuple[str, ...]
    inputs: str = "images"


_KEYS_OF_GEMMA = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
)
_TENSORS_OF_GEMMA = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_KEYS_OF_GEMMA4 = (
    "vision_config",
    "audio_config",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "boa_token_id",
    "eoa_token_index",
    "eoa_token_id",
    "audio_token_id",
    "vision_soft_tokens_per_image",
)
_TENSORS_OF_GEMMA4 = (
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
)
_IMAGES_AND_SOUND = "images and sound"
_KEYS_OF_QWEN = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "language_model_only",
)
_TENSORS_OF_QWEN = ("model.visual.",)
# By the model_type of the whole model.
WRAPPERS = {
    "gemma3": Wrapper("gemma3_text", _KEYS_OF_GEMMA, _TENSORS_OF_GEMMA),
    "gemma4": Wrapper("gemma4_text", _KEYS_OF_GEMMA4, _TENSORS_OF_GEMMA4, _IMAGES_AND_SOUND),
    "gemma4_unified": Wrapper(
        "gemma4_unified_text", _KEYS_OF_GEMMA4, _TENSORS_OF_GEMMA4, _IMAGES_AND_SOUND
    ),
    "qwen3_5": Wrapper("qwen3_5_text", _KEYS_OF_QWEN, _TENSORS_OF_QWEN),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", _KEYS_OF_QWEN, _TENSORS_OF_QWEN),
}
# Keys under which configs of other models have another one, of texts, images or sound.
PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "vision_config",
    "audio_config",
)
# said outside or inside, and alike if in both
ALIKE_IF_IN_BOTH = ("initializer_range", "tie_word_embeddings", "quantization_config")
# outer keys of the text model, which win over its own
OUTER_TEXT_KEYS = (*IDS, *ALIKE_IF_IN_BOTH)
# Of published files, and of those that newer versions of transformers write.
_NAMES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
}


def text_config(config: Json) -> Json:
    """Return the config.json of the text model: `config` itself, unless that has one inside.

    Raises UserError for models with several kinds of input that are not read, and for keys that are
    not known.
    """
    model_type = config.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None:
        # A model of text alone has none of these.
        parts = [key for key in PARTS if isinstance(config.get(key), Mapping)]
        if parts:
            raise _refusal(model_type, parts, config[parts[0]])
        return config
    inner_config = config.get("text_config")
    if not isinstance(inner_config, Mapping):
        raise UserError.of("convert.hf_text_config_missing", kind=model_type, text=wrapper.text)
    inner_type = inner_config.get("model_type", wrapper.text)
    if inner_type != wrapper.text:
        raise UserError.of(
            "convert.hf_text_config_type", model_type=short(inner_type), text=wrapper.text
        )
    # Keys outside may contradict those inside, of which transformers lets one win.
    _check_outer_keys(config, inner_config, wrapper)
    outer = {key: config[key] for key in OUTER_TEXT_KEYS if key in config}
    return {**inner_config, **outer, "model_type": wrapper.text}


def _check_outer_keys(config: Json, inner_config: Json, wrapper: Wrapper) -> None:
    """Raise UserError for keys beside text_config that are not known, or contradict it, and for
    parts that are none."""
    for part in PARTS:
        if part in config and not isinstance(config[part], Mapping | None):
            raise UserError(wrong_value(part, config[part], "a table"))
    for outer_key in config.keys() - {*FREE, *wrapper.keys, *OUTER_TEXT_KEYS, "text_config"}:
        if config[outer_key] is not None:
            raise UserError.of(
                "convert.hf_key_unknown",
                key=outer_key,
                value=short(config[outer_key]),
                kind=config["model_type"],
            )
    for outer_key in ALIKE_IF_IN_BOTH:
        in_both = outer_key in config and outer_key in inner_config
        if in_both and inner_config[outer_key] != config[outer_key]:
            raise UserError.of(
                "convert.hf_text_config_differs",
                key=outer_key,
                value=short(config[outer_key]),
                text_value=short(inner_config[outer_key]),
            )


def text_tensors(stored: Mapping[str, Any], config: Json) -> dict[str, Any]:
    """Return the tensors of the text model, by the names that they have in a folder of its own."""
    # A folder of a text model alone has the names already.
    wrapper = WRAPPERS.get(config.get("model_type", ""))
    if wrapper is None:
        return dict(stored)
    tensors: dict[str, Any] = {}
    for name, tensor in stored.items():
        if not name.startswith(wrapper.tensors):
            inner_name = _inner_name(name)
            # Of two tensors for one place neither replaces the other: one has no place.
            tensors[name if inner_name in stored else inner_name] = tensor
    return tensors


def wrapped_notes(stored: Mapping[str, Any], config: Json) -> list[str]:
    """Return the note on tensors of images that are left out."""
    model_type = config.get("model_type", "")
    wrapper = WRAPPERS.get(model_type)
    if wrapper is None:
        return []
    left_out = sum(name.startswith(wrapper.tensors) for name in stored)
    return [
        f"config.json has model_type = {model_type!r}: its text model is read, of model_type "
        f"{wrapper.text!r}; {left_out} tensors for {wrapper.inputs} are left out, and a folder "
        "that is written has none"
    ]


def _inner_name(name: str) -> str:
    """Return the name of a tensor of the text model in a folder of its own."""
    for prefix, inner_prefix in _NAMES.items():
        if name.startswith(prefix):
            return inner_prefix + name.removeprefix(prefix)
    return name


def _refusal(model_type: Any, parts: list[str], inner_config: Json) -> UserError:
    """Return the error about a model of several kinds of input that is not read.

    inner_config: the first of its parts.
    """
    text_type = None
    if "vision" not in parts[0] and "audio" not in parts[0]:
        text_type = inner_config.get("model_type")
    text = f"a text model of model_type {text_type!r}" if text_type else "its text model"
    return UserError.of(
        "convert.hf_several_inputs",
        kind=model_type,
        parts=", ".join(parts),
        readers=", ".join(WRAPPERS),
        text=text,
    )
