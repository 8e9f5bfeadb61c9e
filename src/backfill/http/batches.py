"""The routes of ``/v1/batches``."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from backfill.http.bodies import json_body, owner_of, query_limit
from backfill.http.files import HasJobs, json_list
from backfill.http.openapi import takes_json
from backfill.http.streaming import WARNING_HEADER
from backfill.jobs.outlook import Outlook
from backfill.jobs.records import BatchRecord, TokenUsage
from backfill.preparation.lines import LineError
from backfill.protocol.batches import CreateBatchRequest, parse_window_s
from backfill.protocol.body_check import unknown_fields_warning
from backfill.protocol.parsing import parse_body
from backfill.protocol.shapes import Json

_DEFAULT_PAGE, _MAX_PAGE = 20, 100
_MAX_BODY_BYTES = 64 << 10


def build_batches_router(state: HasJobs) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/batches", openapi_extra=takes_json(CreateBatchRequest))
    async def create(request: Request, response: Response) -> Json:
        """Create a batch from an uploaded file of requests."""
        async with json_body(request, state.bodies, _MAX_BODY_BYTES) as held:
            body = parse_body(CreateBatchRequest, held.raw)
        body.check()
        expires_after = body.output_expires_after
        jobs = state.ready_jobs()
        batch = await jobs.create_batch(
            owner_of(request),
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            completion_window_s=parse_window_s(body.completion_window),
            metadata=body.metadata,
            output_expires_after_s=None if expires_after is None else expires_after.seconds,
        )
        if unknown := list(body.model_extra or ()):
            warning = unknown_fields_warning(unknown, CreateBatchRequest.model_fields)
            response.headers[WARNING_HEADER] = warning
        return batch_body(batch, jobs.outlook)

    @router.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        """List batches, the newest first."""
        jobs = state.ready_jobs()
        page = await jobs.list_batches(
            owner_of(request),
            limit=query_limit(request, default=_DEFAULT_PAGE, maximum=_MAX_PAGE),
            after=request.query_params.get("after"),
        )
        return json_list([batch_body(batch, jobs.outlook) for batch in page.items], has_more=page.has_more)

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> Json:
        """Retrieve a batch."""
        jobs = state.ready_jobs()
        return batch_body(await jobs.get_batch(owner_of(request), batch_id), jobs.outlook)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Json:
        """Cancel a batch; results of completed lines are kept."""
        # The body is not read: the official client sends the Content-Type of JSON and no body.
        jobs = state.ready_jobs()
        return batch_body(await jobs.cancel_batch(owner_of(request), batch_id), jobs.outlook)

    return router


def batch_body(batch: BatchRecord, outlook: Outlook) -> Json:
    """OpenAI's Batch object, and ``warning``; times of events that have not happened are null."""
    warnings = [*(error.message for error in batch.errors if error.is_warning), outlook.warning(batch.id)]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors_body([error for error in batch.errors if not error.is_warning]),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": asdict(batch.request_counts),
        "usage": _usage_body(batch.usage),
        "metadata": batch.user_metadata,
        "warning": " ".join(filter(None, warnings)) or None,
    }


def _errors_body(errors: list[LineError]) -> Json | None:
    if not errors:
        return None
    return {"object": "list", "data": [asdict(error) for error in errors]}


def _usage_body(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
