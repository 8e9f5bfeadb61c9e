"""An engine in an actor of Ray, through which batches of rows go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pyarrow as pa

from backfill.core.errors import BackfillError, InvalidRequest, RequestLost
from backfill.core.sampling import RequestOutputKind, SamplingParams
from backfill.llm.async_llm import AsyncLLM
from backfill.llm.outputs import RequestOutput

INPUTS = ("messages", "prompt", "prompt_token_ids")
ERROR_COLUMN = "__inference_error__"
_COLUMNS = {
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int64()),
    "finish_reason": pa.string(),
    "num_input_tokens": pa.int64(),
    "num_generated_tokens": pa.int64(),
    "num_cached_tokens": pa.int64(),
    "time_taken_llm": pa.float64(),
}
_MAX_RUNS = 3  # of a row whose engine dies under it


class _OfflineLLM(AsyncLLM):
    """Nobody waits for the next token of a row."""

    _is_offline = True


class BackfillEngine:
    """Serves the rows of each batch at once, as offline requests. For ``Dataset.map_batches``.

    Args:
        llm_keywords: of ``AsyncLLM``.
        continues: errors of rows become a column; otherwise the first one is raised.
    """

    def __init__(self, llm_keywords: Mapping[str, Any], continues: bool) -> None:
        self._llm = _OfflineLLM(**llm_keywords)
        self._continues = continues

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield the batch with the columns that are generated, its rows in their order.

        Raises: InvalidRequest for a row that can never be served, RequestLost if the engine died again and
            again; with ``continues`` neither.
        """
        names = [name for name in (*INPUTS, "sampling_params") if name in batch.column_names]
        rows = batch.select(names).to_pylist()
        if not any(name in INPUTS for name in names):
            raise InvalidRequest(
                f"Rows need one of the columns {', '.join(INPUTS)}; they have "
                f"{', '.join(batch.column_names) or 'none'}.",
                param="messages",
            )
        results = await asyncio.gather(*map(self._result_of, rows))
        for name, kind in _COLUMNS.items():
            batch = _with_column(batch, name, pa.array([each.get(name) for each in results], kind))
        if self._continues:
            errors = [each.get(ERROR_COLUMN, "") for each in results]
            batch = _with_column(batch, ERROR_COLUMN, pa.array(errors, pa.string()))
        yield batch

    async def _result_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Generated columns of a row, or its error."""
        began_s = time.monotonic()
        try:
            output = await self._output_of(row)
        except BackfillError as error:
            if not self._continues:
                raise
            return {ERROR_COLUMN: f"{type(error).__name__}: {error}"}
        first = output.outputs[0]
        return {
            "generated_text": first.text,
            "generated_tokens": first.token_ids,
            "finish_reason": first.finish_reason,
            "num_input_tokens": len(output.prompt_token_ids),
            "num_generated_tokens": len(first.token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "time_taken_llm": time.monotonic() - began_s,
        }

    async def _output_of(self, row: Mapping[str, Any]) -> RequestOutput:
        params = await self._params_of(row.get("sampling_params"))
        for run in range(1, _MAX_RUNS + 1):
            try:
                return await self._last(row, params)
            except RequestLost:
                if run == _MAX_RUNS:
                    raise
        raise AssertionError("the last run returns or raises")

    async def _last(self, row: Mapping[str, Any], params: SamplingParams) -> RequestOutput:
        given = {name: row[name] for name in INPUTS if row.get(name) is not None}
        if len(given) != 1:
            raise InvalidRequest(
                f"A row needs exactly one of {', '.join(INPUTS)}, got {', '.join(given) or 'none'}.",
                param="messages",
            )
        messages = given.get("messages")
        if messages is not None:
            outputs = self._llm.chat(_without_nulls(messages), params, service_class="offline")
        else:
            prompt = given.get("prompt", given.get("prompt_token_ids"))
            outputs = self._llm.generate(prompt, params, service_class="offline")  # type: ignore[arg-type]
        *_, last = [output async for output in outputs]
        assert last.finished
        return last

    async def _params_of(self, given: Mapping[str, Any] | None) -> SamplingParams:
        """Sampling of a row; without any the model's recommendation.

        A table has the union of all rows' fields, with null for what a row does not have.
        """
        if given is None:
            return await self._llm.get_default_sampling_params()
        fields = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**{**fields, "output_kind": RequestOutputKind.FINAL_ONLY})
        except TypeError as error:
            raise InvalidRequest(f"sampling_params: {error}", param="sampling_params") from None


def _without_nulls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if value is not None} for each in messages]


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)
