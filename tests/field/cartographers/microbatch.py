"""Dynamic batching in front of a model worker process (asyncio)."""
import asyncio
import logging
from collections import deque
from functools import partial

import torch

log = logging.getLogger("microbatch")


class LaneFull(Exception):
    pass


class Lanes:
    """Rows of the worker's fixed input tensor."""

    def __init__(self, count, width):
        self.inputs = torch.zeros(count, width)
        self._vacant = deque(range(count))
        self._waiters = deque()

    def grab(self):
        if not self._vacant:
            raise LaneFull()
        return self._vacant.popleft()

    def grab_or_none(self):
        return self._vacant.popleft() if self._vacant else None

    async def grab_async(self):
        while not self._vacant:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        return self._vacant.popleft()

    def ungrab(self, lane):
        self._vacant.append(lane)
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


class Ask:
    def __init__(self, ids, lane=None):
        self.ids = ids
        self.lane = lane
        self.done = asyncio.get_event_loop().create_future()
        self.cancelled = False


class MicroBatcher:
    def __init__(self, lanes, worker, max_batch=32, inflight=4):
        self.lanes = lanes
        self.worker = worker
        self.max_batch = max_batch
        self.queue = asyncio.Queue()
        self.gate = asyncio.Semaphore(inflight)
        self.parked = {}
        self.tasks = set()

    def _fill(self, lane, ids):
        ids = ids[:self.lanes.inputs.shape[1]]
        self.lanes.inputs[lane, :len(ids)] = torch.as_tensor(ids)

    # ------------------------------------------------------------- entry points

    async def ask(self, ids):
        lane = await self.lanes.grab_async()  # clean: near miss, the Ask carries it to _run_batch, which gives it back
        self._fill(lane, ids)
        item = Ask(ids, lane)
        self.queue.put_nowait(item)
        return await item.done

    async def ask_now(self, ids):
        lane = self.lanes.grab_or_none()  # leak: too long an input returns with it
        if lane is None:
            return None
        if len(ids) > self.lanes.inputs.shape[1]:
            log.info("input of %d tokens refused", len(ids))
            return None
        self._fill(lane, ids)
        item = Ask(ids, lane)
        self.queue.put_nowait(item)
        return await item.done

    async def ask_timed(self, ids, seconds):
        """Runs alone, outside of the batches."""
        lane = self.lanes.grab()  # leak: the timeout is turned into None without ungrab
        self._fill(lane, ids)
        try:
            out = await asyncio.wait_for(self.worker.single(lane), seconds)
        except asyncio.TimeoutError:
            return None
        self.lanes.ungrab(lane)
        return out

    async def ask_many(self, rows):
        taken = []
        try:
            for ids in rows:
                lane = self.lanes.grab()  # clean: near miss, LaneFull leaves through the finally which empties taken
                taken.append(lane)
                self._fill(lane, ids)
            return await self.worker.batch(taken)
        finally:
            for lane in taken:
                self.lanes.ungrab(lane)

    async def ask_pair(self, a, b):
        left = self.lanes.grab()  # leak: LaneFull of the second is answered without giving it back
        try:
            right = self.lanes.grab()  # clean: ungrabbed after the batch
        except LaneFull:
            return None
        self._fill(left, a)
        self._fill(right, b)
        try:
            return await self.worker.batch([left, right])
        finally:
            self.lanes.ungrab(left)
            self.lanes.ungrab(right)

    # ------------------------------------------------------------- batching loop

    async def loop(self):
        while True:
            item = await self.queue.get()
            batch = [item]
            while len(batch) < self.max_batch and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            await self.gate.acquire()  # clean: near miss, released by the task's done callback
            task = asyncio.create_task(self._run_batch(batch))
            self.tasks.add(task)
            task.add_done_callback(self._batch_over)

    def _batch_over(self, task):
        self.tasks.discard(task)
        self.gate.release()

    async def _run_batch(self, batch):
        try:
            outs = await self.worker.batch([i.lane for i in batch])
            for item, out in zip(batch, outs):
                if not item.done.done():
                    item.done.set_result(out)
        except RuntimeError as exc:
            for item in batch:
                if not item.done.done():
                    item.done.set_exception(exc)
        finally:
            for item in batch:
                self.lanes.ungrab(item.lane)

    async def flush_once(self):
        await self.gate.acquire()  # leak: an empty queue returns with the permit
        if self.queue.empty():
            return 0
        batch = []
        while not self.queue.empty():
            batch.append(self.queue.get_nowait())
        try:
            await self._run_batch(batch)
        finally:
            self.gate.release()
        return len(batch)

    async def reload(self, path):
        async with self.gate:
            await self.worker.load(path)

    # ------------------------------------------------------------- parked sessions

    def park(self, session, state):
        lane = self.lanes.grab_or_none()  # leak: an expired session is removed by sweep() with its lane
        if lane is None:
            return False
        if session in self.parked:
            self.lanes.ungrab(lane)
            return False
        self.lanes.inputs[lane] = state
        self.parked[session] = (lane, asyncio.get_running_loop().time())
        return True

    def unpark(self, session):
        lane, _ = self.parked.pop(session)
        state = self.lanes.inputs[lane].clone()
        self.lanes.ungrab(lane)
        return state

    def sweep(self, ttl):
        now = asyncio.get_running_loop().time()
        for session, (_, since) in list(self.parked.items()):
            if now - since > ttl:
                log.debug("session %s expired", session)
                del self.parked[session]

    # ------------------------------------------------------------- callbacks

    def fire(self, ids, on_done):
        lane = self.lanes.grab_or_none()  # clean: near miss, given back in the callback bound with partial
        if lane is None:
            on_done(None)
            return
        self._fill(lane, ids)
        self.worker.submit(lane, callback=partial(self._fired, lane, on_done))

    def _fired(self, lane, on_done, result):
        try:
            on_done(result)
        finally:
            self.lanes.ungrab(lane)

    def fire_scored(self, ids, on_score):
        lane = self.lanes.grab_or_none()  # leak: the callback returns on an error result before the ungrab
        if lane is None:
            return False
        self._fill(lane, ids)

        def scored(result):
            if result.get("error"):
                log.error("scoring: %s", result["error"])
                return
            on_score(result["score"])
            self.lanes.ungrab(lane)

        self.worker.submit(lane, callback=scored)
        return True
