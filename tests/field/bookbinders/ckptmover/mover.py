"""Moves checkpoint files: one thread reads parts into buffers, some others send them."""
import logging
import queue
import threading

from .parts import Closing, Conns, PartBuffers
from .upload import PartCorrupt, Upload, send_part

log = logging.getLogger("ckptmover")


class Mover:
    def __init__(self, store, connect, senders=4, part_bytes=8 << 20):
        self.store = store
        self.bufs = PartBuffers(senders * 2, part_bytes)
        self.conns = Conns(connect, senders)
        self._q = queue.Queue()
        self._threads = [threading.Thread(target=self._send_loop, daemon=True) for _ in range(senders)]
        for t in self._threads:
            t.start()

    def _send_loop(self):
        while True:
            task = self._q.get()
            if task is None:
                self._q.task_done()
                return
            upload, number, buf, n = task
            try:
                if not send_part(self.conns, upload, number, bytes(buf[:n])):
                    upload.failed = True
            except PartCorrupt as e:
                log.error("%s", e)
                upload.failed = True
            finally:
                self.bufs.restore(buf)
                self._q.task_done()

    def _read_parts(self, f, upload):
        number = 0
        while not upload.failed:
            buf = self.bufs.rent()  # leak: shutdown() throws queued parts away and doesn't restore their buffers
            n = f.readinto(buf)
            if not n:
                self.bufs.restore(buf)
                break
            number += 1
            self._q.put((upload, number, buf, n))
        return number

    def move(self, path, key):
        upload = Upload(self.store, key)  # clean: closed in the finally
        try:
            with open(path, "rb") as f:  # clean: closed by the with
                parts = self._read_parts(f, upload)
            self._q.join()
            log.info("%s: %d parts", key, parts)
        except Closing:
            upload.failed = True
        finally:
            result = upload.close()
        return result

    def fetch(self, key, path):
        got = 0
        with open(path, "wb") as f, self.conns.one() as conn:  # clean: the with closes the file and repays the connection
            buf = self.bufs.rent()  # clean: restored in the finally
            try:
                while True:
                    n = conn.get_into(key, got, buf)
                    if n <= 0:
                        break
                    f.write(memoryview(buf)[:n])
                    got += n
            finally:
                self.bufs.restore(buf)
        return got

    def verify(self, key, path):
        """Compares the stored file with the local one, part for part."""
        local = remote = None
        try:
            local = self.bufs.rent()  # clean: near miss, the finally restores what isn't None
            remote = self.bufs.rent()  # clean: near miss, the same
            with open(path, "rb") as f, self.conns.one() as conn:  # clean: the with closes and repays
                at = 0
                while n := f.readinto(local):
                    if conn.get_into(key, at, remote) != n or local[:n] != remote[:n]:
                        return at
                    at += n
            return None
        except Closing:
            return -1
        finally:
            for buf in (local, remote):
                if buf is not None:
                    self.bufs.restore(buf)

    def shutdown(self):
        self.bufs.closing = True
        while True:
            try:
                self._q.get_nowait()
            except queue.Empty:
                break
            self._q.task_done()
        for _ in self._threads:
            self._q.put(None)
        for t in self._threads:
            t.join()
