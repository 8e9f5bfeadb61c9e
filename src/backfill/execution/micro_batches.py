"""Micro-batches of a step: its prefills and its decodes, which overlap on two CUDA streams.

Prefills are bound by compute, attention of decodes by memory. NanoFlow (arXiv 2408.12757) runs operators of
both kinds at once: it splits each batch into nano-batches and plans which operators share the processors, and
how. Here the split is by kind, and the GPU divides its processors between the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from backfill.core.plan import ScheduledSlice


def split_step(
    slices: Sequence[ScheduledSlice], num_micro_batches: int
) -> tuple[tuple[ScheduledSlice, ...], ...]:
    """The slices of each micro-batch, in their order: prefills, then decodes.

    A step of one kind is one micro-batch: two would read the weights twice, and both would be bound by the
    same resource.
    """
    if num_micro_batches > 1:
        prefills = tuple(scheduled for scheduled in slices if not is_decode(scheduled))
        decodes = tuple(scheduled for scheduled in slices if is_decode(scheduled))
        if prefills and decodes:
            return prefills, decodes
    return (tuple(slices),)


def is_decode(scheduled: ScheduledSlice) -> bool:
    """One token, after others."""
    return scheduled.num_tokens == 1 and scheduled.start > 0


class MicroBatchStreams:
    """The first micro-batch runs on the current CUDA stream, the second on one of its own. On CPU no-ops.

    No tensor needs ``record_stream``. A micro-batch allocates, uses and frees its tensors on its own stream;
    what both use, weights and KV pool, outlives them. Rows of both meet on the current stream after
    ``forked``, when it has waited for the second stream; and that one waits for the current stream before
    it next reuses their memory.

    Args:
        device: of the model, with its index.
    """

    def __init__(self, device: torch.device, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._device = device
        self._second: torch.cuda.Stream | None = None
        if device.type == "cuda" and num_micro_batches > 1:
            # Decodes have few thread blocks, which would else be queued behind all those of a matrix product.
            self._second = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._queued: list[torch.cuda.Event] = []

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Micro-batches run within this; what follows on the current stream comes after all of them."""
        self._queued = []
        if self._second is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._second.wait_stream(current)
        try:
            yield
        finally:
            # After a failure too: what is queued may write to blocks that the next step gives to others.
            current.wait_stream(self._second)

    def of(self, micro_batch: int) -> AbstractContextManager[object]:
        """Work that is issued within this goes to the stream of micro-batch 0 or 1."""
        return nullcontext() if self._second is None or micro_batch == 0 else torch.cuda.stream(self._second)

    def wait_for_previous_group(self) -> None:
        """Keep at most one group of layers queued: layers queued on a GPU cannot be stopped.

        Waits for what was queued at the previous call within ``forked``.
        """
        if self._device.type != "cuda":
            return
        for event in self._queued:
            event.synchronize()
        self._queued = []
        for stream in self._all():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._queued.append(event)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """``stream`` goes on after what was issued to these streams until now. Only on CUDA."""
        for each in self._all():
            stream.wait_stream(each)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """These streams go on after ``event``. Only on CUDA."""
        for each in self._all():
            each.wait_event(event)

    def _all(self) -> list[torch.cuda.Stream]:
        current = torch.cuda.current_stream(self._device)
        return [current] if self._second is None else [current, self._second]

    def synchronize(self) -> None:
        """Wait until the device has computed everything that was issued. Not within ``forked``."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
