"""Unchanged clients on a server of ours: what they send is understood, and what they get they can read.

    clients.py --python CLIENTS_ENV/bin/python

The environment has some of `openai`, `langchain-openai`, `litellm` with `mcp`, `instructor`, and
`lm-eval[api,hf]`; those that are missing are named. Each line has a client, its version, what was checked,
and ok or what went wrong; the exit status is 1 if anything did. The model is small, so
the grammar makes it call: what it says is not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
QUESTION: list[Any] = [{"role": "user", "content": "Describe a fruit, please."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "yellow"]}, "sour": {"type": "boolean"}},
    "required": ["colour", "sour"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "describe", "description": "Says it.", "parameters": SCHEMA}}
]
NAMED: Any = {"type": "function", "function": {"name": "describe"}}
MAX_TOKENS = 200
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would download one

Check = Callable[[str], None]
CHECKS: dict[str, list[Check]] = {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="interpreter of the clients' environment")
    parser.add_argument("--url", help="of a server that runs; the clients are those of this interpreter")
    args = parser.parse_args()
    if args.url:
        raise SystemExit(run_checks(args.url))
    if args.python is None:
        parser.error("give --python, or --url")
    from served import served

    from backfill.models.resolve import DEFAULT_MODEL, resolve_model

    environment = {**os.environ, **ENVIRONMENT, "LM_EVAL_TOKENIZER": str(resolve_model(DEFAULT_MODEL))}
    with served("--kv-gib", "0.5", "--max-model-len", "2048", "--tool-call-parser", "hermes") as port:
        command = [args.python, __file__, "--url", f"http://127.0.0.1:{port}/v1"]
        status = subprocess.run(command, env=environment, check=False).returncode
    raise SystemExit(status)


def run_checks(url: str) -> int:
    """Prints a line for each check. Returns: 1 if one failed."""
    status = 0
    for package, checks in CHECKS.items():
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            print(f"{package:17} is not installed")
            continue
        for check in checks:
            try:
                check(url)
                outcome = "ok"
            except Exception as error:  # whatever a client raises
                status, outcome = 1, f"FAILED: {type(error).__name__}: {error}"[:400]
            print(f"{package:17} {version(package):9} {check.__doc__:74} {outcome}", flush=True)
    return status


def checks(package: str) -> Callable[[Check], Check]:
    """A check of this client; its docstring says of what."""

    def add(check: Check) -> Check:
        CHECKS.setdefault(package, []).append(check)
        return check

    return add


def expect(condition: object, got: object) -> None:
    if not condition:
        raise AssertionError(f"got {got!r}")


def expect_fruit(arguments: Any) -> None:
    fruit = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(fruit) == {"colour", "sour"} and isinstance(fruit["sour"], bool), arguments)


def fruit_model() -> Any:
    from typing import Literal

    from pydantic import ConfigDict, create_model

    kind: Any = Literal["red", "green", "yellow"]
    # Else the schema allows more keys, and a small model writes them until max_tokens.
    closed = ConfigDict(extra="forbid")
    return create_model("Fruit", colour=(kind, ...), sour=(bool, ...), __config__=closed)


def openai_client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", max_retries=0)


@checks("openai")
def parse(url: str) -> None:
    """chat.completions.parse with a pydantic model"""
    fruit = fruit_model()
    answer = openai_client(url).chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=fruit, max_tokens=MAX_TOKENS
    )
    expect(isinstance(answer.choices[0].message.parsed, fruit), answer)


@checks("openai")
def forced_tools(url: str) -> None:
    """tools with tool_choice required and named, two choices"""
    for choice in ("required", NAMED):
        answer = openai_client(url).chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=choice, n=2,
            parallel_tool_calls=False, max_tokens=MAX_TOKENS,
        )  # fmt: skip
        for each in answer.choices:
            expect(each.finish_reason == "tool_calls" and each.message.content is None, each)
            expect_fruit(each.message.tool_calls[0].function.arguments)


@checks("openai")
def streamed_tools(url: str) -> None:
    """tools in a stream: events of the arguments, and the whole"""
    request = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": NAMED}
    with openai_client(url).chat.completions.stream(**request, max_tokens=MAX_TOKENS) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    expect(len(events) > 1 and final.finish_reason == "tool_calls", final)
    expect_fruit(final.message.tool_calls[0].function.arguments)


@checks("openai")
def conversation(url: str) -> None:
    """tools with tool_choice auto, and a tool's answer in the conversation"""
    call = {"id": "c", "type": "function", "function": {"name": "describe", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    answer = openai_client(url).chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, max_tokens=8
    )
    expect(answer.choices[0].message.content, answer)


@checks("openai")
def logprobs(url: str) -> None:
    """logprobs with top_logprobs, whole and in a stream"""
    request = {"model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    create = openai_client(url).chat.completions.create
    whole = create(**request, temperature=0).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in create(**request, temperature=0, stream=True)]
    streamed = [each for choice in chunks if choice.logprobs for each in choice.logprobs.content]
    expect([each.token for each in streamed] == [each.token for each in whole], streamed)
    expect(all(len(each.top_logprobs) == 3 for each in whole), whole)


def langchain_model(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=MAX_TOKENS)


@checks("langchain-openai")
def structured_output(url: str) -> None:
    """with_structured_output by json_schema and by function_calling"""
    fruit = fruit_model()
    for method in ("json_schema", "function_calling"):
        answer = langchain_model(url).with_structured_output(fruit, method=method).invoke(QUESTION)
        expect(isinstance(answer, fruit), answer)


@checks("langchain-openai")
def bound_tools(url: str) -> None:
    """bind_tools, forced: invoke, stream and ainvoke"""
    model = langchain_model(url).bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False)
    total = None
    for chunk in model.stream(QUESTION):
        total = chunk if total is None else total + chunk
    for answer in (model.invoke(QUESTION), total, asyncio.run(model.ainvoke(QUESTION))):
        expect(answer is not None and len(answer.tool_calls) == 1, answer)
        expect(answer.tool_calls[0]["name"] == "describe" and answer.tool_calls[0]["id"], answer)
        expect_fruit(answer.tool_calls[0]["args"])


@checks("langchain-openai")
def free_tools(url: str) -> None:
    """bind_tools, free, with a tool's message"""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    call = {"name": "describe", "args": {"colour": "red", "sour": False}, "id": "c"}
    messages = [
        HumanMessage("A fruit?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("done", tool_call_id="c"),
    ]
    answer = langchain_model(url).bind(max_tokens=8).bind_tools(TOOLS).invoke(messages)
    expect(answer.content, answer)


@checks("litellm")
def litellm_tools(url: str) -> None:
    """completion with tools, whole and in a stream, and a response_format"""
    import litellm

    request = {
        "model": f"openai/{MODEL}",  # hosted_vllm would drop additionalProperties from tools
        "api_base": url,
        "api_key": "none",
        "messages": QUESTION,
        "max_tokens": MAX_TOKENS,
    }
    tools = {**request, "tools": TOOLS, "tool_choice": NAMED}
    whole = litellm.completion(**tools)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**tools, stream=True)))
    for answer in (whole, streamed):
        expect(answer.choices[0].finish_reason == "tool_calls", answer)
        expect_fruit(answer.choices[0].message.tool_calls[0].function.arguments)
    schema = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA, "strict": True}}
    expect_fruit(litellm.completion(**request, response_format=schema).choices[0].message.content)


@checks("instructor")
def instructor_modes(url: str) -> None:
    """response_model by tools and by JSON schema, whole and partial"""
    import instructor

    fruit = fruit_model()
    request = {"model": MODEL, "messages": QUESTION, "max_tokens": MAX_TOKENS, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(url), mode=mode)
        answer = client.chat.completions.create(response_model=fruit, **request)
        expect(isinstance(answer, fruit), answer)
        *_, last = client.chat.completions.create_partial(response_model=fruit, **request)
        expect(last.colour in ("red", "green", "yellow"), last)


@checks("lm-eval")
def local_completions(url: str) -> None:
    """local-completions: loglikelihood and generate_until (figures: scoring.py)"""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{url}/completions", model=MODEL, tokenizer=os.environ.get("LM_EVAL_TOKENIZER", MODEL)
    )
    likelihoods = [
        model.loglikelihood([Instance("loglikelihood", {}, ("One, two, three,", text), 0)])[0][0]
        for text in (" four", " blue")
    ]
    expect(0 > likelihoods[0] > likelihoods[1], likelihoods)
    request = ("One, two, three,", {"until": ["\n"], "max_gen_toks": 8})
    expect(model.generate_until([Instance("generate_until", {}, request, 0)])[0].strip(), "nothing")


if __name__ == "__main__":
    main()
