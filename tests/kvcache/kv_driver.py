"""A driver that uses the KV cache as a scheduler does, at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from backfill.kvcache.content import Evictable
from tests.kvcache.kv_model import CacheModel, Running, Setup


class Driver:
    """Random use of the cache in rounds: queue, restores, slices, a plan's copies, a step's outcome."""

    submits, preempts, frees, skips, fails, stops = 0.5, 0.15, 0.1, 0.2, 0.05, 0.2  # probabilities
    gives_up = 0.3  # rather than preempt
    resizes = 0.3
    limits = (*Evictable,)
    most_queued = 100

    def __init__(self, setup: Setup, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = CacheModel(setup, self.rng)

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.round()
        self.drain()

    def round(self) -> None:
        model, rng = self.model, self.rng
        model.now_s += rng.choice((0.01, 0.1, 10.0))
        model.advance(model.now_s, rng.choice((0, 1, 3, 100)))
        if model.setup.max_num_blocks is not None:
            self.resize(model.setup.max_num_blocks)
        self.act(model.end_restores)
        if rng.random() < self.submits and len(model.at("queued")) < self.most_queued:
            self.act(model.submit)
        for _ in range(rng.randrange(3)):
            self.act(self.admit_one)
        slices = self.choose_slices()
        if rng.random() < self.preempts:
            self.act(lambda: self.leave(model.preempt, slices, "running", "restoring"))
        if rng.random() < self.frees:
            self.act(lambda: self.leave(model.free, slices, "queued", "running", "restoring"))
        self.act(model.take_copies)
        self.act(lambda: self.step(slices))
        done = rng.sample(model.in_flight, rng.randint(0, len(model.in_flight)))
        self.act(lambda: model.complete(done))

    def resize(self, max_num_blocks: int) -> None:
        """Move on with a drain, as a planner does before all else; sometimes begin one, or grow."""
        model, rng = self.model, self.rng
        if rng.random() < self.resizes:
            num_blocks = rng.randint(model.setup.num_blocks, max_num_blocks)
            self.act(lambda: model.resize(num_blocks))
        limit = rng.choice(self.limits)
        running = [each.request.request_id for each in model.at("running")]
        in_flight = rng.sample(running, rng.randint(0, len(running)))
        self.act(lambda: model.drain(limit, rng.choice((0, 1, 2, 100)), in_flight))

    def act(self, action: Callable[[], object]) -> None:
        action()
        self.model.check()

    def admit_one(self) -> None:
        queued = self.model.at("queued")
        if queued:
            limit = self.rng.choice(self.limits)
            may_preempt = self.rng.random() > self.gives_up
            self.model.admit(self.rng.choice(queued), limit, self.rng.randrange(2), may_preempt)

    def leave(self, how: Callable[[Running], None], slices: dict[Running, int], *places: str) -> None:
        leaving = self.model.at(*places)
        if leaving:
            each = self.rng.choice(leaving)
            slices.pop(each, None)
            how(each)

    def choose_slices(self) -> dict[Running, int]:
        """Running requests and where their slices end."""
        model, rng, slices = self.model, self.rng, dict[Running, int]()
        for each in model.at("running"):
            if each.place != "running" or rng.random() < self.skips:
                continue
            request = each.request
            if each.suspended_until is None and request.num_pending_tokens > 1:
                self.act(lambda request=request: model.cache.match_more(request))  # type: ignore[misc]
            end = min(request.num_tokens, request.num_computed_tokens + rng.randint(1, 2 * model.size))
            end = each.suspended_until or end
            if not self.preempt_for_slots(each, end, slices):
                continue
            limit = rng.choice(self.limits)
            while not model.grow(each, end, limit):
                victims = [other for other in model.at("running", "restoring") if other is not each]
                if not victims or rng.random() < self.gives_up:
                    break
                victim = rng.choice(victims)
                slices.pop(victim, None)
                self.act(lambda victim=victim: model.preempt(victim))  # type: ignore[misc]
            else:
                slices[each] = end
        return slices

    def preempt_for_slots(self, each: Running, end: int, slices: dict[Running, int]) -> bool:
        """Preempt who shares a block with the request and is in its way; False if that is the request."""
        victims = list[Running | None]()
        self.act(lambda: victims.append(self.model.preempt_for_slots(each, end)))
        for victim in victims:
            if victim is not None:
                slices.pop(victim, None)
        return victims[0] is not each and self.model.cache.sharing.reserve_slots(each.request, end)

    def step(self, slices: dict[Running, int]) -> None:
        model, rng = self.model, self.rng
        has_failed = rng.random() < self.fails
        for each, end in slices.items():
            request = each.request
            start, outcome = request.num_computed_tokens, rng.random()
            is_whole = not has_failed and outcome >= self.stops
            model.compute(each, start, end, is_whole=is_whole)
            each.suspended_until = None
            if has_failed:
                request.num_computed_tokens = rng.choice((0, start))
                model.preempt(each)
            elif is_whole:
                model.commit(each, end)
                if end == request.num_tokens:
                    request.append(rng.randrange(model.setup.vocab_size))
                    if len(request.output_token_ids) == request.sampling.max_tokens:
                        model.free(each)
            elif outcome < self.stops / 2:
                each.suspended_until = end

    def drain(self) -> None:
        """Alone in the cache, every request can be served; in the end nothing is left behind."""
        model, cache = self.model, self.model.cache
        for each in model.at("running", "restoring"):
            self.act(lambda each=each: model.preempt(each))  # type: ignore[misc]
        if model.setup.max_num_blocks is not None:
            self.settle()
            self.act(lambda: model.resize(model.setup.num_blocks))
            self.act(lambda: model.drain(Evictable.ALL, 100))
            assert not cache.resizing.num_draining, "nobody uses it, and it cannot be drained"
        for each in list(model.all.values()):
            self.settle()
            assert model.admit(each, Evictable.ALL, 0, may_preempt=False), "alone, and it cannot be admitted"
            self.settle()
            assert each.place == "running"
            end = each.request.num_tokens
            assert model.grow(each, end, Evictable.ALL), "alone, and it cannot grow"
            self.act(model.take_copies)  # lazy checkpoints of what it is about to overwrite
            model.compute(each, each.request.num_computed_tokens, end)
            model.commit(each, end)
            self.act(lambda each=each: model.free(each))  # type: ignore[misc]
        self.settle()
        counts = cache.counts
        assert counts.referenced == counts.cached_with_copy == 0
        if not model.setup.prefix_caching:
            assert counts.empty == model.setup.num_blocks and cache.counts.host_usage_frac == 0.0

    def settle(self) -> None:
        """Copies begin and complete until there are no more."""
        model = self.model
        for _ in range(20):
            model.advance(model.now_s, 100)
            self.act(model.take_copies)
            if not model.in_flight and not model.at("restoring"):
                break
            self.act(lambda: model.complete(list(model.in_flight)))
            self.act(model.end_restores)
        assert not model.in_flight and not model.at("restoring")


class SharingDriver(Driver):
    """Calmer, so that two requests share a block until they meet: most of the time everyone decodes."""

    submits, preempts, frees, skips, fails, stops = 0.5, 0.02, 0.01, 0.1, 0.02, 0.1
    gives_up = 0.97
    most_queued = 5
    limits = (*Evictable, *[Evictable.LOSING_NOTHING] * 3)
