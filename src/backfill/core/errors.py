"""Errors a caller can cause. Broken invariants assert instead; "not now" is a return value.

BackfillError
├── ConfigError            an option or a configuration value is out of range
│   └── InvalidOption      likewise, of the library: also a ValueError
├── ModelError             the model cannot be used
│   ├── ModelNotFound      no such folder, file, hub id or known name
│   ├── UnsupportedModel   readable, but of an architecture or feature that is not implemented
│   └── CorruptModel       a file is truncated, damaged or does not fit its config
├── InsufficientMemory     the machine cannot hold what was asked for
├── RequestError           a request that can never be served as it stands
│   └── InvalidRequest     likewise, of the library: also a ValueError
├── ExecutorDead           a process that holds a part of the model has ended; the engine must start again
├── NotReady               what the request needs is not there now; it may be sent again
├── RequestAborted         its caller aborted it
└── RequestLost            the engine lost a request; it may be run again
    ├── EngineDead         its process has ended
    └── StepFailed         the step that computed it raised an exception
"""

from __future__ import annotations


class BackfillError(Exception):
    """Root of all errors that carry a message meant for the user."""


class ConfigError(BackfillError):
    """An option or a configuration value is out of range.

    Messages name fields of configurations in backticks. Commands and ``LLM`` spell them as their users do
    (``core.options.spell``).

    Args:
        reason: what is wrong and what is allowed.
        field: what the reason is about; it begins the message.
    """

    def __init__(self, reason: str, *, field: str | None = None) -> None:
        super().__init__(reason if field is None else f"`{field}` {reason}")


class InvalidOption(ConfigError, ValueError):
    """An option of the engine is out of range; the message names it."""


class ModelError(BackfillError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """No model folder, GGUF file, hub id or known name matches."""


class UnsupportedModel(ModelError):
    """The model is readable, but needs something that is not implemented."""


class CorruptModel(ModelError):
    """A model file is truncated, damaged, or does not fit its config."""


class InsufficientMemory(BackfillError):
    """The weights or the KV pool do not fit; the message says what would."""


class ExecutorDead(BackfillError):
    """No step can run any more: a process that holds a part of the model has ended, or is out of step."""


class RequestError(BackfillError):
    """A request that can never be served as it stands.

    Args:
        message: what is wrong and what is allowed.
        param: the request field at fault, as the API names it.
        code: machine-readable reason in OpenAI's vocabulary, e.g. ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequest(RequestError, ValueError):
    """A prompt or a sampling parameter that can never be served; ``param`` names it."""


class NotReady(BackfillError):
    """What the request needs is not there now; it may be sent again."""


class RequestAborted(BackfillError):
    """The request's caller aborted it."""


class RequestLost(BackfillError):
    """The engine lost a request, perhaps through no fault of it; it may be run again.

    Args:
        num_lost: engine requests that were lost together, this one included; 0 where none had reached the
            engine.
        num_others: those of them that are not choices of the same client request. With 0, no other request
            can be to blame.
    """

    def __init__(self, message: str, *, num_lost: int = 0, num_others: int = 0) -> None:
        super().__init__(message)
        self.num_lost = num_lost
        self.num_others = num_others


class EngineDead(RequestLost):
    """The engine process has ended; nothing more can be served until it is restarted."""


class StepFailed(RequestLost):
    """The step that computed the request raised an exception; the engine goes on."""
