"""Point-to-point transfers between neighbouring stages."""
import logging
import queue
import threading

import torch.distributed as dist

log = logging.getLogger("pipe.channel")


class PeerGone(Exception):
    pass


class Channel(threading.Thread):
    """One direction to one neighbour. A thread waits for the sends, so that the stage does not."""

    def __init__(self, peer, tags, group=None):
        super().__init__(daemon=True)
        self.peer = peer
        self.tags = tags
        self.group = group
        self.alive = True
        self._sent = queue.Queue()
        self.bytes = 0

    def run(self):
        while True:
            item = self._sent.get()
            if item is None:
                return
            work, tag, then = item
            try:
                work.wait()
            except RuntimeError as e:
                log.error("send to %d failed: %s", self.peer, e)
                self.alive = False
                self.tags.back(tag)
                continue
            self.tags.back(tag)
            then()

    def send(self, tensor, then):
        """Returns at once; then() runs when the tensor may be reused."""
        if not self.alive:
            raise PeerGone("rank %d" % self.peer)
        tag = self.tags.lease()  # clean: near miss, the thread gives it back on both branches of the wait
        work = dist.isend(tensor, self.peer, self.group, tag)
        self.bytes += tensor.numel() * tensor.element_size()
        self._sent.put((work, tag, then))

    def recv(self, out):
        tag = self.tags.lease()  # leak: PeerGone is raised before back()
        dist.recv(out, self.peer, self.group, tag)
        if not self.alive:
            raise PeerGone("rank %d" % self.peer)
        self.tags.back(tag)
        return out

    def ping(self, token):
        tag = self.tags.lease_even()  # clean: given back in finally
        try:
            dist.send(token, self.peer, self.group, tag)
            return True
        except RuntimeError:
            self.alive = False
            return False
        finally:
            self.tags.back(tag)

    def stop(self):
        self._sent.put(None)
        self.join()
