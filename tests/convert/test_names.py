"""The name tables and rearrangements: nothing lost, nothing twice, and each order what its system's
own words say."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.logical_shapes import logical_shapes
from models.parameter_counts import num_parameters
from parallel.context import Context
from tests.other_systems import CONFIGS, FOR_MEGATRON, IN_MEGATRON, megatrons, write_folder
from tests.refusals import sentence
from tools.cli import main
from tools.convert.core.names import HUGGING_FACE, megatron
from tools.convert.core.rules import Match, head_sizes, matches
from tools.convert.core.shards import MergedTensor, merge_shards
from tools.convert.core.transforms import (
    GROUPED,
    GROUPED_INTERLEAVED,
    PACKED,
    PACKED_TRANSPOSED,
    SAME,
    HeadSizes,
    Transform,
)
from tools.convert.formats import open_source
from tools.convert.hf.config import config_of, from_hugging_face, model_type_of
from tools.convert.hf.folder import open_hf
from tools.convert.megatron.args import args_of, model_of_args
from tools.convert.megatron.layout import cut_part, part_shape

SIZES = st.builds(
    lambda kv, groups, half, turned: HeadSizes(
        kv * groups, kv, 2 * half, min(2 * turned, 2 * half)
    ),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 4),
)


def parts(sizes: HeadSizes, columns: int) -> list[Tensor]:
    """Query, key and value whose elements are all different."""
    rows = (sizes.query * sizes.dim, sizes.kv * sizes.dim, sizes.kv * sizes.dim)
    numbers = torch.arange(sum(rows) * columns).view(-1, columns)
    return list(numbers.split(list(rows)))


@pytest.mark.parametrize("how", [PACKED, PACKED_TRANSPOSED, GROUPED, GROUPED_INTERLEAVED])
@given(SIZES, st.integers(1, 3))
def test_what_is_joined_splits_into_the_same(
    how: Transform, sizes: HeadSizes, columns: int
) -> None:
    ours = parts(sizes, columns)
    for one, other in zip(how.split(how.join(ours, sizes), sizes), ours, strict=True):
        assert torch.equal(one, other)


def test_grouped_rows_stand_group_by_group_queries_before_their_key_and_value() -> None:
    sizes = HeadSizes(4, 2, 3, 3)
    stacks = (("q", 4), ("k", 2), ("v", 2))
    query, key, value = (
        [f"{name}{head}.{i}" for head in range(n) for i in range(3)] for name, n in stacks
    )
    names = query + key + value
    joined = GROUPED.join([x.flatten()[:, None] for x in parts(sizes, 1)], sizes)
    assert [names[i] for i in joined.flatten().tolist()] == [
        f"{name}{head}.{i}"
        for name, head in (("q", 0), ("q", 1), ("k", 0), ("v", 0), ("q", 2), ("q", 3), ("k", 1), ("v", 1))
        for i in range(3)
    ]  # fmt: skip


def test_interleaving_puts_the_features_that_turn_together_side_by_side_and_leaves_the_others() -> (
    None
):
    sizes = HeadSizes(1, 1, 6, 4)
    query, key, value = parts(sizes, 1)
    joined = GROUPED_INTERLEAVED.join([query, key, value], sizes).flatten().tolist()
    assert joined[:6] == [0, 2, 1, 3, 4, 5]
    assert joined[6:12] == [6, 8, 7, 9, 10, 11]
    assert joined[12:] == value.flatten().tolist()


def put_together(each: list[torch.Tensor], cut: Any, shape: tuple[int, ...]) -> torch.Tensor:
    shards = [MergedTensor(tuple(one.shape), one.dtype, partial(torch.clone, one)) for one in each]
    match = Match("x", ("x",), SAME, cut, shape)
    return merge_shards(Path(), [match], {"x": shards})["x"].read()


@pytest.mark.parametrize(
    ("cut", "tp"), [*product(("whole", "rows", "columns", "halves", "vocabulary"), (1, 2, 4))]
)
def test_ranks_parts_put_together_are_the_whole(cut: str, tp: int) -> None:
    whole = torch.arange(24 * 8).view(24, 8)
    padded = 32 if cut == "vocabulary" else 24
    each = [cut_part(whole, cut, rank, tp, padded) for rank in range(tp)]  # type: ignore[arg-type]
    assert {tuple(one.shape) for one in each} == {part_shape((24, 8), cut, tp, padded)}  # type: ignore[arg-type]
    assert torch.equal(put_together(each, cut, (24, 8)), whole)


def test_a_gated_layer_is_cut_so_that_a_rank_has_the_gate_of_its_own_features() -> None:
    gate = torch.arange(8)
    up = 100 + torch.arange(8)
    assert cut_part(torch.cat((gate, up)), "halves", 1, 4, 0).tolist() == [2, 3, 102, 103]


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_logical_shapes_are_those_of_the_model(kind: str) -> None:
    config = from_hugging_face(CONFIGS[kind])
    stage = Stage(config, Context(plan("fp32")), cuts(config, 1, 8)[0])
    built = {part.name: part.shape for p in stage.parameters() for part in layout_of(p).parts}
    assert logical_shapes(config) == built
    assert sum(torch.Size(s).numel() for s in built.values()) == num_parameters(config)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_survives_the_way_to_ours_and_back(kind: str) -> None:
    model = from_hugging_face(CONFIGS[kind])
    # what transformers computes as another family is written as that one
    computed_as = {"llama": "llama", "gemma4": "gemma4_text"}
    written = computed_as.get(model.family, CONFIGS[kind]["model_type"])
    assert model_type_of(model) == written
    assert from_hugging_face(config_of(model, "float32")) == model


@pytest.mark.parametrize("kind", sorted(IN_MEGATRON))
def test_a_model_survives_the_way_through_megatrons_args(kind: str) -> None:
    model = from_hugging_face(megatrons(kind))
    again = model_of_args(args_of(model, 256, 2, 1, True, torch.float32), None)
    ours = model.model_dump()
    theirs = again.model_dump()
    differs = {key for key in ours if ours[key] != theirs[key]}
    assert differs <= {"family", "bias", "init_std", "init"}
    assert logical_shapes(again) == logical_shapes(model)


@pytest.mark.cases(19, sample=1)
@pytest.mark.parametrize("kind", sorted(IN_MEGATRON))
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_tensor_goes_from_hugging_face_to_megatron_and_back_bit_for_bit(
    kind: str, interleaved: bool, tmp_path: Path
) -> None:
    source = open_hf(
        write_folder(tmp_path / "hf", kind, torch.bfloat16, **FOR_MEGATRON.get(kind, {}))
    )
    sizes = head_sizes(source.model)
    tp = 4
    seen = set()
    for match in matches(megatron(True, interleaved, source.model), source.model):
        ours = [source.read(f"weight/{name}") for name in match.logical]
        each = [
            cut_part(match.how.join(ours, sizes), match.cut, rank, tp, 512) for rank in range(tp)
        ]
        back = match.how.split(put_together(each, match.cut, match.shape), sizes)
        assert all(torch.equal(one, other) for one, other in zip(ours, back, strict=True))
        seen |= set(match.logical)
    assert seen == logical_shapes(source.model).keys()
    assert set(source.loads.values()) == {1}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_table_names_each_tensor_once(kind: str) -> None:
    model = from_hugging_face(CONFIGS[kind])
    found = matches(HUGGING_FACE[CONFIGS[kind]["model_type"]], model)
    assert len({match.foreign for match in found}) == len(found)
    assert sorted(name for match in found for name in match.logical) == sorted(
        logical_shapes(model)
    )


CHANGES: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "unknown model": ("llama", lambda c: c.update(model_type="bert"), sentence("convert.hf_model_type", kind='bert')),
    "no model": ("llama", lambda c: c.pop("model_type"), sentence("convert.hf_model_type_missing")),
    "another gelu": ("gpt2", lambda c: c.update(activation_function="relu"), "activation_function = 'relu'"),
    "scaled attention": ("gpt2", lambda c: c.update(scale_attn_by_inverse_layer_idx=True), sentence("convert.hf_only_value", alternatives="False or null")),
    "stretched otherwise": ("llama", lambda c: c.update(rope_scaling={"type": "longrope"}), "rope_type = 'longrope'"),
    "quantized": ("llama", lambda c: c.update(quantization_config={"bits": 4}), sentence("convert.quantized_unreadable", description=re.compile(r"'bits': 4\}"))),
    "a cap": ("qwen3", lambda c: c.update(attn_logit_softcapping=5.0), sentence("convert.hf_key_unread", key="attn_logit_softcapping", value="5.0")),
    "both ways": ("mistral", lambda c: c.update(is_causal=False), sentence("convert.hf_only_value", key="is_causal", value="False", alternatives="True")),
    "noise": ("mixtral", lambda c: c.update(router_jitter_noise=0.1), "router_jitter_noise = 0.1"),
    "two bases": ("gpt_neox", lambda c: c.update(rope_theta=50.0), "rope_theta = 50.0"),
    "text for a size": ("llama", lambda c: c.update(num_hidden_layers="4"), sentence("convert.hf_value_kind", key="num_hidden_layers", value="'4'")),
    "layers without end": ("qwen2_moe", lambda c: c.update(num_hidden_layers=10**20), sentence("convert.hf_value_kind", remedy="at most 4096")),
    "further layers without end": (
        "glm4_moe", lambda c: c.update(num_nextn_predict_layers=10**20), sentence("convert.hf_value_kind", remedy="at most 4096")),
    "no layers": ("llama", lambda c: c.update(num_hidden_layers=0), sentence("convert.hf_value_kind", key="num_hidden_layers", value=0, remedy="above 0")),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_configuration_says_and_we_cannot_is_refused(change: str) -> None:
    kind, edit, said = CHANGES[change]
    config = dict(CONFIGS[kind])
    edit(config)
    with pytest.raises(UserError, match=said):
        from_hugging_face(config)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.bool])
def test_weights_that_are_no_floats_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", "deepseek_v3")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    save_file(
        stored | {name: stored[name].to(dtype)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(
        UserError,
        match=sentence("convert.tensor_dtype", name=name, dtype=str(dtype)[6:]),
    ):
        open_hf(folder)


def test_a_correction_stays_fp32_when_all_else_is_rounded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", "glm4_moe")
    for kind, options in (("hf", ["--to", "hf"]), ("ours", [])):
        made = tmp_path / kind / "made"
        made.parent.mkdir(exist_ok=True)
        assert (
            main(["convert", str(folder), str(made), *options, "--dtype", "bf16", "--no-verify"])
            == 0
        )
        again = open_source(made)
        dtypes = {key: again.dtype(key) for key in again.keys("weight")}
        narrow = {key for key, dtype in dtypes.items() if dtype == torch.bfloat16}
        assert (
            set(dtypes) - narrow
            == {key for key in dtypes if key.endswith(".router.correction")}
            != set()
        )
