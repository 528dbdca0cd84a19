"""Decides which KV blocks lie where."""
import logging
import threading
from collections import OrderedDict

from .tiers import TierFull
from .transfer import Copy

logger = logging.getLogger(__name__)


class OffloadManager:
    def __init__(self, device, host, disk, engine):
        self.device = device
        self.host = host
        self.disk = disk
        self.engine = engine
        self.on_host = OrderedDict()
        self.on_disk = {}
        self.lost = 0
        self._mu = threading.Lock()

    # device -> host

    def offload(self, seq, content, block):
        """Start to copy a device block of a sequence to the host tier."""
        if content in self.on_host:
            return False
        try:
            dst = self.host.get()  # leak: when the copy was cancelled by forget() the engine calls neither callback
        except TierFull:
            if not self.spill():
                return False
            return self.offload(seq, content, block)

        def done(copy):
            with self._mu:
                stale = self.on_host.pop(content, None)
                self.on_host[content] = dst
            if stale is not None:
                self.host.put(stale)

        def fail(copy, exc):
            logger.warning("offload of %s: %s", content, exc)
            self.host.put(dst)

        self.engine.submit(Copy((self.device, block), (self.host, dst), done, fail, tag=seq))
        return True

    def forget(self, seq):
        self.engine.cancel(seq)

    # host -> disk

    def spill(self):
        """Move the coldest host block to disk."""
        with self._mu:
            if not self.on_host:
                return False
            content, src = self.on_host.popitem(last=False)
        try:
            dst = self.disk.get_near(src)  # leak: fail() returns the host block and counts, it does not put the disk block back
        except TierFull:
            logger.info("disk tier is full, %s dropped", content)
            self.host.put(src)
            return True

        def done(copy):
            with self._mu:
                stale = self.on_disk.pop(content, None)
                self.on_disk[content] = dst
            if stale is not None:
                self.disk.put(stale)
            self.host.put(src)

        def fail(copy, exc):
            self.lost += 1
            self.host.put(src)
            logger.error("spill of %s: %s", content, exc)

        self.engine.submit_now(Copy((self.host, src), (self.disk, dst), done, fail))
        return True

    # back to the device

    def restore(self, content):
        """Device block with that content, or None; the caller owns the block."""
        with self._mu:
            src = self.on_host.get(content)
        if src is None:
            return self._restore_from_disk(content)  # clean: the caller's
        block = self.device.get()  # clean: near miss, put back by fail, otherwise returned
        ok = []

        def fail(copy, exc):
            self.device.put(block)

        self.engine.submit_now(Copy((self.host, src), (self.device, block), ok.append, fail))
        return block if ok else None

    def _restore_from_disk(self, content):
        src = self.on_disk.get(content)
        if src is None:
            return None
        bounce = self.host.get()  # leak: TierFull of the device tier leaves with the bounce block
        block = self.device.get()  # clean: put back in the failure branch or returned
        ok = []
        fail = lambda copy, exc: logger.warning("restore of %s: %s", content, exc)
        self.engine.submit_now(Copy((self.disk, src), (self.host, bounce), ok.append, fail))
        if ok:
            self.engine.submit_now(Copy((self.host, bounce), (self.device, block), ok.append, fail))
        self.host.put(bounce)
        if len(ok) < 2:
            self.device.put(block)
            return None
        return block

    def restore_prefix(self, contents):
        """As many leading blocks as possible."""
        blocks = []
        for content in contents:
            try:
                block = self.restore(content)  # clean: collected in the list that is returned, also after TierFull
            except TierFull:
                break
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fork_blocks(self, seq, blocks, write):
        """Private copies of blocks; None when the device tier is short."""
        try:
            fresh = self.device.get_batch(len(blocks))  # clean: near miss, returned to the caller after all writes, put back when one is refused
        except TierFull:
            return None
        for old, new in zip(blocks, fresh):
            if not write(seq, old, new):
                self.device.put_batch(fresh)
                return None
        return fresh

    def warm(self, contents, load):
        """Fill the host tier from a loader at start-up."""
        for content in contents:
            try:
                block = self.host.get()  # leak: content that the loader does not know goes on without put
            except TierFull:
                return
            if not load(content, block):
                continue
            with self._mu:
                stale = self.on_host.pop(content, None)
                self.on_host[content] = block
            if stale is not None:
                self.host.put(stale)

    def close(self):
        self.engine.stop()
        with self._mu:
            while self.on_host:
                self.host.put(self.on_host.popitem()[1])
            while self.on_disk:
                self.disk.put(self.on_disk.popitem()[1])
