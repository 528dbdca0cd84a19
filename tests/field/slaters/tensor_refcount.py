"""Reference-counted activations shared between pipeline stages."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

log = logging.getLogger("pipe.refs")


class ActTensor:
    __slots__ = ("tid", "values", "refs")

    def __init__(self, tid: int, values: Sequence[float]) -> None:
        self.tid = tid
        self.values = list(values)
        self.refs = 1


class ActStore:
    """create() hands out the first reference; the tensor goes away with the last decref."""

    def __init__(self) -> None:
        self._live: Dict[int, ActTensor] = {}
        self._next = 0

    def create(self, values: Sequence[float]) -> ActTensor:
        t = ActTensor(self._next, values)
        self._next += 1
        self._live[t.tid] = t
        return t

    def incref(self, t: ActTensor) -> ActTensor:
        t.refs += 1
        return t

    def decref(self, t: ActTensor) -> None:
        t.refs -= 1
        if t.refs == 0:
            del self._live[t.tid]

    def find(self, tid: int) -> Optional[ActTensor]:
        """A new reference, or None."""
        t = self._live.get(tid)
        if t is None:
            return None
        return self.incref(t)  # clean: the new reference is the caller's

    def live(self) -> int:
        return len(self._live)


@dataclass
class Message:
    dst: int
    tensor: ActTensor


class Channel:
    def __init__(self, store: ActStore, depth: int = 4) -> None:
        self.store = store
        self.depth = depth
        self._q: Deque[Message] = deque()

    def send(self, dst: int, t: ActTensor) -> bool:
        self.store.incref(t)  # leak: a full channel returns False with the extra reference
        if len(self._q) >= self.depth:
            return False
        self._q.append(Message(dst, t))
        return True

    def offer(self, dst: int, t: ActTensor) -> bool:
        if len(self._q) >= self.depth:
            return False
        self._q.append(Message(dst, self.store.incref(t)))  # clean: moved into the message, recv passes it on
        return True

    def recv(self) -> Optional[Message]:
        """The message's reference is the receiver's."""
        return self._q.popleft() if self._q else None

    def close(self) -> None:
        while self._q:
            self.store.decref(self._q.popleft().tensor)


class Stage:
    def __init__(self, index: int, store: ActStore, fn: Callable[[List[float]], List[float]]) -> None:
        self.index = index
        self.store = store
        self.fn = fn
        self.saved: Dict[int, ActTensor] = {}
        self.last: Optional[ActTensor] = None
        self.probe: Optional[ActTensor] = None

    def forward(self, mb: int, x: ActTensor, save: bool = True) -> ActTensor:
        """Keeps its own reference on x for the backward when save is set."""
        if save and mb not in self.saved:
            self.store.incref(x)  # clean: near miss, kept in saved once, dropped by backward or discard
            self.saved[mb] = x
        return self.store.create(self.fn(x.values))  # clean: returned to the caller

    def backward(self, mb: int) -> Optional[List[float]]:
        x = self.saved.pop(mb, None)
        if x is None:
            return None
        grad = [2.0 * v for v in x.values]
        self.store.decref(x)
        return grad

    def discard(self) -> None:
        for x in self.saved.values():
            self.store.decref(x)
        self.saved.clear()

    def watch(self, x: ActTensor) -> None:
        """Latest input, for the debugger."""
        self.probe = self.store.incref(x)  # leak: the previous one is overwritten without decref

    def recall(self, x: ActTensor) -> None:
        prev, self.last = self.last, self.store.incref(x)  # clean: near miss, the previous one is dropped next, forget drops the last
        if prev is not None:
            self.store.decref(prev)

    def forget(self) -> None:
        if self.last is not None:
            self.store.decref(self.last)
            self.last = None
        if self.probe is not None:
            self.store.decref(self.probe)
            self.probe = None


def run_chain(store: ActStore, stages: List[Stage], values: Sequence[float], mb: int) -> List[float]:
    x = store.create(values)  # clean: near miss, rebound only after the old one is dropped
    for st in stages:
        y = st.forward(mb, x)  # clean: becomes x, dropped in the next round or at the end
        store.decref(x)
        x = y
    out = list(x.values)
    store.decref(x)
    return out


def run_eval(store: ActStore, stages: List[Stage], values: Sequence[float]) -> List[float]:
    x = store.create(values)  # leak: rebound to the first stage's output
    for st in stages:
        x = st.forward(-1, x, save=False)  # leak: rebound by the next stage, only the last one is dropped
    out = list(x.values)
    store.decref(x)
    return out


def compare(store: ActStore, a_id: int, b_id: int) -> Optional[bool]:
    a = store.find(a_id)  # leak: kept when the second tensor is gone
    if a is None:
        return None
    b = store.find(b_id)  # clean: dropped below
    if b is None:
        log.debug("tensor %d is gone", b_id)
        return None
    same = a.values == b.values
    store.decref(b)
    store.decref(a)
    return same


def peek(store: ActStore, tid: int) -> Optional[float]:
    t = store.find(tid)  # leak: an empty tensor returns before the decref
    if t is None or not t.values:
        return None
    v = t.values[0]
    store.decref(t)
    return v


def lookup_all(store: ActStore, ids: Sequence[int]) -> List[ActTensor]:
    found = (store.find(i) for i in ids)  # clean: those found are returned in the list
    return [t for t in found if t is not None]


def mean_of(store: ActStore, ids: Sequence[int]) -> float:
    ts = lookup_all(store, ids)  # clean: all dropped
    total = sum(sum(t.values) for t in ts)
    for t in ts:
        store.decref(t)
    return total / max(1, len(ts))


def longest(store: ActStore, ids: Sequence[int]) -> Optional[ActTensor]:
    """A reference on the longest one."""
    ts = lookup_all(store, ids)  # leak: the others' references are not dropped
    if not ts:
        return None
    return max(ts, key=lambda t: len(t.values))


def exchange(channel: Channel, store: ActStore, tensors: List[ActTensor]) -> Tuple[int, int]:
    sent = received = 0
    for t in tensors:
        if channel.offer(0, t):  # clean: in the channel, received below
            sent += 1
    while True:
        msg = channel.recv()  # clean: near miss, dropped on both ways
        if msg is None:
            break
        if msg.dst != 0:
            store.decref(msg.tensor)
            continue
        received += 1
        store.decref(msg.tensor)
    return sent, received


def main() -> None:
    store = ActStore()
    stages = [Stage(i, store, lambda v: [x + 1 for x in v]) for i in range(2)]
    print(run_chain(store, stages, [1.0, 2.0], 0))
    for st in reversed(stages):
        st.backward(0)
    ts = [store.create([float(i)]) for i in range(3)]  # clean: dropped at the end
    ch = Channel(store)
    print(exchange(ch, store, ts), mean_of(store, [t.tid for t in ts]), compare(store, ts[0].tid, ts[1].tid), peek(store, ts[0].tid))
    stages[0].recall(ts[0])
    stages[0].recall(ts[1])
    stages[0].forget()
    ch.close()
    for t in ts:
        store.decref(t)
    print("live", store.live())


if __name__ == "__main__":
    main()
