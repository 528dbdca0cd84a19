"""All-to-all in the background; the ticket gives its channel and buffer back when waited for."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from .buffers import BufferPool, TokenBuffer


class Channels:
    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)
        self._ids = list(range(n))

    def obtain(self) -> int:
        self._sem.acquire()  # clean: goes with the channel, free releases it
        return self._ids.pop()

    def free(self, ch: int) -> None:
        self._ids.append(ch)
        self._sem.release()


@dataclass(eq=False)
class Ticket:
    channels: Channels
    pool: BufferPool
    channel: int
    buf: TokenBuffer

    def wait(self) -> torch.Tensor:
        out = self.buf.data[: self.buf.filled].clone()
        self.channels.free(self.channel)
        self.pool.restock(self.buf)
        return out


class Exchange:
    def __init__(self, pool: BufferPool, channels: Channels) -> None:
        self.pool = pool
        self.channels = channels
        self.sent = 0

    def send(self, buf: TokenBuffer) -> Ticket:
        """Takes over the buffer."""
        ch = self.channels.obtain()  # clean: near miss, in the ticket, wait frees it
        self.sent += buf.filled
        return Ticket(self.channels, self.pool, ch, buf)

    def send_if_any(self, buf: TokenBuffer) -> Ticket | None:
        ch = self.channels.obtain()  # leak: an empty buffer is restocked, the channel is not freed
        if buf.filled == 0:
            self.pool.restock(buf)
            return None
        self.sent += buf.filled
        return Ticket(self.channels, self.pool, ch, buf)

    def broadcast(self, bufs: list[TokenBuffer]) -> list[torch.Tensor]:
        tickets = [self.send(b) for b in bufs]  # clean: all are waited for
        return [t.wait() for t in tickets]

    def flush_marker(self, buf: TokenBuffer) -> int:
        self.send(buf)  # leak: nobody waits for the ticket, channel and buffer stay out
        return self.sent
