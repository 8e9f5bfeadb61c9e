from __future__ import annotations

import math
from typing import Any

import pytest

from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError, RequestError
from backfill.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 11}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"num_logprobs": 21}, "top_logprobs"),
    ],
)
def test_each_field_out_of_range_is_named(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**{"max_tokens": 10, **values}).validate(vocab_size=50)
    assert caught.value.param == param


def test_the_edges_of_every_range_are_allowed() -> None:
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=2.0,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=-(2**63),
        stop_token_ids=(49,),
        logit_bias=((0, -100.0),),
        num_logprobs=20,
    ).validate(vocab_size=50)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (EngineConfig(model_dir="", block_size=12), "`block_size`"),
        (EngineConfig(model_dir="", kv_gib=0), "`kv_gib`"),
        (EngineConfig(model_dir="", gpu_memory_utilization=0.0), "`gpu_memory_utilization`"),
        (EngineConfig(model_dir="", max_model_len=0), "`max_model_len`"),
        (EngineConfig(model_dir="", threads=0), "`threads`"),
        (EngineConfig(model_dir="", scheduler=SchedulerConfig(max_num_seqs=0)), "`max_num_seqs`"),
        (EngineConfig(model_dir="", scheduler=SchedulerConfig(ttft_slo=0.0)), "`ttft_slo`"),
        (EngineConfig(model_dir="", scheduler=SchedulerConfig(tpot_slo=float("nan"))), "`tpot_slo`"),
        (EngineConfig(model_dir="", scheduler=SchedulerConfig(promote_before=-1.0)), "`promote_before`"),
        (
            EngineConfig(model_dir="", scheduler=SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8)),
            "`max_num_batched_tokens`",
        ),
        (
            EngineConfig(model_dir="", scheduler=SchedulerConfig(max_prefill_chunk_tokens=0)),
            "`max_prefill_chunk_tokens`",
        ),
    ],
)
def test_each_option_out_of_range_is_named(config: EngineConfig, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        config.validate()
