"""Between the decode rank and a prefill rank: a link that may fail, and a thread that sends rows while the layers compute (disagg.py).

Shapes: L' layers of one message, K kv heads, n rows, E head_dim.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import MinipopError
from .parallel import network_reason


class LinkError(MinipopError):
    """The other side is gone, or silent for too long."""


class Link:
    """What connects rank 0 with prefill rank `number`; `other` is the name of the far side.

    A gloo group of these two alone: it dies with its first failure, on both sides at once, and takes no other link along. `connect`
    makes the next one. JSON values and tensors; nothing is unpickled. timeout: seconds that one message may take.
    """

    def __init__(self, store: dist.Store, number: int, own_rank: int, timeout: float):
        self.store, self.number, self.side, self.timeout = store, number, min(own_rank, 1), timeout
        self.other = f"prefill rank {number}" if own_rank == 0 else "the decode rank"
        self.generation = 0

    def connect(self, limit: float) -> None:
        """Meet the other side. Rank 0 waits for a sign of the prefill rank first: it may be busy, late or dead."""
        self.generation += 1
        name = f"minipop/link/{self.number}/{self.generation}"
        with self._failures(limit):
            if self.side == 1:
                self.store.set(name, "here")
            else:
                end = time.monotonic() + limit
                while not self.store.check([name]):
                    if time.monotonic() > end:
                        raise LinkError(f"{self.other} did not appear within {limit:g} s")
                    time.sleep(0.01)
            self.group = dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), self.side, 2, timedelta(seconds=limit))

    def send(self, tensor: Tensor, limit: float | None = None) -> None:
        """Returns when the other side has taken it. limit: seconds to wait, where it is not the timeout."""
        limit = limit or self.timeout
        with self._failures(limit):
            self.group.send([tensor], 1 - self.side, 0).wait(timedelta(seconds=limit))

    def receive(self, tensor: Tensor, limit: float | None = None) -> Tensor:
        """Fill a tensor."""
        limit = limit or self.timeout
        with self._failures(limit):
            self.group.recv([tensor], 1 - self.side, 0).wait(timedelta(seconds=limit))
        return tensor

    def send_json(self, value: Any, limit: float | None = None) -> None:
        data = json.dumps(value).encode()
        self.send(torch.tensor([len(data)]), limit)
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), limit)

    def receive_json(self, limit: float | None = None) -> Any:
        size = int(self.receive(torch.empty(1, dtype=torch.long), limit))
        return json.loads(self.receive(torch.empty(size, dtype=torch.uint8), limit).numpy().tobytes())

    @contextmanager
    def _failures(self, limit: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as problem:  # gloo's and the store's
            silent = "timed out" in str(problem).lower() or "timeout" in str(problem).lower()
            raise LinkError(f"{self.other} was silent for {limit:g} s" if silent else
                            f"{self.other} is gone: {network_reason(problem)}") from None


class Sender(threading.Thread):
    """Sends rows from a thread of its own, so that the layers go on computing. Used for one prompt."""

    def __init__(self, link: Link):
        super().__init__(daemon=True)
        self.link, self.queue, self.problem = link, SimpleQueue(), None
        self.bytes, self.busy_s, self.begin = 0, 0.0, time.perf_counter()
        self.start()

    def push(self, first: int, start: int, rows: Tensor) -> None:
        if self.problem is not None:
            raise self.problem  # no use in computing more
        self.queue.put((first, start, rows))

    def run(self) -> None:
        try:
            while (message := self.queue.get()) is not None:
                first, start, rows = message
                rows = rows.cpu()  # gloo sends from the host's memory
                begin = time.perf_counter()
                self.link.send(torch.tensor([first, start, rows.shape[1], rows.shape[3]]))
                self.link.send(rows)
                self.busy_s += time.perf_counter() - begin
                self.bytes += rows.nbytes
        except LinkError as problem:
            self.problem = problem

    def finish(self) -> dict[str, float]:
        """Wait for the last message. Seconds of computing and of sending, and how many of the latter lay within the former."""
        computed = time.perf_counter()
        self.queue.put(None)
        self.join()
        if self.problem is not None:
            raise self.problem
        waited = time.perf_counter() - computed
        return {"kv_bytes": self.bytes, "compute_s": computed - self.begin, "transfer_s": self.busy_s,
                "hidden_s": max(0.0, self.busy_s - waited)}
