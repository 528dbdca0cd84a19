"""Concurrency limits with locks and semaphores from the standard library."""
import threading


class Limiter:
    def __init__(self, n):
        self.sem = threading.Semaphore(n)
        self.lock = threading.Lock()
        self.counts = {}

    def submit(self, key, fn):
        if not self.sem.acquire(blocking=False):  # clean: near miss, only a successful try goes on and finally releases
            return None
        try:
            return fn(key)
        finally:
            self.sem.release()

    def submit_counted(self, key, fn):
        if not self.sem.acquire(timeout=1.0):  # leak: too many of one key returns with the permit
            return None
        with self.lock:
            if self.counts.get(key, 0) > 4:
                return None
            self.counts[key] = self.counts.get(key, 0) + 1
        try:
            return fn(key)
        finally:
            self.sem.release()

    def bump(self, key):
        self.lock.acquire()  # clean: near miss, released on both branches
        if key not in self.counts:
            self.lock.release()
            return 0
        self.counts[key] += 1
        value = self.counts[key]
        self.lock.release()
        return value

    def reset(self, key):
        self.lock.acquire()  # leak: an unknown key returns with the lock held
        if key not in self.counts:
            return False
        del self.counts[key]
        self.lock.release()
        return True

    def submit_thread(self, key, fn):
        self.sem.acquire()  # clean: near miss, the started thread releases

        def work():
            try:
                fn(key)
            finally:
                self.sem.release()

        threading.Thread(target=work, daemon=True).start()
