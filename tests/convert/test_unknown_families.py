"""A family that is not known is refused with the one that is nearest, what differs, and ways out;
none is read as another."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError

from megaprec.errors import UserError
from tests.other_systems import CONFIGS
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.text_models import WRAPPERS, text_config
from tools.convert.hf.unknown_family import nearest_family

transformers: Any = pytest.importorskip(
    "transformers",
    reason="needs the package transformers (pip install transformers)",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
CODES = ("convert.hf_model_type", "convert.hf_model_type_other", "convert.hf_several_inputs")
LONGEST_LINE = 1000


def causal_types() -> list[str]:
    """Every model_type of which transformers makes a causal model."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(names)


def default_config(kind: str) -> dict[str, Any]:
    """The config.json of a model_type that says nothing but its defaults; without them where its
    class refuses these itself."""
    try:
        stated = transformers.AutoConfig.for_model(kind).to_dict()
    except StrictDataclassClassValidationError:
        stated = {}
    return {**stated, "model_type": kind}


def require_told(kind: str) -> None:
    """Require that a model_type that is not known is refused with what differs, and no other
    word."""
    config = default_config(kind)
    with pytest.raises(UserError) as refused:
        from_hugging_face(text_config(config))
    (line,) = refused.value.problems
    assert line.code in CODES, kind
    assert len(line) < LONGEST_LINE and "\n" not in line, kind
    if line.code == "convert.hf_several_inputs":
        return
    assert "model.factory" in line and repr(kind) in line, kind
    nearest = nearest_family(config)
    assert (nearest is None) == (line.code == "convert.hf_model_type_other"), kind
    if nearest:
        assert nearest.name in FAMILIES and set(nearest.foreign) <= config.keys(), kind
        for key in nearest.foreign[:3]:
            assert f"{key} = " in line, kind


@pytest.mark.parametrize("kind", ["bloom", "falcon_h1", "gemma4_assistant", "xlstm"])
def test_a_type_that_is_not_known_is_refused_with_what_differs(kind: str) -> None:
    require_told(kind)


@pytest.mark.slow
def test_every_causal_type_of_transformers_is_known_or_refused_with_what_differs() -> None:
    kinds = causal_types()
    unknown = [kind for kind in kinds if kind not in FAMILIES and kind not in WRAPPERS]
    assert len(kinds) > 150 and len(unknown) > 100
    for kind in unknown:
        require_told(kind)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_known_family_under_another_name_differs_by_no_key_of_its_file(kind: str) -> None:
    config = CONFIGS[kind]
    nearest = nearest_family({**config, "model_type": "new", "architectures": ["New"]})
    assert nearest is not None and nearest.foreign == (), nearest


def test_keys_that_the_nearest_family_has_not_are_named_with_their_values() -> None:
    config = {**CONFIGS["llama"], "model_type": "new", "logit_scale": 0.5}
    with pytest.raises(UserError) as refused:
        from_hugging_face(config)
    (line,) = refused.value.problems
    assert line.fields["nearest"] == "llama"
    assert line.fields["differences"] == "does not know logit_scale = 0.5"
    with pytest.raises(UserError) as refused:
        from_hugging_face({**CONFIGS["llama"], "model_type": "new"})
    assert refused.value.problems[0].fields["differences"] == "has the same keys"


def test_values_that_the_nearest_family_refuses_are_named() -> None:
    config = {**CONFIGS["llama"], "model_type": "new", "hidden_act": "mish"}
    config |= {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}
    nearest = nearest_family(config)
    assert nearest is not None and nearest.name == "llama"
    assert set(nearest.foreign) == {"hidden_act", "rope_scaling"}
