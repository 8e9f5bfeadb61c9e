"""The interface between the engine and an executor, and the steps that warm one up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backfill.core.block import SlotCopy, pack_block_ref
from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.offloading.residency import Residency


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the control plane must know about an executor before it plans.

    Attributes:
        num_blocks: blocks in the device's KV pool; the least that it ever has, and has at the start.
        max_model_len: tokens of prompt and output a request can have.
        vocab_size: token ids are in ``[0, vocab_size)``.
        end_token_ids: tokens with which the model ends an output.
        device, dtype: names, for logs and metrics.
        kv_dtype: of KV that is codes; empty where it is of ``dtype``.
        stored_in: names of the formats of matrices of codes; empty where weights are of ``dtype``.
        weight_bits: of a weight in the matrices of layers, on average, with its part of scales.
        num_layers: decoder layers of the model; safepoints lie between them.
        num_host_blocks: blocks in the KV pool in host memory.
        block_bytes: of one KV block, over all layers.
        offload_interval: every so many layers one is offloaded; None without offloading. At the start, and
            the largest, if it may change.
        residencies: divisions of device memory between weights and KV, ascending by interval; the last one
            holds at the start. Empty if there is one.
        layer_bytes: of the weights of one layer; 0 without offloading.
        max_steps_in_flight: steps that may be submitted and not collected yet: the stages of a pipeline, and
            a resumed step beside each (``core.plan.max_in_flight``). If more than 1, the executor is a
            ``PipelinedExecutor``.
        stage_layers: layers of each stage, in their order; empty where there is one stage.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    device: str
    dtype: str
    kv_dtype: str = ""
    stored_in: str = ""
    weight_bits: float = 0.0
    num_layers: int = 1
    num_host_blocks: int = 0
    block_bytes: int = 1
    offload_interval: int | None = None
    residencies: tuple[Residency, ...] = ()
    layer_bytes: int = 0
    max_steps_in_flight: int = 1
    stage_layers: tuple[int, ...] = ()

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """Layers of each stage, of which there is at least one."""
        return self.stage_layers or (self.num_layers,)

    @property
    def max_num_blocks(self) -> int:
        """Blocks that the device's KV pool may grow to."""
        return max((each.num_blocks for each in self.residencies), default=self.num_blocks)

    def check_request(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise RequestError if this executor can never serve the request."""
        if not prompt_token_ids:
            raise RequestError("The prompt must have at least one token.", param="prompt")
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id < self.vocab_size:
                most = self.vocab_size - 1
                message = f"Prompt token ids must be between 0 and {most}, got {token_id!r:.80}."
                raise RequestError(message, param="prompt")
        assert sampling.max_tokens is not None
        num_prompt_tokens = len(prompt_token_ids)
        if num_prompt_tokens >= self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt has "
                f"{num_prompt_tokens}. Please reduce the prompt: the output needs at least one token.",
                param="prompt",
                code="context_length_exceeded",
            )
        if num_prompt_tokens + sampling.max_tokens > self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{num_prompt_tokens + sampling.max_tokens} tokens ({num_prompt_tokens} in the prompt, "
                f"{sampling.max_tokens} in the output). Please reduce the prompt or max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        sampling.check_token_ids(self.vocab_size)


class Executor(ABC):
    """Executes plans in the order in which they were made: one at a time, but for a ``PipelinedExecutor``."""

    info: ExecutorInfo
    _next_plan: StepPlan | None = None  # submitted, without a pipeline

    @abstractmethod
    def run(self, plan: StepPlan) -> StepOutcome:
        """Begin the plan's copies, then compute its slices and sample. Blocks until the slices are done.

        If it raises, no token counts as sampled.

        - Undefined: which requests of ``admitted`` are known, the tokens kept for the requests of the slices,
          the KV that the slices were to write, and the suspended slices that the plan resumes. The engine
          releases such requests before it admits them again; releasing an unknown request does nothing.
        - Done: suspended slices of ``dropped`` are dropped, the interval and the memory are changed, blocks
          are moved, and requests of ``released`` are released; if dropping, changing or moving failed, every
          later call raises. Copies count as begun and are reported once complete; if copying itself failed,
          every later call raises too.
        - Unchanged: all else, with the other suspended slices.
        """

    @abstractmethod
    def request_stop(self, step: int) -> None:
        """Stop the stoppable slices of the step at its next safepoint.

        No effect if that step is not running, is past its last safepoint, or has none. May be called from
        another thread during ``run``, ``submit`` or ``collect``.
        """

    def submit(self, plan: StepPlan) -> None:
        """Begin a step. It does not wait for its end, and reports no failure of a step.

        Without a pipeline the step runs when it is collected.
        """
        assert self._next_plan is None, "a step is in flight"
        self._next_plan = plan

    def collect(self) -> StepOutcome:
        """The outcome of the oldest step that was submitted and not collected. Blocks until the step is done.

        Raises: what made the step fail. It then counts as collected, no rank writes for it any more, and the
            steps behind it are still to be collected: they have run, or fail too.
        """
        plan, self._next_plan = self._next_plan, None
        assert plan is not None, "no step is in flight"
        return self.run(plan)

    def wait(self) -> bool:
        """Wait for the end of the oldest step, or for ``wake``; it may return sooner.

        Returns: False if it was woken: another step may be worth submitting before one is collected.
        """
        return True

    def wake(self) -> None:
        """Let ``wait`` return, now or when it is called next. May be called from another thread."""
        return None  # noqa: RET501 -- an empty body would make it abstract

    def check(self) -> None:
        """Raises: ExecutorDead if no step can run any more. Steps raise it too, but none may be in flight."""
        return None  # noqa: RET501 -- as above


class PipelinedExecutor(Executor):
    """An executor with several steps in flight, as many as ``ExecutorInfo.max_steps_in_flight`` says.

    Steps pass the stages in the order in which they were submitted, so on each rank a plan takes effect after
    all of the plan before it. What ``Executor.run`` says of a plan and its outcome holds for each step.

    Requests of the slices of steps in flight differ, but for successive chunks of one prompt, of which only
    the last one may sample. If one fails, what the later ones compute does not count. A plan that is
    submitted while a step is in flight moves no block, changes no memory and waits for no copy, and keeps
    what the steps in flight may suspend.
    """

    @abstractmethod
    def submit(self, plan: StepPlan) -> None: ...

    @abstractmethod
    def collect(self) -> StepOutcome: ...

    def run(self, plan: StepPlan) -> StepOutcome:
        """``submit`` and ``collect``, with no other step in flight."""
        self.submit(plan)
        return self.collect()


def stopped_outcome(outcome: StepOutcome, plan: StepPlan, layers_done: int, at_s: float) -> StepOutcome:
    """Of a step whose stoppable slices stopped before a layer; ``outcome`` is that of the others."""
    assert plan.safepoints is not None, "a step without safepoints was stopped"
    stopped = tuple(scheduled.request_id for scheduled in plan.slices if scheduled.stoppable)
    suspends = plan.safepoints.suspends
    return replace(
        outcome,
        suspended=stopped if suspends else (),
        discarded=() if suspends else stopped,
        layers_done=layers_done,
        stopped_at_s=at_s,
    )


_CPU_WARM_UP_TOKENS = 16  # their time is that of products, which are the same for more
WARM_UP_TOKENS = 64  # of a step, at least: links between stages have room for as many


def warm_up(executor: Executor, limits: SchedulerConfig) -> None:
    """Run prefills and decodes before any request: libraries do slow work on their first use.

    If requests may share blocks and there is a host pool, slots are copied both ways, too. On CUDA the first
    copies allocate buffers and compile kernels: one for each power of two that the values of a head's slots
    are padded to. So the numbers of slots are powers of two, and the largest one.
    """
    info = executor.info
    if info.device != "cuda":
        _run_once(executor, 0, _CPU_WARM_UP_TOKENS)
    else:  # other kernels compute long contexts and large chunks
        most = max(WARM_UP_TOKENS, limits.max_num_batched_tokens - 1)
        for start, num_tokens in ((0, WARM_UP_TOKENS), (0, min(1024, most)), (4096, min(1024, most))):
            if start + num_tokens < info.max_model_len or start == 0:
                _run_once(executor, start, num_tokens)
    if limits.shares_blocks and info.num_host_blocks:
        size, both = info.block_size, CopyDirections.CHECKPOINT | CopyDirections.RESTORE
        for num in {*(1 << exponent for exponent in range(size.bit_length())), size}:
            slots = (SlotCopy(0, 0, 0, num),)
            copies = BlockCopies(blocking=both, slot_checkpoint=slots, slot_restore=slots)
            executor.run(StepPlan(step=0, work=Compute(slices=()), copies=copies))


def _run_once(executor: Executor, start: int, num_tokens: int) -> None:
    """A prompt's last tokens, and a decode; on CUDA also a decode beside a prompt, if the pool holds both.

    What is before ``start`` is never computed: the KV pool may hold anything.
    """
    info, names = executor.info, (RequestId("warm-up-1"), RequestId("warm-up-2"))
    end = min(start + num_tokens, info.max_model_len - 1, info.num_blocks * info.block_size - 1)
    if end <= start:
        return
    num_blocks = -(-(end + 1) // info.block_size)
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    admitted = tuple(AdmittedRequest(name, (0,) * end, sampling) for name in names)
    blocks = tuple(map(pack_block_ref, range(2 * num_blocks)))
    prefill = ScheduledSlice(names[0], start, end - start, blocks[:num_blocks], samples=True)
    decode = prefill._replace(start=end, num_tokens=1)
    executor.run(StepPlan(step=0, work=Compute((prefill,)), admitted=admitted))
    executor.run(StepPlan(step=1, work=Compute((decode,))))
    if info.device == "cuda" and len(blocks) <= info.num_blocks:  # steps of decodes alone have graphs
        other = prefill._replace(request_id=names[1], blocks=blocks[num_blocks:], num_tokens=end - start - 1)
        if other.num_tokens:
            executor.run(StepPlan(step=2, work=Compute((decode, other._replace(samples=False)))))
    executor.run(StepPlan(step=3, work=Compute(slices=()), released=names))
