"""Which server the load goes to, and what every request carries."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backfill.bench.client import Endpoint
from backfill.core.errors import ConfigError
from backfill.core.options import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """The server, and the fields and headers of every request.

    Attributes:
        backend: the API. openai and vllm use /v1/completions, openai-chat uses /v1/chat/completions.
        base_url: URL of the server, such as http://127.0.0.1:8000.
        host: host of the server, without `base_url`.
        port: port of the server, without `base_url`.
        endpoint: another path than that of `backend`.
        model: model of the requests and of the tokenizer; the server's first by default.
        served_model_name: the model's name in requests, where it differs from `model`.
        header: more headers, KEY=VALUE.
        insecure: do not verify the server's certificate.
        request_timeout_sec: seconds after which a request counts as failed.
        ignore_eos: generate to the full length (an extension of vLLM and of backfill).
        temperature: sampling temperature; the server's default if not given.
        extra_body: more fields of every request as JSON, such as {"priority": 1}.
    """

    backend: Literal["openai", "vllm", "openai-chat"] = "openai"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    header: tuple[str, ...] = ()
    insecure: bool = False
    request_timeout_sec: float = 21_600.0
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: str | None = None

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        if not self.request_timeout_sec > 0:
            raise ConfigError(f"`request_timeout_sec` must be above 0, got {self.request_timeout_sec:g}.")
        self.resolve()

    def resolve(self) -> Endpoint:
        """The endpoint these options name. Its model is empty where the server is to choose.

        Raises: ConfigError for a URL, headers or a body of another shape.
        """
        is_chat = self.backend == "openai-chat"
        body = {} if self.temperature is None else {"temperature": self.temperature}
        return Endpoint(
            base_url=self._url(),
            path=self.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions"),
            model=self.served_model_name or self.model or "",
            is_chat=is_chat,
            ignore_eos=self.ignore_eos,
            body={**body, **self._extra_fields()},
            headers=authorization() | parse_pairs("header", self.header),
            timeout_s=self.request_timeout_sec,
            verifies_tls=not self.insecure,
        )

    def _url(self) -> str:
        if self.base_url is not None:
            return parse_base_url(self.base_url)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def _extra_fields(self) -> dict[str, object]:
        try:
            fields = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`extra_body` must be a JSON object: {error.msg} at character {error.pos}."
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(f"`extra_body` must be a JSON object, got {self.extra_body}.")
        return fields


def parse_base_url(text: str) -> str:
    """Scheme, host and port of a URL that may end in ``/v1``. Raises: ConfigError."""
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"`base_url` must begin with http:// or https://, got {text!r}.")
    return text.rstrip("/").removesuffix("/v1")


def authorization() -> dict[str, str]:
    """The header that carries OPENAI_API_KEY; empty if that is not set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def parse_pairs(field: str, texts: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts by key. Raises: ConfigError naming ``field``."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key):
            raise ConfigError(f"`{field}` takes KEY=VALUE, got {text!r}.")
        pairs[key] = value
    return pairs
