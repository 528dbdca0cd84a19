import logging

from .conn import StoreError
from .session import Session

logger = logging.getLogger(__name__)


class FeatureService:
    def __init__(self, pool):
        self.pool = pool
        self.sessions = {}
        self.subscribers = {}

    def lookup(self, key):
        with self.pool.connection() as conn:  # clean: context manager
            return conn.query(key)

    def lookup_many(self, keys):
        out = {}
        for key in keys:
            conn = self.pool.get_healthy()  # leak: StoreError is caught and the loop continues without put_conn
            if conn is None:
                break
            try:
                out[key] = conn.query(key)
            except StoreError:
                logger.warning("no feature for %s", key)
                continue
            self.pool.put_conn(conn)
        return out

    def lookup_with_default(self, key, default=None):
        conn = self.pool.get_conn()  # clean: near miss, finally also covers the return in except
        if conn is None:
            return default
        try:
            return conn.query(key)
        except StoreError:
            return default
        finally:
            self.pool.put_conn(conn)

    def lookup_retry(self, key, attempts=3):
        conn = self.pool.get_conn()  # leak: rebound in the retry loop after a failure
        while conn is not None and attempts > 0:
            try:
                value = conn.query(key)
                self.pool.put_conn(conn)
                return value
            except StoreError:
                attempts -= 1
                conn = self.pool.get_conn()  # leak: rebound by the next failure, and held when the attempts run out
        return None

    def summary(self, keys):
        with Session(self.pool) as session:  # clean: closed by with
            return [session.fetch(k) for k in keys]

    def nested(self, key, other):
        with self.pool.connection() as conn:  # clean: context manager
            inner = Session(self.pool, conn)  # clean: near miss, not the owner of the lent connection, close() not needed
            return inner.fetch(key), inner.fetch(other)

    def count_present(self, keys):
        session = Session(self.pool)  # leak: close() is not called when nothing was asked for
        if not keys:
            return 0
        present = sum(session.fetch(k) is not None for k in keys)
        session.close()
        return present

    def open_session(self, user):
        if user not in self.sessions:
            self.sessions[user] = Session(self.pool)  # clean: near miss, end_session closes it
        return self.sessions[user]

    def end_session(self, user):
        session = self.sessions.pop(user, None)
        if session is not None:
            session.close()

    def subscribe(self, topic):
        if topic in self.subscribers:
            return False
        self.subscribers[topic] = self.pool.get_conn()  # leak: unsubscribe forgets the entry without put_conn
        return True

    def unsubscribe(self, topic):
        self.subscribers.pop(topic, None)

    def shutdown(self):
        for user in list(self.sessions):
            self.end_session(user)
        self.subscribers.clear()
