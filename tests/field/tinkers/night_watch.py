"""Operations library of the Nightwatch team: spans, label rows, profiler windows, spares, snapshots."""
from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import Callable, Deque, Dict, List, Optional, Tuple


class SpanTable:
    """Open trace spans by id. A span that stays open is shown as running for ever."""

    def __init__(self, sink: Callable[[str, float], None]) -> None:
        self._sink = sink
        self._open: Dict[int, Tuple[str, float]] = {}
        self._ids = itertools.count(1)

    def begin(self, name: str) -> int:
        span = next(self._ids)
        self._open[span] = (name, time.perf_counter())
        return span

    def end(self, span: int) -> None:
        name, started = self._open.pop(span)
        self._sink(name, time.perf_counter() - started)

    def running(self) -> List[str]:
        return [name for name, _ in self._open.values()]


def traced_lookup(spans: SpanTable, index, key: str):
    span = spans.begin("lookup")  # leak: the KeyError is caught and None returned with the span open
    try:
        value = index.find(key)
    except KeyError:
        return None
    spans.end(span)
    return value


def traced_batch(spans: SpanTable, items, work) -> int:
    done = 0
    for item in items:
        span = spans.begin(item.name)  # clean: ended on both ways of the turn
        if not item.ready:
            spans.end(span)
            continue
        work(item)
        spans.end(span)
        done += 1
    return done


class SpanKeeper:
    def __init__(self, spans: SpanTable) -> None:
        self.spans = spans
        self.phase: Optional[int] = None

    def prefill(self) -> None:
        self.phase = self.spans.begin("prefill")  # leak: decode binds the field to its own span before this one ends

    def decode(self) -> None:
        self.phase = self.spans.begin("decode")  # clean: ended in finish

    def finish(self) -> None:
        if self.phase is not None:
            self.spans.end(self.phase)
            self.phase = None


class LabelRows:
    """Rows of the metrics page by label set; a row is shared, counted, and wiped when unused."""

    def __init__(self, rows: int) -> None:
        self._idle = deque(range(rows))
        self._row: Dict[tuple, int] = {}
        self._uses: Counter = Counter()

    def intern(self, **labels: str) -> int:
        key = tuple(sorted(labels.items()))
        row = self._row.get(key)
        if row is None:
            if not self._idle:
                raise OverflowError("too many label sets")
            row = self._row[key] = self._idle.popleft()
        self._uses[row] += 1
        return row

    def expel(self, row: int) -> None:
        self._uses[row] -= 1
        if self._uses[row] == 0:
            for key, r in list(self._row.items()):
                if r == row:
                    del self._row[key]
            self._idle.append(row)


def measure_tenant(rows: LabelRows, tenant: str, page, sample) -> Optional[float]:
    try:
        row = rows.intern(tenant=tenant)  # leak: no sample, then None is returned with the row in use
    except OverflowError:
        return None
    value = sample(tenant)
    if value is None:
        return None
    page[row] = value
    rows.expel(row)
    return value


class TenantGauge:
    def __init__(self, rows: LabelRows, tenant: str, page) -> None:
        self._rows = rows
        self._page = page
        self._row = rows.intern(tenant=tenant, kind="gauge")  # clean: expelled in close

    def set(self, value: float) -> None:
        self._page[self._row] = value

    def close(self) -> None:
        self._rows.expel(self._row)


class RelabelGauge:
    def __init__(self, rows: LabelRows, page) -> None:
        self._rows = rows
        self._page = page
        self._row = -1

    def relabel(self, model: str) -> None:
        row = self._rows.intern(model=model)  # clean: near miss, the former row is expelled before the field changes
        if self._row >= 0:
            self._rows.expel(self._row)
        self._row = row

    def close(self) -> None:
        if self._row >= 0:
            self._rows.expel(self._row)
            self._row = -1


class ProfilerSwitch:
    """The profiler runs while at least one window wants it. Raising a window gives its lowering call."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._start = start
        self._stop = stop
        self._windows = 0
        self._mu = threading.Lock()

    def raise_window(self) -> Callable[[], None]:
        with self._mu:
            self._windows += 1
            if self._windows == 1:
                self._start()
        return partial(self._lower, [True])

    def _lower(self, armed: List[bool]) -> None:
        with self._mu:
            if not armed[0]:
                return
            armed[0] = False
            self._windows -= 1
            if self._windows == 0:
                self._stop()

    @property
    def active(self) -> bool:
        return self._windows > 0


def profile_step(switch: ProfilerSwitch, step: Callable[[], bool]) -> bool:
    lower = switch.raise_window()  # leak: an unfinished step returns False with the window up
    if not step():
        return False
    lower()
    return True


def profile_until(switch: ProfilerSwitch, steps, seconds: float) -> int:
    lower = switch.raise_window()  # clean: lowered in finally
    deadline = time.monotonic() + seconds
    n = 0
    try:
        for step in steps:
            if time.monotonic() > deadline:
                return n
            step()
            n += 1
    finally:
        lower()
    return n


def profile_later(switch: ProfilerSwitch, timer, seconds: float) -> None:
    lower = switch.raise_window()  # clean: the timer calls it
    timer.call_later(seconds, lower)


class WarmSpares:
    """Booted machines in reserve. Mobilized ones work until they stand down or are written off."""

    def __init__(self, names: List[str]) -> None:
        self._ready: Deque[str] = deque(names)
        self._field: Dict[str, float] = {}
        self.written_off: List[str] = []

    def mobilize(self) -> str:
        name = self._ready.popleft()
        self._field[name] = time.monotonic()
        return name

    def stand_down(self, name: str) -> float:
        started = self._field.pop(name)
        self._ready.append(name)
        return time.monotonic() - started

    def write_off(self, name: str) -> None:
        del self._field[name]
        self.written_off.append(name)

    def __len__(self) -> int:
        return len(self._ready)


def replace_node(spares: WarmSpares, cluster, dead: str) -> Optional[str]:
    name = spares.mobilize()  # leak: a spare that can not join is neither stood down nor written off
    if not cluster.join(name):
        return None
    cluster.remove(dead)
    return name


def burst(spares: WarmSpares, cluster, n: int, seconds: float) -> float:
    crew = []
    while len(crew) < n and len(spares):
        crew.append(spares.mobilize())  # clean: each of the crew stands down or is written off
    cluster.run(crew, seconds)
    worked = 0.0
    for name in crew:
        if cluster.alive(name):
            worked += spares.stand_down(name)
        else:
            spares.write_off(name)
    return worked


def rehearse(spares: WarmSpares, cluster) -> List[str]:
    good = []
    for _ in range(len(spares)):
        name = spares.mobilize()  # leak: a spare that fails the check stays in the field
        if cluster.check(name):
            good.append(name)
            spares.stand_down(name)
    return good


@dataclass(frozen=True)
class Epoch:
    number: int


class SnapshotEpochs:
    """Versions of the routing data. Old ones are trimmed once no reader is in them."""

    def __init__(self, data) -> None:
        self._versions: Dict[int, object] = {0: data}
        self._readers: Counter = Counter()
        self._latest = 0
        self._lock = threading.Lock()

    def step_in(self) -> Epoch:
        with self._lock:
            self._readers[self._latest] += 1
            return Epoch(self._latest)

    def step_out(self, epoch: Epoch) -> None:
        with self._lock:
            self._readers[epoch.number] -= 1
            self._trim()

    def data(self, epoch: Epoch):
        return self._versions[epoch.number]

    def replace(self, data) -> None:
        with self._lock:
            self._latest += 1
            self._versions[self._latest] = data
            self._trim()

    def _trim(self) -> None:
        for number in list(self._versions):
            if number != self._latest and self._readers[number] == 0:
                del self._versions[number]


def lookup_route(epochs: SnapshotEpochs, key: str) -> Optional[str]:
    epoch = epochs.step_in()  # leak: a key that is absent returns None inside the epoch
    table = epochs.data(epoch)
    if key not in table:
        return None
    found = table[key]
    epochs.step_out(epoch)
    return found


def count_routes(epochs: SnapshotEpochs) -> int:
    epoch = epochs.step_in()  # clean: stepped out before the return
    n = len(epochs.data(epoch))
    epochs.step_out(epoch)
    return n


class Reader:
    def __init__(self, epochs: SnapshotEpochs) -> None:
        self.epochs = epochs
        self.epoch = epochs.step_in()  # clean: refresh and close both step out of it

    def refresh(self) -> None:
        old, self.epoch = self.epoch, self.epochs.step_in()  # clean: near miss, the old epoch is kept in a name and left
        self.epochs.step_out(old)

    def close(self) -> None:
        self.epochs.step_out(self.epoch)


class CorrelationIds:
    """Ids for log lines: a prefix and a number."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count()

    def obtain(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def log_if_slow(ids: CorrelationIds, log, spent: float) -> Optional[str]:
    cid = ids.obtain()  # clean: an id generator
    if spent < 1.0:
        return None
    log(cid, spent)
    return cid
