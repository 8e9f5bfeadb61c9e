"""Messages between the server and a preparation process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from backfill.blending.pool import Learned
from backfill.blending.requests import OrderName
from backfill.core.errors import BackfillError, RequestError
from backfill.generation.message_format import ReasoningParserName, ToolCallParserName
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.preparation.lines import BadLine, BatchLine, LineError
from backfill.protocol.body_check import BodyCheck
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.options import MAX_RESPONSE_TOKENS
from backfill.protocol.preparer import EngineFacts, RequestContext, RequestPreparer, ServedModel, TextEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationSetup:
    """What the process needs to start. ``order``: in which lines of batches run."""

    model: ServedModel
    order: OrderName
    chat_template: str | None = None
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    uses_generation_config: bool = True
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    is_strict: bool = False
    log_level: str = "INFO"

    def load_tokenizer(self) -> Tokenizer:
        """Raises: ModelError."""
        return Tokenizer.from_folder(
            self.model.folder,
            chat_template=self.chat_template,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
        )

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
        divides: its lines are divided into parts, for several servers.
    """

    endpoint: str | None
    model_names: tuple[str, ...]
    max_lines: int
    max_line_bytes: int
    model_hint: str = ""
    divides: bool = False


class InputReport(msgspec.Struct, tag=True, frozen=True):
    """The check of an input file.

    Attributes:
        total: lines in the file.
        model: the model that the lines name; None if none does.
        warning: how many lines have fields without effect, and which; None if there are none.
        parts: of its lines, where they were to be divided: a bit for each line, as in ``LineSelection``.
    """

    total: int
    model: str | None
    errors: list[LineError]
    warning: str | None = None
    parts: list[bytes] = []


class LineSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines of a file to read.

    Attributes:
        done: a bit for each line to skip: line i is bit i % 8 of byte i // 8.
        observed: of some of these, by number, the tokens of all outputs. They are read for the estimates of
            others.
        unprepared: lines whose bodies are not read, because one of them ended the process.
        complete_by_s: end of the lines' completion window, on the monotonic clock.
        owner, owner_weight: of their batch; see ``Request``.
        spool_folder: on the disk that holds prepared lines; empty for the system's temporary files.
        min_free_bytes: of that disk, left for results.
        is_spooled: False holds prepared lines in memory, a few ahead.
    """

    path: str
    max_line_bytes: int
    done: bytes = b""
    observed: dict[int, int] = {}
    unprepared: frozenset[int] = frozenset()
    complete_by_s: float | None = None
    owner: str = ""
    owner_weight: float = 1.0
    spool_folder: str = ""
    min_free_bytes: int = 0
    is_spooled: bool = True


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
    """Its result is an InputReport. A CancelJob ends it early."""

    path: str
    limits: InputLimits


class IndexLines(msgspec.Struct, tag=True, frozen=True):
    """Prepare the reader's next lines after a position. Its result is LinesIndexed."""

    reader_id: int
    position: Position
    max_lines: int


class TakeLines(msgspec.Struct, tag=True, frozen=True):
    """Its result is LinesTaken: the lines of an owner that are to run next, of all its readers."""

    owner: str
    max_lines: int


Work = PrepareBody | AnswerBody | CheckInput | IndexLines | TakeLines


class Job(msgspec.Struct, tag=True, frozen=True):
    """Server to process. Answered by JobBegun, then JobDone."""

    job_id: int
    work: Work


class Configure(msgspec.Struct, tag=True, frozen=True):
    """An engine is ready. Comes before the first body or line to prepare."""

    facts: EngineFacts


class CancelJob(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for the job: it is not begun, and the check of a file is ended."""

    job_id: int


class RunningTokens(msgspec.Struct, frozen=True):
    """The KV that a line takes which was taken and has not ended.

    Attributes:
        num_prompt_tokens: of all its prompts, without those whose KV waiting lines need too.
        expected_output_tokens: of each choice, in all.
        num_output_tokens: so far, in the mean of its choices.
    """

    num_prompt_tokens: int
    expected_output_tokens: float
    num_choices: int
    num_output_tokens: int = 0


class OpenLines(msgspec.Struct, tag=True, frozen=True):
    """Replaces a reader of this id.

    Attributes:
        running: by number: lines that an earlier reader of the file gave. Their KV counts until they end.
        learned: by the pool of the process before.
    """

    reader_id: int
    selection: LineSelection
    running: dict[int, RunningTokens] = {}
    learned: Learned | None = None


class CloseLines(msgspec.Struct, tag=True, frozen=True):
    reader_id: int


class EndLine(msgspec.Struct, tag=True, frozen=True):
    """A line that was taken has ended. ``num_output_tokens`` of a choice; None where it has no answer."""

    reader_id: int
    number: int
    num_output_tokens: int | None


class LinesProgress(msgspec.Struct, tag=True, frozen=True):
    """How far taken lines of a reader are.

    Attributes:
        num_output_tokens: by number: generated so far, in the mean of a line's choices.
    """

    reader_id: int
    num_output_tokens: dict[int, int]


class OnlineTraffic(msgspec.Struct, tag=True, frozen=True):
    """What online requests take of the engine at present.

    Attributes:
        tokens_per_s: tokens computed.
        reads_per_s: cached tokens that their decodes read.
        held_tokens: whose KV they hold, or have held lately.
    """

    tokens_per_s: float
    reads_per_s: float
    held_tokens: int


class KVRoom(msgspec.Struct, tag=True, frozen=True):
    """Tokens of the KV pool at present, and of these what online requests have, in service or cached."""

    num_tokens: int
    num_online_tokens: int


LineChange = OpenLines | CloseLines | EndLine | LinesProgress | OnlineTraffic | KVRoom
ToPreparation = Job | Configure | CancelJob | LineChange


class LinesIndexed(msgspec.Struct, tag=True, frozen=True):
    """What a job has indexed.

    Attributes:
        num_lines: that wait; 0 also where all were read for their lengths alone.
        position: where indexing continues.
        is_end: the file has no more lines.
        is_held_up: the process holds as many lines as it may.
    """

    num_lines: int
    position: Position
    is_end: bool
    is_held_up: bool = False


class TakenLine(msgspec.Struct, frozen=True):
    """``tokens``: None where the line needs no KV, or nobody forecasts it."""

    reader_id: int
    line: BatchLine
    tokens: RunningTokens | None = None


class LinesTaken(msgspec.Struct, tag=True, frozen=True):
    """No lines only if no line of the owner is indexed and waits, or ``unreadable`` is set.

    Attributes:
        unreadable: a reader whose next line could not be read back. It was closed.
        learned: by the pool so far; None without lines.
    """

    lines: list[TakenLine]
    unreadable: int | None = None
    learned: Learned | None = None


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
Result = Generation | bytes | InputReport | LinesIndexed | LinesTaken


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


def failure_of(error: BaseException) -> Failure:
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
