"""``backfill bench throughput``: the engine's speed in this process, without HTTP."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from backfill.bench.throughput import ThroughputOptions, measure
from backfill.cli.command import VARIABLES, command
from backfill.cli.interrupts import LOADING, interruptible
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.engine.environment import engine_environment, restart_with
from backfill.engine.options import ModelOptions, check_engine


def throughput(
    model: ModelOptions,
    load: ThroughputOptions,
    engine: EngineConfig = EngineConfig(kv_gib=1.0, scheduler=SchedulerConfig(max_num_seqs=64)),  # noqa: B008  # frozen
) -> None:
    """Time a batch, one stream and a first token. The last line of output is a JSON object.

    total_tok_s counts prompt and output tokens of the batch, output_tok_s its output tokens;
    stream_tok_s is one request alone, prefill included; first_token_s is one prompt's time to its
    first token, the median of first_token_samples_s.
    """
    restart_with(engine_environment(os.environ))
    from backfill.models.resolve import resolve_model

    with interruptible(LOADING):
        folder = resolve_model(model.model)
    config = replace(engine, model_dir=str(folder))
    check_engine(config, needs_tokenizer=False)
    with interruptible():
        figures = measure(config, load)
    for name, figure in figures.items():
        if not isinstance(figure, list):
            print(f"{name:22s} {figure:10.3f}")
    print(json.dumps({"engine": "backfill", **figures}))


app = command(
    throughput,
    {
        "Model": "model dtype quantization load_format",
        "Load": "num_prompts input_len output_len stream_len first_token_samples seed",
        "Engine": "tensor_parallel_size pipeline_parallel_size executor threads max_num_seqs "
        "max_num_batched_tokens kv_gib kv_dtype",
    },
    positional="model",
    variables=VARIABLES,
    prefix="BACKFILL_BENCH_",
)
