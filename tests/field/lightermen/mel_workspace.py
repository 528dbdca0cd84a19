"""Log-mel features for speech models on reusable workspaces."""
from __future__ import annotations

import cmath
import math
import threading
from contextlib import ExitStack, contextmanager
from typing import Dict, Generator, Iterable, Iterator, List, Optional, Tuple


class Workspace:
    def __init__(self, n_fft: int, n_mels: int) -> None:
        self.n_fft = n_fft
        self.window = [0.5 - 0.5 * math.cos(2 * math.pi * i / n_fft) for i in range(n_fft)]
        self.frame = [0.0] * n_fft
        self.power = [0.0] * (n_fft // 2 + 1)
        self.mel = [0.0] * n_mels
        self.hits = 0


class WorkspacePool:
    """enter_use() / leave_use(); the number of workspaces is fixed by the constructor."""

    def __init__(self, count: int, n_fft: int, n_mels: int) -> None:
        self._sem = threading.BoundedSemaphore(count)
        self._stack: List[Workspace] = [Workspace(n_fft, n_mels) for _ in range(count)]
        self._mutex = threading.Lock()

    def enter_use(self) -> Workspace:
        self._sem.acquire()  # clean: released by leave_use
        with self._mutex:
            return self._stack.pop()

    def enter_use_nowait(self) -> Optional[Workspace]:
        if not self._sem.acquire(blocking=False):  # clean: near miss, released by leave_use if it was got
            return None
        with self._mutex:
            return self._stack.pop()

    def leave_use(self, ws: Workspace) -> None:
        ws.hits += 1
        with self._mutex:
            self._stack.append(ws)
        self._sem.release()

    def idle(self) -> int:
        """Number of workspaces that nobody uses at the moment."""
        n = 0
        while self._sem.acquire(blocking=False):  # clean: released as often as it was got
            n += 1
        for _ in range(n):
            self._sem.release()
        return n

    def busy_estimate(self, total: int) -> float:
        if not self._sem.acquire(blocking=False):  # leak: a permit taken only to look, not released
            return 1.0
        with self._mutex:
            return 1.0 - len(self._stack) / total

    @contextmanager
    def use(self) -> Iterator[Workspace]:
        ws = self.enter_use()  # clean: left by the finally
        try:
            yield ws
        finally:
            self.leave_use(ws)


class UseToken:
    """Hand-written manager for code that wants to keep the workspace after the block."""

    def __init__(self, pool: WorkspacePool) -> None:
        self._pool = pool
        self._ws: Optional[Workspace] = None

    def __enter__(self) -> "UseToken":
        self._ws = self._pool.enter_use()  # clean: left by __exit__, unless detached
        return self

    @property
    def ws(self) -> Workspace:
        assert self._ws is not None
        return self._ws

    def detach(self) -> Workspace:
        """The workspace becomes the caller's."""
        ws, self._ws = self.ws, None
        return ws

    def __exit__(self, *exc) -> None:
        if self._ws is not None:
            self._pool.leave_use(self._ws)
            self._ws = None


def _dft_power(ws: Workspace) -> None:
    n = ws.n_fft
    for k in range(len(ws.power)):
        acc = 0j
        for i in range(n):
            acc += ws.frame[i] * cmath.exp(-2j * math.pi * k * i / n)
        ws.power[k] = abs(acc) ** 2


def _fill(ws: Workspace, samples: List[float], at: int) -> bool:
    chunk = samples[at : at + ws.n_fft]
    if len(chunk) < ws.n_fft:
        return False
    for i, s in enumerate(chunk):
        ws.frame[i] = s * ws.window[i]
    return True


def _to_mel(ws: Workspace) -> List[float]:
    width = max(1, len(ws.power) // len(ws.mel))
    for m in range(len(ws.mel)):
        ws.mel[m] = math.log10(max(1e-10, sum(ws.power[m * width : (m + 1) * width])))
    return list(ws.mel)


def mel_stream(pool: WorkspacePool, blocks: Iterable[List[float]]) -> Generator[List[float], None, None]:
    """One feature row for each block; the workspace is kept over the whole stream."""
    ws = pool.enter_use()  # clean: near miss, the finally runs when the generator is closed
    try:
        for block in blocks:
            if _fill(ws, block, 0):
                _dft_power(ws)
                yield _to_mel(ws)
    finally:
        pool.leave_use(ws)


def power_stream(pool: WorkspacePool, blocks: Iterable[List[float]]) -> Iterator[List[float]]:
    ws = pool.enter_use()  # leak: a short block returns out of the generator
    for block in blocks:
        if not _fill(ws, block, 0):
            return
        _dft_power(ws)
        yield list(ws.power)
    pool.leave_use(ws)


def onset(pool: WorkspacePool, blocks: Iterable[List[float]], jump: float) -> int:
    """Number of the first row that is louder than the one before, or -1."""
    last: Optional[float] = None
    for n, row in enumerate(mel_stream(pool, blocks)):  # clean: the generator leaves it when it is dropped
        level = max(row)
        if last is not None and level - last > jump:
            return n
        last = level
    return -1


def two_scales(fine: WorkspacePool, coarse: WorkspacePool, samples: List[float]) -> Tuple[list, list]:
    with ExitStack() as stack:
        a = stack.enter_context(fine.use())  # clean: the stack leaves it
        b = coarse.enter_use()  # clean: near miss, registered with the stack
        stack.callback(coarse.leave_use, b)
        if not (_fill(a, samples, 0) and _fill(b, samples, 0)):
            return [], []
        _dft_power(a)
        _dft_power(b)
        return _to_mel(a), _to_mel(b)


def two_channels(
    lpool: WorkspacePool, rpool: WorkspacePool, left: List[float], right: List[float]
) -> Optional[List[float]]:
    a = lpool.enter_use_nowait()  # leak: when the other side is refused this one is not left
    b = rpool.enter_use_nowait()  # leak: when the other side is refused this one is not left
    if a is None or b is None:
        return None
    rows: List[float] = []
    for ws, samples in ((a, left), (b, right)):
        if _fill(ws, samples, 0):
            _dft_power(ws)
            rows += _to_mel(ws)
    lpool.leave_use(a)
    rpool.leave_use(b)
    return rows


def two_channels_or_mono(pool: WorkspacePool, left: List[float], right: List[float]) -> List[float]:
    a = pool.enter_use()  # clean: left at the end
    b = pool.enter_use_nowait()  # clean: near miss, both guards test the same thing
    rows: List[float] = []
    if _fill(a, left, 0):
        _dft_power(a)
        rows += _to_mel(a)
    if b is not None and _fill(b, right, 0):
        _dft_power(b)
        rows += _to_mel(b)
    if b is not None:
        pool.leave_use(b)
    pool.leave_use(a)
    return rows


class LanguageId:
    """Keeps one workspace for as long as the language is undecided."""

    def __init__(self, pool: WorkspacePool, model) -> None:
        self.pool = pool
        self.model = model
        self.ws: Optional[Workspace] = None
        self.scores: Dict[str, float] = {}

    def begin(self) -> None:
        if self.ws is not None:
            return
        with UseToken(self.pool) as token:  # clean: near miss, detached, decide() leaves it
            self.ws = token.detach()  # clean: near miss, decide() leaves it

    def push(self, block: List[float]) -> None:
        if self.ws is not None and _fill(self.ws, block, 0):
            _dft_power(self.ws)
            for lang, score in self.model.score(_to_mel(self.ws)).items():
                self.scores[lang] = self.scores.get(lang, 0.0) + score

    def decide(self) -> Optional[str]:
        if self.ws is not None:
            self.pool.leave_use(self.ws)
            self.ws = None
        return max(self.scores, key=self.scores.get) if self.scores else None


def peak_bin(pool: WorkspacePool, samples: List[float]) -> int:
    ws = pool.enter_use_nowait() or pool.enter_use()  # leak: too few samples return -1 without leave_use
    if not _fill(ws, samples, 0):
        return -1
    _dft_power(ws)
    loudest = max(range(len(ws.power)), key=ws.power.__getitem__)
    pool.leave_use(ws)
    return loudest
