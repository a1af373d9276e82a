"""NxD's checkpoints: every layout and every fusion is the Hugging Face model that was cut; nothing
is left unsaid."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megaprec.errors import UserError
from tests.convert.test_untrusted import Malice
from tests.models.test_families import float32_is_float64
from tests.nxd import Form, put, rank_state, reference_class, save
from tests.other_systems import slow, write_folder
from tests.refusals import raises, shows
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.verify import load_stage

here = pytest.mark.usefixtures("torch_files_read_here")
MANY: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size": 48,
    "vocab_size": 136,
}
EVEN: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 136,
}
LINEAR: dict[str, Any] = {"qkv_linear": True}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the model, of NxD
    "apart": (EVEN, {}),
    "apart, gate and up too": (EVEN, {"gate_up": False}),
    "fused thirds": (EVEN, {"fused": True}),
    "qkv": (EVEN, LINEAR),
    "qkv fused": (EVEN, {**LINEAR, "fused": True}),
    "features of the embedding": (EVEN, {"across": True}),
    "files of their own": (EVEN, {"xser": True}),
}


def wholes(
    tmp_path: Path, kind: str = "llama", **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A configuration and a state dict, with norms that are lively."""
    folder = write_folder(tmp_path / "hf", kind, **changes)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def tensors(folder: Path) -> dict[str, Tensor]:
    source = open_source(folder)
    return {key: source.read(key) for key in source.keys("weight")}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


@pytest.mark.cases(4, sample=1)
@here
@pytest.mark.parametrize("name", FORMS)
def test_every_layout_is_the_model_that_was_cut(name: str, tmp_path: Path) -> None:
    changes, form = FORMS[name]
    config, whole = wholes(tmp_path, **changes)
    expected = tensors(tmp_path / "hf")
    for tp in (1, 2, 4):
        for pp in (1, 2):
            made = Form(tp=tp, pp=pp, **form)
            assert same(tensors(save(tmp_path / f"{tp}{pp}", config, whole, made)), expected), made


@pytest.mark.cases(10, sample=1)
@here
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("tp", "copies"), [(4, 2), (8, 4), (4, 4), (2, 2), (8, 8)])
def test_repeated_heads_are_each_there_once_again(
    tp: int, copies: int, grouped: bool, fused: bool, tmp_path: Path
) -> None:
    config, whole = wholes(tmp_path, **MANY)
    form = Form(tp=tp, pp=2, qkv_linear=True, fused=fused, copies=copies, grouped=grouped)
    assert same(tensors(save(tmp_path / "nxd", config, whole, form)), tensors(tmp_path / "hf"))


@here
def test_the_order_of_the_queries_is_that_of_the_source() -> None:
    """For 8 queries and 2 key heads twice: the example in NxD's converter (trn1), shrunk."""
    whole = {"model.layers.0.self_attn.q_proj.weight": torch.arange(8.0)[:, None]}
    config = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    form = Form(tp=4, qkv_linear=False, copies=2)
    parts = [
        next(iter(rank_state(whole, config, form, t, 0).values())).flatten().tolist()
        for t in range(4)
    ]
    assert parts == [[0, 1], [4, 5], [2, 3], [6, 7]]


@here
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_logits_in_float64_are_those_of_transformers(
    kind: str, grouped: bool, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    config, whole = wholes(tmp_path, kind, **{**MANY, "num_key_value_heads": 2})
    wide = {name: values.double() for name, values in whole.items()}
    if config.get("tie_word_embeddings"):  # the last stage has a copy of its own
        wide["lm_head.weight"] = wide["model.embed_tokens.weight"].clone()
    ids = torch.randint(131, (2, 30), generator=torch.Generator().manual_seed(1))
    with float32_is_float64():
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config),
            attn_implementation="eager",
            dtype=torch.float64,
        )
        model.load_state_dict(wide)
        expected = model.eval()(ids).logits
    form = Form(tp=4, pp=2, qkv_linear=True, fused=True, copies=2, grouped=grouped)
    ours = load_stage(open_source(save(tmp_path / "nxd", config, wide, form)), "fp64")(
        ids.t()
    ).transpose(0, 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


@here
def test_older_and_merged_checkpoints_are_read(tmp_path: Path) -> None:
    """parallel_layers/checkpointing.py:save, and checkpoint_converter.py:save_full."""
    config, whole = wholes(tmp_path, **EVEN)
    expected = tensors(tmp_path / "hf")
    for xser in (False, True):
        folder = tmp_path / f"old{xser}"
        for t in range(2):
            own = rank_state(whole, config, Form(tp=2), t, 0)
            put(
                folder / f"tp_rank_{t:02d}_pp_rank_00" / ("" if xser else "checkpoint.pt"),
                own,
                xser,
            )
        (folder / "config.json").write_text(json.dumps(config))
        assert same(tensors(folder), expected)
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps(config))
    torch.save(whole, merged / "checkpoint.pt")
    assert same(tensors(merged), expected)
    torch.save({"model": whole, "epoch": 3}, merged / "checkpoint.pt")
    assert same(tensors(merged), expected)
    assert open_source(merged).facts.unread == "epoch"


@here
def test_the_folder_of_a_run_of_a_tag_and_of_its_model_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2))
    for folder in (run, run / "step_100", run / "step_100/model"):
        assert main(["diff", str(folder), str(tmp_path / "hf")]) == 0
        assert "0 differ" in capsys.readouterr().out
    shutil.copy(run / "config.json", run / "step_100")
    assert (
        main(["convert", str(run / "step_100"), str(tmp_path / "compared"), "--verify", "logits"])
        == 0
    )
    assert "FP32 differ by at most 0 " in capsys.readouterr().out
    assert main(["convert", str(run), str(tmp_path / "ours")]) == 0
    assert "not read: the optimizer's state (optim/), scheduler.pt" in capsys.readouterr().out
    assert main(["inspect", str(run)]) == 0
    assert "format     NxD" in capsys.readouterr().out


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(folder)
    return "\n".join(caught.value.problems)


@here
def test_of_several_checkpoints_none_is_guessed(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form())
    save(run, config, whole, Form(), tag="step_200")
    assert shows(refused(run), "convert.nxd_several", names="step_100, step_200")
    (run / "step_200/done").unlink()
    assert open_source(run).path == run / "step_100"
    assert shows(refused(run / "step_200"), "convert.nxd_not_whole")


@here
@pytest.mark.parametrize(
    "name", ["tp_rank_01_pp_rank_00", "tp_rank_00_pp_rank_01", "tp_rank_01_pp_rank_01"]
)
@pytest.mark.parametrize("optim", [True, False])
def test_a_missing_file_is_named(name: str, optim: bool, tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2, pp=2))
    file = run / f"step_100/model/dp_rank_00_{name}.pt"
    file.unlink()
    if not optim:
        shutil.rmtree(run / "step_100/optim")
    assert shows(refused(run), "convert.megatron_folder_missing", file=file)


@here
def test_ranks_that_are_missing_without_a_trace_are_missed(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=4))
    shutil.rmtree(run / "step_100/optim")
    (run / "step_100/model/dp_rank_00_tp_rank_03_pp_rank_00.pt").unlink()
    assert shows(
        refused(run),
        "convert.tensor_shape",
        name="model.embed_tokens.weight",
        shape="[102, 24]",
        expected_shape="[136, 24]",
    )


@here
def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2))
    model = run / "step_100/model"
    (run / "config.json").unlink()
    assert shows(refused(run), "convert.nxd_config_missing")
    (run / "config.json").write_text(
        json.dumps({**config, "qkv_linear": True, "sequence_parallel_enabled": True})
    )
    assert open_source(run).kind == "nxd"
    torch.save(whole, run / "step_100/checkpoint.pt")
    assert shows(refused(run / "step_100"), "convert.nxd_two_kinds", merged="checkpoint.pt")
    (run / "step_100/checkpoint.pt").unlink()
    file = model / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    state = torch.load(file)
    torch.save({**state, "model.layers.0.mlp.router.weight": torch.zeros(2)}, file)
    assert shows(refused(run), "convert.missing_on_ranks", name="model.layers.0.mlp.router.weight")
    torch.save({**state, "model.norm.weight": 3}, file)
    assert shows(refused(run), "convert.state_value_not_tensor", name="model.norm.weight")
    torch.save({**state, "model.norm.weight": torch.zeros(24)}, file)
    with raises("convert.ranks_disagree", name="model.norm.weight"):
        tensors(run)
    torch.save({}, model / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    assert shows(refused(run), "convert.nxd_experts")


@here
def test_weights_that_were_left_to_the_optimizer_are_named(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(xser=True))
    lost = run / "step_100/model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_3.pt"
    lost.unlink()
    assert shows(refused(run), "convert.nxd_file_missing", tensor_file=lost)


@here
def test_copies_of_a_head_that_differ_are_refused(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **MANY)
    run = save(tmp_path / "run", config, whole, Form(tp=4, qkv_linear=True, copies=2))
    file = run / "step_100/model/dp_rank_00_tp_rank_03_pp_rank_00.pt"
    state = torch.load(file)
    key = "model.layers.1.self_attn.qkv_proj.weight_v"
    torch.save({**state, key: state[key] + 1}, file)
    with raises("convert.nxd_head_copies", name="model.layers.1.self_attn.v_proj.weight"):
        tensors(run)
    key = "model.layers.0.self_attn.qkv_proj.weight_k"
    torch.save({**state, key: state[key] + 1}, file)
    assert shows(refused(run), "convert.nxd_copies_differ")
    equal = {n: torch.ones_like(v) if ".k_proj" in n else v for n, v in whole.items()}
    assert shows(
        refused(save(tmp_path / "equal", config, equal, Form(tp=4, qkv_linear=True, copies=2))),
        "convert.nxd_copies_order",
    )


@here
def test_a_hugging_face_folder_among_them_is_not_guessed(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2))
    shutil.copy(tmp_path / "hf/model.safetensors", run)
    assert shows(refused(run), "convert.several_formats", names="Hugging Face and of NxD")
    torch.save({}, tmp_path / "hf/checkpoint.pt")
    assert open_source(tmp_path / "hf").kind == "hf"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("xser", [True, *slow((False,))])
def test_a_hostile_pickle_does_not_run(
    xser: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(xser=xser))
    file = run / "step_100/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    with reference_class() as reference:
        one = reference()
        one.tid = Malice(tmp_path / "ran")
        torch.save({"model.norm.weight": one}, file)
    assert main(["convert", str(run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{file} is not opened" in said and "getoutput" in said and "Traceback" not in said
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_files_are_looked_into_by_the_process_that_trusts_none(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    found = tensors(save(tmp_path / "run", config, whole, Form(xser=True)))
    assert same(found, tensors(tmp_path / "hf"))


@here
@pytest.mark.parametrize("name", ["mlp.gate_up_proj.weight", "self_attn.qkv_proj.weight"])
@pytest.mark.parametrize("rows", [-4, 4])
def test_fused_parts_that_do_not_fit_each_other_are_refused(
    rows: int, name: str, tmp_path: Path
) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2, fused=True))
    file = run / "step_100/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    state = torch.load(file)
    key = f"model.layers.1.{name}"
    torch.save(
        {**state, key: torch.cat([state[key], state[key]])[: len(state[key]) + rows].clone()}, file
    )
    assert shows(refused(run), "convert.ranks_shapes", name=key)


@here
@pytest.mark.parametrize("name", ["mlp.gate_up_proj.weight", "self_attn.qkv_proj.weight"])
def test_a_row_that_belongs_to_neither_of_two_fused_parts_is_refused(
    name: str, tmp_path: Path
) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2, fused=True))
    key = f"model.layers.1.{name}"
    for file in (run / "step_100/model").iterdir():
        state = torch.load(file)
        torch.save({**state, key: torch.cat([state[key], state[key][:1]])}, file)
    assert shows(refused(run), "convert.nxd_halves", name=key)


@here
def test_copies_of_a_damaged_tensor_are_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, whole = wholes(tmp_path, "llama-tied", **MANY)
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
    for name in ("norm.weight", "embed_tokens.weight", "layers.0.self_attn.k_proj.weight"):
        whole[f"model.{name}"].view(-1)[3] = torch.nan
    run = save(tmp_path / "run", config, whole, Form(tp=4, pp=2, qkv_linear=True, copies=2))
    assert main(["convert", str(run), str(tmp_path / "ours")]) == 0
    assert "warning: weight/final_norm.weight has 1 of" in capsys.readouterr().out


@here
@pytest.mark.parametrize(
    "name", ["dp_rank_00_tp_rank_1_pp_rank_00.pt", "dp_rank_00_tp_rank_001_pp_rank_000.pt"]
)
def test_two_files_of_one_rank_are_refused(name: str, tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    model = save(tmp_path / "run", config, whole, Form(tp=2)) / "step_100/model"
    shutil.copy(model / "dp_rank_00_tp_rank_01_pp_rank_00.pt", model / name)
    assert shows(refused(tmp_path / "run"), "convert.rank_twice")


@here
def test_what_config_json_and_its_neighbours_say_besides_is_carried_over(tmp_path: Path) -> None:
    config, whole = wholes(
        tmp_path, **EVEN, bos_token_id=5, eos_token_id=[6, 7], architectures=["OtherForCausalLM"]
    )
    run = save(tmp_path / "run", config, whole, Form(tp=2))
    (run / "generation_config.json").write_text('{"temperature": 0.5}')
    (run / "tokenizer_config.json").write_text("{}")
    source = open_source(run)
    assert (source.facts.special["bos_token_id"], source.facts.special["eos_token_id"]) == (
        5,
        [6, 7],
    )
    assert source.facts.generation == {"temperature": 0.5}
    assert any("architectures = ['OtherForCausalLM']" in note for note in source.facts.notes)
    assert [file.name for file in source.tokenizer] == ["tokenizer_config.json"]


@here
@pytest.mark.parametrize("xser", [False, True])
def test_a_copy_of_another_ranks_file_is_noted(xser: bool, tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2, xser=xser))
    assert not open_source(run).facts.notes
    first, other = (run / f"step_100/model/dp_rank_00_tp_rank_0{t}_pp_rank_00.pt" for t in (0, 1))
    shutil.copy(first, other)
    if xser:
        shutil.copytree(f"{first}.tensors", f"{other}.tensors", dirs_exist_ok=True)
    (note,) = open_source(run).facts.notes
    assert "hold the same numbers throughout: one may be a copy of the other" in note


@here
def test_parts_without_a_dimension_to_be_joined_along_are_refused(tmp_path: Path) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2))
    for file in (run / "step_100/model").iterdir():
        torch.save(
            {**torch.load(file), "model.layers.0.self_attn.o_proj.weight": torch.zeros(24)}, file
        )
    assert shows(
        refused(run), "convert.ranks_shapes", name="model.layers.0.self_attn.o_proj.weight"
    )


@here
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "name", ["mlp.gate_up_proj.weight", "self_attn.k_proj.weight", "self_attn.qkv_proj.weight"]
)
@pytest.mark.parametrize(
    "odd", [torch.tensor(1.0), torch.zeros(0, 24), torch.zeros(24), torch.zeros(1, 12, 24)]
)
def test_a_tensor_of_any_other_shape_is_refused(
    odd: Tensor, name: str, fused: bool, tmp_path: Path
) -> None:
    config, whole = wholes(tmp_path, **EVEN)
    run = save(tmp_path / "run", config, whole, Form(tp=2, fused=fused))
    for file in (run / "step_100/model").iterdir():
        torch.save({**torch.load(file), f"model.layers.0.{name}": odd}, file)
    assert "model.layers.0." in refused(run)
