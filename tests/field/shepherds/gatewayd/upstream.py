"""Connections to model servers, and the choice of the server."""
import collections
import http.client
import threading

class NoRoute(Exception):
    """No server has the model, or the one chosen does not answer."""

class Endpoint(object):
    """A server. Its load is the number of connections to it that exist."""

    def __init__(self, host, port, models, limit):
        self.host = host
        self.port = port
        self.models = set(models)
        self.limit = limit
        self.load = 0

    def occupy(self):
        self.load += 1
        return self

    def vacate(self):
        self.load -= 1

class Connection(object):
    def __init__(self, endpoint, model, http_connection):
        self.endpoint = endpoint
        self.model = model
        self.http = http_connection

    def post(self, path, body):
        self.http.request("POST", path, body=body)
        response = self.http.getresponse()
        return response.status, response.read()

class Upstreams(object):
    def __init__(self, endpoints, keep=4):
        self._endpoints = endpoints
        self._keep = keep
        self._idle = collections.defaultdict(list)
        self._lock = threading.Lock()

    def _pick(self, model):
        """Occupy a place on the least loaded server that has the model."""
        with self._lock:
            fitting = [e for e in self._endpoints if model in e.models and e.load < e.limit]
            if not fitting:
                raise NoRoute(model)
            return min(fitting, key=lambda e: e.load).occupy()  # clean: returned to the caller

    def lease(self, model):
        with self._lock:
            idle = self._idle[model]
            if idle:
                return idle.pop()  # clean: returned to the caller
        return self._connect(model)  # clean: returned to the caller

    def _connect(self, model):
        endpoint = self._pick(model)  # leak: a server that refuses the connection keeps its load, NoRoute goes up without vacate()
        http_connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=60)  # clean: where connect() fails there is no socket to close
        try:
            http_connection.connect()
        except OSError as exc:
            raise NoRoute("%s: %s" % (model, exc))
        return Connection(endpoint, model, http_connection)

    def restore(self, connection):
        """The connection is good and may serve the next request."""
        with self._lock:
            idle = self._idle[connection.model]
            if len(idle) < self._keep:
                idle.append(connection)
                return
        self.scrap(connection)

    def scrap(self, connection):
        connection.http.close()
        with self._lock:
            connection.endpoint.vacate()

    def prune(self, model):
        """Close the idle connections of a model that has been unloaded."""
        with self._lock:
            doomed = self._idle.pop(model, [])  # clean: scrapped below, outside the lock
        for connection in doomed:
            self.scrap(connection)
