"""Which tokens the grammars of a step's requests allow next, found beside its forward pass."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from backfill.core.errors import RequestError
from backfill.core.request import MAX_FORCED_TOKENS, RequestId
from backfill.core.structured import StructuredOutputsParams
from backfill.execution.background_thread import BackgroundThread
from backfill.execution.grammars import GrammarCompiler

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)


class OutputGrammar:
    """Where the output of one request is in its grammar: behind the tokens that were committed."""

    def __init__(
        self, params: StructuredOutputsParams, compiling: Future[None], compiler: GrammarCompiler
    ) -> None:
        self._params = params
        self._compiling = compiling
        self._compiler = compiler
        self._matcher: LLMatcher | None = None
        self.pending: deque[int] = deque()  # tokens that the matcher has not seen

    def append(self, token_id: int) -> None:
        """A token of the output was committed."""
        self.pending.append(token_id)

    def matcher(self) -> LLMatcher:
        """Waits until the grammar is compiled. Raises: RequestError."""
        if self._matcher is None:
            self._compiling.result()
            self._matcher = self._compiler.matcher(self._params)
        return self._matcher


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Of the rows of a step whose outputs have grammars.

    Attributes:
        rows: of ``forbidden``, by request.
        forbidden: bool ``[rows, vocab]``; end tokens are allowed where an output is complete.
        forced: tokens that follow the next one, if that is the only one that is allowed.
        errors: why a request cannot go on; its row means nothing.
    """

    rows: Mapping[RequestId, int]
    forbidden: NDArray[np.bool_]
    forced: Mapping[RequestId, tuple[int, ...]]
    errors: Mapping[RequestId, str]


class GrammarMasks:
    """Compiles grammars and fills masks, each in a thread beside the steps.

    Args:
        num_threads: that fill masks: those of the model's kernels, so that no more processors are used.
    """

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self._compiler = compiler
        self._num_threads = num_threads
        self._compiling = BackgroundThread("grammar-compiler")
        self._filling = BackgroundThread("grammar-masks")
        self._executor: LLExecutor | None = None

    def compile(self, params: StructuredOutputsParams) -> Future[None]:
        """Done when the grammar is compiled, or cannot be; at once if it is cached. From any thread."""
        if self._compiler.has(params):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._compiling.submit(self._try_compile, params)

    def output(self, params: StructuredOutputsParams) -> OutputGrammar:
        """Of a new request."""
        return OutputGrammar(params, self.compile(params), self._compiler)

    def begin(self, outputs: Mapping[RequestId, OutputGrammar]) -> Future[TokenMasks]:
        """Fill the masks for the next token of each output."""
        return self._filling.submit(self._masks, outputs)

    def _masks(self, outputs: Mapping[RequestId, OutputGrammar]) -> TokenMasks:
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        executor, errors, matchers = self._executor, {}, {}
        for request_id, output in outputs.items():
            try:
                matchers[request_id] = output.matcher()
            except RequestError as error:
                errors[request_id] = str(error)
            except BaseException:  # a panic in Rust, of this grammar alone
                logger.exception("%s: its grammar could not be compiled", request_id)
                errors[request_id] = "The grammar could not be compiled: a bug of the server."
        pending = {request_id: outputs[request_id].pending for request_id in matchers}
        while behind := [(matchers[name], tokens.popleft()) for name, tokens in pending.items() if tokens]:
            executor.consume_token_par(behind)
        bits = allocate_token_bitmask(len(outputs), self._compiler.num_tokens)
        rows = {request_id: row for row, request_id in enumerate(outputs)}
        filled = [(matcher, rows[request_id]) for request_id, matcher in matchers.items()]
        if filled:  # else it raises
            fill_next_token_bitmask_par(executor, filled, bits)
        num_words = np.count_nonzero(bits, axis=1)
        forced = {}
        for request_id, matcher in matchers.items():
            if matcher.is_error():
                reason = matcher.get_error().partition("\n")[0]
                errors[request_id] = f"The output cannot go on within its grammar: {reason:.200}"
            elif num_words[rows[request_id]] == 1 and _has_one_bit(bits[rows[request_id]]):
                following = matcher.compute_ff_tokens()[1 : 1 + MAX_FORCED_TOKENS]
                if following:
                    forced[request_id] = tuple(following)
        forbidden = np.unpackbits(
            (~bits).view(np.uint8), axis=1, count=self._compiler.vocab_size, bitorder="little"
        )
        return TokenMasks(rows, forbidden.view(np.bool_), forced, errors)

    def close(self) -> None:
        self._compiling.close()
        self._filling.close()

    def _try_compile(self, params: StructuredOutputsParams) -> None:
        try:
            self._compiler.matcher(params)
        except RequestError:
            return  # the compiler keeps the error, which is the request's own


def _has_one_bit(words: NDArray[np.int32]) -> bool:
    """Of words of which one is not 0."""
    word = int(words.view(np.uint32).max())
    return word & (word - 1) == 0
