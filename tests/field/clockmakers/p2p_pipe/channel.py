"""A channel to one peer: a tag and a buffer for each message."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .tags import TagSpace
from .wire import WireBuffer, WirePool


@dataclass
class Request:
    tag: int
    buf: WireBuffer
    work: object
    numel: int
    stale: bool = False


class Channel:
    def __init__(self, pool: WirePool, tags: TagSpace, peer: int):
        self.pool = pool
        self.tags = tags
        self.peer = peer
        self.requests: dict[int, Request] = {}
        self.probes: dict[int, WireBuffer] = {}

    def post_recv(self, numel: int) -> int | None:
        buf = self.pool.pull()  # clean: near miss, moved into the request; complete() unrefs it on every branch
        if buf is None:
            return None
        try:
            tag = self.tags.mint()  # clean: moved into the request with the buffer
        except RuntimeError:
            self.pool.unref(buf)
            return None
        work = dist.irecv(buf.data[:numel], self.peer, tag=tag)
        self.requests[tag] = Request(tag, buf, work, numel)
        return tag

    def complete(self, tag: int) -> torch.Tensor | None:
        req = self.requests.pop(tag)
        out = None
        if not req.stale:
            req.work.wait()
            out = req.buf.data[: req.numel].clone()
        self.pool.unref(req.buf)
        self.tags.retire(req.tag)
        return out

    def post_probe(self, key: int) -> bool:
        if key in self.probes:
            return False
        buf = self.pool.pull()  # leak: finish_probe() pops it and drops it for a negative header
        if buf is None:
            return False
        dist.recv(buf.data[:1], self.peer)
        self.probes[key] = buf
        return True

    def finish_probe(self, key: int) -> int:
        buf = self.probes.pop(key)
        header = int(buf.data[0].item())
        if header < 0:
            return 0
        self.pool.unref(buf)
        return header

    @contextmanager
    def tagged(self):
        tag = self.tags.mint()  # clean: retired in finally
        try:
            yield tag
        finally:
            self.tags.retire(tag)

    def send(self, t: torch.Tensor, timeout: float) -> bool:
        tag = self.tags.mint()  # leak: not retired when no buffer could be filled
        buf = self.pool.pull_filled(t)  # clean: unref'd after the wait
        if buf is None:
            return False
        work = dist.isend(buf.data[: t.numel()], self.peer, tag=tag)
        work.wait()
        self.pool.unref(buf)
        self.tags.retire(tag)
        return True
