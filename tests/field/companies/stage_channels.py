"""Pipeline-parallel stage channels: microbatch activations go through bounded queues."""
from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from threading import Thread
from typing import Callable, Final, Generic, TypeVar

import torch

T = TypeVar("T")
_log: Final = logging.getLogger(__name__)
_STOP: Final = object()


class ActivationPool:
    def __init__(self, shape: tuple[int, ...], depth: int) -> None:
        self.__free: list[torch.Tensor] = [torch.empty(shape) for _ in range(depth)]
        self.__lent: set[int] = set()

    def lend(self) -> torch.Tensor:
        t = self.__free.pop()  # clean: recorded and handed to the caller
        self.__lent.add(id(t))
        return t

    def take_back(self, t: torch.Tensor) -> None:
        if id(t) not in self.__lent:
            raise ValueError("not one of ours")
        self.__lent.remove(id(t))
        self.__free.append(t)

    def __len__(self) -> int:
        return len(self.__free)


@dataclass(slots=True)
class Message(Generic[T]):
    mb: int
    payload: T
    last: bool = False


class Channel:
    def __init__(self, depth: int) -> None:
        self._q: queue.Queue = queue.Queue(depth)

    def send(self, msg: object) -> None:
        self._q.put(msg)

    def send_nowait(self, msg: object) -> bool:
        try:
            self._q.put_nowait(msg)
            return True
        except queue.Full:
            return False

    def recv(self) -> object:
        return self._q.get()


class Stage(Thread):
    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], pool: ActivationPool, inp: Channel, out: Channel):
        super().__init__(daemon=True)
        self.fn = fn
        self.pool = pool
        self.inp = inp
        self.out = out
        self.dropped = 0

    def run(self) -> None:
        while True:
            msg = self.inp.recv()
            if msg is _STOP:
                self.out.send(_STOP)
                return
            assert isinstance(msg, Message)
            dst = self.pool.lend()  # clean: sent on, the sink takes it back
            dst.copy_(self.fn(msg.payload))
            self.pool.take_back(msg.payload)
            self.out.send(Message(msg.mb, dst, msg.last))

    def forward_nowait(self, msg: Message) -> None:
        dst = self.pool.lend()  # leak: a full channel only counts the drop
        dst.copy_(self.fn(msg.payload))
        self.pool.take_back(msg.payload)
        if not self.out.send_nowait(Message(msg.mb, dst, msg.last)):
            self.dropped += 1
            _log.debug("microbatch %d dropped", msg.mb)

    def forward_dropping(self, msg: Message) -> None:
        dst = self.pool.lend()  # clean: near miss, taken back when the channel is full
        dst.copy_(self.fn(msg.payload))
        self.pool.take_back(msg.payload)
        if not self.out.send_nowait(Message(msg.mb, dst, msg.last)):
            self.pool.take_back(dst)
            self.dropped += 1


class Source:
    def __init__(self, pool: ActivationPool, out: Channel) -> None:
        self.pool, self.out = pool, out

    def feed(self, batches: list[torch.Tensor]) -> int:
        for i, b in enumerate(batches):
            act = self.pool.lend()  # clean: sent on
            act.copy_(b)
            self.out.send(Message(i, act, last=i == len(batches) - 1))
        self.out.send(_STOP)
        return len(batches)

    def feed_valid(self, batches: list[torch.Tensor]) -> int:
        n = 0
        for b in batches:
            act = self.pool.lend()  # leak: a batch with NaN is skipped and its activation with it
            act.copy_(b)
            if torch.isnan(act).any():
                _log.error("NaN in microbatch, skipping")
                continue
            self.out.send(Message(n, act))
            n += 1
        self.out.send(_STOP)
        return n

    def feed_reuse(self, batches: list[torch.Tensor]) -> int:
        n = 0
        act = None
        for b in batches:
            if act is None:
                act = self.pool.lend()  # clean: near miss, a skipped one is used for the next batch and the spare goes back
            act.copy_(b)
            if torch.isnan(act).any():
                continue
            self.out.send(Message(n, act))
            act = None
            n += 1
        if act is not None:
            self.pool.take_back(act)
        self.out.send(_STOP)
        return n


class Sink:
    def __init__(self, pool: ActivationPool, inp: Channel) -> None:
        self.pool, self.inp = pool, inp

    def collect(self) -> list[torch.Tensor]:
        outs: list[torch.Tensor] = []
        while (msg := self.inp.recv()) is not _STOP:
            assert isinstance(msg, Message)
            outs.append(msg.payload.clone())
            self.pool.take_back(msg.payload)
        return outs


def bubble_test(pool: ActivationPool, n: int) -> float:
    held = [pool.lend() for _ in range(n)]  # clean: near miss, reversed order, but all of them
    s = sum(float(t.sum()) for t in held)
    for t in reversed(held):
        pool.take_back(t)
    return s


def bubble_half(pool: ActivationPool, n: int) -> float:
    held = [pool.lend() for _ in range(n)]  # leak: every second one only is taken back
    s = sum(float(t.sum()) for t in held)
    for t in held[::2]:
        pool.take_back(t)
    return s


def copy_through(pool: ActivationPool, x: torch.Tensor, scale: float | None) -> torch.Tensor:
    t = pool.lend()  # leak: scaling binds t to the product; take_back refuses that one
    t.copy_(x)
    if scale is not None:
        t = t * scale
    out = t.clone()
    if scale is None:
        pool.take_back(t)
    return out
