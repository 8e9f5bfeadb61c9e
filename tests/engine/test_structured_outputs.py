"""Outputs follow their grammars, whatever else is served, preempted or failing beside them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from backfill.core.clock import WallClock
from backfill.core.config import SchedulerConfig
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.structured import StructuredOutputsParams
from backfill.engine.engine import Engine
from backfill.engine.messages import TokenOutput
from backfill.execution import grammar_masks
from backfill.execution.create import create_torch_executor
from backfill.execution.stage import Stage
from backfill.execution.torch_executor import TorchExecutor
from backfill.generation.tokenizer import Tokenizer
from tests.builders import make_request
from tests.engine.interruptions import (
    Interruptions,
    WithBlocks,
    before_layers,
    drain,
    stopping_engine,
    tokens_of,
    undisturbed,
)
from tests.engine.schemas import random_schema
from tests.execution.tiny import tiny_config
from tests.integrity import check_scheduler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Run:
    """Requests on one engine with a random model."""

    def __init__(self, executor: TorchExecutor, tokenizer: Tokenizer, **limits: Any) -> None:
        self.tokenizer = tokenizer
        num_blocks = limits.pop("num_blocks", executor.info.num_blocks)
        self.engine = Engine(SchedulerConfig(**limits), WithBlocks(executor, num_blocks), WallClock())
        self.outputs: dict[RequestId, list[TokenOutput]] = {}
        self.num_steps = 0

    def text(self, structured: dict[str, Any], **sampling: Any) -> str:
        request = make_request(structured_outputs=StructuredOutputsParams(**structured), **sampling)
        return self.texts([request])[0]

    def texts(self, requests: Sequence[Request]) -> list[str]:
        for request in requests:
            assert self.engine.add(request) is None
        while self.engine.has_unfinished:
            self.num_steps += 1
            for output in self.engine.step():
                self.outputs.setdefault(output.request_id, []).append(output)
            check_scheduler(self.engine.scheduler)
        self.engine.step()
        return [
            self.tokenizer.decode(
                [each.token_id for each in self.outputs[request.request_id] if each.token_id is not None],
                skip_special_tokens=True,
            )
            for request in requests
        ]


@pytest.fixture(scope="module")
def executor(small_model: Path) -> Iterator[TorchExecutor]:
    executor = create_torch_executor(tiny_config(small_model, kv_gib=1 / 128, max_model_len=512))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(small_model)


@pytest.fixture
def run(executor: TorchExecutor, tokenizer: Tokenizer) -> Run:
    return Run(executor, tokenizer)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 40},
        pytest.param({"temperature": 0.0}, marks=pytest.mark.slow),
    ],
)
def test_an_output_is_what_was_asked_for(run: Run, sampling: dict[str, Any]) -> None:
    sampling["max_tokens"] = 60
    person = json.loads(run.text({"json": PERSON}, **{**sampling, "max_tokens": 300}))
    jsonschema.validate(person, PERSON)
    compact = run.text({"json": PERSON, "disable_any_whitespace": True}, **sampling)
    assert compact == json.dumps(json.loads(compact), separators=(",", ":"), ensure_ascii=False)
    assert re.fullmatch("[a-c]{3,5}-[0-9]+", run.text({"regex": "[a-c]{3,5}-[0-9]{1,4}"}, **sampling))
    choices = ["yes", "no", 'perhaps "é😀"\n']
    assert run.text({"choice": choices}, **sampling) in choices
    assert run.text({"grammar": 'start: "<" ("a" | "b")+ ">" "!"'}, **sampling)[0] == "<"
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f=1>", "schema": PERSON, "end": "</f>"}]}
    for number in re.findall("<f=1>(.*?)</f>", run.text({"structural_tag": tag}, **sampling), re.DOTALL):
        jsonschema.validate(json.loads(number), PERSON)


@pytest.mark.parametrize(("drawn", "num_schemas"), [(0, 30), pytest.param(1, 100, marks=pytest.mark.slow)])
def test_finished_outputs_of_random_schemas_are_valid(run: Run, drawn: int, num_schemas: int) -> None:
    rng = random.Random(drawn)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    requests = [
        make_request(
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=index % 2 == 0),
            temperature=1.0,
            seed=index,
            max_tokens=120,
        )
        for index, schema in enumerate(schemas)
    ]
    ends: Counter[FinishReason | None] = Counter()
    for schema, request, text in zip(schemas, requests, run.texts(requests), strict=True):
        ends[request.finish_reason] += 1
        if request.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text), schema)
    assert ends[FinishReason.ERROR] <= 0.05 * num_schemas, "refused: nothing satisfies them"
    assert ends[FinishReason.STOP] >= 0.6 * num_schemas, ends


def mixed_requests() -> list[Request]:
    json_of, words = StructuredOutputsParams(json=PERSON), StructuredOutputsParams(regex="([a-z]{4,9} ){4}")
    fields: list[dict[str, Any]] = [
        {"structured_outputs": json_of, "temperature": 1.0, "seed": 5},
        {},
        {"structured_outputs": json_of},
        {"structured_outputs": words, "temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 9},
        {"structured_outputs": StructuredOutputsParams(json_object=True), "seed": 2, "logprobs": 3},
    ]
    named = [{"request_id": f"mixed{index}", **each} for index, each in enumerate(fields)]
    return [make_request(24, max_tokens=30, **each) for each in named]


def test_an_output_depends_on_its_request_alone(executor: TorchExecutor, tokenizer: Tokenizer) -> None:
    together = Run(executor, tokenizer).texts(mixed_requests())
    alone = [Run(executor, tokenizer).texts([request])[0] for request in mixed_requests()]
    crowded = Run(executor, tokenizer, num_blocks=16, prefix_caching=False)
    preempted = mixed_requests()
    assert together == alone == crowded.texts(preempted)
    assert any(request.num_preemptions for request in preempted if request.sampling.structured_outputs)


def test_suspended_slices_change_no_output(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_model", Interruptions(executor._model))

    def jobs() -> list[Request]:
        return [replace(each, service_class=ServiceClass.OFFLINE) for each in mixed_requests()]

    expected = undisturbed(executor, served := jobs())
    monkeypatch.setattr(executor, "_stage", Stage.whole(executor.info.num_layers))
    engine, interrupted = stopping_engine(executor), jobs()
    chats = [make_request(9, 3, request_id=f"chat{number}") for number in range(5)]

    def arrive(_: int, step: int, layer: int) -> None:
        if layer == 2 and step % 4 == 3 and step // 4 < len(chats):
            engine.arrive(chats[step // 4])

    before_layers(executor, arrive)
    for request in interrupted:
        assert engine.add(request) is None
    for _ in range(40):
        engine.step()
    before_layers(executor, None)
    drain(engine, executor)
    assert tokens_of(interrupted) == expected == tokens_of(served)
    assert engine.num_stopped_steps > 1


FORM = "customer identification number: [0-9]{3}, date of the last purchase: [0-9]{2}"


def test_what_a_grammar_forces_needs_no_steps_of_its_own(
    executor: TorchExecutor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex=FORM), "temperature": 1.0}

    def run_all() -> tuple[list[str], list[TokenOutput], int]:
        run = Run(executor, tokenizer, num_blocks=16)
        requests = [
            make_request(9, most, request_id=f"r{seed}", seed=seed, **sampling)
            for seed, most in enumerate((60, 60, 7))
        ]
        texts = run.texts(requests)
        outputs = run.outputs[requests[0].request_id]
        return texts, outputs, run.num_steps

    texts, outputs, num_steps = run_all()
    monkeypatch.setattr(grammar_masks, "MAX_FORCED_TOKENS", 0)
    expected, _, most_steps = run_all()
    assert texts == expected and re.fullmatch(FORM, texts[0])
    assert num_steps < 0.7 * most_steps
    assert outputs[0].first_scheduled_at_s is not None
    assert [each.finish_reason for each in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_forced_tokens_end_at_stop_tokens_and_have_log_probabilities_if_asked(run: Run) -> None:
    token_ids = run.tokenizer.encode("customer identification number", add_special_tokens=False)
    structured = StructuredOutputsParams(regex=FORM)
    stopped = make_request(structured_outputs=structured, stop_token_ids=[token_ids[2]], max_tokens=60)
    logged = make_request(structured_outputs=structured, logprobs=1, max_tokens=60)
    run.texts([stopped, logged])
    assert stopped.output_token_ids == token_ids[:3]
    assert run.outputs[stopped.request_id][-1].stop_token_id == token_ids[2]
    assert all(each.logprobs is not None for each in run.outputs[logged.request_id])


def test_a_complete_output_can_only_end(run: Run) -> None:
    structured = StructuredOutputsParams(choice=["yes"])
    early = make_request(structured_outputs=structured, min_tokens=20, max_tokens=40)
    endless = make_request(structured_outputs=structured, ignore_eos=True, max_tokens=6)
    assert run.texts([early, endless]) == ["yes", "yes"]
    assert early.finish_reason is FinishReason.STOP
    assert len(early.output_token_ids) == 20  # end tokens, where nothing else is allowed
    assert endless.finish_reason is FinishReason.LENGTH


def test_a_stop_token_and_max_tokens_end_an_output_before_it_is_complete(run: Run) -> None:
    structured = StructuredOutputsParams(regex="[ab]{40}")
    (a_id,) = run.tokenizer.encode("a", add_special_tokens=False)
    short = make_request(structured_outputs=structured, max_tokens=2)
    to_stop: dict[str, Any] = {"allowed_token_ids": [a_id], "stop_token_ids": [a_id]}
    stopped = make_request(structured_outputs=structured, max_tokens=60, **to_stop)
    run.texts([short, stopped])
    assert (short.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert stopped.output_token_ids == [a_id]


def test_log_probabilities_are_those_among_what_is_allowed(run: Run) -> None:
    structured = StructuredOutputsParams(regex="[ab]")
    request = make_request(structured_outputs=structured, logprobs=5, temperature=1.0)
    text = run.texts([request])[0]
    first, end = [each.logprobs for each in run.outputs[request.request_id]]
    assert first is not None and end is not None
    assert {run.tokenizer.decode([token_id]) for token_id, _ in first.top} == {"a", "b"}
    assert sum(2.718281828**value for _, value in first.top) == pytest.approx(1.0)
    assert text in ("a", "b")
    assert end.logprob <= 0.0 and all(value <= 0.0 for _, value in end.top)


def test_who_has_a_grammar_that_cannot_be_used_fails_alone(run: Run) -> None:
    wrong = make_request(structured_outputs=StructuredOutputsParams(regex="[a"))
    right = make_request(structured_outputs=StructuredOutputsParams(regex="[a]"))
    assert run.texts([wrong, right])[1] == "a"
    (failure,) = run.outputs[wrong.request_id]
    assert failure.finish_reason is FinishReason.ERROR and failure.token_id is None
    assert "regular expression" in failure.message
    assert right.finish_reason is FinishReason.STOP
