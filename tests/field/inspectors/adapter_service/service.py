"""Adapter residency: loading, sessions, merging, model-bound use."""
import contextlib
import weakref
from typing import Optional

from .leases import Arena, Lease, grant, grant_pair


class AdapterService:
    def __init__(self, arena: Arena, fetcher) -> None:
        self.arena, self.fetcher = arena, fetcher
        self.loaded: dict[str, Lease] = {}
        self.sessions: dict[str, list[Lease]] = {}
        self.pairs: dict[str, tuple[Lease, Lease]] = {}

    def load(self, name: str, nbytes: int) -> bool:
        if name in self.loaded:
            return True
        lease = grant(self.arena, nbytes)  # clean: near miss, surrendered when the download fails
        if lease is None:
            return False
        try:
            self.fetcher.download(name, lease.span)
        except OSError:
            lease.surrender()
            return False
        self.loaded[name] = lease
        return True

    def load_retrying(self, name: str, nbytes: int) -> bool:
        if name in self.loaded:
            return True
        for _ in range(3):
            lease = grant(self.arena, nbytes)  # leak: each failed download leaves its lease behind
            if lease is None:
                return False
            try:
                self.fetcher.download(name, lease.span)
                self.loaded[name] = lease
                return True
            except OSError:
                self.fetcher.back_off()
        return False

    def load_split(self, name: str, a_bytes: int, b_bytes: int) -> bool:
        if name in self.pairs:
            return True
        pair = grant_pair(self.arena, a_bytes, b_bytes)  # clean: stored in pairs, shutdown() surrenders both
        if pair is None:
            return False
        self.pairs[name] = pair
        return True

    def open_session(self, sid: str, names: list[str]) -> bool:
        if sid in self.sessions:
            return False
        held: list[Lease] = []
        for name in names:
            lease = self.loaded.get(name)
            if lease is None:
                for other in held:
                    other.surrender()
                return False
            held.append(lease.join())  # clean: near miss, rolled back or left to close_session()
        self.sessions[sid] = held
        return True

    def extend_session(self, sid: str, name: str) -> bool:
        lease = self.loaded[name].join()  # leak: an unknown session returns after joining
        held = self.sessions.get(sid)
        if held is None:
            return False
        held.append(lease)
        return True

    def merge(self, names: list[str], limit: int) -> bool:
        with contextlib.ExitStack() as stack:
            for name in names:
                lease = stack.enter_context(self.loaded[name].join())  # clean: near miss, the exit stack surrenders
                if lease.span[1] > limit:
                    return False
                self.fetcher.accumulate(lease.span)
        return True

    def bind(self, model, name: str) -> None:
        lease = self.loaded[name].join()  # clean: near miss, surrendered when the model is collected
        weakref.finalize(model, lease.surrender)

    def compress(self, name: str) -> bool:
        source = self.loaded[name].join()  # leak: no room for the target returns still joined
        target = grant(self.arena, source.span[1] // 2)  # clean: replaces the surrendered original in loaded
        if target is None:
            return False
        self.fetcher.quantize(source.span, target.span)
        self.loaded.pop(name).surrender()
        self.loaded[name] = target
        source.surrender()
        return True

    def preview(self, name: str, nbytes: int, limit: int) -> Optional[bytes]:
        span = self.arena.cut_below(nbytes, limit)  # leak: an incomplete preview returns without fill
        if span is None:
            return None
        got = self.fetcher.head(name, span)
        if got < nbytes:
            return None
        image = self.fetcher.read(span)
        self.arena.fill(span)
        return image

    def rank(self, path: str) -> int:
        card = open(path)  # clean: near miss, closed in front of both returns
        line = card.readline()
        if not line.startswith("r="):
            card.close()
            return 0
        card.close()
        return int(line[2:])

    def close_session(self, sid: str) -> None:
        for lease in self.sessions.pop(sid):
            lease.surrender()

    def shutdown(self) -> None:
        for sid in list(self.sessions):
            self.close_session(sid)
        for first, second in self.pairs.values():
            first.surrender()
            second.surrender()
        for lease in self.loaded.values():
            lease.surrender()
