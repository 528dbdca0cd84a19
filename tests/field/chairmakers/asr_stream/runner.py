"""Batches frames of all sessions through the encoder, on a thread of its own."""
from __future__ import annotations

import logging
import threading

import numpy as np

from .buffers import FramePool, StateBank, Windows
from .session import Session

logger = logging.getLogger("asr.runner")


class Runner(threading.Thread):
    def __init__(self, encoder, frames: FramePool, bank: StateBank, windows: Windows) -> None:
        super().__init__(daemon=True)
        self.encoder, self.frames, self.bank, self.windows = encoder, frames, bank, windows
        self.sessions: dict[str, Session] = {}
        self.lock = threading.Lock()
        self.halt = threading.Event()

    def open_session(self, sid: str, rate: int) -> Session | None:
        state = self.bank.claim()  # leak: the constructor of the session raises UnsupportedRate for other rates
        if state is None:
            return None
        session = Session(sid, self.frames, self.bank, state, rate)
        with self.lock:
            older = self.sessions.get(sid)
            self.sessions[sid] = session
        if older is not None:
            older.close()
        return session

    def close_session(self, sid: str) -> str:
        with self.lock:
            session = self.sessions.pop(sid, None)
        if session is None:
            return ""
        session.close()
        return " ".join(session.text)

    def tick(self) -> int:
        """One batch. Returns how many frames went through."""
        window = self.windows.loan(timeout=0.5)  # leak: with nothing to do the loan is not repaid before the return
        if window is None:
            return 0
        with self.lock:
            batch = [(s, f) for s in list(self.sessions.values())[:len(window)] if (f := s.take_ready()) is not None]
        if not batch:
            return 0
        try:
            for row, (_session, frame) in zip(window, batch):
                row[:] = self.encoder.log_mel(frame.pcm[:frame.used])
            states = np.array([s.state for s, _ in batch])
            tokens, new = self.encoder.run(window[:len(batch)], self.bank.data[states])
            for i, (session, _frame) in enumerate(batch):
                if np.isfinite(new[i]).all():
                    self.bank.data[session.state] = new[i]
                    session.text.extend(tokens[i])
                else:
                    self.bank.poison(session.state)
                    session.restart()
        finally:
            for _session, frame in batch:
                self.frames.checkin(frame)
            self.windows.repay(window)
        return len(batch)

    def benchmark(self, rounds: int) -> float | None:
        """Frames per second on noise, for the log at start-up."""
        window = self.windows.loan()  # clean: repaid by the finally for the early return too
        try:
            if rounds <= 0:
                return None
            window[:] = np.random.default_rng(0).standard_normal(window.shape)
            return self.encoder.time_it(window, rounds)
        finally:
            self.windows.repay(window)

    def run(self) -> None:
        while not self.halt.is_set():
            if self.tick() == 0:
                self.halt.wait(0.01)
        logger.info("halted with %d sessions", len(self.sessions))
