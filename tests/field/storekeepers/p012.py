import time


class PortRange:
    def __init__(self, first, last):
        self._free = list(range(first, last))
        self._taken = {}

    def grant(self, owner):
        port = self._free.pop()
        self._taken[port] = owner
        return port

    def revoke(self, port):
        if self._taken.pop(port, None) is not None:
            self._free.append(port)


def make_launcher(ports, spawn, kill):
    """Build start/stop/status functions that share one worker."""
    rpc = None
    metrics = None
    process = None

    def start(name):
        nonlocal rpc, metrics, process
        if process is not None:
            return process
        rpc = ports.grant(name)  # clean: stop revokes it
        metrics = ports.grant(name)  # leak: stop sets it to None without revoke
        process = spawn(name, rpc, metrics)
        return process

    def stop(grace):
        nonlocal rpc, metrics, process
        if process is None:
            return
        kill(process, grace)
        ports.revoke(rpc)
        rpc = metrics = process = None

    def status():
        return {"process": process, "rpc": rpc, "at": time.time()}

    return start, stop, status


def make_debugger(ports):
    sessions = {}

    def attach(pid):
        if pid not in sessions:
            sessions[pid] = ports.grant(pid)  # clean: detach revokes it
        return sessions[pid]

    def detach(pid):
        port = sessions.pop(pid, None)
        if port is not None:
            ports.revoke(port)
        return port

    return attach, detach


def make_tunnel(ports, connect):
    hops = []

    def extend(host):
        port = ports.grant(host)  # leak: collapse revokes only the first hop and clears the rest
        hops.append((host, port))
        connect(host, port)
        return len(hops)

    def collapse():
        if hops:
            ports.revoke(hops[0][1])
        hops.clear()

    return extend, collapse


def probe(ports, connect, host):
    port = ports.grant("probe")  # clean: revoked in finally
    try:
        return connect(host, port)
    finally:
        ports.revoke(port)
