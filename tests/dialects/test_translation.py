"""A plan written back in its own words is the same plan; in another's, what is not listed as a loss
is said."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.dialects import nemo
from megaprec.dialects.reading import Resolved
from megaprec.dialects.translate import DIALECTS, differences, translate
from megaprec.errors import UserError
from tools.config.tables.native_keys import native_keys_of, plan_of
from tools.config.tables.precision_settings import FP8, Precision


def said(resolved: Resolved) -> dict[str, Any]:
    return {key: decision.value for key, decision in resolved.settings.items()}


def resolve(system: str, config: Any) -> Resolved:
    return DIALECTS[system].resolve(config)


SCALES = st.sampled_from([1.0, 2.0**10, 2.0**16, 2.0**24])
ANY = st.sampled_from(["float16", "bfloat16", "float32"])
FACTORS = {
    "growth_factor": st.sampled_from([2.0, 1.5]),
    "backoff_factor": st.sampled_from([0.5, 0.8]),
}
TORCH_SCALER = {
    "init_scale": SCALES,
    "growth_interval": st.integers(1, 3000),
    "enabled": st.booleans(),
    **FACTORS,
}


def some(required: Any = None, /, **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required or {}, optional=optional)


NXD = st.one_of(
    some({"optimizer_config": some(grad_clipping=st.booleans(), max_grad_norm=SCALES)}),
    some(
        {"optimizer_config": some({"zero_one_enabled": st.just(True)}, max_grad_norm=SCALES)},
        use_master_weights=st.just(True),
        use_fp32_grad_acc=st.booleans(),
        use_master_weights_in_ckpt=st.booleans(),
    ),
    some(
        {"optimizer_config": st.just({"zero_one_enabled": True})}, use_master_weights=st.just(False)
    ),
)
DELAYED = some(
    margin=st.integers(-2, 8),
    fp8_format=st.sampled_from(["HYBRID", "E4M3"]),
    amax_history_len=st.integers(1, 2048),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
    reduce_amax=st.booleans(),
    fp8_dpa=st.booleans(),
    fp8_mha=st.booleans(),
    override_linear_precision=st.sampled_from([[False] * 3, [False, False, True]]),
)
OTHER = some(
    {"recipe": st.sampled_from(["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])}
)
AUTOCAST = some(enabled=st.booleans(), calibrating=st.booleans(), fp8_recipe=DELAYED | OTHER)
SMP = some(
    mixed_precision=some(
        param_dtype=ANY,
        buffer_dtype=ANY,
        cast_forward_inputs=st.booleans(),
        cast_root_forward_inputs=st.booleans(),
        keep_low_precision_grads=st.booleans(),
    ),
    grad_scaler=some(**TORCH_SCALER),
    fp8_autocast=AUTOCAST,
) | some(
    {
        "mp_policy": some(
            param_dtype=ANY, reduce_dtype=ANY, output_dtype=ANY, cast_forward_inputs=st.booleans()
        )
    },
    fp8_autocast=AUTOCAST,
)
COLOSSALAI = st.one_of(
    some({"fp16": some({"mode": st.just("TORCH")}, **TORCH_SCALER)}),
    some(
        {
            "fp16": some(
                {"mode": st.just("APEX"), "opt_level": st.sampled_from(["O0", "O2", "O3"])},
                cast_model_type=ANY,
                keep_batchnorm_fp32=st.booleans(),
                master_weights=st.booleans(),
                loss_scale=SCALES | st.just("dynamic"),
                max_loss_scale=SCALES,
                cast_model_outputs=ANY,
                enabled=st.booleans(),
            )
        }
    ),
    some(
        {
            "fp16": some(
                {"mode": st.just("APEX")},
                patch_torch_functions=st.booleans(),
                loss_scale=SCALES | st.just("dynamic"),
                cast_model_outputs=ANY,
                num_losses=st.integers(1, 3),
            )
        }
    ),
    some(
        {
            "fp16": some(
                {"mode": st.just("PARALLEL")},
                clip_grad=SCALES,
                initial_scale=SCALES,
                growth_interval=st.integers(1, 3000),
                hysteresis=st.integers(1, 4),
                **FACTORS,
            )
        }
    ),
)
INTERNEVO = some(
    dtype=st.sampled_from(
        ["torch.float16", "torch.half", "torch.bfloat16", "torch.float32", "torch.tf32"]
    ),
    checkpoint=st.booleans() | st.sampled_from([0.25, 0.5]),
    residual_in_fp32=st.booleans(),
    use_fp32_norm=st.booleans(),
    num_layers=st.integers(1, 9),
    num_chunks=st.integers(1, 3),
    embed_grad_scale=st.sampled_from([1, 0.1]),
    use_flash_attn=st.booleans(),
    drop_rate=st.sampled_from([0.0, 0.1]),
    attn_drop_rate=st.sampled_from([0.0, 0.1]),
    grad_scaler=some(
        fp16=some(initial_scale=SCALES, growth_interval=st.integers(1, 3000)), **FACTORS
    ),
    hybrid_zero_optimizer=some(clip_grad_norm=SCALES),
    parallel=some(
        zero1=st.sampled_from([-1, 1, 2, {"size": 4}]),
        tensor=st.sampled_from([1, {"size": 2, "mode": "fsp"}]),
    ),
)
WHOLE: dict[str, Any] = {
    "dtype": st.sampled_from(["torch.bfloat16", "torch.tf32"]),
    "num_layers": st.integers(1, 9),
    "num_attention_heads": st.sampled_from([1, 4, 8]),
    "mlp_ratio": st.sampled_from([1.0, 8 / 3, 2.5, 2.6, 4.0]),
    "norm_type": st.sampled_from(["rmsnorm", "layernorm"]),
    "layer_norm_epsilon": st.sampled_from([1e-5, 1e-6]),
    "embed_grad_scale": st.sampled_from([1, 0.1]),
    "rope_base": st.sampled_from([500, 1e6]),
    "use_swiglu": st.booleans(),
    "use_flash_attn": st.booleans(),
    "use_scaled_init": st.booleans(),
}
LATER: dict[str, Any] = {
    "num_kv_attention_heads": st.sampled_from([None, 1, 4]),
    "no_bias": st.booleans(),
    "ffn_other_init_std": st.sampled_from([0.01, 0.02]),
    "out_head_init_std": st.sampled_from([0.01, 0.02]),
}
NTK: dict[str, Any] = {
    "use_dynamic_ntk_rope": st.booleans(),
    "max_position_embeddings": st.sampled_from([64, 2048]),
}
HIDDEN = st.sampled_from([192, 1000, 2048, 4096])
INTERNEVO |= some({"hidden_size": HIDDEN}, **WHOLE, **NTK)
INTERNEVO |= some({"hidden_size": HIDDEN, "model_type": st.just("LLAMA2")}, **WHOLE, **LATER)
INTERNEVO |= some(
    {"hidden_size": HIDDEN, "model_type": st.just("INTERNLM2_PUBLIC")}, **WHOLE, **LATER, **NTK
)
NEMO_FIELDS = {
    "pipeline_dtype": st.just("float32"),
    "grad_reduce_in_fp32": st.booleans(),
    "autocast_enabled": st.booleans(),
    "fp8": st.sampled_from(["hybrid", "e4m3"]),
    "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "mxfp8", "blockwise"]),
    "fp8_margin": st.integers(-2, 4),
    "fp8_amax_history_len": st.integers(1, 2048),
    "fp8_amax_compute_algo": st.sampled_from(["max", "most_recent"]),
    "fp8_wgrad": st.booleans(),
    "fp8_dot_product_attention": st.booleans(),
    "fp8_params": st.booleans(),
    "first_last_layers_bf16": st.booleans(),
    "num_layers_at_end_in_bf16": st.integers(0, 2),
    "fp4_param_gather": st.just(False),
    "fp16_loss_scale": SCALES,
    "fp16_initial_loss_scale": SCALES,
    "fp16_hysteresis": st.integers(1, 4),
}
FP4 = some({"precision": st.just("bf16"), "fp4": st.just("e2m1")}, **NEMO_FIELDS)
NEMO = (
    FP4
    | some({"precision": st.sampled_from(sorted(nemo.PRECISION_DTYPES))}, **NEMO_FIELDS)
    | some({"recipe": st.sampled_from(sorted(nemo.RECIPES))}, **NEMO_FIELDS)
)
CONFIGS = {"nxd": NXD, "smp": SMP, "colossalai": COLOSSALAI, "internevo": INTERNEVO, "nemo": NEMO}


def resolved_or_none(system: str, config: dict[str, Any]) -> Resolved | None:
    """None for a configuration that the system refuses, which a random one may be."""
    try:
        return resolve(system, config)
    except UserError:
        return None


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("system", CONFIGS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_plan_written_back_in_its_own_words_is_the_same_plan(
    system: str, data: st.DataObject
) -> None:
    resolved = resolved_or_none(system, data.draw(CONFIGS[system]))
    if resolved is None:
        return
    translation = translate(resolved.plan, said(resolved), system)
    assert translation.losses == ()
    again = resolve(system, translation.config)
    assert again.plan == resolved.plan
    assert said(again) == said(resolved)


@pytest.mark.cases(6, sample=1)
@pytest.mark.parametrize("system", CONFIGS)
@pytest.mark.parametrize("to", CONFIGS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_what_is_not_listed_as_unsaid_is_said(system: str, to: str, data: st.DataObject) -> None:
    """A field that the translation does not list has its value there; so one without a list
    translates back exactly."""
    resolved = resolved_or_none(system, data.draw(CONFIGS[system]))
    if resolved is None:
        return
    translation = translate(resolved.plan, said(resolved), to)
    other = resolve(to, translation.config)
    listed = {line.partition(" = ")[0] for line in translation.losses}
    assert {line.partition(" = ")[0] for line in differences(resolved.plan, other.plan)} <= listed
    if not translation.losses:
        assert (
            resolve(system, translate(other.plan, said(other) | said(resolved), system).config).plan
            == resolved.plan
        )


@pytest.mark.parametrize("system", CONFIGS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_native_keys_say_all_of_any_plan(system: str, data: st.DataObject) -> None:
    resolved = resolved_or_none(system, data.draw(CONFIGS[system]))
    if resolved is None:
        return
    keys = native_keys_of(resolved.plan)
    precision = {
        key.removeprefix("precision."): value
        for key, value in keys.items()
        if key.startswith("precision.")
    }
    fp8 = {key.removeprefix("fp8."): value for key, value in keys.items() if key.startswith("fp8.")}
    tables = Precision.model_validate(precision), FP8.model_validate(fp8)
    assert plan_of(*tables, resolved.plan) == resolved.plan
