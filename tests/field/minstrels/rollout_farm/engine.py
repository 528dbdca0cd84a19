"""Client side of the generation engine: sessions keep the KV cache of a conversation on the server."""
from dataclasses import dataclass, field


class EngineFull(Exception):
    pass


@dataclass
class Session:
    engine: "Engine"
    sid: int
    tokens: list[int] = field(default_factory=list)

    async def extend(self, prompt: list[int], n: int) -> list[int]:
        self.tokens += prompt
        new = await self.engine.generate(self.sid, self.tokens, n)
        self.tokens += new
        return new

    def close(self) -> None:
        self.engine._close(self)


class Engine:
    def __init__(self, backend, width: int):
        self.backend = backend
        self._sids = set(range(width))
        self.version = 0

    def open(self) -> Session:
        if not self._sids:
            raise EngineFull("no session left")
        sid = self._sids.pop()  # clean: goes into the Session that is returned
        return Session(self, sid)

    async def generate(self, sid, tokens, n):
        return await self.backend.generate(sid, tokens, n)

    def _close(self, session: Session) -> None:
        self.backend.evict(session.sid)
        self._sids.add(session.sid)


class SessionTable:
    """Session per seat, kept over the turns of an episode."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._by_seat: dict[int, Session] = {}

    def start(self, seat_index: int) -> None:
        s = self.engine.open()  # leak: the collector starts a rewardless episode again without end(), the first entry is overwritten
        self._by_seat[seat_index] = s

    def current(self, seat_index: int) -> Session:
        s = self._by_seat.get(seat_index)
        if s is None:
            s = self._by_seat[seat_index] = self.engine.open()  # clean: near miss, only where the table has none, end() or end_all() closes it
        return s

    def end(self, seat_index: int) -> None:
        s = self._by_seat.pop(seat_index, None)
        if s is not None:
            s.close()

    def end_all(self) -> None:
        for i in list(self._by_seat):
            self.end(i)
