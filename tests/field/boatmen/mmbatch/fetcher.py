"""Gets images from urls over a few kept connections."""
import http.client
import logging
import queue
import urllib.parse

logger = logging.getLogger(__name__)


class FetchError(Exception):
    pass


class Fetcher(object):
    def __init__(self, cfg):
        self.cfg = cfg
        self.tokens = queue.Queue()
        for i in range(cfg.fetch_connections):
            self.tokens.put(i)
        self.kept = {}

    def _connect(self, host):
        conn = self.kept.pop(host, None)  # clean: returned to the caller, None is not a connection
        if conn is None:
            conn = http.client.HTTPSConnection(host, timeout=5)  # clean: returned to the caller
        return conn

    def _keep(self, host, conn):
        if host in self.kept:
            conn.close()
        else:
            self.kept[host] = conn

    def _check_url(self, parts):
        if parts.scheme != "https" or not parts.netloc:
            raise FetchError("bad url")

    def _check_status(self, resp):
        if resp.status != 200:
            raise FetchError(resp.status)

    def get(self, url):
        parts = urllib.parse.urlsplit(url)
        try:
            token = self.tokens.get(timeout=10)  # leak: a url without a host is refused after the token was taken
        except queue.Empty:
            raise FetchError("too many fetches")
        self._check_url(parts)
        conn = self._connect(parts.netloc)  # leak: an answer other than 200 is raised past both _keep and close
        try:
            conn.request("GET", parts.path or "/")
            resp = conn.getresponse()
            self._check_status(resp)
            body = resp.read(self.cfg.max_bytes + 1)
        except (OSError, http.client.HTTPException) as exc:
            conn.close()
            raise FetchError(url) from exc
        finally:
            self.tokens.put(token)
        if len(body) > self.cfg.max_bytes:
            conn.close()
            raise FetchError("image is too large")
        self._keep(parts.netloc, conn)
        return body

    def head(self, url):
        """The size that the server tells, or None."""
        parts = urllib.parse.urlsplit(url)
        conn = self._connect(parts.netloc)  # clean: closed in the finally, never kept
        try:
            conn.request("HEAD", parts.path or "/")
            resp = conn.getresponse()
            return int(resp.headers.get("content-length", 0)) or None
        except (OSError, http.client.HTTPException):
            logger.debug("no head for %s", url)
            return None
        finally:
            conn.close()

    def close(self):
        for conn in self.kept.values():
            conn.close()
        self.kept.clear()
