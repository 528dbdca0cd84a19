"""Device streams, the least loaded first."""
import heapq
from contextlib import ExitStack, contextmanager


class StreamsBusy(RuntimeError):
    pass


class KernelError(RuntimeError):
    pass


class Stream:
    def __init__(self, index, load):
        self.index = index
        self.load = load

    def __lt__(self, other):
        return self.load < other.load


class StreamPool:
    def __init__(self, count):
        self._heap = [(0, index) for index in range(count)]

    def checkout(self):
        if not self._heap:
            raise StreamsBusy()
        load, index = heapq.heappop(self._heap)
        return Stream(index, load)

    def restore(self, stream):
        heapq.heappush(self._heap, (stream.load, stream.index))


def replay(pool, graph, inputs):
    held = False
    stream = pool.checkout()  # leak: the raise comes before held is set, and the finally goes by held
    try:
        if inputs.shape != graph.input_shape:
            raise ValueError(f"captured for {graph.input_shape}")
        held = True
        stream.load += graph.cost
        return graph.replay(stream, inputs)
    finally:
        if held:
            pool.restore(stream)


class GraphRunner:
    def __init__(self, pool, graph, stream, owns_stream=False):
        self.pool = pool
        self.graph = graph
        self.stream = stream
        self.owns_stream = owns_stream

    def close(self):
        self.graph.destroy()
        if self.owns_stream:
            self.pool.restore(self.stream)


def capture_and_run(pool, capture, model, batches):
    stream = pool.checkout()  # leak: the runner takes the stream for borrowed by default, and this function leaves it to the runner
    runner = GraphRunner(pool, capture(model, stream), stream)
    try:
        return [runner.graph.replay(stream, batch) for batch in batches]
    finally:
        runner.close()


class SideStream:
    def __init__(self, pool, device):
        self.pool = pool
        self.device = device

    def __enter__(self):
        self.stream = self.pool.checkout()  # leak: with an exception in the block __exit__ resets the device and does not restore the stream
        self.device.set_stream(self.stream)
        return self.stream

    def __exit__(self, exc_type, exc, tb):
        self.device.set_stream(None)
        if exc_type is None:
            self.pool.restore(self.stream)
        else:
            self.device.reset_error()
        return False


def checked_norm(pool, device, tensor):
    with SideStream(pool, device) as stream:
        value = device.norm(tensor, stream)
        if value != value:
            raise KernelError("norm is not a number")
    return value


class CopyStream:
    def __init__(self, pool, device):
        self.pool = pool
        self.device = device
        self.stream = None

    def __enter__(self):
        self.stream = self.pool.checkout()  # leak: __enter__ raises on a missing peer, and then __exit__ is not called
        if not self.device.peer_access():
            raise KernelError("no peer access")
        self.device.set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc):
        self.device.set_stream(None)
        self.pool.restore(self.stream)


class PeerStream:
    def __init__(self, pool, device):
        self.pool = pool
        self.device = device
        self.stream = None

    def __enter__(self):
        self.stream = self.pool.checkout()  # clean: before the raise __enter__ calls what __exit__ would have called
        if not self.device.peer_access():
            self.__exit__(None, None, None)
            raise KernelError("no peer access")
        self.device.set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc):
        self.device.set_stream(None)
        self.pool.restore(self.stream)


@contextmanager
def stream_for(pool, device):
    stream = pool.checkout()  # leak: an exception of the body is raised at the yield and nothing there catches it
    device.set_stream(stream)
    yield stream
    device.set_stream(None)
    pool.restore(stream)


def quantize(pool, device, tensor, bits):
    with stream_for(pool, device) as stream:
        scale = device.absmax(tensor, stream)
        if scale == 0:
            raise ZeroDivisionError("tensor is all zeros")
        return device.round(tensor, scale, bits, stream)


def warm_kernels(pool, device, kernels):
    with ExitStack() as stack:
        for kernel in kernels:
            stream = pool.checkout()  # leak: pop_all() moves the callbacks to a new stack that nobody keeps or closes
            stack.callback(pool.restore, stream)
            kernel.compile(device, stream)
        stack.pop_all()
    return len(kernels)


class PipelineStages:
    def __init__(self, pool, stages):
        self.streams = []
        with ExitStack() as stack:
            for stage in stages:
                stream = pool.checkout()  # clean: on StreamsBusy the stack restores, on success the object keeps the moved stack and close() closes it
                stack.callback(pool.restore, stream)
                self.streams.append((stage, stream))
            self._stack = stack.pop_all()

    def forward(self, batch):
        for stage, stream in self.streams:
            batch = stage(batch, stream)
        return batch

    def close(self):
        self._stack.close()


def all_norms(pool, device, tensors):
    with ExitStack() as stack:
        norms = []
        for tensor in tensors:
            stream = pool.checkout()  # clean: the callback is bound to this stream and runs on the raise below and at the end
            stack.callback(pool.restore, stream)
            norms.append(device.norm(tensor, stream))
        if any(norm != norm for norm in norms):
            raise KernelError("norm is not a number")
        return norms


class ActiveStreams:
    def __init__(self, pool, width):
        self.pool = pool
        self.width = width
        self.heap = []

    def open(self):
        stream = self.pool.checkout()  # leak: at full width heapreplace gives the least loaded stream out and the result is ignored
        if len(self.heap) < self.width:
            heapq.heappush(self.heap, stream)
        else:
            heapq.heapreplace(self.heap, stream)
        return stream

    def close(self):
        while self.heap:
            self.pool.restore(heapq.heappop(self.heap))


class BusiestStreams:
    def __init__(self, pool, width):
        self.pool = pool
        self.width = width
        self.heap = []

    def open(self):
        stream = self.pool.checkout()  # clean: heappushpop gives out the new or an older stream, and that one is restored
        if len(self.heap) < self.width:
            heapq.heappush(self.heap, stream)
        else:
            self.pool.restore(heapq.heappushpop(self.heap, stream))

    def close(self):
        while self.heap:
            self.pool.restore(heapq.heappop(self.heap))


def offload(pool, device, tensor, host):
    stream = pool.checkout()  # leak: a tensor that is pinned on the host already returns before the callback with the restore is registered
    device.set_stream(stream)
    if host.aliases(tensor):
        device.set_stream(None)
        return host.find(tensor)
    event = device.copy_async(tensor, host, stream)
    device.set_stream(None)
    event.add_callback(lambda: pool.restore(stream))
    return host.find(tensor)
