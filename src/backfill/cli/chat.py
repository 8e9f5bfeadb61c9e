"""``backfill chat`` and ``backfill run``: a model in the terminal, without a server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event

from backfill.cli.command import VARIABLES, command
from backfill.cli.interrupts import interruptible
from backfill.cli.live import note
from backfill.core.errors import BackfillError, ConfigError, RequestError
from backfill.core.sampling import RequestOutputKind, SamplingParams
from backfill.engine.options import ModelOptions
from backfill.llm.async_llm import AsyncLLM
from backfill.llm.llm import LoopThread

_STOP_S = 5.0
_ENDS = ("/bye", "/exit", "/quit")
_HELP = """/clear   forget the conversation
/bye     end; so do Ctrl-D, and Ctrl-C at the prompt
/help    this
Ctrl-C stops an answer. Options: backfill chat --help"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How answers are made.

    Attributes:
        system: the system message.
        temperature: 0 takes the likeliest token each time.
        max_tokens: of an answer. Default: what the context leaves.
    """

    system: str | None = None
    temperature: float = 0.7
    max_tokens: int | None = None

    def validate(self) -> None:
        """Raises: ConfigError."""
        try:
            self.sampling()
        except RequestError as error:
            raise ConfigError(str(error).removeprefix(f"{error.param} "), field=error.param) from None

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, output_kind=RequestOutputKind.DELTA
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is asked.

    Attributes:
        prompt: the question. Default: what standard input holds.
    """

    prompt: str | None = None

    def text(self) -> str:
        """Raises: ConfigError if there is none, or if it is not UTF-8."""
        text = self.prompt
        if text is None and sys.stdin.isatty():
            raise ConfigError("is needed, or a question on standard input.", field="prompt")
        try:
            text = sys.stdin.read() if text is None else text
            text.encode()
        except UnicodeError:  # what was not UTF-8 is refused by the first or, as surrogates, by the second
            raise ConfigError("must be UTF-8.", field="prompt") from None
        if not text.strip():
            raise ConfigError("is empty.", field="prompt")
        return text


class Chat:
    """A conversation with a model of this process's own, on an event loop beside the terminal's thread."""

    def __init__(self, model: ModelOptions, answers: AnswerOptions) -> None:
        self.llm = AsyncLLM(model.model, revision=model.revision)
        self._sampling = answers.sampling()
        self._messages: list[Mapping[str, str]] = []
        if answers.system:
            self._messages.append({"role": "system", "content": answers.system})
        self._loop = LoopThread("backfill-chat")

    def __enter__(self) -> Chat:
        if sys.stderr.isatty():
            note("loading the model")
        self._loop.run(self.llm.start())
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.run(self.llm.shutdown())
        self._loop.close()

    def clear(self) -> None:
        """Forget all but the system message."""
        self._messages = [each for each in self._messages if each["role"] == "system"]

    def ask(self, question: str) -> None:
        """Print the answer as it comes; what has come is kept.

        Raises: BackfillError; KeyboardInterrupt once the answer has been stopped.
        """
        has_ended = Event()
        answer = self._loop.submit(self._answer(question, has_ended))
        try:
            self._loop.result_of(answer)
        except KeyboardInterrupt:
            answer.cancel()
            has_ended.wait(_STOP_S)  # else the prompt would come before the answer's end
            raise

    async def _answer(self, question: str, has_ended: Event) -> None:
        asked = {"role": "user", "content": question}
        parts: list[str] = []
        try:
            async for output in self.llm.chat([*self._messages, asked], self._sampling):
                parts.append(output.outputs[0].text)
                print(parts[-1], end="", flush=True)
        finally:
            if parts:  # a question without any answer is not part of the conversation
                print()
                self._messages += [asked, {"role": "assistant", "content": "".join(parts)}]
            has_ended.set()


def run(prompt: PromptOptions, model: ModelOptions, answers: AnswerOptions) -> None:
    """Answer PROMPT and end."""
    question = prompt.text()
    with interruptible(), Chat(model, answers) as chat:
        chat.ask(question)


def chat(model: ModelOptions, answers: AnswerOptions) -> None:
    """Talk with MODEL. Ctrl-C stops an answer; Ctrl-D, /bye or Ctrl-C at the prompt ends; /help says more."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then has a history
    with interruptible(), Chat(model, answers) as chat:
        while (question := _read_question()) is not None:
            try:
                command = question.strip()
                if command == "/clear":
                    chat.clear()
                elif command.startswith("/"):
                    print(_HELP if command == "/help" else f"No command {command}; /help lists them.")
                elif command:
                    with suppress(KeyboardInterrupt):
                        chat.ask(question)
            except BackfillError as error:
                print(f"backfill: {error}", file=sys.stderr)
                if isinstance(error, RequestError) and error.code == "context_length_exceeded":
                    print("The conversation counts too; /clear forgets it.", file=sys.stderr)


def _read_question() -> str | None:
    """None at the end."""
    try:
        question = input(">>> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if question.strip() in _ENDS else question


_ANSWERS = "system temperature max_tokens"
chat_app = command(
    chat, {"Model": "model revision", "Answers": _ANSWERS}, positional="model", variables=VARIABLES
)
run_app = command(
    run,
    {"Question": "prompt", "Model": "model revision", "Answers": _ANSWERS},
    positional="prompt",
    variables=VARIABLES,
)
