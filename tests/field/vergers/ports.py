"""A range of local ports, kept as a set, and the launchers that hand them to servers."""
import threading
import weakref


class PortRange:
    def __init__(self, first, last):
        self._free = set(range(first, last + 1))
        self._leased = set()
        self._cond = threading.Condition()

    def lease(self):
        with self._cond:
            while not self._free:
                self._cond.wait()
            port = self._free.pop()
            self._leased.add(port)
            return port

    def release(self, port):
        with self._cond:
            self._leased.remove(port)
            self._free.add(port)
            self._cond.notify()


class NotHealthy(RuntimeError):
    pass


class EngineHandle:
    def __init__(self, ports, port, process):
        self.ports = ports
        self.port = port
        self.process = process

    def stop(self):
        self.process.terminate()
        self.ports.release(self.port)


def launch_engine(ports, spawn, log, args):
    port = ports.lease()  # leak: a spawn that fails is logged and raised again, with the port still leased
    try:
        process = spawn([*args, "--port", str(port)])
    except OSError:
        log.error("engine did not start on %d", port)
        raise
    return EngineHandle(ports, port, process)


def launch_checked(ports, spawn, args):
    port, handle = ports.lease(), None  # clean: the finally keeps the port leased only when a handle that stop() can be called on is returned
    try:
        process = spawn([*args, "--port", str(port)])
        if process.poll() is not None:
            raise NotHealthy(process.returncode)
        handle = EngineHandle(ports, port, process)
        return handle
    finally:
        if handle is None:
            ports.release(port)


def launch_replicas(ports, spawn, specs, budget):
    started = []
    for spec in specs:
        port = ports.lease()  # leak: the break over the memory budget leaves with a port that no replica has got
        budget -= spec.memory
        if budget < 0:
            break
        started.append(EngineHandle(ports, port, spawn(spec.args + [str(port)])))
    return started


def run_with_sidecar(ports, spawn, job):
    port = None

    def start():
        port = ports.lease()  # leak: the assignment makes a local name of start(), the port that the finally tests stays None
        return spawn(port)

    process = start()
    try:
        return job.run(process)
    finally:
        process.terminate()
        if port is not None:
            ports.release(port)


class MetricsServer:
    def __init__(self, ports):
        self.ports = ports
        self.port = ports.lease()  # clean: close() releases it, and the tracing server below goes through super()

    def close(self):
        self.ports.release(self.port)


class TracingServer(MetricsServer):
    def __init__(self, ports, exporter):
        super().__init__(ports)
        self.exporter = exporter

    def close(self):
        try:
            self.exporter.flush()
        finally:
            super().close()


class DebugServer:
    def __init__(self, ports):
        self.ports = ports
        self.port = ports.lease()  # leak: the close() of the profiling server replaces this one's and does not call it

    def close(self):
        self.ports.release(self.port)


class ProfilingServer(DebugServer):
    def __init__(self, ports, profiler):
        super().__init__(ports)
        self.profiler = profiler

    def close(self):
        self.profiler.stop()
        self.profiler = None


class FailoverPair:
    def __init__(self, ports, spawn):
        self.ports = ports
        self.spawn = spawn
        self.primary = self._start()
        self.standby = self._start()

    def _start(self):
        port = self.ports.lease()  # leak: promote() releases the port of the server it has just promoted, the port of the one it stopped stays leased
        return port, self.spawn(port)

    def promote(self):
        old, self.primary = self.primary, self.standby
        old[1].terminate()
        self.ports.release(self.primary[0])
        self.standby = self._start()


class WorkerFleet:
    def __init__(self, ports, log):
        self.ports = ports
        self.log = log
        self.leased = []

    def add(self, worker):
        port = self.ports.lease()  # leak: a port that drop() released makes release() raise KeyError in stop(), and the ports behind it in the list are cleared away
        self.leased.append(port)
        worker.listen(port)
        return port

    def drop(self, worker, port):
        worker.terminate()
        self.ports.release(port)

    def stop(self):
        try:
            for port in self.leased:
                self.ports.release(port)
        except KeyError as err:
            self.log.debug("port %s already released", err)
        self.leased.clear()


def mirror_traffic(ports, spawn, client, live_ports):
    port = ports.lease()  # leak: the loop over the live servers uses the same name, so the finally releases the last of their ports
    process = spawn(port)
    try:
        client.warm(port)
        for port in live_ports:
            client.mirror(port, process)
        return client.report()
    finally:
        process.terminate()
        ports.release(port)


class Channel:
    def __init__(self, ports, connect):
        self.ports = ports
        self.port = ports.lease()  # leak: when the reader is closed first neither of the two ends releases, the writer never does
        self.socket = connect(self.port)
        self.reading = self.writing = True

    def close_reader(self):
        if not self.reading:
            return
        self.reading = False
        self.socket.shutdown_read()
        if not self.writing:
            self.ports.release(self.port)

    def close_writer(self):
        self.writing = False
        self.socket.shutdown_write()


class Tunnel:
    def __init__(self, ports, host):
        self.host = host
        self.port = ports.lease()  # clean: the finalizer releases it when the tunnel is collected, or at close()
        self._finalizer = weakref.finalize(self, ports.release, self.port)

    def address(self):
        return f"{self.host}:{self.port}"

    def close(self):
        self._finalizer()


def wait_healthy(ports, spawn, probe, attempts):
    port = ports.lease()  # clean: a healthy server takes it over in the handle, otherwise it is released ahead of the raise
    process = spawn(port)
    for _ in range(attempts):
        if probe(port):
            return EngineHandle(ports, port, process)
    process.terminate()
    ports.release(port)
    raise NotHealthy(port)
