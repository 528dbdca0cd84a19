"""Ports and processes of the tool servers (search, python, calculator) for agentic rollouts."""
import itertools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request

log = logging.getLogger("tools")

LO, HI = 21000, 21999

_mu = threading.Lock()
_free = list(range(LO, HI + 1))
_used = set()
_servers = {}
_groups = {}
_standby = {}
_seq = itertools.count()


class NoPort(Exception):
    pass


class StartFailed(Exception):
    pass


def grab():
    with _mu:
        if not _free:
            raise NoPort
        p = _free.pop()  # clean: noted in the used set and returned
        _used.add(p)
        return p


def grab_bindable(tries=20):
    """Other people's processes sit in our range, too."""
    for _ in range(tries):
        p = grab()  # leak: a port that cannot be bound is left behind when the loop goes on
        with socket.socket() as s:  # clean: with statement
            try:
                s.bind(("127.0.0.1", p))
            except OSError:
                log.info("port %d is taken by a stranger", p)
                continue
        return p
    raise NoPort(f"{tries} tries")


def grab_even():
    """RTP-style pair: even port for control, the next for data."""
    with _mu:
        for p in _free:
            if p % 2 == 0 and p + 1 in _free:
                _free.remove(p)  # clean: returned as first of the pair
                _free.remove(p + 1)  # clean: returned as second of the pair
                _used.update((p, p + 1))
                return p, p + 1
    raise NoPort("pair")


def drop(p):
    with _mu:
        if p in _used:
            _used.discard(p)
            _free.append(p)


class ToolServer:
    def __init__(self, kind, port, proc):
        self.kind, self.port, self.proc = kind, port, proc
        self.calls = 0

    def call(self, payload, timeout=10):
        self.calls += 1
        req = urllib.request.Request(f"http://127.0.0.1:{self.port}/", json.dumps(payload).encode())
        with urllib.request.urlopen(req, timeout=timeout) as r:  # clean: with statement
            return json.load(r)

    def alive(self):
        return self.proc.poll() is None

    def stop(self):
        if self.alive():
            self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(5)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        drop(self.port)


def launch(kind, port):
    proc = subprocess.Popen(["tool-server", kind, "--port", str(port)], env=dict(os.environ, TOOL=kind))  # clean: near miss, reaped before StartFailed, else in the server
    for _ in range(50):
        if proc.poll() is not None:
            raise StartFailed(f"{kind} exited with {proc.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()  # clean: closed at once
            return ToolServer(kind, port, proc)
        except OSError:
            time.sleep(0.1)
    proc.kill()
    proc.wait()
    raise StartFailed(f"{kind} does not listen")


def start(kind):
    port = grab()  # clean: near miss, dropped when the start fails, else the server's stop() drops it
    try:
        srv = launch(kind, port)  # clean: registered in the table
    except StartFailed:
        drop(port)
        raise
    with _mu:
        _servers.setdefault(kind, []).append(srv)
    return srv


def start_private(kind):
    """For one episode; the caller stops it."""
    port = grab_bindable()  # leak: StartFailed of launch() passes through and the port stays used
    return launch(kind, port)  # clean: returned to the caller


def pick(kind):
    with _mu:
        live = [s for s in _servers.get(kind, ()) if s.alive()]
    return random.choice(live) if live else start(kind)  # clean: near miss, start() keeps it in the table for stop_all


def start_group(name, kinds):
    servers = []
    for k in kinds:
        try:
            servers.append(start_private(k))  # leak: a StartFailed returns None and the servers started before run on
        except StartFailed as e:
            log.error("group %s: %s", name, e)
            return None
    _groups[name] = servers
    return servers


def stop_group(name):
    for s in _groups.pop(name, ()):
        s.stop()


def standby(kind):
    """One spare server a kind, ready before it is needed."""
    srv = start_private(kind)  # leak: a spare that is already there is overwritten in the table
    _standby[kind] = srv


def take_standby(kind):
    """The caller stops it."""
    srv = _standby.pop(kind, None)
    return srv if srv is not None else start_private(kind)  # clean: returned to the caller


def with_private(kind, fn):
    srv = take_standby(kind)  # clean: stopped in the finally
    try:
        return fn(srv)
    finally:
        srv.stop()


def replace_dead(kind):
    n = 0
    with _mu:
        servers = list(_servers.get(kind, ()))
    for old in servers:
        if old.alive():
            continue
        with _mu:
            _servers[kind].remove(old)
        old.stop()
        try:
            start(kind)  # clean: near miss, the result is not used here but start() put it in the table
        except (StartFailed, NoPort) as e:
            log.error("no replacement for %s: %s", kind, e)
            continue
        n += 1
    return n


def media_server(cmd, register):
    ctl, data = grab_even()  # leak: a refused registration returns after the process is reaped, without dropping the ports
    proc = subprocess.Popen([cmd, str(ctl), str(data)])  # clean: reaped on refusal, else returned
    if not register(ctl, data):
        proc.kill()
        proc.wait()
        return None
    return proc, ctl, data


def media_stop(handle):
    proc, ctl, data = handle
    proc.terminate()
    proc.wait()
    drop(ctl)
    drop(data)


def episode(policy, task, kinds):
    name = f"ep-{task['id']}-{next(_seq)}"
    if start_group(name, kinds) is None:  # clean: the group is in the table and stop_group is in the finally
        return None
    try:
        return policy.run(task, {s.kind: s.call for s in _groups[name]})
    finally:
        stop_group(name)


def stop_all():
    with _mu:
        rest = [s for lst in _servers.values() for s in lst]
        _servers.clear()
    for name in list(_groups):
        stop_group(name)
    for s in rest + [_standby.pop(k) for k in list(_standby)]:
        s.stop()
