"""Low-overhead step profiler: pooled CUDA events, trace files, memory snapshots."""
import atexit
import contextlib
import json
import os
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Dict, IO, List, Optional, Tuple

import torch


class EventPool:
    def __init__(self):
        self._ready: List[torch.cuda.Event] = []
        self.created = 0

    def acquire(self) -> torch.cuda.Event:
        if self._ready:
            return self._ready.pop()
        self.created += 1
        return torch.cuda.Event(enable_timing=True)

    def release(self, ev: torch.cuda.Event) -> None:
        self._ready.append(ev)

    def acquire_pair(self) -> Tuple[torch.cuda.Event, torch.cuda.Event]:
        return self.acquire(), self.acquire()  # clean: both handed to the caller

    def acquire_done(self) -> Optional[torch.cuda.Event]:
        """An event whose work is over, if there is one."""
        if not self._ready:
            return None
        ev = self._ready.pop()  # leak: an unfinished event is taken from the list and not put back
        if not ev.query():
            return None
        return ev


@dataclass
class Span:
    name: str
    begin: Any
    end: Any


class StepProfiler:
    def __init__(self, out_dir: str, every: int = 100):
        self.out_dir = out_dir
        self.every = every
        self.events = EventPool()
        self.spans: List[Span] = []
        self.totals: Dict[str, float] = defaultdict(float)
        self.step_no = 0
        self._trace: IO[str] = open(os.path.join(out_dir, "trace.json"), "w")  # clean: near miss, closed by the finalizer
        weakref.finalize(self, self._trace.close)

    @contextlib.contextmanager
    def span(self, name: str):
        begin, end = self.events.acquire_pair()  # clean: kept in spans, collect() releases both
        begin.record()
        yield
        end.record()
        self.spans.append(Span(name, begin, end))

    def collect(self) -> None:
        torch.cuda.synchronize()
        for s in self.spans:
            self.totals[s.name] += s.begin.elapsed_time(s.end)
            self.events.release(s.begin)
            self.events.release(s.end)
        self.spans.clear()

    def timeit(self, fn, *args) -> float:
        begin, end = self.events.acquire_pair()  # leak: only one event of the pair is released
        begin.record()
        fn(*args)
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end)
        self.events.release(begin)
        return ms

    def wait_for(self, stream: torch.cuda.Stream, timeout: float) -> bool:
        ev = self.events.acquire()  # leak: released only when it did not time out
        ev.record(stream)
        t0 = time.monotonic()
        while not ev.query():
            if time.monotonic() - t0 > timeout:
                return False
            time.sleep(0.001)
        self.events.release(ev)
        return True

    def fence(self, streams: List[torch.cuda.Stream]) -> None:
        evs = []
        for s in streams:
            ev = self.events.acquire()  # clean: gathered and released below
            ev.record(s)
            evs.append(ev)
        for ev in evs:
            ev.synchronize()
        for ev in evs:
            self.events.release(ev)

    def marker(self) -> None:
        self.events.acquire().record()  # leak: recorded and thrown away

    def export(self, path: str) -> int:
        try:
            fh = open(path, "w")  # clean: closed in the else branch, nothing open in the handler
        except OSError:
            return 0
        else:
            json.dump(dict(self.totals), fh)
            fh.close()
        return len(self.totals)

    def last_trace(self) -> Optional[dict]:
        fh = open(os.path.join(self.out_dir, "last.json"))  # leak: bad json is swallowed with the file open
        try:
            data = json.load(fh)
        except ValueError:
            return None
        fh.close()
        return data

    def merge(self, paths: List[str]) -> Dict[str, float]:
        merged: Dict[str, float] = defaultdict(float)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(p)) for p in paths]  # clean: near miss, the stack closes each
            for fh in files:
                head = fh.readline()
                if not head.startswith("{"):
                    continue
                for k, v in json.loads(head).items():
                    merged[k] += v
        return dict(merged)


class MemorySampler:
    def __init__(self, path: str, enabled: bool):
        self.enabled = enabled
        self.fh = None
        if enabled:
            self.fh = open(path, "a")  # clean: near miss, stop() closes under the same condition
            atexit.register(self.stop)

    def sample(self) -> None:
        if self.enabled:
            self.fh.write(f"{time.time():.3f} {torch.cuda.memory_allocated()}\n")

    def stop(self) -> None:
        if self.enabled and not self.fh.closed:
            self.fh.close()

    def rotate(self, path: str) -> None:
        if not self.enabled:
            return
        old, self.fh = self.fh, open(path, "a")  # clean: near miss, the old file is closed after the exchange
        old.close()
