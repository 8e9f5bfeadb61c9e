"""A generation request, from its admission to the end of its response."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import Request

from backfill.api.admission import Reservation
from backfill.api.objective_admission import check_hopeless, check_objectives
from backfill.api.online_load import OpenChoice
from backfill.api.predictions import AskedPrompts
from backfill.api.state import ServerState
from backfill.core.prefixes import token_keys
from backfill.core.request import ServiceClass
from backfill.generation.generator import GenerationRequest
from backfill.http.bodies import is_routed, json_body, owner_of
from backfill.http.limits import OwnerSlot
from backfill.http.middleware import ALONE_HEADER
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.generation_fields import MAX_CHOICES
from backfill.protocol.preparer import RequestContext
from backfill.protocol.request_headers import REQUEST_HEADERS, TIER_HEADER, is_flex

_PEEKED_NAMES = (b'"service_tier"', b'"n"')


class _PeekedFields(msgspec.Struct):
    service_tier: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()


_peeked_decoder = msgspec.json.Decoder(_PeekedFields)


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest:
    """What the server runs for a client, and what this takes of the server until ``close``.

    A choice is given back when it ends, so that the next request need not wait for the client to read.

    Attributes:
        arrived_at_s: on the server's clock.
    """

    generation: Generation
    arrived_at_s: float
    _slot: OwnerSlot
    _reservation: Reservation
    _in_load: Sequence[OpenChoice]  # none for an offline request, and where the load is not predicted
    _held: ExitStack

    def on_prompt_progress(self, choice: int, num_computed_tokens: int) -> None:
        if self._in_load:
            self._in_load[choice].on_prompt_progress(num_computed_tokens)

    def on_first_token(self, choice: int) -> None:
        self._slot.on_first_token(choice)
        if self._in_load:
            self._in_load[choice].on_first_token()

    def on_choice_end(self, choice: int) -> None:
        self._slot.on_choice_end(choice)
        self._reservation.release_choice()
        if self._in_load:
            self._in_load[choice].on_end()

    def close(self) -> None:
        """Release what is still held. Further calls do nothing."""
        self._held.close()


async def open_request(state: ServerState, endpoint: GenerationEndpoint, request: Request) -> OpenRequest:
    """Admit a request and prepare it. Without capacity it is refused before its body is read.

    Raises, holding nothing: what ``json_body`` and ``Admission.reserve`` do; OwnerLimited;
        OfflineUnavailable; ClientDisconnect; BackfillError for a body that cannot be served;
        ObjectiveUnavailable, RequestShed.
    """
    owner = owner_of(request)
    state.admission.check_capacity(owner)
    arrived_at_s: float = request.state.arrived_at_s
    with ExitStack() as held:
        slot = state.limiter.enter(owner, is_routed=is_routed(request))
        held.callback(slot.release)
        request.state.answer_headers = slot.headers
        async with json_body(request, state.bodies, state.server_config.max_body_bytes) as body:
            service_class, num_choices = peek(body.raw, request.headers.get(TIER_HEADER))
            slot.resize(num_choices)
            alone = _alone_of(request, state)
            try:
                reservation = state.admission.reserve(owner, service_class, num_choices, alone=alone)
            finally:
                if alone:
                    state.feed_jobs()  # lines wait until it has run, or has its turn no more
            held.callback(reservation.release)
            if service_class is ServiceClass.OFFLINE:
                body.mark_offline()
            context = _context_of(request, slot.weight)
            generation = await state.prepare(endpoint, body.raw, context, service_class, request.receive)
            prepared = generation.request
            slot.resize(prepared.num_choices, len(prepared.prompts))
            slot.queue([len(prepared.prompt_of(choice)) for choice in range(prepared.num_choices)])
            reservation.resize(prepared.num_choices, prepared.service_class)
            in_load = count_online(state, generation, arrived_at_s)
            for choice in in_load:
                held.callback(choice.on_end)
            state.begin_answer(generation)
            held.callback(state.end_answer)
            return OpenRequest(generation, arrived_at_s, slot, reservation, in_load, held.pop_all())


def peek(raw: bytes, tier_header: str | None = None) -> tuple[ServiceClass, int]:
    """The service class and number of choices of a request, by a cheap look at its body.

    A body that cannot be read, or with more choices than anybody may have, counts as one choice; preparing it
    finds the error or the real values.

    Args:
        tier_header: the service tier of a body that names none.
    """
    fields = _PeekedFields()
    if any(name in raw for name in _PEEKED_NAMES):  # a search takes a tenth of the time of decoding
        with suppress(msgspec.DecodeError, RecursionError):
            fields = _peeked_decoder.decode(raw)
    is_offline = is_flex(bytes(fields.service_tier), tier_header)
    service_class = ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE
    digits = bytes(fields.n)[:4]
    n = int(digits) if digits.isdigit() else 1
    return service_class, n if 1 <= n <= MAX_CHOICES else 1


def count_online(state: ServerState, generation: Generation, arrived_at_s: float) -> list[OpenChoice]:
    """Count an online request in the load, which must leave headroom for its objectives.

    Returns: nothing for an offline request, and where the load is not predicted.
    Raises, counting nothing: ObjectiveUnavailable, RequestShed with ``--shed-hopeless``.
    """
    request, load = generation.request, state.online_load
    if load is None or request.slo is None:
        return []
    prompt_tokens = [len(request.prompt_of(choice)) for choice in range(request.num_choices)]
    asked = AskedPrompts(
        num_tokens=prompt_tokens,
        keys=_prefix_keys(state, request),
        priority=request.priority,
        owner=request.owner,
        arrived_at_s=arrived_at_s,
        first_token_by_s=arrived_at_s + request.slo.ttft_s,
    )
    now_s, default = state.clock.now_s(), state.ready_preparer().engine_facts.default_slo
    predicted = load.predict(asked, now_s=now_s)
    passing = partial(load.passing, asked, now_s=now_s, default=default)
    if state.server_config.shed_hopeless:
        check_hopeless(predicted, request.slo.ttft_s, passing)
    end_s = partial(state.admission.retry_after_s, ServiceClass.ONLINE)
    check_objectives(generation.objectives, default, load, predicted, passing, prompt_tokens, end_s)
    return load.add(asked, bounds_steps=request.slo.tpot_s <= default.tpot_s)


def _prefix_keys(state: ServerState, request: GenerationRequest) -> list[list[int]]:
    """Of the chunks of each choice's prompt; none where cached KV is not used."""
    config = state.engine_config.scheduler
    if not config.prefix_caching or request.samplings[0].prompt_logprobs is not None:
        return []
    salt = (request.owner if config.prefix_cache_scope == "owner" else "", request.cache_salt)
    of_prompts = [token_keys(tuple(prompt), salt) for prompt in request.prompts]
    return [of_prompts[request.prompt_index(choice)] for choice in range(request.num_choices)]


def _alone_of(request: Request, state: ServerState) -> str:
    """The name of a request that is to be the only one of its class; empty for others.

    A turn is kept by name, so one that brings none gets no turn.
    """
    may_ask = state.api_keys is None or is_routed(request)
    return request.state.request_id or "" if may_ask and ALONE_HEADER in request.headers else ""


def _context_of(request: Request, owner_weight: float) -> RequestContext:
    headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
    return RequestContext(
        request_id=request.state.request_id,
        headers=headers,
        owner=owner_of(request),
        owner_weight=owner_weight,
    )
