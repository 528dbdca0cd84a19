"""Ports for rendezvous, metrics and debug servers of distributed jobs on a shared node. Module-level state."""
import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time

log = logging.getLogger("launch.ports")

FIRST, LAST = 29500, 29999

_mutex = threading.Lock()
_free = set(range(FIRST, LAST + 1))
_owners = {}
_groups = {}
_debuggers = {}


class PortsExhausted(OSError):
    pass


class RendezvousFailed(RuntimeError):
    pass


def _is_open(port):
    with socket.socket() as s:
        s.settimeout(0.2)
        return s.connect_ex(("127.0.0.1", port)) == 0


def claim(owner):
    """A port that nobody listens on."""
    with _mutex:
        while _free:
            port = _free.pop()  # leak: a port somebody else listens on right now is skipped and never comes back to the set
            if _is_open(port):
                log.debug("port %d is taken by a stranger", port)
                continue
            _owners[port] = owner
            return port
    raise PortsExhausted(f"no port for {owner}")


def claim_exactly(port, owner):
    with _mutex:
        if port not in _free:
            return False
        _free.remove(port)  # clean: the caller knows the number and owns it from here
        _owners[port] = owner
    return True


def claim_run(count, owner):
    """Consecutive ports, as some frameworks want them."""
    with _mutex:
        for first in sorted(_free):
            run = range(first, first + count)
            if all(p in _free for p in run):
                _free.difference_update(run)  # clean: the run is returned to the caller
                _owners.update(dict.fromkeys(run, owner))
                return list(run)
    raise PortsExhausted(f"no {count} ports in a row for {owner}")


def yield_back(port):
    with _mutex:
        if _owners.pop(port, None) is not None:
            _free.add(port)


@contextlib.contextmanager
def claimed(owner):
    port = claim(owner)  # clean: given back by the finally
    try:
        yield port
    finally:
        yield_back(port)


def _wait_ready(port, deadline):
    while time.monotonic() < deadline:
        if _is_open(port):
            return
        time.sleep(0.1)
    raise RendezvousFailed(f"nothing listens on {port}")


# ---- torchrun groups


def start_group(job_id, command, nproc, timeout=120.0):
    port = claim(job_id)  # leak: RendezvousFailed is raised again after the kill, without the port
    argv = ["torchrun", f"--nproc-per-node={nproc}", f"--master-port={port}", *command]
    proc = subprocess.Popen(argv, start_new_session=True)
    try:
        _wait_ready(port, time.monotonic() + timeout)
    except RendezvousFailed:
        log.error("group %s never came up", job_id)
        os.killpg(proc.pid, signal.SIGKILL)
        raise
    _groups[job_id] = (proc, port)
    return proc


def reap_groups():
    for job_id, (proc, port) in list(_groups.items()):
        if proc.poll() is not None:
            del _groups[job_id]
            yield_back(port)
            log.info("group %s ended with %d", job_id, proc.returncode)


def start_with_retry(job_id, command, attempts=3):
    for attempt in range(attempts):
        port = claim(f"{job_id}#{attempt}")  # clean: near miss, a failed attempt gives its own port back, a good one is kept in the table
        proc = subprocess.Popen([*command, "--port", str(port)])
        try:
            _wait_ready(port, time.monotonic() + 20.0)
        except RendezvousFailed as exc:
            log.warning("attempt %d: %s", attempt, exc)
            proc.kill()
            yield_back(port)
            continue
        _groups[f"{job_id}:{port}"] = (proc, port)
        return True
    return False


def start_pipeline(job_id, stages):
    """One process per stage, each told about the port of the next one."""
    with contextlib.ExitStack() as stack:
        ports = []
        for stage in stages:
            port = claim(f"{job_id}/{stage.name}")  # clean: near miss, registered with the stack before anything else can fail
            stack.callback(yield_back, port)
            ports.append(port)
        procs = [stage.start(ports[i], ports[(i + 1) % len(ports)]) for i, stage in enumerate(stages)]
        for port in ports:
            _wait_ready(port, time.monotonic() + 60.0)
        log.info("pipeline %s on ports %s", job_id, ports)
        for proc in procs:
            proc.wait()


# ---- sidecars


class MetricsServer:
    """Prometheus exporter of one job. The admin port is only there with debug on."""

    def __init__(self, job_id, debug=False):
        self.job_id = job_id
        self.debug = debug
        self.port = claim(f"{job_id}/metrics")  # clean: given back by stop(), and here when there is no admin port
        try:
            self.admin_port = claim(f"{job_id}/admin") if debug else None  # leak: with the debug flag switched off meanwhile, stop() leaves the port out
        except PortsExhausted:
            yield_back(self.port)
            raise
        self._proc = None

    def start(self):
        argv = ["job-exporter", self.job_id, str(self.port)]
        if self.admin_port is not None:
            argv += ["--admin", str(self.admin_port)]
        self._proc = subprocess.Popen(argv)

    def set_debug(self, debug):
        self.debug = debug
        if self._proc is not None:
            self._proc.send_signal(signal.SIGUSR1 if debug else signal.SIGUSR2)

    def stop(self):
        if self._proc is not None:
            self._proc.terminate()
        yield_back(self.port)
        if self.debug and self.admin_port is not None:
            yield_back(self.admin_port)


def run_with_metrics(job_id, command):
    server = MetricsServer(job_id)  # clean: stopped in the finally
    try:
        server.start()
        return subprocess.call(command)
    finally:
        server.stop()


def attach_debugger(job_id, rank):
    """Start debugpy for one rank. Asking again moves the debugger to another port."""
    port = claim(f"{job_id}/debug/{rank}")  # leak: asking again overwrites the entry with the old port
    _debuggers[job_id, rank] = port
    with open(f"/run/jobs/{job_id}/{rank}.debug", "w") as f:
        f.write(str(port))
    return port


def detach_debuggers(job_id):
    for key in [k for k in _debuggers if k[0] == job_id]:
        yield_back(_debuggers.pop(key))


def health_check(job_id):
    with claimed(f"{job_id}/health") as port:  # clean: context manager
        code = subprocess.call(["job-health", job_id, "--reply-port", str(port)])
    return code == 0


def reserve_nccl(job_id, pairs):
    """Two runs of ports, for the ring and for the tree."""
    ring = claim_run(pairs, f"{job_id}/ring")  # leak: the second run may raise PortsExhausted while this one is held
    tree = claim_run(pairs, f"{job_id}/tree")  # clean: returned together with the ring
    return ring, tree


def launch_nccl(job_id, pairs, command):
    ring, tree = reserve_nccl(job_id, pairs)  # clean: all ports go back in the finally
    env = dict(os.environ, NCCL_RING=",".join(map(str, ring)), NCCL_TREE=",".join(map(str, tree)))
    try:
        return subprocess.call(command, env=env)
    finally:
        for port in ring + tree:
            yield_back(port)


def pick_stable(job_id, wanted):
    """The port a job had last time, if possible."""
    random.shuffle(wanted)
    for port in wanted:
        if claim_exactly(port, job_id):  # clean: near miss, the number is all there is to keep, the caller gets it
            return port
    return claim(job_id)  # clean: returned to the caller
