"""Megatron-LM's --use-mup becomes muP with the same initial weights, rates, decays and scores, or is
refused by the names of arguments."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.optim.rules.param_groups import Group, factors
from models.logical_shapes import logical_shapes
from models.mup import READOUTS
from tests.importing.test_import import BASE, refused, run_of
from tests.refusals import raises, shows
from tools.convert.megatron.keys import refuse_others

MUP = f"{BASE} --use-mup --mup-base-hidden-size 16 --untie-embeddings-and-output-weights"


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rates_and_decays_are_those_of_megatron(tmp_path: Path, decay: float) -> None:
    """A step takes rate x decay of a weight; Megatron multiplies the head's logits by 1 / m where
    ours has a smaller head."""
    run = run_of(tmp_path, *MUP.split(), "--weight-decay", str(decay))
    model = run.model
    groups = [Group(**group.model_dump()) for group in run.optimizer.groups]
    assert (model.mup_base_hidden, model.mup.growth, run.optimizer.weight_decay) == (16, 4, decay)
    hidden = 0
    for name, shape in logical_shapes(model).items():
        grown = model.mup.growth_of(Part(name, shape))
        part = Part(name, shape, growth=grown)
        lr, decay_factor = factors(part, groups)
        is_hidden = len(shape) == 2 and not name.startswith(("embedding", "positions", "head"))
        hidden += is_hidden
        multiplier = 0.25 if name.endswith(READOUTS) else 1.0
        assert lr == (0.25 if is_hidden else 1.0) * multiplier, name
        if decay:
            taken = (0.25 if is_hidden else 1.0) if len(shape) == 2 else 0.0
            assert lr * decay_factor == taken, name
    assert hidden == 24
    assert bool(groups) == bool(decay)
    # each pattern is of matrices alone
    vectors = [name for name, shape in logical_shapes(model).items() if len(shape) == 1]
    assert not [name for name in vectors for group in groups if fnmatchcase(name, group.pattern)]


@pytest.mark.parametrize(
    ("arguments", "scalar"),
    [
        ("", 16.0**2),  # 1 / head_dim
        ("--mup-base-head-dim 4", 16.0**2 / 4),
        ("--mup-base-head-dim 16", 16.0),
        ("--mup-attn-scale-power 0.5", 16.0),
    ],
)
def test_scores_are_scaled_as_in_megatron(tmp_path: Path, arguments: str, scalar: float) -> None:
    run = run_of(tmp_path, *MUP.split(), *arguments.split())
    assert run.model.attention_scalar == scalar


def test_the_head_begins_as_the_embedding_where_that_has_a_deviation_of_its_own(
    tmp_path: Path,
) -> None:
    model = run_of(tmp_path, *MUP.split(), "--embedding-init-method-std", "0.5").model
    assert model.initial_std("embedding") == 0.5
    assert model.initial_std("head") == 0.125
    assert model.initial_std("qkv") == 0.01


def test_without_a_base_the_model_is_its_own_base(tmp_path: Path) -> None:
    run = run_of(tmp_path, *BASE.split(), "--use-mup")
    assert run.model.mup_base_hidden == 64
    assert run.model.mup.growth == 1
    assert not run.optimizer.groups


def test_that_epsilon_differs_is_told(tmp_path: Path) -> None:
    run_of(tmp_path, *MUP.split())
    assert "--adam-eps is divided by 4" in (tmp_path / "imported.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--num-experts 4", "--num-experts 4"),
        ("--optimizer sgd", "--optimizer sgd"),
        ("--mup-attn-scale-power 0.7", "--mup-attn-scale-power 0.7"),
        ("--mup-base-head-dim 2.5", "--mup-base-head-dim 2.5"),
        ("--mup-output-mult 2.0", "--mup-output-mult 2.0"),
        ("--mup-embedding-mult 10", "model.embedding_scale"),
    ],
)
def test_what_has_no_equal_here_is_refused_by_name(arguments: str, said: str) -> None:
    assert any(said in problem for problem in refused(*MUP.split(), *arguments.split()))


def test_a_base_that_has_no_such_widths_is_refused(tmp_path: Path) -> None:
    arguments = [
        *BASE.split(),
        "--ffn-hidden-size",
        "100",
        "--use-mup",
        "--mup-base-hidden-size",
        "24",
    ]
    with pytest.raises(UserError) as caught:
        run_of(tmp_path, *arguments)
    assert shows(str(caught.value), "model.mup_width", key="ffn", value=100, base=24)


def test_a_checkpoint_that_was_trained_with_it_is_not_converted() -> None:
    """Its logits are multiplied, which none of our models does."""
    with raises("convert.megatron_argument_only", key="use_mup"):
        refuse_others({"use_mup": True, "mup_base_hidden_size": 16})
    refuse_others({"use_mup": False, "mup_base_hidden_size": None, "mup_attn_scale_power": 1.0})
