"""The laws of QK-clip and of the largest logits: a plain float64 loop over whole logical weights,
whatever a layout cuts."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.update_rules import AdamW, UpdateRule
from megaprec.precision.plan import plan
from models.attention import largest_logits
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.engine.engine import Engine, build_stages
from models.engine.options import EngineOptions, QKClip
from models.logical_shapes import logical_shapes
from parallel.pipeline.kinds import schedule
from tests.families import put
from tests.layouts import Fragment, assemble, fragments, share_of
from tests.ranks import run_ranks
from tools.verify.oracle import plain_attention, plain_decoder

CLOSE = 1e-12
SAMPLES = 4
LENGTH = 12
LR = 1e-3
EPS = 1e-3
SKIPPED = 1  # the step whose loss is called too large
STEPS = 4
SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 24,
    "heads": 4,
    "ffn": 16,
    "vocab": 53,
    "max_positions": 16,
}
LATENT = {"kv_rank": 7, "query_rank": 0, "rope_dim": 4, "nope_dim": 6, "value_dim": 5}
# with thresholds that some heads exceed and others do not
MODELS: dict[str, tuple[dict[str, Any], QKClip]] = {
    "gpt2, biases": ({"family": "gpt2"}, QKClip(5.0)),
    "llama, shared keys": ({"kv_heads": 2}, QKClip(4.0, alpha=0.3)),
    "llama, one key head": ({"kv_heads": 1}, QKClip(4.0)),
    "mistral, window": (
        {"family": "mistral", "kv_heads": 2, "window": 3, "window_layers": (1,)},
        QKClip(4.0),
    ),
    "latents": ({"family": "deepseek_v3", "latent": LATENT}, QKClip(2.0)),
    "latents of queries": (
        {"family": "deepseek_v3", "latent": {**LATENT, "query_rank": 9}},
        QKClip(2.0, alpha=0.7),
    ),
    "gemma2, soft cap": (
        {"family": "gemma2", "kv_heads": 2, "attention_softcap": 3.0},
        QKClip(4.0),
    ),
}
ZERO2 = {"shard_gradients": True}
ZERO3 = {"shard_weights": True, "overlap": True}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one process": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
    "dp2 zero1": ({"dp": 2}, {}),
    "dp2 zero2": ({"dp": 2}, ZERO2),
    "dp2 zero3": ({"dp": 2}, ZERO3),
    "tp2 dp2 zero3": ({"dp": 2, "tp": 2}, ZERO3),
}


@dataclass(frozen=True)
class Job:
    """Steps on one batch from these weights. settings: of the optimizer."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokens: Tensor
    targets: Tensor
    clip: QKClip | None
    settings: dict[str, Any]
    rule: str = "adamw"
    lr: float = LR
    documents: Tensor | None = None


@dataclass(frozen=True)
class Trained:
    """Largest logits of each step, [layers, heads] each, and the last weights."""

    logits: list[Tensor]
    weights: dict[str, Tensor]


def config_of(model: str) -> ModelConfig:
    changes, _ = MODELS[model]
    return ModelConfig(**{"family": "llama", **SIZES, **changes})


def data(config: ModelConfig) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights large enough for logits above the thresholds, tokens and targets."""
    dice = torch.Generator().manual_seed(3)
    weights = {
        name: 0.45 * torch.randn(shape, generator=dice, dtype=torch.float64)
        + float("norm" in name and name.endswith("weight") and not config.norm_unit_offset)
        for name, shape in logical_shapes(config).items()
    }
    ids = torch.randint(config.vocab, (SAMPLES, LENGTH + 1), generator=dice)
    return weights, ids[:, :-1], ids[:, 1:]


def job_of(model: str, settings: dict[str, Any], **changes: Any) -> Job:
    config = config_of(model)
    weights, tokens, targets = data(config)
    _, clip = MODELS[model]
    return Job(**{"config": config, "weights": weights, "tokens": tokens, "targets": targets}
               | {"clip": clip, "settings": settings} | changes)  # fmt: skip


def _train(mesh: DeviceMesh | None, jobs: list[Job]) -> list[tuple[list[Any], list[Fragment]]]:
    return [_train_one(mesh, job) for job in jobs]


def _train_one(mesh: DeviceMesh | None, job: Job) -> tuple[list[Any], list[Fragment]]:
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh else {}
    options = EngineOptions(1, LENGTH, attention_logits=True, qk_clip=job.clip)
    planned = schedule("1f1b", sizes.get("pp", 1), SAMPLES // sizes.get("dp", 1))
    parts = build_stages(job.config, plan("fp64"), mesh, planned, options)
    for stage in parts.by_number.values():
        put(stage, job.weights)
    adamw = AdamW(eps=EPS)
    rule: UpdateRule = adamw if job.rule == "adamw" else Muon(adamw=adamw)
    optimizer = parts.make_optimizer(clip=0.0, rule=rule, **job.settings)
    engine = Engine(parts, optimizer)
    packing = UNPACKED if job.documents is None else Packing(job.documents)
    share = share_of(mesh, (job.tokens, job.targets, None), packing)
    reports: list[Any] = []
    for number in range(STEPS):
        limits = StepLimits(loss=0.0) if number == SKIPPED else NO_LIMITS
        report = engine.step(share, job.lr, number, limits=limits)
        assert report.changed == (number != SKIPPED)
        reports.append([attention.largest_logits for attention in report.attentions])
    optimizer.wait()
    return reports, fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])


@cache
def trained(layout: str, **changes: Any) -> dict[str, Trained]:
    """Each model, all in one start of the ranks."""
    axes, settings = LAYOUTS[layout]
    if layout.startswith("dp2 zero1"):
        settings = {"zero_size": 0}
    jobs = [job_of(model, settings, **changes) for model in MODELS]
    ranks = run_ranks(_train, {"pp": 1, "dp": 1, "tp": 1, **axes}, jobs=jobs)
    found: dict[str, Trained] = {}
    for number, model in enumerate(MODELS):
        logits = [torch.tensor(step, dtype=torch.float64) for step in ranks[0][number][0]]
        assert all(rank[number][0] == ranks[0][number][0] for rank in ranks), "ranks differ"
        found[model] = Trained(logits, assemble([rank[number][1] for rank in ranks]))
    return found


class Scores:
    """The scores of each attention, unmasked, that the plain decoder computes."""

    def __init__(self) -> None:
        self.of_layers: list[Tensor] = []

    def look(self, scores: Tensor, cap: float) -> Tensor:
        self.of_layers.append(scores.detach())
        return cap * (scores / cap).tanh() if cap else scores

    def largest(self, config: ModelConfig, documents: Tensor | None = None) -> Tensor:
        """The largest score of each head of each layer among tokens that see each other."""
        rows: list[list[float]] = []
        for n, scores in enumerate(self.of_layers):
            window = config.of_layer(n).window or LENGTH
            of_heads: list[float] = []
            for head in range(config.heads):
                seen = [
                    scores[b, head, i, j].item()
                    for b in range(SAMPLES)
                    for i in range(LENGTH)
                    for j in range(max(0, i - window + 1), i + 1)
                    if documents is None or documents[b, i] == documents[b, j]
                ]
                of_heads.append(max(seen))
            rows.append(of_heads)
        return torch.tensor(rows, dtype=torch.float64)


def clip_head(
    weights: dict[str, Tensor], config: ModelConfig, n: int, clip: QKClip, largest: Tensor
) -> None:
    """One head of keys of a layer, and the heads of queries that share it, row by row."""
    group = config.heads // config.kv_heads
    d = config.head_dim
    name = f"layers.{n}.attention"
    for g in range(config.kv_heads):
        top = max(largest[g * group + k].item() for k in range(group))
        factor = min(1.0, clip.threshold / top) if top > 0 else 1.0
        for kind in ("weight", "bias"):
            if config.latent or f"{name}.query.{kind}" not in weights:
                continue
            for k in range(group):
                head = g * group + k
                weights[f"{name}.query.{kind}"][head * d : (head + 1) * d] *= factor**clip.alpha
            weights[f"{name}.key.{kind}"][g * d : (g + 1) * d] *= factor ** (1 - clip.alpha)
        if config.latent:
            turning = config.latent.rope_dim
            still = config.latent.nope_dim
            query = weights[f"{name}.{'query_up' if config.latent.query_rank else 'query'}.weight"]
            query[g * d : g * d + turning] *= factor
            query[g * d + turning : (g + 1) * d] *= factor**clip.alpha
            keys = weights[f"{name}.key_up.weight"]
            keys[g * still : (g + 1) * still] *= factor ** (1 - clip.alpha)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """The scores of plain passes, the last ones last."""
    passes: list[Scores] = []
    monkeypatch.setattr(plain_attention, "capped", lambda x, cap: passes[-1].look(x, cap))
    return passes


def plainly(job: Job, passes: list[Scores]) -> Trained:
    """The same steps by torch's AdamW; matrices are decayed, vectors not."""
    config = job.config
    w = {name: values.clone().requires_grad_() for name, values in job.weights.items()}
    trained = {name: values for name, values in w.items() if not name.endswith("correction")}
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=(0.9, 0.95), eps=EPS, foreach=False)
    logits: list[Tensor] = []
    for number in range(STEPS):
        passes.append(Scores())
        made = plain_decoder.logits(config, w, job.tokens)
        largest = passes[-1].largest(config, job.documents)
        logits.append(largest)
        optimizer.zero_grad()
        F.cross_entropy(made.flatten(0, 1), job.targets.flatten()).backward()
        if number == SKIPPED:
            continue
        optimizer.step()
        with torch.no_grad():
            for n in range(config.layers):
                if job.clip is not None:
                    clip_head(w, config, n, job.clip, largest[n])
    return Trained(logits, {name: values.detach() for name, values in w.items()})


def require_close(found: Trained, expected: Trained) -> None:
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=0)
    assert found.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        torch.testing.assert_close(found.weights[name], values, rtol=0, atol=CLOSE, msg=name)


@pytest.mark.cases(len(MODELS), sample=9)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_logits_and_clips_are_those_of_a_plain_loop(
    layout: str, model: str, looked_at: list[Scores]
) -> None:
    expected = plainly(job_of(model, {}), looked_at)
    _, clip = MODELS[model]
    is_above = torch.stack(expected.logits) > clip.threshold
    assert is_above.any() and not is_above.all(), "the threshold tells no heads apart"
    require_close(trained(layout)[model], expected)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_a_clip_alone_brings_the_largest_logit_of_a_batch_to_the_threshold(
    model: str, rule: str
) -> None:
    """Without a learning rate nothing else changes the weights, under any rule, and what the first
    layer reads stays the same."""
    found = trained("tp2", rule=rule, lr=0.0)[model]
    config = config_of(model)
    _, clip = MODELS[model]
    before, *after = (step[0].view(config.kv_heads, -1) for step in found.logits)
    top = before.amax(-1, keepdim=True)
    shrunk = before * (clip.threshold / top).clamp(max=1)
    for step in after:
        is_above = (top > clip.threshold).expand_as(before)
        torch.testing.assert_close(step[is_above], shrunk[is_above], rtol=CLOSE, atol=0)


def test_without_a_threshold_logits_are_told_and_nothing_is_clipped(
    looked_at: list[Scores],
) -> None:
    for model, found in trained("one process", clip=None).items():
        require_close(found, plainly(job_of(model, {}, clip=None), looked_at))


def test_logits_between_documents_do_not_count(looked_at: list[Scores]) -> None:
    model = "llama, shared keys"
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] * 1 + [1] * 11, [0] * 6 + [1] * 6])
    job = job_of(model, {}, documents=documents, lr=0.0, clip=None)
    reports, _ = _train_one(None, job)
    # positions go on over documents here, and so the first layer's scores are those of the whole
    plainly(job_of(model, {}, clip=None, lr=0.0), looked_at)
    whole = looked_at[0].largest(job.config, documents)[0]
    ours = torch.tensor(reports[0][0], dtype=torch.float64)
    torch.testing.assert_close(ours, whole, rtol=CLOSE, atol=0)
    unmasked = looked_at[0].largest(job.config)[0]
    assert (unmasked > whole).any(), "no logit between documents was the largest"


def test_blocks_of_rows_have_the_largest_logits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("mistral, window", {}, lr=0.0)
    whole, _ = _train_one(None, job)
    monkeypatch.setattr(largest_logits, "MOST_LOGITS", 5 * 4 * LENGTH)
    cut, _ = _train_one(None, job)
    for ours, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours, dtype=torch.float64),
            torch.tensor(theirs, dtype=torch.float64),
            rtol=CLOSE,
            atol=0,
        )
