"""Bodies of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from pydantic import BaseModel

from backfill.core.errors import RequestError
from backfill.protocol.chat import ConversationFields, Messages, check_conversation
from backfill.protocol.parsing import FailFastList, StrictModel


class TokenizeRequest(ConversationFields):
    """Body of ``POST /tokenize``: a prompt, or messages.

    ``add_special_tokens`` is true by default for a prompt, and false for messages.
    """

    model_config = StrictModel
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None

    def check(self) -> None:
        """Raise RequestError for a combination of fields that cannot be served."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        check_conversation(self.messages or (), self.continue_final_message)


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = StrictModel
    model: str | None = None
    tokens: FailFastList[int]
