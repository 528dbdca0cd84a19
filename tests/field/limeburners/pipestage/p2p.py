"""Point-to-point buffers and the channel that sends and receives them."""
from __future__ import annotations

import collections
from typing import Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist


class P2PBuffer:
    """Tensor with a use count; goes back to its pool when the count reaches zero."""

    def __init__(self, pool: "P2PPool", data: torch.Tensor):
        self.pool = pool
        self.data = data
        self.uses = 0

    def share(self) -> "P2PBuffer":
        self.uses += 1
        return self

    def unref(self) -> None:
        self.uses -= 1
        if self.uses == 0:
            self.pool._put(self)


class P2PPool:
    def __init__(self, depth: int, shape: Tuple[int, ...], device="cuda"):
        self._stack: Deque[P2PBuffer] = collections.deque(
            P2PBuffer(self, torch.empty(shape, device=device)) for _ in range(depth)
        )

    def draw(self) -> Optional[P2PBuffer]:
        """A buffer with one use, or None."""
        if not self._stack:
            return None
        buf = self._stack.pop()
        buf.uses = 1
        return buf

    def _put(self, buf: P2PBuffer) -> None:
        self._stack.append(buf)

    def resize(self, shape: Tuple[int, ...]) -> int:
        """Reallocates the buffers that are not in use."""
        done: List[P2PBuffer] = []
        while True:
            buf = self.draw()  # clean: near miss, all that were drawn are put back at the end
            if buf is None:
                break
            if tuple(buf.data.shape) != shape:
                buf.data = torch.empty(shape, device=buf.data.device)
            done.append(buf)
        for buf in done:
            buf.unref()
        return len(done)


class Channel:
    """Connection to one neighbour stage."""

    def __init__(self, pool: P2PPool, peer: int):
        self.pool = pool
        self.peer = peer
        self._sending: List[Tuple[P2PBuffer, object]] = []
        self._parked: Dict[int, P2PBuffer] = {}
        self.dead = False

    def send(self, buf: P2PBuffer) -> None:
        """Keeps a use of its own until the transfer is over."""
        held = buf.share()  # clean: near miss, flush drops it when the request is done
        self._sending.append((held, dist.isend(held.data, self.peer)))

    def send_and_drop(self, buf: P2PBuffer) -> None:
        """The caller's use ends here."""
        self.send(buf)
        buf.unref()

    def flush(self, block: bool = False) -> None:
        keep = []
        for buf, req in self._sending:
            if block:
                req.wait()
            if block or req.is_completed():
                buf.unref()
            else:
                keep.append((buf, req))
        self._sending = keep

    def recv(self) -> Optional[P2PBuffer]:
        """Buffer with the received tensor for the caller, or None (peer gone, or no buffer left)."""
        if self.dead:
            return None
        buf = self.pool.draw()  # clean: returned or dropped, or None
        if buf is None:
            return None
        header = torch.zeros(1, dtype=torch.int64)
        dist.recv(header, self.peer)
        if int(header) < 0:
            self.dead = True
            buf.unref()
            return None
        dist.recv(buf.data, self.peer)
        return buf

    def recv_expected(self, tag: int) -> Optional[P2PBuffer]:
        """Parks out-of-order messages until their turn."""
        if tag in self._parked:
            return self._parked.pop(tag)
        while True:
            buf = self.recv()  # clean: near miss, parked ones are popped later or dropped by close
            if buf is None:
                return None
            got = int(buf.data.flatten()[0])
            if got == tag:
                return buf
            self._parked[got] = buf

    def recv_latest(self) -> Optional[P2PBuffer]:
        """Drops everything but the newest message."""
        newest: Optional[P2PBuffer] = None
        while True:
            buf = self.recv()  # leak: an older message in newest is overwritten
            if buf is None:
                return newest
            newest = buf

    def ping(self) -> bool:
        buf = self.pool.draw()  # leak: send has a use of its own, this one is not dropped
        if buf is None:
            return False
        buf.data.zero_()
        self.send(buf)
        self.flush(block=True)
        return True

    def close(self) -> None:
        self.flush(block=True)
        for buf in self._parked.values():
            buf.unref()
        self._parked.clear()
