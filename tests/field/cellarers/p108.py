import http.client
import threading
from collections import defaultdict


class HostSessions:
    def __init__(self, per_host=4):
        self._shelves = defaultdict(list)
        self._gates = {}
        self._guard = threading.Lock()
        self.per_host = per_host

    def _gate(self, host):
        with self._guard:
            return self._gates.setdefault(host, threading.BoundedSemaphore(self.per_host))

    def checkout(self, host):
        self._gate(host).acquire()
        shelf = self._shelves[host]
        return shelf.pop() if shelf else http.client.HTTPSConnection(host, timeout=10)

    def checkin(self, host, session):
        self._shelves[host].append(session)
        self._gate(host).release()

    def discard(self, host, session):
        session.close()
        self._gate(host).release()


def fetch(sessions, host, path):
    s = sessions.checkout(host)  # clean: checked in, or discarded after an error
    try:
        s.request("GET", path)
        body = s.getresponse().read()
    except OSError:
        sessions.discard(host, s)
        return b""
    sessions.checkin(host, s)
    return body


def head_status(sessions, host, path):
    s = sessions.checkout(host)  # leak: a server error returns without checkin or discard
    s.request("HEAD", path)
    resp = s.getresponse()
    if resp.status >= 500:
        return None
    sessions.checkin(host, s)
    return resp.status


def ping_all(sessions, hosts):
    alive = []
    for host in hosts:
        s = sessions.checkout(host)  # leak: closed, yet the host's place is never returned
        s.request("GET", "/healthz")
        if s.getresponse().status == 200:
            alive.append(host)
        s.close()
    return alive


def post(sessions, host, path, body):
    s = sessions.checkout(host)  # clean: checked in within finally
    try:
        s.request("POST", path, body)
        return s.getresponse().status
    finally:
        sessions.checkin(host, s)
