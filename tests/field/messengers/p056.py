"""Retries around a vendor API whose sessions come from a small pool."""
import functools
import time


class VendorBusy(Exception):
    pass


class SessionPool:
    def __init__(self, sessions):
        self._resting = list(sessions)

    def borrow_session(self):
        return self._resting.pop()

    def rest(self, session):
        self._resting.append(session)


def retrying(times):
    def decorate(fn):
        @functools.wraps(fn)
        def inner(*args):
            for attempt in range(times):
                try:
                    return fn(*args)  # clean: handed to the caller
                except VendorBusy:
                    time.sleep(0.1 * attempt)
            return None
        return inner
    return decorate


class Vendor:
    def __init__(self, sessions):
        self.sessions = sessions
        self.failed = 0

    @retrying(3)
    def opened(self):
        if self.load() > 0.9:
            raise VendorBusy()
        return self.sessions.borrow_session()  # clean: handed to the caller

    def load(self):
        return self.failed / 100

    def price(self, sku):
        session = self.opened()  # clean: rested in finally
        if session is None:
            return None
        try:
            return session.get(f"/price/{sku}")
        finally:
            self.sessions.rest(session)

    def stock(self, sku):
        for _ in range(3):
            session = self.opened()  # leak: a busy answer borrows again
            if session is None:
                continue
            try:
                amount = session.get(f"/stock/{sku}")
            except VendorBusy:
                self.failed += 1
                continue
            self.sessions.rest(session)
            return amount
        return None

    def order(self, sku, amount):
        for _ in range(3):
            session = self.opened()  # clean: rested before the answer is judged
            if session is None:
                continue
            reply = session.post("/order", {"sku": sku, "amount": amount})
            self.sessions.rest(session)
            if reply.get("state") != "busy":
                return reply
        return None

    def refresh(self):
        self.opened()  # leak: the session is dropped
        return self.failed
