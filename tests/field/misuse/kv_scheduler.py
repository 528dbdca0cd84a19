"""A scheduler and its block manager, after reports of blocks that came back twice."""

import logging

logger = logging.getLogger(__name__)


class BlockAllocator:
    """Hands out numbers of blocks; a number that comes back twice is handed out twice."""

    def __init__(self, count):
        self.free_ids = list(range(count))
        self.taken = set()

    def allocate(self):
        block = self.free_ids.pop()
        self.taken.add(block)
        return block

    def free(self, block):
        self.taken.remove(block)
        self.free_ids.append(block)


class TolerantAllocator:
    """The same, but what it does not know is none of its business."""

    def __init__(self, count):
        self.free_ids = list(range(count))
        self.taken = set()

    def allocate_block(self):
        block = self.free_ids.pop()
        self.taken.add(block)
        return block

    def free_block(self, block):
        if block not in self.taken:
            return
        self.taken.discard(block)
        self.free_ids.append(block)


class Request:
    def __init__(self, block):
        self.block = block
        self.finished = False


class Scheduler:
    def __init__(self, count):
        self.allocator = BlockAllocator(count)
        self.tolerant = TolerantAllocator(count)
        self.running = []

    def preempt_finished(self, request):
        """Sites after sgl-project/sglang#18694: preemption frees what finishing has freed."""
        if request.finished:
            self.allocator.free(request.block)
        self.running.remove(request)
        self.allocator.free(request.block)

    def preempt_unfinished(self, request):
        if request.finished:
            self.allocator.free(request.block)
            return
        self.running.remove(request)
        self.allocator.free(request.block)

    def finish(self, request):
        """After sgl-project/sglang-jax#982: two parts of one path free the same slot."""
        self._drop(request)
        logger.debug("finished")
        self.allocator.free(request.block)

    def _drop(self, request):
        self.running.remove(request)
        self.allocator.free(request.block)

    def finish_once(self, request):
        self._take_out(request)
        self.allocator.free(request.block)

    def _take_out(self, request):
        self.running.remove(request)

    def abort(self, request):
        self._drop_and_forget(request)
        if request.block is not None:
            self.allocator.free(request.block)

    def _drop_and_forget(self, request):
        self.allocator.free(request.block)
        request.block = None

    def swap(self, request):
        self.allocator.free(request.block)
        request.block = self.allocator.allocate()
        if request.finished:
            self.allocator.free(request.block)

    def tolerant_twice(self):
        block = self.tolerant.allocate_block()
        self.tolerant.free_block(block)
        self.tolerant.free_block(block)

    def drain(self, requests):
        for request in requests:
            self.allocator.free(request.block)

    def drain_twice(self, blocks):
        for block in blocks:
            self.allocator.free(block)
        for block in blocks:
            self.allocator.free(block)

    def probe(self):
        block = self.allocator.allocate()
        try:
            if not self.running:
                self.allocator.free(block)
                return False
            self.running[0].block = block
            return True
        except IndexError:
            return False

    def reserve(self, ready):
        block = self.allocator.allocate()
        if not ready:
            self.allocator.free(block)
        try:
            return self._fits(block)
        finally:
            self.allocator.free(block)

    def reserve_guarded(self, ready):
        block = self.allocator.allocate()
        if not ready:
            self.allocator.free(block)
            block = None
        try:
            return self._fits(0)
        finally:
            if block is not None:
                self.allocator.free(block)

    def _fits(self, number):
        return number < 8

    def retry(self, times):
        block = self.allocator.allocate()
        for attempt in range(times):
            if self._fits(attempt):
                break
            self.allocator.free(block)
            block = self.allocator.allocate()
        self.allocator.free(block)

    def retry_forgetful(self, times):
        block = self.allocator.allocate()
        for attempt in range(times):
            if self._fits(attempt):
                break
            self.allocator.free(block)
        return None
