"""A run goes on with the model of its checkpoint, and with no other."""

import json
from types import SimpleNamespace
from typing import Any, cast

from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem
from models.config import ModelConfig
from models.presets import preset
from tools.saved.train_state import read_model
from tools.training.other_model import other_keys


def differences(saved: dict[str, Any], asked: ModelConfig) -> list[str]:
    store = cast(Store, SimpleNamespace(index={"model": saved}, path="here"))
    return [*other_keys(read_model(store), asked, "here")]


def saved(model: ModelConfig) -> dict[str, Any]:
    return json.loads(model.model_dump_json())


def test_weights_of_a_loss_may_change_but_not_what_the_weights_mean() -> None:
    model = preset("mixtral-demo", vocab=99)
    assert not differences(
        saved(model), model.model_copy(update={"router_aux_loss": 0.5, "router_z_loss": 0.1})
    )
    assert differences(
        saved(model), model.model_copy(update={"window": 7, "experts_per_token": 1})
    ) == [
        Problem.of("training.other_model", key="window", value=7, saved=0),
        Problem.of("training.other_model", key="experts_per_token", value=1, saved=2),
    ]


def test_a_checkpoint_without_a_newer_key_has_its_default() -> None:
    model = preset("gpt2")
    older = {
        key: value
        for key, value in saved(model).items()
        if key not in ("window", "mlp_bias", "rope_scaling")
    }
    assert not differences(older, model)
    assert differences(older, model.model_copy(update={"mlp_bias": False})) == [
        Problem.of("training.other_model", key="mlp_bias", value="false", saved="true")
    ]


def test_scores_may_change_with_the_scaling_that_they_follow_and_not_by_themselves() -> None:
    follows = preset("deepseek-v2-lite")
    longer = dict(follows.rope_scaling) | {"factor": 80.0}
    other = {**saved(follows), "rope_scaling": longer}
    del other["attention_scalar"]
    scaled = ModelConfig(
        **json.loads(json.dumps(other)),
    )
    assert scaled.attention_scalar != follows.attention_scalar
    assert not differences(saved(follows), scaled)
    by_itself = follows.model_copy(update={"attention_scalar": 50.0})
    for one, another in ((follows, by_itself), (by_itself, follows)):
        (problem,) = differences(saved(one), another)
        assert problem == Problem.of(
            "training.other_model",
            key="attention_scalar",
            value=json.dumps(another.attention_scalar),
            saved=json.dumps(one.attention_scalar),
        )
