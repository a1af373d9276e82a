"""A packed sample whose documents are told apart trains as its documents do one by one, in every
family and layout."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Resets, Samples
from models.attention import kernels
from models.attention.packing import UNPACKED, Packing, causal_mask
from models.config import ModelConfig
from models.decoder import stages
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from models.engine.engine import Engine, build_stages
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.logical_shapes import is_never_trained
from parallel.context import Context
from parallel.pipeline.kinds import schedule
from tests import oracle, runs
from tests.families import put
from tests.layouts import Fragment, Recording, assemble
from tests.ranks import run_ranks

LENGTH = 24
SAMPLES = 4
SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "ffn": 24,
    "vocab": 53,
    "max_positions": 32,
    "init_std": 0.4,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"},
    "gpt_neox": {"family": "gpt_neox", "rotary_fraction": 0.5},
    "llama with fewer key heads": {"family": "llama", "kv_heads": 2},
    "llama with one key head": {"family": "llama", "kv_heads": 1},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "kv_heads": 2},
    "mistral with a window": {"family": "mistral", "window": 4, "kv_heads": 2},
    "smollm3": {"family": "smollm3", "kv_heads": 2, "nope_layers": [1]},
    "exaone4": {
        "family": "exaone4",
        "kv_heads": 2,
        "window": 4,
        "window_layers": [0],
        "nope_layers": [1],
    },
    "cohere2": {
        "family": "cohere2",
        "kv_heads": 2,
        "window": 4,
        "window_layers": [0],
        "nope_layers": [1],
    },
    "nanochat": {"family": "nanochat", "kv_heads": 2},
    "apertus": {"family": "apertus", "kv_heads": 2},
    "ministral3": {
        "family": "ministral3",
        "kv_heads": 2,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 5,
            "query_beta": 0.7,
        },
    },
    "olmo3": {"family": "olmo3", "kv_heads": 2, "window": 4, "window_layers": [0]},
    "gemma3": {
        "family": "gemma3",
        "kv_heads": 1,
        "window": 4,
        "window_layers": [0],
        "window_rope_base": 50.0,
    },
    "gemma4": {
        "family": "gemma4",
        "kv_heads": 2,
        "head_dim": 6,
        "global_head_dim": 10,
        "global_kv_heads": 1,
        "global_key_as_value": True,
        "window": 4,
        "window_layers": [0],
        "window_rope_base": 50.0,
        "rope_scaling": {"kind": "proportional", "fraction": 0.5},
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "latent": {"query_rank": 9, "kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
        "window": 4,
    },
    "gemma2": {"family": "gemma2", "kv_heads": 1, "window": 4, "window_layers": [0]},
    "gpt_oss": {
        "family": "gpt_oss",
        "experts": 4,
        "router_aux_loss": 0.0,
        "kv_heads": 2,
        "window": 4,
    }
    | {"window_layers": [0]},
    "gpt_oss through dropout": {
        "family": "gpt_oss",
        "experts": 4,
        "router_aux_loss": 0.0,
        "attention_dropout": 1e-14,
    },
    "qwen3_next": {
        "family": "qwen3_next",
        "kv_heads": 2,
        "head_dim": 8,
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5},
        "delta_layers": [0],
        "experts": 4,
        "router_aux_loss": 0.0,
    }
    | {"rotary_fraction": 0.5},
    "kimi_linear": {
        "family": "kimi_linear",
        "latent": {"kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
        "delta_net": {
            "key_heads": 4,
            "value_heads": 4,
            "key_dim": 3,
            "value_dim": 5,
            "gate_rank": 2,
        },
        "delta_layers": [0],
    },
    "nemotron_h": {
        "family": "nemotron_h",
        "kv_heads": 2,
        "mamba": {"heads": 4, "head_dim": 3, "state_dim": 5, "groups": 2},
        "hybrid_pattern": "M*",
    },
    "nemotron_h with experts": {
        "family": "nemotron_h",
        "kv_heads": 2,
        "mamba": {"heads": 4, "head_dim": 3, "state_dim": 5, "groups": 2},
        "hybrid_pattern": "MEM",
        "layers": 3,
        "experts": 4,
        "router_aux_loss": 0.0,
        "router": {"score": "sigmoid"},
    },
    "mixtral": {"family": "mixtral", "experts": 4, "router_aux_loss": 0.0, "kv_heads": 2},
    "gpt2 through dropout": {"family": "gpt2", "attention_dropout": 1e-14},
    "mistral through dropout": {"family": "mistral", "window": 5, "attention_dropout": 1e-14},
}
CONFIGS = {name: ModelConfig(**{**SIZES, **changes}) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    """Samples out of a stream of documents of 1 to 17 tokens."""
    dice = torch.Generator().manual_seed(4)
    prefix = tmp_path_factory.mktemp("packed") / "x"
    with IndexedWriter(prefix, 53) as writer:
        for length in torch.randint(1, 18, (40,), generator=dice).tolist():
            writer.add_document(torch.randint(0, 53, (length,), generator=dice).tolist())
    batch = Samples(
        IndexedDataset(prefix), LENGTH, 0, False, resets=Resets(True, True, True)
    ).batch(0, SAMPLES)
    assert batch.mask is not None and (batch.mask == 0).sum() > SAMPLES
    return Share(
        batch.tokens,
        batch.targets,
        batch.mask.double(),
        packing=Packing(batch.documents, batch.positions),
    )


def weights_of(config: ModelConfig) -> oracle.Weights:
    """Random logical weights of every shape that the model has."""
    dice = torch.Generator().manual_seed(5)
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, LENGTH)[0])
    shapes = {
        part.name: part.shape for p in stage.parameters() for part, _, _ in layout_of(p).spans()
    }
    return {
        name: torch.randn(shape, generator=dice, dtype=torch.float64) * 0.3
        + name.endswith("norm.weight")
        for name, shape in sorted(shapes.items())
    }


def one_by_one(config: ModelConfig, share: Share) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model, each document run by itself."""
    w = {
        name: value.clone().requires_grad_(not is_never_trained(name))
        for name, value in weights_of(config).items()
    }
    assert share.mask is not None and share.packing.documents is not None
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets, mask, documents in zip(
        share.tokens, share.targets, share.mask, share.packing.documents, strict=True
    ):
        for number in documents.unique():
            own = documents == number
            logits = oracle.logits(config, w, tokens[own][None])[0]
            each = torch.nn.functional.cross_entropy(logits, targets[own], reduction="none")
            total = total + (each * mask[own]).sum()
    loss = total / share.mask.sum()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in w.items() if value.grad is not None}


def packed(mesh: DeviceMesh, what: bytes, sequence: bool) -> list[tuple[float, list[Fragment]]]:
    """Loss and gradients of ours, for each model."""
    configs, share = pickle.loads(what)
    return [_step(mesh, config, share, sequence) for config in configs]


def _step(
    mesh: DeviceMesh, config: ModelConfig, share: Share, sequence: bool
) -> tuple[float, list[Fragment]]:
    parts = build_stages(
        config,
        plan("fp64"),
        mesh,
        schedule("1f1b", mesh["pp"].size(), SAMPLES // 2),
        EngineOptions(micro_batch=2, seq_length=LENGTH, sequence=sequence),
    )
    for stage in parts.by_number.values():
        put(stage, weights_of(config))
    engine = Engine(parts, parts.make_optimizer(Recording, clip=0.0, plant=None))
    report = engine.step(share, lr=0.0, number=0)
    assert isinstance(engine.optimizer, Recording)
    return report.loss, engine.optimizer.seen[0]


def run_all(
    names: list[str], share: Share, tp: int = 1, pp: int = 1, sequence: bool = False
) -> list[tuple[float, dict[str, Tensor]]]:
    what = pickle.dumps(([CONFIGS[name] for name in names], share))
    ranks = run_ranks(packed, {"tp": tp, "pp": pp}, what=what, sequence=sequence)
    return [
        (answers[0][0], assemble([fragments for _, fragments in answers]))
        for answers in zip(*ranks, strict=True)
    ]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("tp", "pp", "sequence"),
    [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)],
)
def test_a_packed_sample_trains_as_its_documents_do_one_by_one(
    share: Share, tp: int, pp: int, sequence: bool
) -> None:
    for name, (loss, grads) in zip(
        CONFIGS, run_all(list(CONFIGS), share, tp, pp, sequence), strict=True
    ):
        expected, theirs = one_by_one(CONFIGS[name], share)
        assert abs(loss - expected) < 1e-12, name
        assert grads.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(
                grads[key],
                value,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, at=f"{name} {key}": f"{at}: {m}",
            )


@pytest.mark.parametrize("name", ["gpt2", "llama with fewer key heads", "mistral with a window"])
def test_the_loss_of_a_packed_sample_is_that_of_its_documents_one_by_one(
    share: Share, name: str
) -> None:
    ((loss, _),) = run_all([name], share)
    assert abs(loss - one_by_one(CONFIGS[name], share)[0]) < 1e-12


@pytest.mark.parametrize("name", ["gpt2", "llama with fewer key heads", "mistral with a window"])
def test_a_sample_that_is_taken_for_one_document_trains_otherwise(share: Share, name: str) -> None:
    plain = Share(share.tokens, share.targets, share.mask, packing=UNPACKED)
    ((loss, _),) = run_all([name], plain)
    assert abs(loss - one_by_one(CONFIGS[name], share)[0]) > 1e-3


def test_all_layers_of_a_stage_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def noted(*given: Any) -> Tensor:
        made.append(causal_mask(*given))
        return made[-1]

    for module in (stages, kernels):
        monkeypatch.setattr(module, "causal_mask", noted)
    config = CONFIGS["mistral with a window"]
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, LENGTH)[0])
    documents = torch.arange(LENGTH).expand(2, -1) // 5
    stage(torch.zeros(LENGTH, 2, dtype=torch.int64), None, Packing(documents))
    assert len(stage.layers) == 2
    assert [mask.shape for mask in made] == [(2, 1, LENGTH, LENGTH)]


def test_each_reset_is_one_of_its_own(share: Share) -> None:
    """Rotary positions only tell how far apart two tokens are: once attention is reset, resetting
    them too is nothing. Learned ones tell more."""
    attention = Share(
        share.tokens, share.targets, share.mask, packing=Packing(documents=share.packing.documents)
    )
    positions = Share(
        share.tokens, share.targets, share.mask, packing=Packing(positions=share.packing.positions)
    )
    names = ["llama with fewer key heads", "gpt2"]
    rotary, learned = (one_by_one(CONFIGS[name], share)[0] for name in names)
    (one, _), (two, _) = run_all(names, attention)
    assert abs(one - rotary) < 1e-12 and abs(two - learned) > 1e-3
    assert all(
        abs(loss - e) > 1e-3
        for (loss, _), e in zip(run_all(names, positions), (rotary, learned), strict=True)
    )


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose text is many documents."""
    folder = tmp_path_factory.mktemp("run")
    file = runs.write_run(folder)
    lines = (folder / "text.txt").read_text().splitlines()
    (folder / "many.jsonl").write_text(
        "".join(
            json.dumps({"text": line[: 5 + 3 * (n % 9)]}) + "\n" for n, line in enumerate(lines)
        )
    )
    return file


@pytest.mark.campaign
def test_a_run_with_all_resets_is_the_same_in_every_layout(documents: Path) -> None:
    folder = documents.parent
    given = [
        f"data.source={folder}/many.jsonl",
        f"data.cache={folder}/many",
        "precision.compute=fp64",
        "train.steps=4",
    ]
    resets = [
        "data.reset_attention_mask=true",
        "data.reset_position_ids=true",
        "data.eod_mask_loss=true",
    ]

    def trained(name: str, *more: str, **layout: int) -> list[dict[str, Any]]:
        return runs.steps(
            runs.train_on(documents, *given, *more, f"train.folder={folder}/{name}", **layout)
        )

    alone = trained("one", *resets)
    runs.assert_close(
        alone, trained("four", *resets, "parallel.sequence=true", tensor=2, pipeline=2), 1e-9
    )
    runs.assert_close(alone, trained("two", *resets, "train.micro_batch=4", data=2), 1e-9)
    none = trained("none")[-1]["loss"]
    for reset in resets:
        assert abs(trained(reset.split("=")[0], reset)[-1]["loss"] - none) > 1e-6
