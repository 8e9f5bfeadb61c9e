import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, OPTConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel
from backfill.models.config import Architecture, ModelConfig
from backfill.models.frequencies import inverse_frequencies
from backfill.models.generation_config import GenerationDefaults, end_token_ids
from backfill.models.rope import RopeConfig
from backfill.models.tensor_shapes import layer_parameters, num_parameters

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
LLAMA: dict[str, Any] = {
    **SMALL,
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 7],
}
SMALL_OPT: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 128,
}
OPT: dict[str, Any] = {
    **SMALL_OPT,
    "architectures": ["OPTForCausalLM"],
    "max_position_embeddings": 256,
}


def parse(folder: Path, base: dict[str, Any] = LLAMA, /, **changes: Any) -> ModelConfig:
    """``base`` with ``changes`` through a config.json; a value of ``...`` removes the key."""
    fields = {key: value for key, value in (base | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(folder)


def test_llama_fields(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert config.architecture is Architecture.LLAMA
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 8, 2, 8)
    assert config.rope == RopeConfig(theta=5000.0)
    assert (config.norm_eps, config.dtype, config.eos_token_ids) == (1e-5, "bfloat16", (2, 7))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert not config.tie_word_embeddings
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2
    assert config.kv_bytes_per_token(1) == 2 * 2 * 2 * (8 + 4)  # a row of codes has a float32 scale


def test_biases_and_norms_of_each_architecture(tmp_path: Path) -> None:
    qwen2 = parse(tmp_path, architectures=["Qwen2ForCausalLM"])
    qwen3 = parse(tmp_path, architectures=["Qwen3ForCausalLM"])
    biased = parse(tmp_path, attention_bias=True, mlp_bias=True)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_opt_fields(tmp_path: Path) -> None:
    config = parse(tmp_path, OPT, word_embed_proj_dim=32, do_layer_norm_before=False)
    assert config.architecture is Architecture.OPT
    assert config.rope is None
    assert config.tie_word_embeddings
    assert config.qkv_bias
    assert config.word_embed_proj_dim == 32
    assert not config.final_layer_norm
    assert parse(tmp_path, OPT).word_embed_proj_dim == 64


@pytest.mark.parametrize(
    "hf_config",
    [
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SMALL, tie_word_embeddings=True, head_dim=16),
        MistralConfig(**SMALL),
        Qwen2Config(**SMALL),
        Qwen3Config(**SMALL, head_dim=16),
        OPTConfig(**SMALL_OPT),
        OPTConfig(**SMALL_OPT, word_embed_proj_dim=32, do_layer_norm_before=False, enable_bias=False),
    ],
    ids=lambda c: c.model_type,
)
def test_counts_the_parameters_transformers_creates(hf_config: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert num_parameters(config) == model.num_parameters()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert layer_parameters(config) == sum(each.numel() for each in layers[0].parameters())


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    ],
    ids=lambda s: s["rope_type"] if s else "default",
)
@pytest.mark.parametrize("style", [4, 5])
def test_rope_frequencies_equal_transformers(
    scaling: dict[str, Any] | None, style: int, tmp_path: Path
) -> None:
    hf_config = LlamaConfig(
        **SMALL | {"hidden_size": 1024}, rope_parameters={"rope_theta": 500_000.0, **(scaling or {})}
    )
    if style == 5:
        hf_config.architectures = ["LlamaForCausalLM"]
        hf_config.save_pretrained(tmp_path)
        config = ModelConfig.from_folder(tmp_path)
    else:
        old = {"max_position_embeddings": 4096, "hidden_size": 1024, "rope_theta": 500_000.0}
        config = parse(tmp_path, **old, rope_scaling=scaling)
    if scaling is None:
        expected, factor = 1.0 / 500_000.0 ** (torch.arange(0, 128, 2).float() / 128), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf_config)
    assert config.rope is not None
    frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_base_of_a_rope_may_be_null_where_its_parameters_have_it(tmp_path: Path) -> None:
    config = parse(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 500_000.0})
    assert config.rope is not None
    assert config.rope.theta == 500_000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quantization bitsandbytes .*; supported: awq .*, gptq \(4 and 8 bits\), .*, float weights",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
            "sliding_window in 1 of 2 layers",
        ),
    ],
)
def test_refuses_what_it_cannot_compute(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named) as error:
        parse(tmp_path, **changes)
    assert "supported: " in str(error.value)


@pytest.mark.parametrize(
    "changes", [{"activation_function": "gelu"}, {"layer_norm_elementwise_affine": False}]
)
def test_refuses_other_opt_variants(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        parse(tmp_path, OPT, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": ...}, "vocab_size must be a positive integer, got None"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None"),
        ({"rope_theta": None}, "rope_theta must be a positive number, got None"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta must be a positive number"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": None}, "architectures must be a list"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
    ],
)
def test_malformed_values_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match=message) as error:
        parse(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff".encode("utf-8", "surrogateescape"), "[" * 100_000])
def test_config_that_is_not_an_object(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorruptModel):
        ModelConfig.from_folder(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")


def test_sliding_window_only_where_active(tmp_path: Path) -> None:
    mistral, qwen = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    assert parse(tmp_path, architectures=mistral, sliding_window=64).sliding_window == 64
    assert parse(tmp_path, architectures=mistral, sliding_window=None).sliding_window is None
    assert parse(tmp_path, architectures=mistral, sliding_window=256).sliding_window is None
    assert parse(tmp_path, architectures=qwen, sliding_window=64).sliding_window is None
    windowed = parse(
        tmp_path, architectures=qwen, sliding_window=64, use_sliding_window=True, max_window_layers=0
    )
    assert windowed.sliding_window == 64
    assert parse(tmp_path, sliding_window=64).sliding_window is None


def test_generation_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults()
    text = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [5, 3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(text))
    defaults = GenerationDefaults.from_folder(tmp_path)
    assert defaults == GenerationDefaults(0.6, 0.9, 20, None, 1.1, (5, 3))
    assert end_token_ids(parse(tmp_path), defaults) == (2, 3, 5, 7)
    (tmp_path / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(CorruptModel, match=r"top_p must be a number in \[0, 1\], got 1.5"):
        GenerationDefaults.from_folder(tmp_path)


def test_end_tokens_outside_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 128, 9223372036854775808]}')
    config, defaults = parse(tmp_path, eos_token_id=[2, 777]), GenerationDefaults.from_folder(tmp_path)
    assert end_token_ids(config, defaults) == (2, 3)
    assert "vocabulary of 128: 128, 777, 9223372036854775808;" in caplog.text
    caplog.clear()
    assert end_token_ids(parse(tmp_path, eos_token_id=127), GenerationDefaults()) == (127,)
    assert caplog.text == ""


def test_absent_token_ids_take_the_architecture_s_defaults(tmp_path: Path) -> None:
    assert parse(tmp_path, eos_token_id=...).eos_token_ids == (2,)
    assert parse(tmp_path, eos_token_id=None).eos_token_ids == ()
    assert parse(tmp_path, architectures=["Qwen2ForCausalLM"], eos_token_id=...).eos_token_ids == ()
    assert parse(tmp_path, eos_token_id=-1).eos_token_ids == ()


def test_imports_no_torch() -> None:
    code = (
        "import backfill.models.generation_config, backfill.models.resolve, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
