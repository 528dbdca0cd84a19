"""The engine thread."""
from __future__ import annotations

import logging
import threading
from typing import Dict, List, Optional, Sequence

import torch

from .request import Request, RequestQueue
from .resources import Credits, FusionBuffer, FusionPool, TagSpace

log = logging.getLogger(__name__)


class Engine:
    def __init__(
        self, queue: RequestQueue, pool: FusionPool, tags: TagSpace, transport, peers: Sequence[int]
    ):
        self.queue = queue
        self.pool = pool
        self.tags = tags
        self.transport = transport
        self.credits: Dict[int, Credits] = {peer: Credits(8) for peer in peers}
        self._stop = threading.Event()
        self._open: Optional[FusionBuffer] = None
        self._sealed: List[FusionBuffer] = []

    def loop(self) -> None:
        while not self._stop.is_set():
            request = self.queue.pop()
            if request is None:
                self._stop.wait(0.001)
                continue
            self._execute(request)
            self.queue.retire(request)

    def _execute(self, request: Request) -> None:
        target = request.buf
        if target is not None and target.append(request.tensor):
            self.transport.all_reduce(target.data[:target.fill], request.tag)
            return
        self.transport.all_reduce(request.tensor, request.tag)

    def fuse(self, tensors: Sequence[torch.Tensor]) -> int:
        """Pack tensors into as few buffers as possible; seal the full ones."""
        packed = 0
        for tensor in tensors:
            if self._open is None:
                self._open = self.pool.fetch()  # clean: near miss, sealed or open, flush shelves it
                if self._open is None:
                    break
            if not self._open.append(tensor):
                self._sealed.append(self._open)
                self._open = None
                self.transport.all_reduce(tensor, 0)
                continue
            packed += 1
        return packed

    def flush(self) -> None:
        if self._open is not None:
            self._sealed.append(self._open)
            self._open = None
        sealed, self._sealed = self._sealed, []
        with self.tags.tag("flush") as tag:  # clean: with block
            for buf in sealed:
                self.transport.all_reduce(buf.data[:buf.fill], tag)
                self.pool.shelve(buf)

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        credits = self.credits[peer]
        credits.spend()  # clean: near miss, the transport's callback earns it again
        self.transport.send(peer, tensor, on_complete=lambda: credits.earn())

    def send_all(self, tensor: torch.Tensor) -> int:
        sent = 0
        for peer, credits in self.credits.items():
            credits.spend()  # leak: a peer that is down is passed over with its credit spent
            if not self.transport.is_up(peer):
                log.warning("peer %d is down", peer)
                continue
            self.transport.send(peer, tensor, on_complete=credits.earn)
            sent += 1
        return sent

    def broadcast(self, tensor: torch.Tensor, root: int, rank: int) -> None:
        tag = self.tags.allot("broadcast")  # leak: the root reclaims the tag and the other ranks do not
        if rank == root:
            for peer in self.credits:
                self.transport.send(peer, tensor, on_complete=None)
            self.tags.reclaim(tag)
        else:
            self.transport.recv(root, tensor, tag)

    def scatter(self, pieces: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        tag = self.tags.allot("scatter")  # clean: reclaimed in both branches
        if rank == 0:
            for peer, piece in zip(self.credits, pieces[1:]):
                self.transport.send(peer, piece, on_complete=None)
            self.tags.reclaim(tag)
            return pieces[0]
        out = torch.empty_like(pieces[0])
        self.transport.recv(0, out, tag)
        self.tags.reclaim(tag)
        return out

    def gather(self, tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> int:
        buf = self.pool.fetch_empty()  # clean: shelved before every return
        if buf is None:
            return 0
        got = 0
        for peer, target in zip(self.credits, out):
            if not self.transport.is_up(peer):
                self.pool.shelve(buf)
                return got
            self.transport.recv(peer, buf.data[:target.numel()], 0)
            target.view(-1).copy_(buf.data[:target.numel()])
            got += 1
        self.pool.shelve(buf)
        return got

    def stop(self) -> None:
        self._stop.set()
        self.flush()
