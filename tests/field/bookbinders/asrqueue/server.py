import contextlib
import logging
import threading

from .batcher import Batcher
from .lanes import AllLanesBusy, ChunkPool, LaneTable
from .session import Monitor, Session, preflight

log = logging.getLogger("asr.server")


class Server:
    def __init__(self, model, rows=64):
        self.lanes = LaneTable(rows, model.width)
        self.chunks = ChunkPool(1600, rows * 8)
        self._lock = threading.Lock()
        self._sessions = {}
        self._monitors = {}
        self.batcher = Batcher(self.current, self.chunks, model)

    def current(self):
        with self._lock:
            return list(self._sessions.values())

    def hello(self, sid):
        session = Session(sid, self.lanes, self.chunks)
        try:
            row = session.open()  # clean: near miss, the table has the session, and bye(), a second hello() or shutdown() closes it
        except AllLanesBusy:
            log.warning("no lane for %s", sid)
            return None
        with self._lock:
            old = self._sessions.get(sid)
            self._sessions[sid] = session
        if old is not None:
            old.close()
        log.debug("%s has lane %d", sid, row)
        return session

    def bye(self, sid):
        with self._lock:
            session = self._sessions.pop(sid, None)
        if session is None:
            return ""
        try:
            self.batcher.flush(session)
        finally:
            session.close()
        return " ".join(session.text)

    def watch(self, screen, sid):
        """Put the session on a screen, in place of what that screen showed."""
        with self._lock:
            session = self._sessions.get(sid)
            if session is None or session.lane is None:
                return False
            self._monitors[screen] = Monitor(self.lanes, session.lane)  # leak: the monitor that the screen had before is overwritten and not stopped
        return True

    def unwatch(self, screen):
        with self._lock:
            mon = self._monitors.pop(screen, None)
        if mon is not None:
            mon.stop()

    @contextlib.contextmanager
    def dictation(self, sid):
        session = Session(sid, self.lanes, self.chunks)
        session.open()  # clean: closed in the finally
        try:
            yield session
        finally:
            session.close()

    def transcribe(self, sid, packets):
        with self.dictation(sid) as session:  # clean: closed by the context manager
            for pcm in packets:
                if session.push(pcm):
                    self.batcher.flush(session)
            return " ".join(session.text)

    def level(self, sid):
        session = self._sessions[sid]
        lane = self.lanes.share(session.lane)  # clean: released in the finally
        try:
            return float(self.lanes.state[lane.row].abs().max())
        finally:
            self.lanes.release(lane)

    def ready(self):
        return preflight(self.lanes, self.chunks, "preflight")

    def shutdown(self):
        self.batcher.stop()
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
            monitors, self._monitors = list(self._monitors.values()), {}
        for mon in monitors:
            mon.stop()
        for session in sessions:
            session.close()
