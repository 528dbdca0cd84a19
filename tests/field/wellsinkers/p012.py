"""Permits for heavy queries, counted under a condition."""
import threading
import time


class PermitDesk:
    def __init__(self, permits):
        self._left = permits
        self._cv = threading.Condition()
        self.waiting = 0

    def enter(self, patience):
        deadline = time.monotonic() + patience
        with self._cv:
            self.waiting += 1
            try:
                while self._left == 0:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not self._cv.wait(remaining):
                        return False
                self._left -= 1
                return True
            finally:
                self.waiting -= 1

    def leave(self):
        with self._cv:
            self._left += 1
            self._cv.notify()


class ReportService:
    def __init__(self, desk, warehouse):
        self.desk = desk
        self.warehouse = warehouse

    def monthly(self, month):
        if not self.desk.enter(30.0):  # clean: left in finally
            return None
        try:
            return self.warehouse.query("monthly", month)
        finally:
            self.desk.leave()

    def daily(self, day):
        if not self.desk.enter(5.0):  # leak: a cached answer returns without leaving
            return None
        cached = self.warehouse.cached("daily", day)
        if cached is not None:
            return cached
        rows = self.warehouse.query("daily", day)
        self.desk.leave()
        return rows

    def refresh(self, names):
        for name in names:
            if self.desk.enter(1.0):  # clean: left after each query
                self.warehouse.query("refresh", name)
                self.desk.leave()


def export(desk, warehouse, sink):
    if desk.enter(60.0):  # leak: left only when there are rows
        rows = warehouse.query("export", None)
        if rows:
            sink.write_all(rows)
            desk.leave()
