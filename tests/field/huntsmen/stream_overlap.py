"""Layer-by-layer offloading: weights stay in host memory and travel to the GPU just in time.

Streams and events are pooled, because creating them inside the decode loop is slow.  A
thread pool reads the weights of layer i + depth while layer i computes.
"""
import logging
import threading
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor

import torch

logger = logging.getLogger("offload")


class MissingWeights(KeyError):
    pass


class StreamPool:
    """lend() / reclaim()"""

    def __init__(self, device, size):
        self.device = device
        self._streams = deque(torch.cuda.Stream(device) for _ in range(size))
        self._guard = threading.Condition()
        self.lent = 0

    def lend(self, timeout=None):
        with self._guard:
            while not self._streams:
                if not self._guard.wait(timeout):
                    raise TimeoutError("all copy streams are lent")
            stream = self._streams.popleft()  # clean: goes to the caller
            self.lent += 1
            return stream

    def lend_idle(self):
        """A stream on which nothing is pending any more, or None."""
        with self._guard:
            for _ in range(len(self._streams)):
                stream = self._streams.popleft()  # leak: one that is still busy is passed over without being appended again
                if stream.query():
                    self.lent += 1
                    return stream
            return None

    def reclaim(self, stream):
        with self._guard:
            self.lent -= 1
            self._streams.append(stream)
            self._guard.notify()


class EventPool:
    def __init__(self):
        self._events = []
        self.made = 0

    def get(self):
        if self._events:
            return self._events.pop()  # clean: goes to the caller
        self.made += 1
        return torch.cuda.Event()

    def put(self, event):
        self._events.append(event)


class Transfer:
    """A copy under way: the stream and event belong to it until finish()."""

    def __init__(self, engine, stream, event, tensors):
        self.engine = engine
        self.stream = stream
        self.event = event
        self.tensors = tensors
        self.finished = False

    def finish(self):
        if not self.finished:
            self.finished = True
            self.event.synchronize()
            self.engine.events.put(self.event)
            self.engine.streams.reclaim(self.stream)
        return self.tensors


class OffloadEngine:
    def __init__(self, host_weights, device, streams=4, depth=2):
        self.host = host_weights
        self.device = device
        self.depth = depth
        self.streams = StreamPool(device, streams)
        self.events = EventPool()
        self.workers = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="copy")
        self.pending = {}
        self._evict_stream = None
        self.late = 0

    # -- copies ----------------------------------------------------------

    def _weights(self, layer):
        try:
            return self.host[layer]
        except KeyError:
            raise MissingWeights(layer) from None

    def _copy(self, layer, stream):
        out = {}
        with torch.cuda.stream(stream):
            for name, tensor in self._weights(layer).items():
                out[name] = tensor.to(self.device, non_blocking=True)
        return out

    def begin(self, layer):
        stream = self.streams.lend()  # clean: near miss, reclaimed if the weights are missing, else the Transfer owns it
        try:
            tensors = self._copy(layer, stream)
        except MissingWeights:
            self.streams.reclaim(stream)
            raise
        event = self.events.get()  # clean: the Transfer owns it
        event.record(stream)
        return Transfer(self, stream, event, tensors)

    def fetch_now(self, layer):
        transfer = self.begin(layer)  # clean: finished on the next line
        return transfer.finish()

    def prefetch(self, layer):
        if layer in self.pending:
            return
        self.pending[layer] = self.begin(layer)  # clean: near miss, not begun twice, weights_for() or cancel_all() finish it

    def weights_for(self, layer):
        transfer = self.pending.pop(layer, None)
        if transfer is None:
            self.late += 1
            return self.fetch_now(layer)
        return transfer.finish()

    def cancel_all(self):
        for transfer in self.pending.values():
            transfer.finish()
        self.pending.clear()

    # -- background reads -------------------------------------------------

    def read_ahead(self, layer, on_ready):
        """Copy in a worker thread; the stream is lent here, so that the queue cannot outrun the copies."""
        stream = self.streams.lend()  # leak: for a future that close() cancels, _read_done() returns before the reclaim
        future = self.workers.submit(self._copy, layer, stream)
        future.add_done_callback(lambda f: self._read_done(f, layer, stream, on_ready))
        return future

    def _read_done(self, future, layer, stream, on_ready):
        try:
            tensors = future.result()
        except CancelledError:
            logger.debug("read of layer %s cancelled", layer)
            return
        except MissingWeights:
            logger.error("no weights for layer %s", layer)
            tensors = None
        stream.synchronize()
        self.streams.reclaim(stream)
        if tensors is not None:
            on_ready(layer, tensors)

    def read_group(self, layers):
        """Several layers on one stream, in the order given."""
        stream = self.streams.lend()  # clean: near miss, the callback reclaims on each outcome, a cancelled future included
        future = self.workers.submit(self._read_group, layers, stream)
        future.add_done_callback(lambda _: self.streams.reclaim(stream))
        return future.result()

    def _read_group(self, layers, stream):
        got = [self._copy(layer, stream) for layer in layers]
        stream.synchronize()
        return got

    # -- eviction and odd jobs ---------------------------------------------

    def evict(self, tensors, layer):
        if self._evict_stream is None:
            self._evict_stream = self.streams.lend()  # clean: near miss, lent once and reclaimed in close()
        with torch.cuda.stream(self._evict_stream):
            for name, t in tensors.items():
                self.host[layer][name].copy_(t, non_blocking=True)

    def checksum(self, layer):
        stream = self.streams.lend()  # leak: MissingWeights out of _copy() is answered with None and the stream stays lent
        try:
            tensors = self._copy(layer, stream)
        except MissingWeights:
            return None
        with torch.cuda.stream(stream):
            total = sum(t.double().sum() for t in tensors.values())
        value = float(total)
        self.streams.reclaim(stream)
        return value

    def time_copy(self, layer, repeat=3):
        """Seconds for one copy; events of the pool have no timing, so only the order is used."""
        first = self.events.get()  # leak: for a layer without weights the method returns before the events are put back
        first.record()
        if not self.host.get(layer):
            return 0.0
        last = self.events.get()  # clean: put back at the end
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(repeat):
            self.fetch_now(layer)
        ended.record()
        last.record()
        last.synchronize()
        self.events.put(first)
        self.events.put(last)
        return began.elapsed_time(ended) / 1e3 / repeat

    def close(self):
        self.workers.shutdown(wait=True, cancel_futures=True)
        self.cancel_all()
        if self._evict_stream is not None:
            self._evict_stream.synchronize()
            self.streams.reclaim(self._evict_stream)
            self._evict_stream = None


class OffloadedModel(torch.nn.Module):
    def __init__(self, engine, layers, skip=()):
        super().__init__()
        self.engine = engine
        self.layers = layers
        self.skip = set(skip)

    def forward(self, x):
        for i in range(min(self.engine.depth, len(self.layers))):
            self.engine.prefetch(i)
        for i, layer in enumerate(self.layers):
            weights = self.engine.weights_for(i)
            if i + self.engine.depth < len(self.layers):
                self.engine.prefetch(i + self.engine.depth)
            x = torch.func.functional_call(layer, weights, (x,))
        return x

    def forward_skipping(self, x):
        """Early-exit variant: some layers are left out by the router."""
        nxt = self.engine.begin(0)  # leak: when layer 0 is skipped the loop continues without finishing its transfer
        for i, layer in enumerate(self.layers):
            current, nxt = nxt, None
            if i + 1 < len(self.layers):
                nxt = self.engine.begin(i + 1)  # leak: likewise, when layer i + 1 is skipped its transfer is never finished
            if i in self.skip:
                continue
            x = torch.func.functional_call(layer, current.finish(), (x,))
        return x
