"""A model that no Hugging Face family says: the line names what would have to be otherwise, and no more."""

from typing import Any

import pytest

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.write_config import to_hugging_face

SIZES = {"layers": 3, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 53, "max_positions": 16}
LATENT = {"latent": {"query_rank": 9, "kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5}, "experts": 4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"family": "deepseek_v3", "shared_experts": 25, **LATENT},
            "deepseek_v3 cannot say shared_experts = 25: 24 wo",
        ),
        (
            {"family": "deepseek_v2", "shared_experts": 24, **LATENT},
            "deepseek_v2 cannot say norm_topk = True: False would do",
        ),
        ({"family": "glm4_moe", "experts": 4, "shared_experts": 70}, "shared_experts = 70: 72 would do"),
        (
            {"family": "deepseek_v3", "shared_experts": 24, "dense_layers": (1,), **LATENT},
            "dense_layers = (1,): () would do",
        ),
        ({"family": "llama", "norm": "layer", "attention_softcap": 3.0}, "norm = layer, attention_softcap = 3.0, and "),
    ],
)
def test_a_model_that_no_family_says_is_refused_by_what_makes_it_so(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        to_hugging_face(ModelConfig.model_validate(SIZES | changes), "float32")
    (line,) = refused.value.problems
    assert said in line and len(line) < 250
