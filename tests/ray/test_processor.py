"""Datasets of Ray Data through engines on a real cluster of two nodes."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from ray.cluster_utils import Cluster

from backfill import LLM, InvalidOption, InvalidRequest, SamplingParams
from backfill.ray import ProcessorConfig, build_processor, engine_actor
from backfill.ray.engine_actor import BackfillEngine
from tests.api.servers import wait_until
from tests.parallel.processes import parent

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "ray.md"
ENGINE = {"dtype": "float32", "kv_gib": 0.05}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 250}


def config_of(model: Path, **fields: Any) -> ProcessorConfig:
    return ProcessorConfig(model_source=str(model), engine_kwargs=ENGINE, **fields)


def test_rows_have_what_the_library_generates(cluster: Cluster, small_model: Path) -> None:
    """Rows of all kinds, on two engines, one on each node."""
    from ray import data

    texts = [f"The number {number} is" for number in range(24)]
    with LLM(str(small_model), threads=1, **ENGINE) as llm:
        expected = llm.generate(texts, SamplingParams(**GREEDY), use_tqdm=False)
    processor = build_processor(
        config_of(small_model, concurrency=2, batch_size=4),
        preprocess=lambda row: {**row, "prompt": row["text"], "sampling_params": GREEDY},
        postprocess=lambda row: {**row, "answer": row["generated_text"]},
    )
    dataset = data.from_items([{"text": text, "kept": {"n": n}} for n, text in enumerate(texts)])
    rows = sorted(processor(dataset.repartition(6)).take_all(), key=lambda row: row["kept"]["n"])
    assert [row["answer"] for row in rows] == [each.outputs[0].text for each in expected]
    assert [list(row["generated_tokens"]) for row in rows] == [each.outputs[0].token_ids for each in expected]
    assert {row["num_generated_tokens"] for row in rows} == {8}
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert [row["num_input_tokens"] for row in rows] == [len(each.prompt_token_ids) for each in expected]


def test_a_row_that_cannot_be_served_is_named_and_costs_no_other(cluster: Cluster, small_model: Path) -> None:
    from ray import data

    hello = [{"role": "user", "content": "Hello"}]
    items: list[dict[str, Any]] = [
        {"messages": hello, "sampling_params": GREEDY},
        {"messages": [], "sampling_params": GREEDY},
        {"messages": hello, "sampling_params": {**GREEDY, "temperature": -1.0}},
    ]
    processor = build_processor(config_of(small_model, should_continue_on_error=True))
    rows = processor(data.from_items(items).repartition(1)).take_all()
    assert [row["__inference_error__"].split(":")[0] for row in rows] == [
        "",
        "InvalidRequest",
        "InvalidRequest",
    ]
    assert "temperature" in rows[2]["__inference_error__"]
    assert [row["num_generated_tokens"] for row in rows] == [8, None, None]


@pytest.mark.anyio
async def test_by_default_a_row_that_cannot_be_served_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """To Ray, which ends the pipeline. The row reaches no engine."""
    monkeypatch.setattr(engine_actor, "_OfflineLLM", mock.Mock())
    given = ProcessorConfig(model_source="m")
    engine = BackfillEngine(given.llm_keywords, given.should_continue_on_error)
    rows = pa.Table.from_pylist([{"prompt": "Hello", "sampling_params": {"temperature": -1.0}}])
    with pytest.raises(InvalidRequest, match="temperature must be"):
        await anext(engine(rows))


def test_no_row_is_lost_when_engines_and_actors_die(cluster: Cluster, small_model: Path) -> None:
    from ray import data

    processor = build_processor(
        config_of(small_model, batch_size=4),
        preprocess=lambda row: {**row, "prompt": f"{row['id']} and", "sampling_params": LONG},
    )
    rows = iter(processor(data.range(32, override_num_blocks=8)).iter_rows())
    seen = [next(rows)["id"]]
    (engine,) = engines_of_actors()
    os.kill(engine, signal.SIGKILL)
    seen.append(next(rows)["id"])
    wait_until(lambda: engines_of_actors() not in ([], [engine]), "another engine in the same actor")
    os.kill(parent(engines_of_actors()[0]), signal.SIGKILL)
    seen += [row["id"] for row in rows]
    assert sorted(seen) == list(range(32))


def engines_of_actors() -> list[int]:
    """Processes of engines whose parent is a worker of Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if name_of(int(folder.name)) == "backfill-engine" and name_of(parent(int(folder.name))) == "ray":
                found.append(int(folder.name))
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip().partition("::")[0]


def test_the_document_prints_answers(
    cluster: Cluster, small_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With another model, which answers sooner."""
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert '"smollm2-135m-instruct"' in snippet
    snippet = snippet.replace("smollm2-135m-instruct", str(small_model))
    exec(compile(snippet, DOCUMENT.name, "exec"), {})
    assert len(capfd.readouterr().out.splitlines()) >= 8


def test_options_are_checked_before_anything_starts(small_model: Path) -> None:
    with pytest.raises(TypeError, match="did you mean kv_gib"):
        ProcessorConfig(model_source="m", engine_kwargs={"kv_gb": 1})
    with pytest.raises(InvalidOption, match="kv_gib must be"):
        ProcessorConfig(model_source="m", engine_kwargs={"kv_gib": -1.0})
    with pytest.raises(InvalidOption, match="engine_kwargs has no executor but process"):
        ProcessorConfig(model_source="m", engine_kwargs={"executor": "ray"})
    with pytest.raises(InvalidOption, match="concurrency must be"):
        ProcessorConfig(model_source="m", concurrency=(2, 1))
    with pytest.raises(InvalidOption, match="batch_size must be at least 1"):
        ProcessorConfig(model_source="m", batch_size=0)
    with pytest.raises(InvalidOption, match="model_source"):
        ProcessorConfig(model_source="")
    with pytest.raises(TypeError, match="preprocess must be a function"):
        build_processor(ProcessorConfig(model_source="m"), preprocess="row")  # type: ignore[arg-type]
