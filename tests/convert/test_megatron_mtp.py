"""Modules of multi-token prediction in Megatron's checkpoints: what we write Megatron-core loads,
and it loses as much; what it saves is read with its optimizer's state; over any ranks they come
back bit for bit."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import UserError
from models.config import ModelConfig
from tests import oracle, runs
from tests.convert.test_megatron import (
    PADDED,
    build,
    core,
    place,
    pretend_there_is_a_gpu,
    run,
    save_in_chunks,
)
from tests.convert.test_mtp_folders import folder_of
from tests.other_systems import (
    FOR_MEGATRON,
    MEGATRON,
    NEEDS_MEGATRON,
    megatrons,
    slow,
    write_folder,
)
from tests.ranks import run_ranks
from tests.refusals import raises, sentence
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.args import args_of, model_of_args

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("torch_files_read_here"),
]
PRELOADED = MEGATRON
MODULES = 2
SCALE = 0.3
LEARNED = {"position_embedding_type": "learned_absolute", "add_position_embedding": True}
LEARNED["use_rotary_position_embeddings"] = False
# Megatron's loss counts the rows that pad a vocabulary, and the plain model has no scaled
# positions.
FULL = {"vocab_size": PADDED[1], "rope_scaling": None}


def held(path: Path) -> dict[str, Tensor]:
    source = open_source(path)
    return {key: source.rows(key, 0, source.shapes[key][0]) for key in source.shapes}


def with_modules(kind: str, tp: int, pp: int, **options: Any) -> Any:
    """Megatron-core's model of a kind with two modules, on this rank."""
    gpt = core("models.gpt")
    specs = core("models.gpt.gpt_layer_specs")
    made = gpt.GPTModel.__init__

    def init(self: Any, config: Any, layers: Any, *a: Any, **said: Any) -> None:
        if said["post_process"]:
            last = layers.layer_specs[-1]
            said["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(
                config, last, use_transformer_engine=False
            )
        made(self, config, layers, *a, **said)

    gpt.GPTModel.__init__ = init
    options["options"] = {"mtp_num_layers": MODULES, "mtp_loss_scaling_factor": SCALE}
    return build(kind, tp, pp, num_nextn_predict_layers=MODULES, **options)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(131, (2, 21), generator=torch.Generator().manual_seed(4))
    return ids[:, :-1], ids[:, 1:]


def losses(mesh: DeviceMesh, kind: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Load our file strictly; return the loss of every token, and the mean of each module."""
    model = with_modules(kind, 1, 1, **FULL)
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(folder / "iter_0000000" / place(mesh, 1), weights_only=True)
    model.load_state_dict(content["model"], strict=True)
    assert [n for n, _ in model.named_parameters()] == [
        n for n in content["model"] if not n.endswith("expert_bias")
    ]
    core("transformer.moe.moe_utils").te_general_gemm = None
    tokens, targets = batch()
    s = tokens.shape[1]
    positions = torch.arange(s)[None].expand(2, -1)
    future = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    own = model.train()(tokens, positions, future, labels=targets)
    ahead = core("transformer.multi_token_prediction").MTPLossLoggingHelper.tracker["values"]
    return own.detach(), ahead.detach()


@NEEDS_MEGATRON
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["deepseek_v3", *slow(("glm4_moe",))])
def test_megatron_core_loads_the_modules_and_loses_as_much(kind: str, tmp_path: Path) -> None:
    hf = folder_of(tmp_path / "hf", kind, MODULES, **FOR_MEGATRON[kind], **FULL)
    run(hf, tmp_path / "megatron", "--to", "megatron", "--layers", "local")
    ((own, ahead),) = run_ranks(losses, {}, kind=kind, folder=tmp_path / "megatron")
    model, (tokens, targets) = open_source(tmp_path / "megatron").model, batch()
    w = {
        key.removeprefix("weight/"): value.double()
        for key, value in held(tmp_path / "megatron").items()
    }
    read = oracle.hidden(model, w, tokens, [])
    ours = F.cross_entropy(
        oracle.of_head(model, w, read).transpose(1, 2), targets, reduction="none"
    )
    torch.testing.assert_close(own, ours.float(), rtol=1e-5, atol=1e-5)
    further = torch.stack(
        [each.mean() for each in oracle.ahead(model, w, read, tokens, targets, [])]
    )
    torch.testing.assert_close(ahead, further.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.cases(None, sample=2)
@pytest.mark.parametrize("kind", ["deepseek_v3", *slow(("glm4_moe",))])
@pytest.mark.parametrize("layout", [(2, 2, 2), *slow(((1, 1, 2),), ((1, 4, 1),))])
def test_modules_come_back_bit_for_bit_over_any_ranks(
    kind: str, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    hf = write_folder(tmp_path / "hf", kind, num_nextn_predict_layers=MODULES, **FOR_MEGATRON[kind])
    require_the_same(hf, tmp_path, layout)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_run_with_modules_comes_back_with_its_optimizers_state(tied: str, tmp_path: Path) -> None:
    file = runs.write_run(tmp_path)
    changes = (
        "model.mtp_layers=2",
        "model.mtp_loss_weight=0.7",
        "train.steps=1",
        f"model.tied={tied}",
    )
    assert runs.train(file, *changes, "model.dropout=0") == 0
    again = require_the_same(tmp_path / "run", tmp_path, (2, 2, 1))
    assert open_source(again).model.mtp_loss_weight == 0.7
    assert {key.partition("/")[0] for key in held(again)} == {"weight", "exp_avg", "exp_avg_sq"}


def require_the_same(first: Path, tmp_path: Path, layout: tuple[int, int, int]) -> Path:
    """Convert to Megatron-LM over (tp, pp, ep) and on to our checkpoint, which is returned."""
    tp, pp, ep = layout
    run(
        first,
        tmp_path / "megatron",
        "--to",
        "megatron",
        "--tp",
        tp,
        "--pp",
        pp,
        "--ep",
        ep,
        "--no-verify",
    )
    run(tmp_path / "megatron", tmp_path / "back", "--no-verify")
    one = held(first)
    other = held(tmp_path / "back")
    assert open_source(tmp_path / "back").model.mtp_layers == MODULES
    assert sum(key.startswith("weight/mtp.") for key in one) > 10
    assert one.keys() == other.keys() and not [
        key for key in one if not torch.equal(one[key], other[key])
    ]
    return tmp_path / "back"


def save(mesh: DeviceMesh, kind: str, folder: Path, pp: int, in_chunks: bool) -> dict[str, Tensor]:
    """What Megatron's own code saves of random weights; return this rank's tensors."""
    pretend_there_is_a_gpu()
    model = with_modules(kind, 1, pp)
    with torch.no_grad():  # as after the first step: stages begin with the same embedding
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    changed = {**megatrons(kind), "num_nextn_predict_layers": MODULES}
    args = args_of(from_hugging_face(changed), PADDED[1], 1, pp, False, torch.float32)
    said = {"args": argparse.Namespace(**args), "iteration": 5}
    if in_chunks:
        group = core("parallel_state").get_data_parallel_group(with_context_parallel=True)
        save_in_chunks(
            {**model.sharded_state_dict(metadata={"dp_cp_group": group}), **said}, folder
        )
    else:
        (folder / place(mesh, pp)).parent.mkdir(parents=True)
        torch.save(
            {**said, "model": model.state_dict_for_save_checkpoint()}, folder / place(mesh, pp)
        )
        dist.barrier()
    return {n: v for n, v in model.state_dict().items() if v is not None}


@pytest.mark.cases(1, sample=1)
@NEEDS_MEGATRON
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_what_megatron_core_saves_of_modules_is_read(
    in_chunks: bool, pp: int, tmp_path: Path
) -> None:
    kind = "deepseek_v3"
    made = tmp_path / "theirs"
    theirs = run_ranks(save, {"pp": pp}, kind=kind, folder=made, pp=pp, in_chunks=in_chunks)
    run(
        made,
        tmp_path / "legacy",
        "--to",
        "megatron",
        "--pp",
        pp,
        "--layers",
        "local",
        "--no-verify",
    )
    for rank, own in enumerate(theirs):
        folder = "mp_rank_00" + (f"_{rank:03d}" if pp > 1 else "")
        with torch.serialization.safe_globals([argparse.Namespace]):
            ours = torch.load(
                tmp_path / f"legacy/iter_0000005/{folder}/model_optim_rng.pt", weights_only=True
            )["model"]
        assert ours.keys() == own.keys() and any(
            name.startswith("mtp.layers.1.") for name in own
        ) == (rank == pp - 1)
        cut = {
            name: len(values) if len(values) != PADDED[1] else 131 for name, values in ours.items()
        }
        assert not [
            name for name in own if not torch.equal(ours[name][: cut[name]], own[name][: cut[name]])
        ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"mtp_use_repeated_layer": True},
            sentence(
                "convert.megatron_argument_only",
                key="mtp_use_repeated_layer",
                value=True,
                allowed="it must be off",
            ),
        ),
        (
            {"mtp_num_layers": "1"},
            sentence(
                "convert.megatron_argument_kind",
                key="mtp_num_layers",
                value="1",
                kind="a whole number from 0 on",
            ),
        ),
        (LEARNED, sentence("convert.megatron_mtp_positions", modules=2)),
        (
            {"window_size": (3, 0), "window_attn_skip_freq": 2},
            sentence("convert.megatron_mtp_windows", window_attn_skip_freq=2),
        ),
    ],
)
def test_modules_that_are_none_of_ours_are_refused_by_name(
    changes: dict[str, Any], says: str
) -> None:
    model = ModelConfig(
        family="llama", layers=4, hidden=16, heads=2, vocab=64, max_positions=16, mtp_layers=MODULES
    )
    args = args_of(model, 128, 1, 1, False, torch.float32)
    assert model_of_args(args, 64).mtp_layers == MODULES
    with pytest.raises(UserError) as refused:
        model_of_args(args | changes, 64)
    assert re.search(says, str(refused.value))


def test_modules_may_have_a_stage_of_their_own_and_the_last_norm_stands_with_the_last_layer(
    tmp_path: Path,
) -> None:
    """TransformerBlock.has_final_layernorm_in_this_stage of Megatron-core."""
    hf = write_folder(
        tmp_path / "hf",
        "deepseek_v3",
        num_nextn_predict_layers=MODULES,
        **FOR_MEGATRON["deepseek_v3"],
    )
    run(hf, tmp_path / "there", "--to", "megatron", "--no-verify", "--pp", "2")
    expected = held(tmp_path / "there")
    (tmp_path / "there").rename(tmp_path / "apart")
    whole = tmp_path / "apart/iter_0000000"
    files = [whole / f"mp_rank_00_00{stage}/model_optim_rng.pt" for stage in range(3)]
    content = torch.load(files[1], weights_only=False)
    of_decoder = {name for name in content["model"] if name.startswith("decoder.")}
    files[2].parent.mkdir()
    for file, own in ((files[1], of_decoder), (files[2], content["model"].keys() - of_decoder)):
        torch.save(
            {**content, "model": {name: content["model"][name].clone() for name in own}}, file
        )
    found = held(tmp_path / "apart")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )
    files[1].rename(whole / "kept")
    files[2].rename(files[1])
    (whole / "kept").rename(files[2])
    with raises("convert.layer_of_stage"):
        open_source(tmp_path / "apart")


def test_expert_ranks_of_a_stage_without_experts_are_no_copies(tmp_path: Path) -> None:
    hf = write_folder(tmp_path / "hf", "deepseek_v3", **FOR_MEGATRON["deepseek_v3"])
    run(hf, tmp_path / "there", "--to", "megatron", "--no-verify", "--pp", "4", "--ep", "2")
    for file in (tmp_path / "there").rglob("*.pt"):  # as Megatron-LM writes them: with checksums
        content = torch.load(file, weights_only=False)
        torch.save(
            {
                **content,
                "model": {name: values.clone() for name, values in content["model"].items()},
            },
            file,
        )
    assert not open_source(tmp_path / "there").facts.notes
