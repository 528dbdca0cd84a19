"""Handing KV caches from prefill workers to decode workers.

The receiving side registers memory and sends the keys over; the sending side
posts writes under a window of credits and learns of their end by completions.
"""
from __future__ import annotations

import enum
import json
import logging
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

logger = logging.getLogger("kv.handoff")

class RegistrationError(RuntimeError):
    """The device has no memory keys left or refuses the range."""

class PeerRefused(RuntimeError):
    pass

class WindowClosed(RuntimeError):
    pass

class CqeStatus(enum.Enum):
    SUCCESS = 0
    REMOTE_ERROR = 1
    FLUSHED = 2

@dataclass(frozen=True)
class MemKey:
    lkey: int
    addr: int
    length: int

class Registrar:
    """Keys are a scarce resource of the network card, so they are numbered and reused."""

    def __init__(self, device: Any, max_keys: int) -> None:
        self._device = device
        self._numbers: "queue.Queue[int]" = queue.Queue()
        for number in range(max_keys):
            self._numbers.put(number)

    def register(self, addr: int, length: int) -> MemKey:
        try:
            number = self._numbers.get_nowait()  # clean: put back when the device refuses, else part of the key
        except queue.Empty:
            raise RegistrationError("no memory keys left") from None
        if not self._device.map(number, addr, length):
            self._numbers.put(number)
            raise RegistrationError(f"range {addr:#x}+{length} refused")
        return MemKey(number, addr, length)

    def deregister(self, key: MemKey) -> None:
        self._device.unmap(key.lkey)
        self._numbers.put(key.lkey)

class SendWindow:
    """Credits for writes in flight."""

    def __init__(self, credits: int) -> None:
        self._sem = threading.Semaphore(credits)
        self.credits = credits
        self.closed = False

    def take(self) -> None:
        if self.closed:
            raise WindowClosed()
        self._sem.acquire()  # clean: the caller's credit

    def take_many(self, n: int, timeout: float = 1.0) -> bool:
        """All n credits, or False."""
        deadline = time.monotonic() + timeout
        for _ in range(n):
            left = deadline - time.monotonic()
            if not self._sem.acquire(timeout=max(left, 0.0)):  # leak: False is returned with the credits of the rounds before
                return False
        return True

    def put(self, n: int = 1) -> None:
        for _ in range(n):
            self._sem.release()

class ControlSession:
    def __init__(self, sock: socket.socket, peer: Tuple[str, int], features: List[str]) -> None:
        self.sock = sock
        self.peer = peer
        self.features = features
        self.opened = time.monotonic()

    def send(self, message: Dict[str, Any]) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def stale(self) -> bool:
        return time.monotonic() - self.opened > 900.0

    def close(self) -> None:
        self.sock.close()

def connect(peer: Tuple[str, int], timeout: float = 3.0) -> ControlSession:
    sock = socket.create_connection(peer, timeout=timeout)  # clean: closed in both refusals, else inside the session
    try:
        sock.sendall(b'{"op":"hello","version":2}\n')
        answer = sock.recv(4096).decode("utf-8", "replace")
    except OSError:
        sock.close()
        raise
    if not answer.startswith("{"):
        sock.close()
        raise PeerRefused(f"{peer} answered {answer[:40]!r}")
    return ControlSession(sock, peer, json.loads(answer).get("features", []))

class SessionCache:
    def __init__(self) -> None:
        self._by_peer: Dict[Tuple[str, int], ControlSession] = {}
        self._lock = threading.Lock()

    def get(self, peer: Tuple[str, int]) -> ControlSession:
        with self._lock:
            session = self._by_peer.get(peer)
            if session is not None and not session.stale():
                return session
            if session is not None:
                session.close()
                del self._by_peer[peer]
            session = self._by_peer[peer] = connect(peer)  # clean: the stale one is closed first, close_all closes the rest
            return session

    def close_all(self) -> None:
        with self._lock:
            for session in self._by_peer.values():
                session.close()
            self._by_peer.clear()

def announce(peers: List[Tuple[str, int]], capacity: int) -> int:
    """Tell every peer how many sequences we can still take."""
    told = 0
    for peer in peers:
        try:
            session = connect(peer)  # leak: a peer without the feature is skipped with its session open
        except (OSError, PeerRefused) as exc:
            logger.warning("cannot reach %s: %s", peer, exc)
            continue
        if "capacity" not in session.features:
            logger.debug("%s is too old for capacity reports", peer)
            continue
        session.send({"op": "capacity", "free": capacity})
        session.close()
        told += 1
    return told

@dataclass
class Expected:
    request_id: str
    k_key: MemKey
    v_key: MemKey
    deadline: float
    layers_seen: int = 0
    on_ready: Optional[Callable[[str], None]] = None

class KVReceiver:
    def __init__(self, registrar: Registrar, sessions: SessionCache, n_layers: int) -> None:
        self._registrar = registrar
        self._sessions = sessions
        self._n_layers = n_layers
        self._expected: Dict[str, Expected] = {}
        self._lock = threading.Lock()

    def prepare(self, request_id: str, source: Tuple[str, int], k: Tuple[int, int], v: Tuple[int, int],
                on_ready: Callable[[str], None], patience: float = 20.0) -> None:
        k_key = self._registrar.register(*k)  # leak: a refusal of V leaves K registered, and expire() drops entries with their keys
        v_key = self._registrar.register(*v)  # leak: expire() drops entries without deregistering
        entry = Expected(request_id, k_key, v_key, time.monotonic() + patience, on_ready=on_ready)
        with self._lock:
            self._expected[request_id] = entry
        self._sessions.get(source).send({"op": "pull", "request": request_id, "k": k_key.lkey, "v": v_key.lkey})

    def on_layer(self, request_id: str) -> None:
        with self._lock:
            entry = self._expected.get(request_id)
            if entry is None:
                return
            entry.layers_seen += 1
            if entry.layers_seen < self._n_layers:
                return
            del self._expected[request_id]
        self._registrar.deregister(entry.k_key)
        self._registrar.deregister(entry.v_key)
        if entry.on_ready is not None:
            entry.on_ready(request_id)

    def expire(self) -> List[str]:
        now = time.monotonic()
        with self._lock:
            late = [r for r, e in self._expected.items() if e.deadline < now]
            for request_id in late:
                entry = self._expected.pop(request_id)
                logger.warning("%s: %d of %d layers in time", request_id, entry.layers_seen, self._n_layers)
        return late

@dataclass
class Write:
    request_id: str
    layer: int
    done: Callable[["Write", CqeStatus], None]

class KVSender:
    def __init__(self, nic: Any, registrar: Registrar, window: SendWindow) -> None:
        self.nic = nic
        self.registrar = registrar
        self.window = window
        self.failed: List[str] = []

    def send_layer(self, request_id: str, layer: int, block: memoryview) -> None:
        self.window.take()  # leak: _layer_done returns for a flushed write before it puts the credit back
        self.nic.post_write(Write(request_id, layer, self._layer_done), block)

    def _layer_done(self, write: Write, status: CqeStatus) -> None:
        if status is CqeStatus.FLUSHED:
            logger.info("%s/%d flushed", write.request_id, write.layer)
            return
        if status is CqeStatus.REMOTE_ERROR:
            self.failed.append(write.request_id)
        self.window.put()

    def send_burst(self, request_id: str, blocks: List[memoryview]) -> bool:
        if not self.window.take_many(len(blocks)):  # clean: near miss, each write puts one credit back in _burst_done
            return False
        for layer, block in enumerate(blocks):
            self.nic.post_write(Write(request_id, layer, self._burst_done), block)
        return True

    def _burst_done(self, write: Write, status: CqeStatus) -> None:
        if status is not CqeStatus.SUCCESS:
            self.failed.append(write.request_id)
        self.window.put()

    def send_header(self, request_id: str, addr: int, raw: bytes) -> bool:
        key = self.registrar.register(addr, len(raw))  # clean: deregistered in the finally
        try:
            self.window.take()  # clean: put back in the inner finally
            try:
                return self.nic.write_sync(key.lkey, raw)
            finally:
                self.window.put()
        except WindowClosed:
            return False
        finally:
            self.registrar.deregister(key)

    def drain(self) -> None:
        self.window.closed = True
        for _ in range(self.window.credits):
            self.window._sem.acquire()  # clean: near miss, waits for the writes in flight and is undone on the next line
        self.window.put(self.window.credits)
