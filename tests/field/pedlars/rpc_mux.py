"""Multiplexed RPC connection: stream ids, send credits and pending calls, with a thread per direction."""
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional


class StreamIds:
    """Odd ids below a limit; an id may be used again once it is retired."""

    def __init__(self, limit: int) -> None:
        self._ids = list(range(1, limit, 2))
        self._lock = threading.Lock()

    def next_id(self) -> Optional[int]:
        with self._lock:
            if not self._ids:
                return None
            return self._ids.pop(0)

    def retire(self, sid: int) -> None:
        with self._lock:
            self._ids.append(sid)


class Credits:
    def __init__(self, window: int) -> None:
        self.window = window
        self._cv = threading.Condition()

    def spend(self, n: int, timeout: Optional[float] = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self.window >= n, timeout):
                return False
            self.window -= n
            return True

    def restock(self, n: int) -> None:
        with self._cv:
            self.window += n
            self._cv.notify_all()


class Frame(NamedTuple):
    sid: int
    kind: str
    body: bytes


class Call:
    def __init__(self, sid: int, cost: int) -> None:
        self.sid = sid
        self.cost = cost
        self.reply: "Future[bytes]" = Future()


class Mux:
    def __init__(self, ids: StreamIds, credits: Credits, write: Callable[[Frame], bool]) -> None:
        self.ids = ids
        self.credits = credits
        self.write = write
        self.calls: Dict[int, Call] = {}
        self.streams: Dict[int, "queue.Queue[bytes]"] = {}
        self._wlock = threading.Lock()

    def call(self, body: bytes) -> Optional[Call]:
        if not self.credits.spend(len(body), 1.0):  # leak: kept when there is no stream id
            return None
        sid = self.ids.next_id()  # clean: near miss, retired by on_reply() or fail_all()
        if sid is None:
            return None
        call = Call(sid, len(body))
        self.calls[sid] = call
        self.write(Frame(sid, "call", body))
        return call

    def call_sized(self, body: bytes) -> Optional[Call]:
        sid = self.ids.next_id()  # clean: retired here if there is no credit
        if sid is None:
            return None
        if not self.credits.spend(len(body), 1.0):  # clean: near miss, restocked with call.cost
            self.ids.retire(sid)
            return None
        call = Call(sid, len(body))
        self.calls[sid] = call
        self.write(Frame(sid, "call", body))
        return call

    def on_reply(self, frame: Frame) -> bool:
        call = self.calls.pop(frame.sid, None)
        if call is None:
            return False
        self._end(call)
        call.reply.set_result(frame.body)
        return True

    def _end(self, call: Call) -> None:
        self.credits.restock(call.cost)
        self.ids.retire(call.sid)

    def fail_all(self, why: Exception) -> int:
        failed = list(self.calls.values())
        self.calls.clear()
        for call in failed:
            self._end(call)
            call.reply.set_exception(why)
        return len(failed)

    def one_way(self, body: bytes) -> bool:
        sid = self.ids.next_id()  # leak: retired only when the write went through
        if sid is None:
            return False
        if self.write(Frame(sid, "note", body)):
            self.ids.retire(sid)
            return True
        return False

    def open_stream(self, depth: int) -> Optional[int]:
        sid = self.ids.next_id()  # leak: close_stream() removes the queue only
        if sid is None:
            return None
        self.streams[sid] = queue.Queue(depth)
        self.write(Frame(sid, "open", b""))
        return sid

    def on_data(self, frame: Frame) -> None:
        q = self.streams.get(frame.sid)
        if q is not None:
            q.put(frame.body)

    def close_stream(self, sid: int) -> int:
        q = self.streams.pop(sid, None)
        if q is None:
            return 0
        self.write(Frame(sid, "close", b""))
        return q.qsize()

    @contextmanager
    def borrowed_id(self) -> Iterator[Optional[int]]:
        sid = self.ids.next_id()  # clean: retired after the block if there was one
        try:
            yield sid
        finally:
            if sid is not None:
                self.ids.retire(sid)

    def ask_version(self) -> Optional[int]:
        with self.borrowed_id() as sid:  # clean: with
            if sid is None:
                return None
            self.write(Frame(sid, "version", b""))
            return sid

    @contextmanager
    def metered(self, n: int) -> Iterator[bool]:
        granted = self.credits.spend(n, 0.2)  # leak: restocked on no way, the block ends the manager
        yield granted

    def send_metered(self, body: bytes) -> bool:
        with self.metered(len(body)) as granted:  # clean: the loss is inside the manager
            return granted and self.write(Frame(0, "data", body))

    def write_pair(self, a: Frame, b: Frame) -> bool:
        self._wlock.acquire()  # leak: the return after the failed first frame keeps the lock
        if not self.write(a):
            return False
        done = self.write(b)
        self._wlock.release()
        return done

    def write_run(self, frames: List[Frame]) -> int:
        sent = 0
        self._wlock.acquire()  # clean: break and normal end both come to the release
        for f in frames:
            if not self.write(f):
                break
            sent += 1
        self._wlock.release()
        return sent

    def try_write(self, frame: Frame) -> bool:
        if not self._wlock.acquire(timeout=0.1):  # clean: released in finally
            return False
        try:
            return self.write(frame)
        finally:
            self._wlock.release()


class Upload:
    """Streams a body in pieces; its id lives from begin() to either end."""

    def __init__(self, mux: Mux) -> None:
        self.mux = mux
        self.sid: Optional[int] = None
        self.sent = 0

    def begin(self) -> bool:
        if self.sid is not None:
            return False
        self.sid = self.mux.ids.next_id()  # clean: near miss, _over() is on finish() and abort()
        return self.sid is not None

    def piece(self, body: bytes) -> bool:
        if self.sid is None:
            return False
        if not self.mux.credits.spend(len(body)):  # clean: restocked with the same length below
            return False
        ok = self.mux.write(Frame(self.sid, "piece", body))
        self.mux.credits.restock(len(body))
        self.sent += len(body) if ok else 0
        return ok

    def _over(self) -> None:
        sid, self.sid = self.sid, None
        if sid is not None:
            self.mux.ids.retire(sid)

    def finish(self) -> int:
        self._over()
        return self.sent

    def abort(self) -> None:
        if self.sid is not None:
            self.mux.write(Frame(self.sid, "abort", b""))
        self._over()


class Pinger(threading.Thread):
    """Uses one id for all its life."""

    def __init__(self, mux: Mux, period: float) -> None:
        super().__init__(daemon=True)
        self.mux = mux
        self.halt = threading.Event()
        self.period = period
        self.missed = 0

    def run(self) -> None:
        sid = self.mux.ids.next_id()  # leak: three misses leave by return, the id stays taken
        if sid is None:
            return
        while not self.halt.wait(self.period):
            if self.mux.write(Frame(sid, "ping", b"")):
                self.missed = 0
                continue
            self.missed += 1
            if self.missed == 3:
                return
        self.mux.ids.retire(sid)


class Heartbeat(threading.Thread):
    def __init__(self, mux: Mux, period: float) -> None:
        super().__init__(daemon=True)
        self.mux = mux
        self.halt = threading.Event()
        self.period = period

    def run(self) -> None:
        sid = self.mux.ids.next_id()  # clean: break comes to the retire after the loop
        if sid is None:
            return
        while not self.halt.wait(self.period):
            if not self.mux.write(Frame(sid, "beat", b"")):
                break
        self.mux.ids.retire(sid)


def collect(mux: Mux, bodies: List[bytes]) -> List[Any]:
    """Calls in parallel; the ids come back with the replies."""
    calls = [mux.call_sized(b) for b in bodies]  # clean: near miss, on_reply() ends each call
    return [c.reply.result(5.0) for c in calls if c is not None]
