"""Sums over ranks and messages between stages with torch.distributed: NCCL on CUDA, gloo elsewhere.

NCCL has not been measured here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from backfill.execution.collectives import Handover, PeerFailed
from backfill.parallel.shared_state import RankProgress
from backfill.parallel.stage_links import (
    NUM_MESSAGES,
    NUM_VALUES,
    RowShape,
    pack_header,
    unpack_header,
    with_rows,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store, Work

# A rank that has ended closes its connections, which the others notice at once. This is for one that hangs.
_TIMEOUT = timedelta(minutes=10)


def create_process_group(store: Store, name: str, rank: int, size: int, device: torch.device) -> ProcessGroup:
    """A group of the ranks that call this with the same name. Blocks until all ``size`` of them have."""
    prefixed = dist.distributed_c10d.PrefixStore(name, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return cast("ProcessGroup", dist.ProcessGroupNCCL(prefixed, rank, size, options))
    return cast("ProcessGroup", dist.ProcessGroupGloo(prefixed, rank, size, _TIMEOUT))


@contextmanager
def _exchange(progress: RankProgress) -> Iterator[None]:
    """Errors of torch.distributed within this become ``PeerFailed``."""
    try:
        with progress.exchanging():
            yield
    except PeerFailed:
        raise
    except RuntimeError as error:
        raise PeerFailed(f"a rank cannot be reached: {error}") from error


class TorchGroup:
    """See ``SafepointGroup``. Sums are taken in an order that NCCL or gloo chooses.

    A rank that fails in a step leaves others in a collective, which torch cannot take back. So it closes its
    connections, and every later step fails on all ranks.

    With NCCL the host would have to wait for all that it has issued to read what was decided. ``stop_agreed``
    is therefore what travelled with the last sum of the layer before: the device still has one to compute.
    """

    def __init__(self, group: ProcessGroup, progress: RankProgress) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group: ProcessGroup | None = group
        self._progress = progress
        self._is_nccl = group.name() == "nccl"
        self._is_stop_asked: Callable[[], bool] | None = None
        self._answers: deque[Callable[[], bool]] = deque(maxlen=2)  # of the last armed layers

    def begin_step(self) -> None:
        self._is_stop_asked = None
        self._answers.clear()

    def fail_step(self) -> None:
        self.close()

    def arm(self, is_stop_asked: Callable[[], bool] | None) -> None:
        self._is_stop_asked = is_stop_asked
        if is_stop_asked is None:
            self._answers.clear()
        else:
            self._answers.append(lambda: False)

    @property
    def stop_agreed(self) -> bool:
        return bool(self._answers) and self._answers[0 if self._is_nccl else -1]()

    def all_reduce(self, x: Tensor) -> Tensor:
        flat, asked = x.view(-1), self._is_stop_asked
        if asked is not None:
            flat = torch.cat((flat, x.new_full((1,), float(self.rank == 0 and asked()))))
        with _exchange(self._progress):
            self._open().allreduce([flat]).wait()
        if asked is None:
            return flat.view(x.shape)
        self._answers[-1] = _answer_on_device(flat[-1:]) if self._is_nccl else _answer(flat[-1:])
        return flat[:-1].view(x.shape)

    def gather_columns(self, x: Tensor) -> Tensor | None:
        is_root = self.rank == 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if is_root else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with _exchange(self._progress):
            self._open().gather([parts] if is_root else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=1) if is_root else None

    def close(self) -> None:
        """Others find their connections to this rank closed."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _open(self) -> ProcessGroup:
        if self._group is None:
            raise PeerFailed("the ranks were separated by a step that failed")
        return self._group


def _answer(value: Tensor) -> Callable[[], bool]:
    return lambda: bool(value > 0)


def _answer_on_device(value: Tensor) -> Callable[[], bool]:
    """Waits, when it is called, until the device has computed the value."""
    copy = torch.empty(1, dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> bool:
        copied.synchronize()
        return bool(copy > 0)

    return read


class TorchLink:
    """See ``StageLink``. The sender is rank 0 of both groups, the receiver rank 1.

    Args:
        headers: a gloo group: the receiver reads the header before it allocates memory for the rows.
        rows: the same group, or one of NCCL for rows on CUDA.
        device: of the rows.
        progress: of the rank at this end.
    """

    def __init__(
        self,
        headers: ProcessGroup,
        rows: ProcessGroup,
        shape: RowShape,
        device: torch.device,
        progress: RankProgress,
    ) -> None:
        self._headers = headers
        self._rows = rows
        self._shape = shape
        self._device = device
        self._progress = progress
        self._sent: deque[list[tuple[Work, Tensor]]] = deque()

    def send(self, number: int, handover: Handover | None) -> None:
        tensors = [tensor.clone() for tensor in self._shape.rows_of(handover)]
        values = torch.tensor(pack_header(number, handover, tensors), dtype=torch.float64)
        with _exchange(self._progress):
            while len(self._sent) >= NUM_MESSAGES:
                for work, _ in self._sent.popleft():
                    work.wait()
            works = [(self._headers.send([values], 1, 0), values)]
            works += [(self._rows.send([tensor], 1, 1), tensor) for tensor in tensors]
        self._sent.append(works)

    def receive(self) -> tuple[int, Handover | None]:
        values = torch.empty(NUM_VALUES, dtype=torch.float64)
        with _exchange(self._progress):
            self._headers.recv([values], 0, 0).wait()
            number, handover, num_tensors, num_rows = unpack_header(values.tolist())
            tensors = [
                torch.empty(num_rows, self._shape.hidden_size, dtype=self._shape.dtype, device=self._device)
                for _ in range(num_tensors)
            ]
            for tensor in tensors:
                self._rows.recv([tensor], 0, 1).wait()
        return number, with_rows(handover, tensors)

    def close(self) -> None:
        """The other end finds its connections closed."""
        for group in (self._headers, self._rows):
            group.abort()
