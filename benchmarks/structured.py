"""What schemas cost a batch: tokens/s of requests that decode together, in this process.

Without a schema, with one, and with one each, in turns in one run. Schemas are compiled before.

Usage: structured.py MODEL_DIR [--num-requests 64] [--output-len 96] [--rounds 3] [--compact] [--threads N].
--compact: without whitespace, so that more tokens are forced. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from in_process import restart_in_engine_environment

from backfill.core.clock import WallClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.request import FinishReason, Request, RequestId
from backfill.core.sampling import SamplingParams
from backfill.core.structured import StructuredOutputsParams
from backfill.engine.engine import Engine
from backfill.execution.create import create_torch_executor
from backfill.execution.torch_executor import TorchExecutor

_INPUT_LEN = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compact", action="store_true")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    restart_in_engine_environment()
    executor = create_torch_executor(EngineConfig(model_dir=args.model_dir, kv_gib=1.0, threads=args.threads))
    print(json.dumps(throughput(executor, args.num_requests, args.output_len, args.rounds, args.compact)))


def throughput(
    executor: TorchExecutor, num_requests: int, output_len: int, num_rounds: int, compact: bool
) -> dict[str, float]:
    """Medians over the rounds: tokens/s without schemas, and with them as a share of that of the round."""
    forms: dict[str, list[StructuredOutputsParams | None]] = {
        "unconstrained": [None] * num_requests,
        "one schema": [form_of(0, compact)] * num_requests,
        "a schema each": [form_of(number, compact) for number in range(num_requests)],
    }
    assert executor.grammars is not None
    for form in set(forms["a schema each"]):
        assert form is not None
        executor.grammars.compile(form).result()
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds + 1):
        rates = {}
        for name, structured in forms.items():
            requests = [
                _request(f"{number} {name} {index}", output_len, each)
                for index, each in enumerate(structured)
            ]
            seconds = _run(executor, requests)
            assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
            rates[name] = num_requests * output_len / seconds
        print({name: round(rate) for name, rate in rates.items()}, flush=True)
        rounds.append(rates)
    measured = rounds[1:]  # the first warms up
    shares = {
        name: statistics.median(each[name] / each["unconstrained"] for each in measured)
        for name in forms
        if name != "unconstrained"
    }
    return {"unconstrained": statistics.median(each["unconstrained"] for each in measured), **shares}


def form_of(number: int, compact: bool) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=record_schema(number), disable_any_whitespace=compact)


def record_schema(number: int) -> dict[str, Any]:
    """Records with long keys, as extraction has them; no output of a few hundred tokens completes it."""
    record = {
        "type": "object",
        "properties": {
            f"customer_identification_{number}": {"type": "integer"},
            "date_of_last_purchase": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            "preferred_product_category": {"enum": ["garden", "kitchen", "office"]},
            "comment": {"type": "string", "maxLength": 80},
        },
    }
    record |= {"required": list(record["properties"]), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 100}


def _request(name: str, max_tokens: int, structured: StructuredOutputsParams | None) -> Request:
    prompt = random.Random(name)
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=[prompt.randrange(1000, 40000) for _ in range(_INPUT_LEN)],
        sampling=SamplingParams(
            max_tokens=max_tokens, seed=0, structured_outputs=structured, ignore_eos=True
        ),
    )


def _run(executor: TorchExecutor, requests: Sequence[Request]) -> float:
    """Seconds until all have ended."""
    engine = Engine(SchedulerConfig(max_num_seqs=64), executor, WallClock())
    for request in requests:
        refusal = engine.add(request)
        assert refusal is None, refusal
    began = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - began
    engine.step()  # drops the last ones
    return seconds


if __name__ == "__main__":
    main()
