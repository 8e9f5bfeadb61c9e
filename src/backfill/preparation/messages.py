"""Messages between the server and the preparation process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from backfill.core.errors import BackfillError, RequestError
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.preparation.lines import BadLine, BatchLine, LineError
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import EngineFacts, RequestContext, RequestPreparer, ServedModel, TextEndpoint
from backfill.protocol.response_size import MAX_RESPONSE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationSetup:
    """What the process needs to start."""

    model: ServedModel
    chat_template: str | None = None
    uses_generation_config: bool = True
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    is_strict: bool = False
    log_level: str = "INFO"

    def load_tokenizer(self) -> Tokenizer:
        """Raises: ModelError."""
        return Tokenizer.from_folder(self.model.folder, chat_template=self.chat_template)

    def create_preparer(self, tokenizer: Tokenizer) -> RequestPreparer:
        """Raises: ModelError where the model's defaults cannot be read."""
        from_model = self.uses_generation_config
        defaults = GenerationDefaults.from_folder(self.model.folder) if from_model else GenerationDefaults()
        return RequestPreparer(
            self.model,
            tokenizer,
            defaults,
            max_response_tokens=self.max_response_tokens,
            is_strict=self.is_strict,
        )

    @property
    def line_check(self) -> BodyCheck:
        """Checks lines before there is a tokenizer or an engine."""
        return BodyCheck(is_strict=self.is_strict, max_response_tokens=self.max_response_tokens)


class InputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an input file may hold.

    Attributes:
        endpoint: every line's url must be this; None allows every batch endpoint.
        model_names: names that lines may use for the model; ``model_hint`` is added to the error for another.
    """

    endpoint: str | None
    model_names: tuple[str, ...]
    max_lines: int
    max_line_bytes: int
    model_hint: str = ""


class InputReport(msgspec.Struct, tag=True, frozen=True):
    """The check of an input file.

    Attributes:
        total: lines in the file.
        model: the model that the lines name; None if none does.
        warning: how many lines have fields without effect, and which; None if there are none.
    """

    total: int
    model: str | None
    errors: list[LineError]
    warning: str | None = None


class LineSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines of a file to read.

    Attributes:
        done: a bit for each line to skip: line i is bit i % 8 of byte i // 8.
        names_only: do not prepare the bodies.
        complete_by_s: end of the lines' completion window, on the monotonic clock.
        owner: of their batch.
    """

    path: str
    max_line_bytes: int
    done: bytes = b""
    names_only: bool = False
    complete_by_s: float | None = None
    owner: str = ""


class Position(msgspec.Struct, frozen=True):
    """Where reading continues: after line ``number``, at byte ``offset``."""

    number: int = 0
    offset: int = 0


START = Position()


class PrepareBody(msgspec.Struct, tag=True, frozen=True):
    """Its result is a Generation."""

    endpoint: GenerationEndpoint
    body: bytes
    context: RequestContext


class AnswerBody(msgspec.Struct, tag=True, frozen=True):
    """Its result is a JSON body."""

    endpoint: TextEndpoint
    body: bytes


class CheckInput(msgspec.Struct, tag=True, frozen=True):
    """Its result is an InputReport. A CancelCheck ends it early."""

    path: str
    limits: InputLimits


class ReadLines(msgspec.Struct, tag=True, frozen=True):
    """Its result is LinesRead, with at least one line unless the file has no more."""

    reader_id: int
    max_lines: int


Work = PrepareBody | AnswerBody | CheckInput | ReadLines


class Job(msgspec.Struct, tag=True, frozen=True):
    """Server to process. Answered by JobBegun, then JobDone."""

    job_id: int
    work: Work


class Configure(msgspec.Struct, tag=True, frozen=True):
    """An engine is ready. Comes before the first body or line to prepare."""

    facts: EngineFacts


class CancelCheck(msgspec.Struct, tag=True, frozen=True):
    job_id: int


class OpenLines(msgspec.Struct, tag=True, frozen=True):
    reader_id: int
    selection: LineSelection
    position: Position


class CloseLines(msgspec.Struct, tag=True, frozen=True):
    reader_id: int


ToPreparation = Job | Configure | CancelCheck | OpenLines | CloseLines


class LinesRead(msgspec.Struct, tag=True, frozen=True):
    lines: list[BatchLine]
    position: Position


class RequestFailure(msgspec.Struct, tag=True, frozen=True):
    message: str
    param: str | None
    code: str | None


class LineFailure(msgspec.Struct, tag=True, frozen=True):
    error: LineError


class FileFailure(msgspec.Struct, tag=True, frozen=True):
    number: int | None
    reason: str
    filename: str | None


class Bug(msgspec.Struct, tag=True, frozen=True):
    message: str


Failure = RequestFailure | LineFailure | FileFailure | Bug
Result = Generation | bytes | InputReport | LinesRead


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The process is ready, or cannot start for the reason in ``error``."""

    error: str | None = None


class JobBegun(msgspec.Struct, tag=True, frozen=True):
    """A thread works on the job now. If the process ends before JobDone, the job may be the reason."""

    job_id: int


class JobDone(msgspec.Struct, tag=True, frozen=True):
    job_id: int
    result: Result | Failure


FromPreparation = Loaded | JobBegun | JobDone


def failure_of(error: Exception) -> Failure:
    """An exception of a job, as a message."""
    match error:
        case RequestError():
            return RequestFailure(str(error), error.param, error.code)
        case BadLine():
            return LineFailure(error.error)
        case OSError():
            filename = None if error.filename is None else str(Path(str(error.filename)))
            return FileFailure(error.errno, error.strerror or str(error), filename)
        case _:
            return Bug(f"{type(error).__name__}: {error}")


def exception_of(failure: Failure) -> Exception:
    """The exception again, for the caller of the job."""
    match failure:
        case RequestFailure(message, param, code):
            return RequestError(message, param=param, code=code)
        case LineFailure(error):
            return BadLine(error.code, error.message, error.line or 0, error.param)
        case FileFailure(number, reason, filename):
            return OSError(number, reason, filename) if number is not None else OSError(reason)
        case Bug():
            return BackfillError("The server had an error while it prepared the request.")
