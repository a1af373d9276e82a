"""A file of a program that is none of the five is not taken for one of them because a name in it is
the same."""

import re
from pathlib import Path

import pytest

from megaprec.errors import UserError
from tests.refusals import raises
from tools.commands.precision import read_precision

FILES = {
    "Colossal-AI's ZeRO of 0.1": (
        "config.py",
        (
            "zero = dict(model_config=dict(shard_strategy=TensorShardStrategy()), "
            "optimizer_config=dict())\n"
        ),
        "precision.colossalai.zero",
    ),
    "the same beside a mode": (
        "config.py",
        (
            "fp16 = dict(mode='NAIVE')\nzero = dict(level=2, "
            "optimizer_config=dict(initial_scale=2**5))\n"
        ),
        "precision.colossalai.zero",
    ),
    "an optimizer's empty settings": (
        "config.py",
        "optimizer_config = dict()\n",
        "says nothing of precision",
    ),
    "an optimizer's own settings": (
        "config.py",
        "optimizer_config = dict(grad_clip=None)\nmodel = dict(type='ResNet')\n",
        "says nothing of precision",
    ),
    "a model that another trainer makes": (
        "config.toml",
        '[model]\ndtype = "bfloat16"\n[training]\nmixed_precision_reduce = "float32"\n',
        "dtype = bfloat16: not read",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_table_of_a_common_name_is_no_systems_without_a_key_of_its_own(
    case: str, tmp_path: Path
) -> None:
    name, text, said = FILES[case]
    (path := tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_precision(path)
    assert said in str(caught.value)


def test_a_misspelt_key_beside_nxds_own_table_is_refused_by_name(tmp_path: Path) -> None:
    (path := tmp_path / "config.py").write_text(
        "mixed_precision_config = dict(use_master_weights=True)\noptimizer_config = "
        "dict(zero_one=True)\n"
    )
    with raises(
        "dialect.wrong_value",
        key="precision.nxd.optimizer_config.zero_one",
        place=re.compile("line 2"),
        value="true",
        why=re.compile("^no such key"),
    ):
        read_precision(path)


PARTS = {
    "InternEvo's scaler": (
        "grad_scaler = dict(fp16=dict(initial_scale=2**10))\n",
        "InternEvo's `model = dict(...)`",
    ),
    "InternEvo's clipping": (
        "hybrid_zero_optimizer = dict(clip_grad_norm=1.0)\n",
        "InternEvo's `model = dict(...)`",
    ),
    "NeMo's optimizer": (
        "opt = OptimizerConfig(clip_grad=0.5, use_distributed_optimizer=True)\n",
        "NeMo's precision plugin",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_a_configuration_whose_dtype_is_elsewhere_is_refused_and_no_default_takes_its_place(
    case: str, tmp_path: Path
) -> None:
    text, missing = PARTS[case]
    (path := tmp_path / "config.py").write_text(text)
    with pytest.raises(UserError) as caught:
        read_precision(path)
    assert f"{path}, line 1: " in str(caught.value) and missing in str(caught.value)
