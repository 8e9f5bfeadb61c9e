"""What the server and the preparation process say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from backfill.core.errors import BackfillError, RequestError
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.preparation.lines import BadLine, BatchLine, LineError
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import EngineFacts, RequestContext, RequestPreparer, ServedModel, TextEndpoint
from backfill.protocol.requests import GenerationEndpoint
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
        """What finds faults of lines before there is a tokenizer or an engine."""
        return BodyCheck(is_strict=self.is_strict, max_response_tokens=self.max_response_tokens)


class InputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an input file may hold.

    Attributes:
        endpoint: what every line's url must be; None allows any endpoint there is.
        model_names: what lines may call the model; ``model_hint`` is told of a line that calls it otherwise.
    """

    endpoint: str | None
    model_names: tuple[str, ...]
    max_lines: int
    max_line_bytes: int
    model_hint: str = ""


class InputReport(msgspec.Struct, frozen=True):
    """What was found in an input file: how many lines, the model they name, and what is wrong.

    ``warning`` says which fields of how many lines have no effect; None where there are none.
    """

    total: int
    model: str | None
    errors: list[LineError]
    warning: str | None = None


class LineSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines of a file to read, and what for.

    Attributes:
        done: a bit for each line that is not to be read: that of line i is bit i % 8 of byte i // 8.
        names_only: the bodies are left alone.
        complete_by_s: end of the lines' completion window, on the monotonic clock.
    """

    path: str
    max_line_bytes: int
    done: bytes = b""
    names_only: bool = False
    complete_by_s: float | None = None


class Position(msgspec.Struct, frozen=True):
    """Where reading goes on: after line ``number``, at byte ``offset``."""

    number: int = 0
    offset: int = 0


START = Position()


class Configure(msgspec.Struct, tag=True, frozen=True):
    """An engine is ready. Comes before the first body or line to prepare."""

    facts: EngineFacts


class PrepareBody(msgspec.Struct, tag=True, frozen=True):
    """Answered by Prepared."""

    job_id: int
    endpoint: GenerationEndpoint
    body: bytes
    context: RequestContext


class AnswerBody(msgspec.Struct, tag=True, frozen=True):
    """Answered by Answered."""

    job_id: int
    endpoint: TextEndpoint
    body: bytes


class CheckInput(msgspec.Struct, tag=True, frozen=True):
    """Answered by InputChecked, unless a CancelCheck comes first."""

    job_id: int
    path: str
    limits: InputLimits


class CancelCheck(msgspec.Struct, tag=True, frozen=True):
    job_id: int


class OpenLines(msgspec.Struct, tag=True, frozen=True):
    reader_id: int
    selection: LineSelection
    position: Position


class ReadLines(msgspec.Struct, tag=True, frozen=True):
    """Answered by LinesRead, with at least one line unless the file has no more."""

    job_id: int
    reader_id: int
    max_lines: int


class CloseLines(msgspec.Struct, tag=True, frozen=True):
    reader_id: int


Job = PrepareBody | AnswerBody | CheckInput | ReadLines
ToPreparation = Job | Configure | CancelCheck | OpenLines | CloseLines


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The process is ready; ``fault`` is why it never will be."""

    fault: str | None = None


class JobBegun(msgspec.Struct, tag=True, frozen=True):
    """A thread works on the job now: if the process ends before the answer, this may be why."""

    job_id: int


class Prepared(msgspec.Struct, tag=True, frozen=True):
    job_id: int
    generation: Generation


class Answered(msgspec.Struct, tag=True, frozen=True):
    """``body`` is JSON."""

    job_id: int
    body: bytes


class InputChecked(msgspec.Struct, tag=True, frozen=True):
    job_id: int
    report: InputReport


class LinesRead(msgspec.Struct, tag=True, frozen=True):
    job_id: int
    lines: list[BatchLine]
    position: Position


class RequestFault(msgspec.Struct, tag=True, frozen=True):
    message: str
    param: str | None
    code: str | None


class LineFault(msgspec.Struct, tag=True, frozen=True):
    error: LineError


class FileFault(msgspec.Struct, tag=True, frozen=True):
    number: int | None
    reason: str
    filename: str | None


class Bug(msgspec.Struct, tag=True, frozen=True):
    message: str


Fault = RequestFault | LineFault | FileFault | Bug


class JobFailed(msgspec.Struct, tag=True, frozen=True):
    job_id: int
    fault: Fault


JobDone = Prepared | Answered | InputChecked | LinesRead | JobFailed
FromPreparation = Loaded | JobBegun | JobDone


def fault_of(error: Exception) -> Fault:
    """An exception of a job, for the way to the server."""
    match error:
        case RequestError():
            return RequestFault(str(error), error.param, error.code)
        case BadLine():
            return LineFault(error.error)
        case OSError():
            return FileFault(error.errno, error.strerror or str(error), _name(error.filename))
        case _:
            return Bug(f"{type(error).__name__}: {error}")


def error_of_fault(fault: Fault) -> Exception:
    """The exception again, for whoever asked for the job."""
    match fault:
        case RequestFault(message, param, code):
            return RequestError(message, param=param, code=code)
        case LineFault(error):
            return BadLine(error.code, error.message, error.line or 0, error.param)
        case FileFault(number, reason, filename):
            return OSError(number, reason, filename) if number is not None else OSError(reason)
        case Bug():
            return BackfillError("The server had an error while it prepared the request.")


def _name(filename: object) -> str | None:
    return str(Path(str(filename))) if filename is not None else None
