"""Bodies and parameters of the Files and Batches API, and their limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from backfill.core.errors import RequestError
from backfill.protocol.generation import GenerationEndpoint
from backfill.protocol.parsing import StrictModel, told

BATCH_ENDPOINTS: tuple[str, ...] = get_args(GenerationEndpoint)
UPLOAD_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
FILE_PURPOSES = (*UPLOAD_PURPOSES, "batch_output")
DEFAULT_EXPIRY_ANCHOR = "created_at"

MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 24 * 3600
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_FILENAME_CHARS = 255

_UNIT_S = {"m": 60, "h": 3600, "d": 24 * 3600}
_MAX_WINDOW_S = 365 * 24 * 3600
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([mhd])", re.ASCII)
_DEFAULT_FILENAME = "upload"  # OpenAI's client gives this name to bytes without one


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=MAX_METADATA_PAIRS),
]


class ExpiresAfter(BaseModel):
    model_config = StrictModel
    anchor: Literal["created_at"]
    seconds: Annotated[int, told(minimum=MIN_EXPIRY_S, maximum=MAX_EXPIRY_S)]


class CreateBatchRequest(BaseModel):
    """Body of ``POST /v1/batches``. Unknown fields are kept, to be named."""

    model_config = ConfigDict(strict=True, extra="allow")
    input_file_id: str
    endpoint: GenerationEndpoint
    completion_window: Annotated[str, told(pattern="^([1-9][0-9]{0,5}m|[1-9][0-9]{0,3}h|[1-9][0-9]{0,2}d)$")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self) -> None:
        """Raise RequestError naming the first field that is not allowed."""
        parse_window_s(self.completion_window)
        if self.output_expires_after is not None:
            check_expiry_s(self.output_expires_after.seconds, "output_expires_after")


def parse_window_s(window: str) -> int:
    """Seconds of a completion window such as ``24h``, ``30m`` or ``3d``. Raises: RequestError."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise RequestError(
            f"completion_window must be a number of minutes, hours or days of at most a year, "
            f"such as '24h', '30m' or '3d', got {window[:40]!r}.",
            param="completion_window",
        )
    return seconds


def check_expiry_s(seconds: int, param: str) -> None:
    """Raise RequestError unless files may expire after this time."""
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise RequestError(
            f"{param}.seconds must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}, got {seconds}.", param=param
        )


def check_purpose(purpose: str) -> None:
    """Raise RequestError unless uploads may have this purpose."""
    if purpose not in UPLOAD_PURPOSES:
        raise RequestError(
            f"purpose must be one of {', '.join(UPLOAD_PURPOSES)}, got {purpose!r}.", param="purpose"
        )


def clean_filename(filename: str, purpose: str) -> str:
    """The client's filename without folders. It is only ever shown, never used as a path.

    Raises: RequestError for a name that is too long or not printable, and for a batch's that does not end in
        .jsonl.
    """
    name = re.split(r"[/\\]", filename)[-1] or _DEFAULT_FILENAME
    if not name.isprintable() or len(name) > MAX_FILENAME_CHARS:
        raise RequestError(
            f"The filename must be at most {MAX_FILENAME_CHARS} printable characters.", param="file"
        )
    if purpose == "batch" and "." in name and not name.lower().endswith(".jsonl"):
        raise RequestError("Invalid file format for Batch API. Must be .jsonl", param="file")
    return name
