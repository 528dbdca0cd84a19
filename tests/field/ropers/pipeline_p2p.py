"""1F1B pipeline stage with pooled point-to-point communication buffers."""
from __future__ import annotations

import collections
import enum
from typing import Callable, Deque, Dict, List, Optional, Tuple


class CommBuffer:
    __slots__ = ("slot", "shape", "payload")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.shape: Tuple[int, ...] = ()
        self.payload: object = None


class CommBufferPool:
    def __init__(self, slots: int) -> None:
        self._idle: Deque[CommBuffer] = collections.deque(CommBuffer(i) for i in range(slots))
        self._busy: Dict[int, CommBuffer] = {}

    def checkout(self, shape: Tuple[int, ...]) -> CommBuffer:
        if not self._idle:
            raise BufferError("communication buffers exhausted")
        buf = self._idle.popleft()
        buf.shape = shape
        self._busy[buf.slot] = buf
        return buf

    def checkin(self, buf: CommBuffer) -> None:
        self._busy.pop(buf.slot)
        buf.payload = None
        self._idle.append(buf)

    def outstanding(self) -> int:
        return len(self._busy)


class Direction(enum.Enum):
    PREV = 0
    NEXT = 1


class Link:
    """Loopback transport; the real one wraps isend/irecv."""

    def __init__(self) -> None:
        self.queue: Deque[object] = collections.deque()

    def send(self, value: object) -> None:
        self.queue.append(value)

    def recv(self) -> object:
        if not self.queue:
            raise TimeoutError("peer did not send")
        return self.queue.popleft()


class PipelineStage:
    def __init__(self, rank: int, size: int, pool: CommBufferPool, prev: Link, nxt: Link) -> None:
        self.rank, self.size = rank, size
        self.pool = pool
        self.prev, self.next = prev, nxt
        self.inputs: Deque[CommBuffer] = collections.deque()
        self.outputs: Dict[int, CommBuffer] = {}
        self._grad_in: Optional[CommBuffer] = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def recv_forward(self, shape) -> Optional[CommBuffer]:
        if self.is_first:
            return None
        buf = self.pool.checkout(shape)  # clean: returned, unhandled exceptions aside
        buf.payload = self.prev.recv()
        return buf

    def try_recv_forward(self, shape) -> Optional[CommBuffer]:
        buf = self.pool.checkout(shape)  # leak: the timeout is survived and buf is dropped
        try:
            buf.payload = self.prev.recv()
        except TimeoutError:
            return None
        return buf

    def poll_backward(self, shape) -> Optional[CommBuffer]:
        buf = self.pool.checkout(shape)  # clean: given back on timeout, returned otherwise
        try:
            buf.payload = self.next.recv()
        except TimeoutError:
            self.pool.checkin(buf)
            return None
        return buf

    def forward_step(self, mb: int, shape, fn: Callable[[object], object]) -> None:
        inp = self.recv_forward(shape)  # clean: queued in inputs, backward_step gives it back
        out = self.pool.checkout(shape)  # clean: kept in outputs until backward or given back on the last stage
        out.payload = fn(inp.payload if inp is not None else mb)
        if inp is not None:
            self.inputs.append(inp)
        if self.is_last:
            self.pool.checkin(out)
            return
        self.next.send(out.payload)
        self.outputs[mb] = out

    def backward_step(self, mb: int) -> None:
        out = self.outputs.pop(mb, None)
        if out is not None:
            self.pool.checkin(out)
        if self.inputs:
            self.pool.checkin(self.inputs.popleft())

    def eval_step(self, mb: int, shape, fn: Callable[[object], object]) -> Optional[object]:
        inp = self.recv_forward(shape)  # leak: never given back in evaluation on later stages
        result = fn(inp.payload if inp is not None else mb)
        if self.is_last:
            return result
        self.next.send(result)
        return None

    def eval_many(self, mbs: List[int], shape, fn: Callable[[object], object]) -> List[object]:
        results: List[object] = []
        for mb in mbs:
            inp = self.recv_forward(shape)  # clean: near miss, None on the first stage and checked in elsewhere
            results.append(fn(inp.payload if inp is not None else mb))
            if self.is_first:
                continue
            self.pool.checkin(inp)
        return results

    def post_grad_recv(self, shape) -> None:
        self._grad_in = self.pool.checkout(shape)  # leak: a second post before take_grad overwrites the first

    def take_grad(self) -> Optional[object]:
        buf, self._grad_in = self._grad_in, None
        if buf is None:
            return None
        value = buf.payload
        self.pool.checkin(buf)
        return value

    def cooldown(self, pending: int, shape) -> int:
        done = 0
        for _ in range(pending):
            grad = self.poll_backward(shape)  # leak: break on the stop marker skips the checkin
            if grad is None:
                break
            if grad.payload == "stop":
                break
            if self.inputs:
                self.pool.checkin(self.inputs.popleft())
            self.pool.checkin(grad)
            done += 1
        return done

    def drain(self, shape) -> int:
        n = 0
        while True:
            grad = self.poll_backward(shape)  # clean: near miss, checked in before the test that breaks
            if grad is None:
                return n
            last = grad.payload == "stop"
            self.pool.checkin(grad)
            if last:
                break
            n += 1
        return n

    def reset(self) -> None:
        for buf in self.outputs.values():
            self.pool.checkin(buf)
        self.outputs.clear()
        while self.inputs:
            self.pool.checkin(self.inputs.pop())


def train_batch(stage: PipelineStage, micro_batches: int, shape) -> None:
    warmup = min(stage.size - stage.rank - 1, micro_batches)
    for mb in range(micro_batches):
        stage.forward_step(mb, shape, lambda x: x)
        if mb >= warmup:
            stage.backward_step(mb - warmup)
    for mb in range(micro_batches - warmup, micro_batches):
        stage.backward_step(mb)


def exchange_shapes(pool: CommBufferPool, link: Link, dims: List[int], wait: bool) -> Optional[List[int]]:
    hdr = pool.checkout((len(dims),))  # leak: returns before checkin when not waiting
    hdr.payload = list(dims)
    link.send(hdr.payload)
    if not wait:
        return None
    peer = pool.checkout((len(dims),))  # clean: given back below
    peer.payload = link.recv()
    result = list(peer.payload)
    pool.checkin(peer)
    pool.checkin(hdr)
    return result


def broadcast_tied(pool: CommBufferPool, links: List[Link], value: object) -> None:
    bufs = [pool.checkout((1,)) for _ in links]  # clean: every one is given back in the loop
    for buf, link in zip(bufs, links):
        buf.payload = value
        link.send(buf.payload)
    for buf in bufs:
        pool.checkin(buf)


def broadcast_nonzero(pool: CommBufferPool, links: List[Link], values: List[int]) -> int:
    sent = []
    for link, value in zip(links, values):
        buf = pool.checkout((1,))  # leak: only the nonzero ones are kept and given back
        buf.payload = value
        if value:
            link.send(value)
            sent.append(buf)
    for buf in sent:
        pool.checkin(buf)
    return len(sent)


if __name__ == "__main__":
    p = CommBufferPool(16)
    a, b = Link(), Link()
    s = PipelineStage(0, 2, p, a, b)
    train_batch(s, 4, (2, 2))
    s.reset()
    exchange_shapes(p, a, [1, 2], True)
    broadcast_tied(p, [a, b], 3)
    assert p.outstanding() == 0
