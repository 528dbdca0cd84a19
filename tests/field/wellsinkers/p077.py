"""Login sessions to a mainframe; an invalidation makes all older ones stale."""
import threading


class Record:
    session, generation, lent = None, -1, False


class SessionStore:
    def __init__(self, connect, size):
        self._connect, self._generation = connect, 0
        self._records = [Record() for _ in range(size)]
        self._lock = threading.RLock()

    def invalidate(self):
        self._generation += 1

    def _refresh(self, record):
        if record.generation != self._generation:
            record.session = self._connect()
            record.generation = self._generation

    def logon(self):
        with self._lock:
            for record in self._records:
                if not record.lent:
                    self._refresh(record)
                    record.lent = True
                    return record
        return None

    def logoff(self, record, broken=False):
        with self._lock:
            record.lent = False
            if broken:
                record.generation = -1


def run_job(store, jcl):
    record = store.logon()  # leak: a rejected job returns with the session
    if record is None:
        return None
    job_id = record.session.submit(jcl)
    if job_id is None:
        return None
    output = record.session.output(job_id)
    store.logoff(record)
    return output


def ping(store):
    if (record := store.logon()) is not None:  # clean: logged off, broken or not
        store.logoff(record, broken=not record.session.ping())


def cancel_jobs(store, jobs):
    for job in jobs:
        record = store.logon()  # leak: the break leaves one lent
        if record is None or not record.session.cancel(job):
            break
        store.logoff(record)


def tail(store, job):
    record = store.logon()  # clean: logged off in finally
    if record is not None:
        try:
            yield from record.session.follow(job)
        finally:
            store.logoff(record)
