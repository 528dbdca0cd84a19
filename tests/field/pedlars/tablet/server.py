"""Request handlers over the map of tablets."""
import logging
from typing import Callable, Dict, Optional

from .store import Tablet, TabletMap

log = logging.getLogger("tablet.server")


class Request:
    def __init__(self, tablet: str, verb: str, body: bytes) -> None:
        self.name = tablet
        self.verb = verb
        self.body = body
        self.tablet: Optional[Tablet] = None


class Server:
    def __init__(self, tablets: TabletMap) -> None:
        self.tablets = tablets
        self.handlers: Dict[str, Callable[[Request], bytes]] = {
            "put": self._put,
            "stat": self._stat,
        }

    def _resolve(self, name: str) -> Optional[Tablet]:
        base = name.split("@", 1)[0]
        return self.tablets.hold(base)  # clean: handed on to the handlers

    def dispatch(self, req: Request) -> bytes:
        req.tablet = self._resolve(req.name)  # clean: near miss, _finish() lets go on both ways
        handler = self.handlers.get(req.verb)
        if req.tablet is None or handler is None:
            self._finish(req)
            return b"ERR"
        reply = handler(req)
        self._finish(req)
        return reply

    def _finish(self, req: Request) -> None:
        if req.tablet is not None:
            self.tablets.let_go(req.tablet)
            req.tablet = None

    def _put(self, req: Request) -> bytes:
        ext = req.tablet.extents[-1] if req.tablet.extents else req.tablet.new_extent()
        return b"OK" if ext.extend(req.body) else b"FULL"

    def _stat(self, req: Request) -> bytes:
        return str(sum(len(e.blocks) for e in req.tablet.extents)).encode()

    def copy(self, source: str, target: str) -> int:
        src = self._resolve(source)  # leak: let go of only when the target is there
        dst = self._resolve(target)  # clean: let go of at the end
        if src is None or dst is None:
            if dst is not None:
                self.tablets.let_go(dst)
            log.warning("copy %s to %s: no such tablet", source, target)
            return 0
        out = dst.new_extent()
        n = sum(out.extend(e.payload[b]) for e in src.extents for b in e.blocks)
        self.tablets.let_go(dst)
        self.tablets.let_go(src)
        return n

    def exists(self, name: str) -> bool:
        return bool(self._resolve(name))  # leak: the hold of a known tablet is dropped
