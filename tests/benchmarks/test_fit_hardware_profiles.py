from __future__ import annotations

from pathlib import Path

import fit_hardware_profiles as fit
import pytest


def test_shares_of_the_devices_add_up_to_the_model() -> None:
    whole, part = (fit.operator_work(fit.OPT_30B, 100, num_devices) for num_devices in (1, 4))
    for name in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"):
        assert 4 * part[name].flops == whole[name].flops
        assert part[name].num_bytes < whole[name].num_bytes / 3
    assert part["input_layernorm"] == whole["input_layernorm"]


def test_a_layer_of_opt_has_no_gate_and_no_rotation() -> None:
    work = fit.operator_work(fit.OPT_13B, 1, 1)
    assert "attn_rope" not in work
    weights = sum(each.flops / 2 for each in work.values())
    assert weights == 12 * 5120**2
    llama = fit.operator_work(fit.LLAMA_2_7B, 1, 1)
    assert sum(each.flops / 2 for each in llama.values()) == 4 * 4096**2 + 3 * 4096 * 11008


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [(fit.OPT_13B, 12.85e9), (fit.OPT_30B, 29.97e9), (fit.LLAMA_2_7B, 6.74e9), (fit.LLAMA_3_8B, 8.03e9)],
)
def test_weights_are_as_many_as_published(shape: fit.TabledShape, parameters: float) -> None:
    assert shape.weight_bytes == pytest.approx(2 * parameters, rel=0.003)


def test_a_model_derived_from_itself_is_as_measured() -> None:
    measured = {8: dict.fromkeys(("emb", *fit.LAYER_OPERATORS), 1e-5)}
    derived = fit.derived_operators(fit.LLAMA_2_7B, fit.LLAMA_2_7B, 1, measured)
    assert derived[8] == pytest.approx(measured[8])
    assert fit.derivation_error(fit.LLAMA_2_7B, 1, measured, measured).p95 == pytest.approx(0.0)


def test_few_tokens_cost_their_weights_bytes_and_many_their_flops() -> None:
    measured = {n: dict.fromkeys(("emb", *fit.LAYER_OPERATORS), 1e-4) for n in (1, 4096)}
    derived = fit.derived_operators(fit.LLAMA_2_7B, fit.OPT_13B, 2, measured)
    weights_ratio = 5120 * 10240 / (4096 * 2 * 11008)
    for num_tokens in measured:  # with one token the bytes of the weights, with 4,096 the FLOPs
        assert derived[num_tokens]["mlp_up_proj"] == pytest.approx(1e-4 * weights_ratio, rel=1e-3)
    assert derived[1]["mlp_act"] == pytest.approx(1e-4 * 2 * 10240 / (3 * 11008))
    assert derived[1]["add"] == pytest.approx(1e-4 * 5120 / 4096)
    one, many = (fit.operator_work(fit.OPT_13B, n, 2)["mlp_up_proj"] for n in (1, 4096))
    assert one.roofline_s(fit.MEASURED_DEVICE) == one.num_bytes / fit.MEASURED_DEVICE.bandwidth
    assert many.roofline_s(fit.MEASURED_DEVICE) == many.flops / fit.PEAK_FLOPS


def test_a_model_on_one_device_needs_no_all_reduce(tmp_path: Path) -> None:
    table = tmp_path / "all_reduce.csv"
    table.write_text(
        "num_workers,devices_per_node,size,time_stats.all_reduce.median\n"
        "2,2,2048,0.02\n2,1,2048,9.0\n2,2,4096,0.01\n4,4,2048,0.5\n"
    )
    assert fit.read_all_reduce(table, 1) == ([], [])
    sizes, seconds = fit.read_all_reduce(table, 2)
    assert sizes == [2048, 4096]
    assert seconds == pytest.approx([1e-5, 1e-5])
    assert fit.read_all_reduce(table, 4)[1] == pytest.approx([5e-4])
