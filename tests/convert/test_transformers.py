"""Against the real transformers: its folders in, ours out, the same logits, the same training, the
same token ids."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaprec.tokens.indexed import IndexedWriter
from tests.models.test_families import corrections, counting, float32_is_float64
from tests.other_systems import (
    BACK_FROM_MEGATRON,
    BUFFERS,
    CONFIGS,
    FOR_MEGATRON,
    OTHERS_FROM_MEGATRON,
    WITHOUT_MEGATRON,
    slow,
    usually,
)
from tests.refusals import raises, shows
from tests.runs import checkpoint, steps, tensors, train_on, write_run
from tools.cli import main
from tools.convert.core import names, transforms
from tools.convert.formats import open_source
from tools.convert.hf.rope import KEYS_OF_IMAGES
from tools.convert.verify import compare_logits, load_stage

transformers: Any = pytest.importorskip(
    "transformers",
    reason="needs the package transformers (pip install transformers)",
    exc_type=ImportError,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("torch_files_read_here"),
]


def run(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def theirs(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of random weights that is lively enough for every tensor to matter, saved by
    transformers."""
    torch.manual_seed(3)
    # which it changes inside
    config = transformers.AutoConfig.for_model(**deepcopy({**CONFIGS[kind], **changes}))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=dtype
    )
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.25)
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.normal_(0.0, 0.1)
            if name.endswith("layer_scalar"):
                values.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.cases(12, sample=1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_that_transformers_wrote_is_read_tensor_by_tensor(
    kind: str, tmp_path: Path
) -> None:
    theirs(tmp_path / "hf", kind)
    source = open_source(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    buffers = [values for name, values in model.named_buffers() if name.endswith(BUFFERS)]
    count = sum(values.numel() for values in (*model.parameters(), *buffers))
    assert sum(torch.Size(shape).numel() for shape in source.shapes.values()) == count


@pytest.mark.cases(13, sample=1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_in_float64_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    ids = torch.randint(131, (3, 40), generator=torch.Generator().manual_seed(1))
    with float32_is_float64():
        expected = theirs(tmp_path / "hf", kind, torch.float64)(ids).logits
    ours = load_stage(open_source(tmp_path / "hf"), "fp64")(ids.t()).transpose(0, 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", usually(("gpt2", "glm4_moe", "qwen2"), BACK_FROM_MEGATRON))
def test_what_is_exported_transformers_loads_and_computes_the_same(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = theirs(tmp_path / "hf", kind, **FOR_MEGATRON.get(kind, {}))
    run(tmp_path / "hf", tmp_path / "ours", "--verify", "logits")
    run(
        tmp_path / "ours",
        tmp_path / "megatron",
        "--to",
        "megatron",
        "--tp",
        2,
        "--pp",
        2,
        "--verify",
        "logits",
    )
    run(tmp_path / "megatron", tmp_path / "back", "--to", "hf", "--verify", "logits")
    assert capsys.readouterr().out.count("FP32 differ by at most") == 3
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = again.state_dict()
    others = model.state_dict()
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in others)
    assert again.dtype == torch.float32
    said, found = (getattr(one.config, "rope_parameters", None) or {} for one in (model, again))
    assert _flat(found).items() >= _flat(said).items()
    for key in ("tie_word_embeddings", "attention_bias", "layer_norm_epsilon", "head_dim"):
        assert getattr(again.config, key, None) == getattr(model.config, key, None), key


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters, those of each type of layer by names of their own; without those of
    images, which turn nothing of a text."""
    tables = {key: table for key, table in parameters.items() if isinstance(table, dict)} or {
        "": parameters
    }
    return {
        f"{kind} {key}": value
        for kind, table in tables.items()
        for key, value in table.items()
        if key not in KEYS_OF_IMAGES
    }


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("kind", sorted(WITHOUT_MEGATRON))
def test_models_that_megatron_lacks_come_back_bit_for_bit_and_are_refused_there(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_comes_back(kind, tmp_path)
    assert (
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "megatron"), "--to", "megatron"])
        == 2
    )
    assert shows(capsys.readouterr().err, "convert.megatron_not_expressible")


@pytest.mark.parametrize(("kind", "other"), OTHERS_FROM_MEGATRON.items())
def test_what_megatron_cannot_name_comes_back_bit_for_bit_and_from_megatron_as_another(
    kind: str, other: str, tmp_path: Path
) -> None:
    model = check_comes_back(kind, tmp_path)
    run(tmp_path / "ours", tmp_path / "megatron", "--to", "megatron", "--tp", 2, "--pp", 2)
    run(tmp_path / "megatron", tmp_path / "other", "--to", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert again.config.model_type == other
    ids = torch.randint(131, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), float32_is_float64():
        torch.testing.assert_close(
            again.double()(ids).logits, model.double()(ids).logits, rtol=0, atol=1e-10
        )


def check_comes_back(kind: str, tmp_path: Path) -> Any:
    """Return transformers' model, whose folder is the same after it was ours (`ours`)."""
    model = theirs(tmp_path / "hf", kind)
    run(tmp_path / "hf", tmp_path / "ours")
    run(tmp_path / "ours", tmp_path / "back", "--to", "hf")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = again.state_dict()
    others = model.state_dict()
    assert all(torch.equal(ours[name], others[name]) for name in others)
    keys = ("layer_types", "sliding_window", "query_pre_attn_scalar", "attention_bias")
    for key in (*keys, "logit_scale", "final_logit_softcapping", "attention_k_eq_v"):
        assert getattr(again.config, key, None) == getattr(model.config, key, None), key
    # a Nemotron-H has no rotary positions
    rotary = _flat(getattr(model.config, "rope_parameters", {}))
    assert _flat(getattr(again.config, "rope_parameters", {})).items() >= rotary.items()
    return model


def test_a_number_beside_the_weights_that_its_family_has_otherwise_is_refused(
    tmp_path: Path,
) -> None:
    theirs(tmp_path / "hf", "apertus")
    file = tmp_path / "hf" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.act_fn.beta"] += 0.01
    save_file(stored, file, metadata={"format": "pt"})
    with raises("convert.hf_constant", name="model.layers.1.mlp.act_fn.beta"):
        open_source(tmp_path / "hf")


PLANTED = {
    "gpt2": ("PACKED_TRANSPOSED", transforms.Transform(
        lambda p, heads: transforms.GROUPED.join(p, heads).t(), lambda w, heads: transforms.GROUPED.split(w.t(), heads)
    )),
    "llama": ("SAME", transforms.Transform(  # rotary partners side by side, as Meta has them
        lambda p, heads: p[0],
        lambda w, heads: [transforms._interleave(w, heads) if len(w) == 40 and w.dim() == 2 else w],
    )),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_a_wrong_rearrangement_is_found_by_the_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads back as it was written, and no shape tells."""
    theirs(tmp_path / "hf", kind)
    name, wrong = PLANTED[kind]
    right = getattr(transforms, name)
    rules = [
        names.NameRule(rule.foreign, rule.logical, wrong, rule.cut)
        if rule.how is right and (kind == "gpt2" or "q_proj.weight" in rule.foreign)
        else rule
        for rule in names.HUGGING_FACE[kind]
    ]
    monkeypatch.setitem(names.HUGGING_FACE, kind, rules)
    # which a small model with the same fault would refuse
    run(tmp_path / "hf", tmp_path / "ours", "--no-verify")
    monkeypatch.undo()
    with raises("convert.verify_differs"):
        compare_logits(tmp_path / "hf", tmp_path / "ours")


LR = 1e-2
STEPS = 3
BATCH = 4
LENGTH = 16
SPEED = 0.02  # of corrections
EPS = 1e-6  # so that a gradient that is zero but for rounding, as a key bias has, moves nothing


def their_training(
    model: Any, batches: list[Tensor], lr: float = LR, eps: float = EPS
) -> list[float]:
    """Plain steps with torch's AdamW; matrices are decayed, vectors not. Returns the losses.

    Corrections of routers, which transformers does not train, follow the loads of each step.
    """
    parameters = dict(model.named_parameters())  # theirs stack experts' biases
    # rates of Kimi Delta Attention are [1, 1, heads, 1]
    ends = ("_bias", "A_log")
    vectors = {p for name, p in parameters.items() if p.dim() < 2 or name.endswith(ends)}
    groups = [
        {"params": [p for p in parameters.values() if p not in vectors], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p in vectors], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps, foreach=False)
    losses = []
    counts = counting(model)
    for tokens in batches:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, correction in corrections(model):
            correction += SPEED * (counts[name].mean() - counts[name]).sign()
            counts[name].zero_()
    return losses


def write_job(folder: Path, ids: Tensor) -> Path:
    """A run file that trains on these ids in their order."""
    with IndexedWriter(folder / "ids", 131) as writer:
        writer.add_document(ids.tolist())
    path = folder / "run.toml"
    path.write_text(f"""
[data]
source = "{folder}/ids"
shuffle = false
vocab_size = 131
begin = "none"
held_out = 0
[precision]
compute = "fp64"
[optimizer]
clip = 0
eps = {EPS}
[lr]
peak = {LR}
schedule = "constant"
[train]
init_from = "{folder}/hf"
folder = "{folder}/run"
steps = {STEPS}
global_batch = {BATCH}
micro_batch = 1
seq_length = {LENGTH}
threads = 1
[log]
plot = false
""")
    return path


TRAINED = (
    *(
        "gpt2",
        "llama",
        "gpt_neox",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_moe-dense-layers",
        "glm4_moe",
        "mixtral",
        "olmo2",
        "olmo3",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "deepseek_v2",
        "deepseek_v3",
        "gemma2",
        "gpt_oss",
        "seed_oss",
        "smollm3",
        "exaone4",
        "ernie4_5",
        "phi3",
        "cohere2",
        "nanochat",
        "apertus",
        "ministral3",
        "granitemoe",
        "granite",
        "arcee",
        "olmoe",
        "minimax_m2",
        "dots1",
        "solar_open",
        "glm4_moe_lite",
        "youtu",
        "kimi_linear",
        "gemma",
        "vaultgemma",
        "cohere",
        "glm4",
        "glm",
        "ministral",
        "cwm",
        "hyperclovax",
        "starcoder2",
        "stablelm",
        "jais2",
    ),
)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", usually(("gpt2", "llama"), TRAINED))
@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(2, 2, 1), *slow((1, 1, 1), (1, 2, 2))])
def test_three_steps_from_a_folder_are_three_steps_of_transformers(
    kind: str, tensor: int, pipeline: int, data: int, tmp_path: Path
) -> None:
    with float32_is_float64():
        model = theirs(tmp_path / "hf", kind, torch.float64).train()
    ids = torch.randint(
        131, (STEPS * BATCH * LENGTH + 1,), generator=torch.Generator().manual_seed(1)
    )
    file = write_job(tmp_path, ids)
    # theirs is asked for its logits, and so adds no loss of the router's
    alone = "model.router_aux_loss=0"
    folder = train_on(
        file,
        alone,
        f"model.router_correction_speed={SPEED}",
        tensor=tensor,
        pipeline=pipeline,
        data=data,
    )
    batches = [
        torch.stack(
            [ids[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(n * BATCH, (n + 1) * BATCH)]
        )
        for n in range(STEPS)
    ]
    with float32_is_float64():
        losses = their_training(model, batches)
    for record, loss in zip(steps(folder), losses, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-12)
    model.save_pretrained(tmp_path / "trained")
    expected = open_source(tmp_path / "trained")
    for key, values in tensors(checkpoint(folder, STEPS)).items():
        if key.startswith("weight/"):
            torch.testing.assert_close(values, expected.read(key), rtol=1e-9, atol=1e-11, msg=key)
    again = open_source(checkpoint(folder, STEPS))  # it has no moments of corrections
    assert {*again.kinds} == {"weight", "exp_avg", "exp_avg_sq"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a SentencePiece tokenizer that ends with an export."""
    file = write_run(tmp_path_factory.mktemp("runs"))
    assert (
        main(["train", str(file), "train.steps=2", "--export-hf", str(file.parent / "exported")])
        == 0
    )
    return file.parent


NASTY = [
    "", " ", "  two  spaces ", "\n\n\t\r\n", "the model learns über Öl", "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈", "数字と漢字、한국어",
    "control \x00\x01\x07\x1b[2J\x7f", "a\u0301e\u0308 \ufeff\u200b\u202e", "1234567890 3.14e-10",
    "x" * 3000 + " " + "ab " * 500,
]  # fmt: skip


def test_a_sentencepiece_tokenizer_is_loaded_by_autotokenizer_with_the_same_ids(
    trained: Path,
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "exported")
    ours = open_source(trained / "run")
    import sentencepiece  # noqa: PLC0415

    model = sentencepiece.SentencePieceProcessor(model_file=str(ours.tokenizer[0]))
    for text in [*NASTY, (trained / "text.txt").read_text()]:
        ids = model.encode(text)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text[:40]
        assert tokenizer.decode(ids) == model.decode(ids)
    assert tokenizer.eos_token_id == model.eos_id()
    assert len(tokenizer) == model.get_piece_size()


def test_an_export_generates_with_transformers(trained: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "exported")
    said = model.generate(
        **tokenizer("the model", return_tensors="pt"), max_new_tokens=5, do_sample=False
    )
    assert said.shape[1] > 5
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "logits" in compare_logits(trained / "run", trained / "exported")
