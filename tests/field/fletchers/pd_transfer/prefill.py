from __future__ import annotations

import logging
from typing import Dict, List, Optional

from .channel import Channel
from .regions import Region, RegionPool, RegionsExhausted

logger = logging.getLogger(__name__)


class PrefillSender:

    def __init__(self, pool: RegionPool, channel: Channel, max_retries: int = 3) -> None:
        self.pool = pool
        self.channel = channel
        self.max_retries = max_retries
        self.sent = 0
        self.failed = 0

    # -- asynchronous --------------------------------------------------

    def send_kv(self, payload: bytes) -> int:
        region = self.pool.lease(len(payload))  # clean: _on_kv_sent unleases it
        region.buf[: len(payload)] = payload
        return self.channel.post_write(region, len(payload), self._on_kv_sent)

    def _on_kv_sent(self, region: Region, ok: bool) -> None:
        self.pool.unlease(region)
        if ok:
            self.sent += 1
        else:
            self.failed += 1

    def send_aux(self, payload: bytes) -> int:
        region = self.pool.lease(len(payload))  # leak: _on_aux_sent returns early on a failed completion
        region.buf[: len(payload)] = payload
        return self.channel.post_write(region, len(payload), self._on_aux_sent)

    def _on_aux_sent(self, region: Region, ok: bool) -> None:
        if not ok:
            self.failed += 1
            logger.warning("aux transfer to %s failed", self.channel.peer)
            return
        self.sent += 1
        self.pool.unlease(region)

    def send_hidden(self, payload: bytes) -> None:
        region = self.pool.lease(len(payload))  # clean: near miss, released by the lambda
        region.buf[: len(payload)] = payload
        self.channel.post_write(region, len(payload), lambda r, ok: self.pool.unlease(r))

    # -- layerwise -----------------------------------------------------

    def send_layers(self, layers: List[bytes]) -> int:
        n = 0
        for kv in layers:
            region = self.pool.lease(self.pool.nbytes)  # leak: continue on an empty layer
            if not kv:
                continue
            region.buf[: len(kv)] = kv
            self.channel.post_write(region, len(kv), self._on_kv_sent)
            n += 1
        return n

    def send_layers_sync(self, layers: List[bytes]) -> bool:
        region = self.pool.lease(max(map(len, layers), default=0))  # clean: near miss, the return in the loop passes the finally
        try:
            for kv in layers:
                region.buf[: len(kv)] = kv
                if not self.channel.write_sync(region, len(kv)):
                    return False
        finally:
            self.pool.unlease(region)
        return True

    # -- retries -------------------------------------------------------

    def send_metadata(self, blob: bytes) -> bool:
        for attempt in range(self.max_retries):
            region = self.pool.lease(len(blob))  # leak: a failed attempt keeps its region
            region.buf[: len(blob)] = blob
            if self.channel.write_sync(region, len(blob)):
                self.pool.unlease(region)
                return True
            logger.info("metadata retry %d", attempt)
        return False

    def send_first_token(self, blob: bytes) -> bool:
        region: Optional[Region] = None
        for attempt in range(self.max_retries):
            try:
                region = self.pool.lease(len(blob))  # clean: near miss, the loop is left as soon as one is held
                break
            except RegionsExhausted:
                logger.info("no region, attempt %d", attempt)
        if region is None:
            return False
        region.buf[: len(blob)] = blob
        ok = self.channel.write_sync(region, len(blob))
        self.pool.unlease(region)
        return ok

    def handshake(self, caps: bytes) -> bool:
        with self.pool.scoped(len(caps)) as region:  # clean: context manager
            region.buf[: len(caps)] = caps
            return self.channel.write_sync(region, len(caps))

    def heartbeat(self) -> bool:
        with self.pool.scoped_nofail(8) as region:  # clean: context manager
            if region is None:
                return False
            region.buf[:8] = b"\0" * 8
            return self.channel.write_sync(region, 8)
