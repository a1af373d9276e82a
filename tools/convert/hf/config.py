"""The model of a Hugging Face config.json, and the config.json of a model.

Every key of a file is read, known not to matter, or refused by name. A model is written in the
words of its own family, or of the first that can say all of it: what is written must be read back
as the same model. What no family can say is an error; numbers that only training goes by, such as
dropout in families that have none, are left out, and `omitted_settings` names them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megaprec.errors import Problem, UserError
from models.config import ModelConfig
from models.equivalence import TRAINING_ONLY_KEYS, with_idle_keys_reset
from tools.console.toml import toml
from tools.convert.hf.families import FAMILIES, keys_of
from tools.convert.hf.keys import IDS, ConfigKeys, Fields, Json, wrong_value
from tools.convert.hf.quantized import require_readable
from tools.convert.hf.unknown_family import unknown_family
from tools.saved.model_fields import problems_of_fields, requirement_of

# Fields that say nothing by themselves.
NAMES = ("family", "bias")
_SIZES = ("layers", "hidden", "heads", "ffn", "vocab", "max_positions")
# Fields that no refusal names: every family has the sizes, and no logit depends on the others.
_UNNAMED_FIELDS = (*TRAINING_ONLY_KEYS, *NAMES, *_SIZES)
# Families that transformers 4 lacks, or rounds, and that other programs have by themselves.
_NEWER_FAMILIES = (
    "qwen3_5",
    "nemotron_h",
    "glm4_moe_lite",
    "minimax_m2",
    "solar_open",
    "youtu",
    "kimi_linear",
    "ministral3",
    "apertus",
    "gemma4",
)
_NAMEABLE_FIELDS = [field for field in ModelConfig.model_fields if field not in _UNNAMED_FIELDS]


def from_hugging_face(config: Json) -> ModelConfig:
    """Return the model of a config.json. Raises UserError for an unknown architecture, key or
    value."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_family(config)
    keys = keys_of(config)
    try:
        require_readable(keys)
        fields: Fields = {"family": keys.family.ours}
        keys_of_field = dict[str, frozenset[str]]()
        for entry in keys.family.entries:
            fields_of_entry, keys_of_entry = keys.read(entry)
            fields |= fields_of_entry
            keys_of_field |= dict.fromkeys(fields_of_entry, keys_of_entry)
        # Entries mark what they read; what is left may be of another model.
        if unread := list(keys.unread()):
            raise UserError(*unread)
        return _make_model(fields, keys, keys_of_field)
    except UserError as error:
        # A null that was read explains what else went wrong.
        raise UserError(*(keys.nulls() or error.problems)) from error
    # Entries count with what the file says, and a file may say anything.
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        misstated = Problem.of("convert.hf_misstated", kind=model_type, error=error)
        raise UserError(*(keys.nulls() or [misstated])) from error


def _make_model(
    fields: Fields, keys: ConfigKeys, keys_of_field: Mapping[str, Collection[str]]
) -> ModelConfig:
    """Return the model with these fields. Raises UserError that names the keys which say wrong
    ones.

    keys_of_field: the keys that were read for each field.
    """
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        of_keys = list[Problem]()
        for finding in error.errors(include_url=False):
            field = str(finding["loc"][0]) if finding["loc"] else ""
            key = _key_with(finding["input"], keys, keys_of_field.get(field, ()))
            if key:
                remedy = requirement_of(finding).removeprefix("must be ")
                of_keys.append(wrong_value(key, finding["input"], remedy))
        # Fields that follow from several keys are wrong for the same reason.
        problems = of_keys or problems_of_fields(error, "config.json")
        raise UserError(*dict.fromkeys(problems)) from error


def _key_with(value: Any, keys: ConfigKeys, candidates: Collection[str]) -> str:
    """Return which of the candidate keys has the value, as the file names it; "" if none has, or if
    the value is no number. Several keys that have it are "a or b".
    """
    if not isinstance(value, int | float):
        return ""
    paths_with_value = list[str]()
    for key in candidates:
        stated = keys.stated.get(key)
        name = keys.as_stated(key)
        value_by_path = {name: stated}
        if isinstance(stated, Mapping):
            value_by_path = {f"{name}.{inner}": number for inner, number in stated.items()}
        for path, number in value_by_path.items():
            if not isinstance(number, bool) and number == value:
                paths_with_value.append(path)
    return " or ".join(sorted(paths_with_value))


def special_ids(config: Json) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text, and of padding, from config.json or
    its family."""
    keys = keys_of(config)
    return {key: keys[key] for key in IDS}


def model_type_of(model: ModelConfig) -> str:
    """Return the model_type that can say all of `model`, that of its own family if that can.
    UserError if there is none."""
    # The first with the family's name: Qwen's dense one stands before the one with experts.
    own_types = [name for name, family in FAMILIES.items() if family.ours == model.family]
    own_type = own_types[0]
    for model_type in (*own_types, *FAMILIES):
        if _unsaid(model_type, model) == []:
            return model_type
    computed = with_idle_keys_reset(model)
    if remedies := _remedies(own_type, computed):
        raise UserError.of(
            "convert.hf_not_expressible", own_kind=own_type, remedies="; or ".join(remedies)
        )
    # Where the class makes no such model at all, all that is unusual about it is named.
    named = _unsaid(own_type, model) or _unusual_fields(computed)
    if not named:
        # Then no field alone is unusual: what is read back says what is wrong with it.
        from_hugging_face(_config_of_type(own_type, computed))
    settings = ", ".join(f"{field} = {toml(getattr(computed, field))}" for field in named)
    raise UserError.of("convert.hf_no_family", settings=settings, own_kind=own_type)


def _unusual_fields(model: ModelConfig) -> list[str]:
    """Return the fields of a model that have another value than their default."""
    unusual = []
    for field in _NAMEABLE_FIELDS:
        if getattr(model, field) != _default(model, field):
            unusual.append(field)
    return unusual


def config_of(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of `model`, with weights in `dtype` (float32, bfloat16, ...)."""
    config = _config_of_type(model_type_of(model), model)
    # torch_dtype is the name that transformers 4 reads; 5 takes both.
    return config | {"torch_dtype": dtype}


def _config_of_type(model_type: str, model: ModelConfig) -> dict[str, Any]:
    """Return what a config.json of a model_type can say of a model, whether that is all or not."""
    family = FAMILIES[model_type]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
    }
    for entry in family.entries:
        config |= entry.write(model)
    # its class would take its default, which this vocabulary may not have
    if (family.defaults["pad_token_id"] or 0) >= model.vocab:
        config["pad_token_id"] = None
    return config


def _unsaid(model_type: str, model: ModelConfig) -> list[str] | None:
    """Return the fields of a model that logits depend on and that a config.json of a model_type
    does not say; None if that makes no such model.

    Modules for multi-token prediction are left out where a family has no place for them.
    """
    if not FAMILIES[model_type].requires(model):
        return None
    try:
        read_back = from_hugging_face(_config_of_type(model_type, model))
    except UserError:
        return None
    needless = {*without_effect(model), "mtp_layers"}
    return [field for field in differing_fields(model, read_back) if field not in needless]


def differing_fields(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the fields in which two models compute or train differently, and those of `NAMES`
    that differ."""
    ours = with_idle_keys_reset(model)
    theirs = with_idle_keys_reset(other)
    fields = type(model).model_fields
    differing = [field for field in fields if getattr(ours, field) != getattr(theirs, field)]
    # a LayerNorm in place of an RMSNorm has a bias unless the model says otherwise
    if "norm" in differing and model.norm_bias == (model.norm == "layer"):
        differing = [field for field in differing if field != "norm_bias"]
    return differing


def without_effect(model: ModelConfig) -> Sequence[str]:
    """Return the fields on which the logits of a model do not depend."""
    names = (*TRAINING_ONLY_KEYS, *NAMES)
    # Without a table of positions it is the size of nothing.
    return names if model.positions == "learned" else (*names, "max_positions")


def omitted_settings(model: ModelConfig) -> list[str]:
    """Return what a config.json of `model` omits, as key = value. Raises UserError if the model
    would compute otherwise.
    """
    differing = differing_fields(model, from_hugging_face(config_of(model, "float32")))
    problems: list[Problem] = []
    for field in differing:
        if field not in without_effect(model):
            value = toml(getattr(model, field))
            problems.append(Problem.of("convert.hf_field_lost", name=field, value=value))
    if problems:
        raise UserError(*problems)
    omitted = []
    for field in differing:
        if field in TRAINING_ONLY_KEYS:
            omitted.append(f"{field} = {toml(getattr(model, field))}")
    return omitted


def notes_on_older_transformers(model: ModelConfig) -> list[str]:
    """Return a note for each thing in the config.json of `model` that transformers 4 refuses or
    computes otherwise."""
    notes = []
    family = FAMILIES[model_type_of(model)]
    for feature in family.beyond_transformers_4(model):
        readers = "transformers 4, and what goes by its keys, such as vLLM and llama.cpp,"
        if family.ours in _NEWER_FAMILIES:
            readers = "transformers 4"
        notes.append(f"config.json needs transformers 5 or newer: {readers} cannot {feature}")
    return notes


def _remedies(model_type: str, model: ModelConfig) -> list[str]:
    """Return a line for each field of which another value alone would be enough, so that a
    config.json of the model_type can say the model: the value, and one that would do."""
    remedies = []
    for field in _NAMEABLE_FIELDS:
        value = getattr(model, field)
        candidates = [_default(model, field)]
        if field == "shared_experts" and model.ffn:
            # Hugging Face counts shared experts of the width of the others.
            count = max(1, round(model.shared_experts / model.ffn))
            candidates.append(model.ffn * count)
        if isinstance(value, bool):
            candidates.append(not value)
        for candidate in candidates:
            changes = {field: candidate}
            if field == "norm":
                changes["norm_bias"] = candidate == "layer"
            changed = model.model_copy(update=changes)
            if candidate != value and _unsaid(model_type, changed) == []:
                remedies.append(f"{field} = {toml(value)}: {toml(candidate)} would do")
                break
    return remedies


def _default(model: ModelConfig, field: str) -> Any:
    """Return the value that a field has if neither it nor `bias`, from which some follow, is
    given."""
    given = model.model_dump(include=model.model_fields_set - {field, "bias"})
    try:
        without_field = ModelConfig.model_validate(given)
        return getattr(without_field, field)
    except ValueError:  # what is given fits this value alone
        return getattr(model, field)
