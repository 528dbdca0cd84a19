"""Prefill side: stages pages and posts writes to the peers."""
from __future__ import annotations

import itertools
import logging
import threading
from functools import partial
from typing import Callable, Dict, List, Optional, Tuple

from .regions import Credits, Region, RegionArena

logger = logging.getLogger(__name__)

PostWrite = Callable[[str, Region, Callable[[bool], None]], None]


class KvSender:
    def __init__(self, arena: RegionArena, credits: Credits, post: PostWrite) -> None:
        self.arena = arena
        self.credits = credits
        self.post = post
        self._inflight: Dict[int, Tuple[str, Region]] = {}
        self._mu = threading.Lock()
        self._seq = itertools.count()
        self.failed = 0

    # -- posting -------------------------------------------------------

    def _on_sent(self, peer: str, region: Region, ok: bool) -> None:
        if not ok:
            self.failed += 1
        self.arena.restore(region)
        self.credits.refund(peer)

    def send(self, peer: str, payload: bytes) -> bool:
        """Fire and forget: the completion gives both leases back."""
        if not self.credits.try_spend(peer):  # clean: refunded on shortage or by _on_sent
            return False
        region = self.arena.carve(len(payload))  # clean: near miss, restored by the completion callback
        if region is None:
            self.credits.refund(peer)
            return False
        self.post(peer, region, partial(self._on_sent, peer, region))
        return True

    def send_tracked(self, peer: str, payload: bytes) -> int:
        """Sequence number of the transfer, -1 when it could not start."""
        if not self.credits.try_spend(peer):  # leak: not refunded when the arena has no hole
            return -1
        region = self.arena.carve(len(payload))  # clean: kept in _inflight, complete() restores it
        if region is None:
            logger.info("arena full, %d bytes for %s", len(payload), peer)
            return -1
        seq = next(self._seq)
        with self._mu:
            self._inflight[seq] = (peer, region)
        self.post(peer, region, lambda ok: self.complete(seq, ok))
        return seq

    def complete(self, seq: int, ok: bool) -> None:
        with self._mu:
            entry = self._inflight.pop(seq, None)
        if entry is None:
            return
        peer, region = entry
        if not ok:
            self.failed += 1
            logger.warning("transfer %d to %s failed", seq, peer)
        self.arena.restore(region)
        self.credits.refund(peer)

    def send_acked(self, peer: str, payload: bytes) -> bool:
        """Synchronous variant for small control tensors."""
        done = threading.Event()
        outcome: List[bool] = []

        def on_done(ok: bool) -> None:
            outcome.append(ok)
            done.set()

        region = self.arena.carve(len(payload))  # leak: a failed write returns without restoring it
        if region is None:
            return False
        self.post(peer, region, on_done)
        done.wait()
        if not outcome[0]:
            self.failed += 1
            return False
        self.arena.restore(region)
        return True

    # -- layers --------------------------------------------------------

    def stage_layers(self, sizes: List[int]) -> Optional[List[Region]]:
        staged: List[Region] = []
        for layer, size in enumerate(sizes):
            region = self.arena.carve(size)  # clean: returned in the list, or all restored on shortage
            if region is None:
                logger.debug("no room for layer %d", layer)
                self._unstage(staged)
                return None
            staged.append(region)
        return staged

    def _unstage(self, regions: List[Region]) -> None:
        for region in regions:
            self.arena.restore(region)

    def send_layers(self, peer: str, sizes: List[int]) -> int:
        """Posts layers until the peer runs out of credits."""
        regions = self.stage_layers(sizes)  # leak: on break the remaining staged regions are dropped
        if regions is None:
            return 0
        posted = 0
        for region in regions:
            if not self.credits.try_spend(peer):  # clean: refunded by _on_sent for each posted region
                break
            self.post(peer, region, partial(self._on_sent, peer, region))
            posted += 1
        return posted

    def send_layers_strict(self, peer: str, sizes: List[int]) -> int:
        regions = self.stage_layers(sizes)  # clean: near miss, the tail that was not posted is unstaged
        if regions is None:
            return 0
        posted = 0
        for region in regions:
            if not self.credits.try_spend(peer):  # clean: refunded by _on_sent
                break
            self.post(peer, region, partial(self._on_sent, peer, region))
            posted += 1
        self._unstage(regions[posted:])
        return posted

    def aligned_region(self, nbytes: int, boundary: int, tries: int) -> Optional[Region]:
        """Some NICs want large transfers on a large boundary."""
        for _ in range(tries):
            region = self.arena.carve(nbytes)  # leak: a misaligned region is overwritten by the next try
            if region is None:
                return None
            if region.offset % boundary == 0:
                return region
        return None
