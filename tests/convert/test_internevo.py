"""InternEvo's checkpoints: every layout is the same model, with the logits of a plain one; nothing
is left unsaid."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from tests.convert.test_untrusted import Malice
from tests.internevo import (
    HIDDEN,
    VOCAB,
    Form,
    config_class,
    logits,
    save,
    stages,
    state,
    tensor_parallel,
    uneven,
    weight_parallel,
    weights,
)
from tests.other_systems import slow
from tests.refusals import raises, sentence, shows
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.verify import load_stage

here = pytest.mark.usefixtures("torch_files_read_here")
FORMS = {
    "w2 closes": Form(),
    "w3 closes": Form(closing="w3"),
    "not gated": Form(closing="fc2"),
    "layer norm, vocabulary cut": Form(norm="layernorm", split_hidden=False),
    "no biases": Form(biased=False, said={"no_bias": True}),
}
LAYOUTS: list[dict[str, int]] = [{"tp": t, "pp": p} for t in (1, 2, 4) for p in (1, 2)]
LAYOUTS += [{"pp": 2, "chunks": 3}, {"tp": 2, "pp": 4}, {"wp": 1}, {"wp": 2, "pp": 2}, {"wp": 4}]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    source = open_source(folder)
    return {key: source.read(key) for key in source.keys("weight")}


@here
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logits_in_float64_are_those_of_a_plain_model(form: Form, tmp_path: Path) -> None:
    whole = weights(form)
    ids = torch.randint(VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    source = open_source(save(tmp_path / "step", form, whole, tp=2, pp=2))
    ours = load_stage(source, "fp64")(ids.t()).transpose(0, 1)
    torch.testing.assert_close(ours, logits(form, whole, ids), rtol=0, atol=1e-10)


@pytest.mark.cases(1, sample=1)
@here
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_layout_is_the_same_model(form: Form, tmp_path: Path) -> None:
    whole = weights(form)
    expected = tensors(save(tmp_path / "whole", form, whole))
    assert sum(values.numel() for values in expected.values()) == sum(
        values.numel() for values in whole.values()
    )
    for n, layout in enumerate(LAYOUTS):
        found = tensors(save(tmp_path / str(n), form, whole, **layout))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), layout


@here
def test_weight_parallelism_of_older_versions_cuts_layers_and_ends_apart(tmp_path: Path) -> None:
    """A file for each pair of a tp and a wp rank that there is: ranks 0 to 3 are 00, 11, 02, 13."""
    form = Form()
    whole = weights(form)
    expected = tensors(save(tmp_path / "whole", form, whole))
    folder = save(tmp_path / "pairs", form, whole)
    (folder / "model_tp0_pp0.pt").unlink()

    def cut(rank: int, name: str, values: torch.Tensor) -> torch.Tensor:
        if name.startswith("embedding"):
            return values.chunk(2, 1)[rank % 2]
        if name.startswith("head"):
            return uneven(values, 2, rank % 2)
        return values if "norm" in name else uneven(values, 4, rank)

    for file in (*folder.glob("topo*"), *folder.glob("optimizer*")):
        file.unlink()
    for rank in range(4):
        own = state(form, whole, stages(1, 1)[0], lambda n, v, r=rank: cut(r, n, v))
        torch.save(own, folder / f"model_tp{rank % 2}_wp{rank}_pp0.pt")
    found = tensors(folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    (folder / "model_tp0_wp2_pp0.pt").unlink()
    with raises("convert.missing_on_ranks"):
        open_source(folder)


@here
def test_a_vocabulary_that_ranks_cut_unevenly_is_whole_again(tmp_path: Path) -> None:
    form = Form()
    whole = weights(form) | {"head.weight": torch.randn(VOCAB, HIDDEN).double()}
    found = tensors(save(tmp_path / "step", form, whole, tp=3, pp=1))
    assert torch.equal(found["weight/head.weight"], whole["head.weight"])


@here
def test_it_is_converted_and_inspected_and_says_what_was_left_and_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = Form()
    folder = save(tmp_path / "step", form, weights(form), tp=2)
    config = {key: value for key, value in form.config.items() if key != "rope_base"}
    torch.save(config, folder / "model_config.pt")
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "not read: the optimizer's state (optimizer_*.pt), config_file.pt, context.pt" in said
    assert "note: " in said and "leaves to InternEvo, which takes: rope_base = 10000" in said
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "format     InternEvo" in said and "rope_base = 10000" in said and "tensor 2" in said
    assert main(["diff", str(folder), str(tmp_path / "ours")]) == 0
    assert "0 differ" in capsys.readouterr().out


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(folder)
    return "\n".join(caught.value.problems)


def change(file: Path, **changes: Any) -> None:
    content = torch.load(file, weights_only=False)
    content |= changes
    torch.save({key: value for key, value in content.items() if value is not None}, file)


@here
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_layers": None}, sentence("convert.model_key_missing", key="num_layers")),
        (
            {"hidden_size": None, "vocab_size": None},
            sentence("convert.model_key_missing", key="hidden_size"),
        ),
        ({"moe_use_residual": True}, sentence("convert.model_key_unknown", key="moe_use_residual")),
        ({"is_reward": True}, sentence("convert.model_key_only", key="is_reward", value=True)),
        (
            {"use_dynamic_ntk_rope": True},
            sentence("convert.model_key_only", key="use_dynamic_ntk_rope", value=True),
        ),
        (
            {"qk_interleaved": True},
            sentence("convert.model_key_only", key="qk_interleaved", value=True),
        ),
        ({"norm_type": "l2"}, sentence("convert.internevo_norm", norm_type="l2")),
        (
            {"mlp_ratio": 8.0},
            sentence("convert.internevo_width", expected=512, ffn=256),
        ),
        ({"no_bias": True}, sentence("convert.internevo_bias", no_bias=True, biases="have")),
        ({"num_kv_attention_heads": 4}, sentence("convert.internevo_heads")),
        ({"num_chunks": 2}, sentence("convert.internevo_chunks", num_chunks=2, chunks=1)),
        (
            {"use_swiglu": False},
            sentence("convert.internevo_swiglu", use_swiglu=False, gate="has a gate"),
        ),
        ({"rope_base": 10**400}, sentence("convert.internevo_number")),
        ({"num_layers": 7}, sentence("convert.tensor_missing", name="blocks.6.norm1.weight")),
        ({"num_layers": 5}, sentence("convert.tensor_surplus", name="blocks.5.norm1.weight")),
        (
            {"vocab_size": 100},
            sentence(
                "convert.joined_shape",
                name="embedding.weight",
                count=2,
                shape="[136, 48]",
                expected_shape="[100, 48]",
            ),
        ),
        ({"num_attention_heads": 7}, sentence("model.hidden_not_multiple", hidden=48, heads=7)),
        (
            {"layer_norm_epsilon": "1e-5"},
            sentence("convert.internevo_number", key="layer_norm_epsilon", value="1e-5"),
        ),
        (
            {"mlp_ratio": "2.67"},
            sentence("convert.internevo_number", key="mlp_ratio", value="2.67"),
        ),
        (
            {"multiple_of": 0},
            sentence("convert.internevo_whole_number", key="multiple_of", value=0),
        ),
        (
            {"hidden_size": "48"},
            sentence("convert.internevo_whole_number", key="hidden_size", value="48"),
        ),
        (
            {"num_layers": True},
            sentence("convert.internevo_whole_number", key="num_layers", value=True),
        ),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused_by_the_key(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=2)
    given = {**Form().config, **config}
    torch.save(
        {key: value for key, value in given.items() if value is not None},
        folder / "model_config.pt",
    )
    assert re.search(said, refused(folder))


@here
@pytest.mark.parametrize(
    "name", ["model_tp1_pp0.pt", "model_tp0_pp1.pt", "model_tp1_pp1.pt", "model_config.pt"]
)
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=2, pp=2)
    (folder / name).unlink()
    assert shows(refused(folder), "convert.megatron_folder_missing", file=folder / name)


@here
def test_ranks_that_are_missing_without_a_trace_are_missed(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=4)
    for file in (*folder.glob("*tp3*"), *folder.glob("topo*"), *folder.glob("optimizer*")):
        file.unlink(missing_ok=True)
    assert shows(refused(folder), "convert.internevo_width", ffn=192)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("length", [3000, *slow((0,), (100,))])
def test_a_damaged_file_is_named(length: int, tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=2)
    file = folder / "model_tp1_pp0.pt"
    file.write_bytes(file.read_bytes()[:length])
    assert f"{file} is not opened" in refused(folder)


@here
def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def broken(name: str, **changes: Any) -> str:
        folder = save(tmp_path / name, Form(), weights(Form()), tp=2)
        change(folder / "model_tp1_pp0.pt", **changes)
        return refused(folder)

    rows = torch.zeros(HIDDEN // 2, HIDDEN)
    assert shows(
        broken("surplus", **{"blocks.0.mlp.w9.weight": rows}),
        "convert.missing_on_ranks",
        name="blocks.0.mlp.w9.weight",
    )
    assert shows(
        broken("lost", **{"blocks.1.mlp.w1.weight": None}),
        "convert.missing_on_ranks",
        name="blocks.1.mlp.w1.weight",
    )
    assert shows(
        broken("norm", **{"norm.weight": None}), "convert.missing_on_ranks", name="norm.weight"
    )
    assert shows(
        broken("type", **{"head.weight": torch.zeros(68, 48).half()}),
        "convert.ranks_dtypes",
        name="head.weight",
    )
    assert shows(broken("text", text="a"), "convert.state_value_not_tensor", name="text")


@here
def test_copies_that_differ_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=2)
    change(folder / "model_tp1_pp0.pt", **{"norm.weight": torch.zeros(HIDDEN).double()})
    with raises("convert.ranks_disagree", name="norm.weight"):
        tensors(folder)


@here
def test_a_closing_layer_that_cannot_be_told_is_not_guessed(tmp_path: Path) -> None:
    """With a width of hidden * tp the parts of w2 and w3 are squares."""
    form = Form()
    whole = weights(form)
    for n in range(6):
        for name, shape in (("w1", (192, 48)), ("w3", (192, 48)), ("w2", (48, 192))):
            whole[f"blocks.{n}.mlp.{name}.weight"] = torch.zeros(shape).double()
    folder = save(tmp_path / "step", form, whole, tp=4, mlp_ratio=4, multiple_of=64)
    assert shows(refused(folder), "convert.internevo_feed_forward", w2="[48, 48]")


@here
@pytest.mark.parametrize("name", ["model_tp0_pp0_dp1.pt", "model_moe_layer0_expert3_tp0.pt"])
def test_kinds_that_are_not_read_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()))
    torch.save({}, folder / name)
    assert shows(refused(folder), "convert.internevo_kinds", path=folder / name)


@here
def test_other_types_of_models_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()))
    torch.save({"layers.0.attention.wqkv.weight": torch.zeros(4, 4)}, folder / "model_tp0_pp0.pt")
    assert shows(refused(folder), "convert.internevo_not_internlm") and "convert2hf" in refused(
        folder
    )


@here
def test_a_folder_of_two_systems_is_refused_with_both_names(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()))
    (folder / "config.json").write_text("{}")
    assert shows(refused(folder), "convert.several_formats", names="Hugging Face and of InternEvo")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["model_config.pt", *slow(("model_tp0_pp0.pt",))])
def test_a_hostile_pickle_does_not_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()))
    with config_class() as config:
        torch.save(config(x=Malice(tmp_path / "ran")), folder / name)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        f"{folder / name} is not opened" in said and "getoutput" in said and "Traceback" not in said
    )
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@here
def test_its_own_settings_class_is_let_in_as_a_dict(tmp_path: Path) -> None:
    assert open_source(save(tmp_path / "step", Form(), weights(Form()))).model.rope_base == 50000


@here
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "chunks": 3}])
def test_stages_with_each_others_names_are_refused(layout: dict[str, int], tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), **layout)
    first = folder / "model_tp0_pp0.pt"
    last = folder / "model_tp0_pp1.pt"
    first.rename(folder / "kept")
    last.rename(first)
    (folder / "kept").rename(last)
    assert shows(refused(folder), "convert.layer_of_stage")


@here
def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=2)
    (folder / "model_tp01_pp0.pt").write_bytes((folder / "model_tp1_pp0.pt").read_bytes())
    assert shows(refused(folder), "convert.rank_twice")


@here
def test_a_copy_of_another_ranks_file_is_noted(tmp_path: Path) -> None:
    form = Form(biased=False, said={"no_bias": True})
    folder = save(tmp_path / "step", form, weights(form), tp=2, pp=3)
    assert not open_source(folder).facts.notes
    (folder / "model_tp0_pp1.pt").write_bytes((folder / "model_tp1_pp1.pt").read_bytes())
    (note,) = open_source(folder).facts.notes
    assert "hold the same numbers throughout: one may be a copy of the other" in note


@here
def test_ranks_that_hold_the_same_layers_by_design_are_no_copies(tmp_path: Path) -> None:
    """Four ranks along tp cut the ends of the model, two along wp its layers: ranks 0 to 3 are 00,
    11, 20, 31."""
    form = Form()
    pp = 3
    whole = weights(form)
    folder = save(tmp_path / "pairs", form, whole, pp=pp)
    for file in folder.glob("*_pp*"):
        file.unlink()

    def cut(rank: int, name: str, values: torch.Tensor) -> torch.Tensor | None:
        kind, count = (weight_parallel, 2) if name.startswith("blocks.") else (tensor_parallel, 4)
        return kind(form, count, rank % count, name, values)

    for rank, p in product(range(4), range(pp)):
        own = state(form, whole, stages(pp, 1)[p], lambda n, v, r=rank: cut(r, n, v))
        torch.save(own, folder / f"model_tp{rank}_wp{rank % 2}_pp{p}.pt")
    assert not open_source(folder).facts.notes


@here
def test_tensors_without_a_dimension_to_be_joined_along_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()), tp=2)
    for rank in (0, 1):
        change(
            folder / f"model_tp{rank}_pp0.pt",
            **{"blocks.1.mixer.out_proj.weight": torch.zeros(24).double()},
        )
    assert shows(
        refused(folder),
        "convert.ranks_shapes",
        name="blocks.1.mixer.out_proj.weight",
        shapes="[24], [24]",
    )


@here
@pytest.mark.parametrize("name", ["embedding.weight", "blocks.0.mlp.w1.weight", "norm.weight"])
def test_a_single_number_is_no_tensor_of_a_model(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "step", Form(), weights(Form()))
    change(folder / "model_tp0_pp0.pt", **{name: torch.tensor(1.0).double()})
    assert shows(refused(folder), "convert.tensor_scalar", name=name)
