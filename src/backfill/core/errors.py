"""Errors a caller can cause. Broken invariants assert instead; "not now" is a return value.

BackfillError
├── ConfigError            an option or a configuration value is out of range
├── ModelError             the model cannot be used
│   ├── ModelNotFound      no such folder, file, hub id or known name
│   ├── UnsupportedModel   readable, but of an architecture or feature that is not implemented
│   └── CorruptModel       a file is truncated, damaged or does not fit its config
├── InsufficientMemory     the machine cannot hold what was asked for
├── RequestError           a request that can never be served as it stands
└── EngineDead             the engine process has ended
"""

from __future__ import annotations


class BackfillError(Exception):
    """Root of all errors that carry a message meant for the user."""


class ConfigError(BackfillError):
    """An option is out of range; the message names it and what is allowed."""


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


class EngineDead(BackfillError):
    """The engine process has ended; nothing more can be served until it is restarted."""
