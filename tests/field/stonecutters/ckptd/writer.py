"""Writes one shard through a spool file."""
from __future__ import annotations

import logging
import os
import shutil
from typing import Iterable, List, Optional

from .spool import SpoolFiles, WriteSlots

log = logging.getLogger("ckptd.writer")


class ShardWriter:
    def __init__(self, spool: SpoolFiles, slots: WriteSlots, host: str):
        self.spool = spool
        self.slots = slots
        self.host = host
        self.failed: List[str] = []

    def write(self, target: str, chunks: Iterable[bytes]) -> bool:
        if not self.slots.occupy(self.host):  # leak: no spool file means a return with the slot occupied
            return False
        path = self.spool.issue()  # clean: recalled in finally
        if path is None:
            return False
        try:
            self._fill(path, chunks)
            shutil.copyfile(path, target)
        except OSError as exc:
            log.error("%s: %s", target, exc)
            self.failed.append(target)
            return False
        finally:
            self.spool.recall(path)
            self.slots.free(self.host)
        return True

    def _fill(self, path: str, chunks: Iterable[bytes]) -> int:
        total = 0
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)  # clean: closed in finally
        try:
            for chunk in chunks:
                total += os.write(fd, chunk)
        finally:
            os.close(fd)
        return total

    def prepare(self, chunks: Iterable[bytes]) -> Optional[str]:
        """A filled spool file; the caller recalls it."""
        path = self.spool.issue()  # leak: an OSError is logged and swallowed with the path out
        if path is None:
            return None
        try:
            self._fill(path, chunks)
        except OSError as exc:
            log.error("spool %s: %s", path, exc)
            return None
        return path

    def retry_failed(self, source) -> int:
        """Rewrites what failed, as far as the slots allow."""
        left = []
        for target in self.failed:
            if not self.slots.occupy(self.host):  # clean: near miss, freed before the result is looked at
                left.append(target)
                continue
            ok = source.dump(target)
            self.slots.free(self.host)
            if not ok:
                left.append(target)
        done = len(self.failed) - len(left)
        self.failed = left
        return done
