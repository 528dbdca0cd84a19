"""Worker loop: takes requests off a queue, answers with plain lists."""
import logging
import queue
from dataclasses import dataclass
from typing import Any, Callable, Optional

from . import buffers
from .encoder import Encoder
from .sessions import SessionTable

log = logging.getLogger(__name__)


@dataclass
class Request:
    sid: Optional[str]
    batch: list
    reply: Callable[[Any], None]
    normalise: bool = False
    reuse: bool = False


class Worker:
    def __init__(self, enc: Encoder, sessions: SessionTable):
        self.enc = enc
        self.sessions = sessions
        self.inbox: "queue.Queue[Optional[Request]]" = queue.Queue()

    def handle(self, req: Request) -> None:
        emb = None
        owned = True
        if req.reuse and req.sid is not None:
            emb = self.sessions.peek(req.sid)
            owned = emb is None
        if emb is None:
            encode = self.enc.encode_normalised if req.normalise else self.enc.encode
            emb = encode(req.batch)  # clean: near miss, owned is true for every encoded tensor, it is remembered or repaid
        if emb is None:
            req.reply({"error": "busy"})
            return
        req.reply(emb.tolist())
        if not owned:
            return
        if req.sid is not None:
            self.sessions.remember(req.sid, emb)
        else:
            buffers.repay(emb)

    def loop(self) -> None:
        while True:
            req = self.inbox.get()
            if req is None:
                return
            if not req.batch:
                req.reply([])
                continue
            self.handle(req)
            self.sessions.expire()

    def bulk(self, batches, sink) -> int:
        done = 0
        for batch in batches:
            emb = self.enc.encode(batch)  # leak: a batch that the sink declines is skipped without repay
            if emb is None:
                log.warning("bulk stopped after %d batches", done)
                break
            if not sink(emb.tolist()):
                continue
            buffers.repay(emb)
            done += 1
        return done

    def mean_of(self, batch) -> Optional[list]:
        emb = self.enc.encode(batch)  # leak: rebound to its mean, so the loan is never repaid
        if emb is None:
            return None
        emb = emb.mean(dim=0)
        return emb.tolist()
