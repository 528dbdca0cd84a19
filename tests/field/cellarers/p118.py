"""Smallest-first session numbers for a terminal server."""
import heapq


class SessionNumbers:
    def __init__(self, limit):
        self.limit = limit
        self._returned = []
        self._next = 0

    def issue(self):
        if self._returned:
            return heapq.heappop(self._returned)
        if self._next == self.limit:
            raise OverflowError("no session numbers left")
        n = self._next
        self._next += 1
        return n

    def retire(self, n):
        heapq.heappush(self._returned, n)


class TerminalServer:
    def __init__(self, numbers, auth):
        self.numbers = numbers
        self.auth = auth
        self.users = {}

    def login(self, user, secret):
        n = self.numbers.issue()  # leak: a wrong secret returns without retiring the number
        if not self.auth.check(user, secret):
            return None
        self.users[n] = user
        return n

    def logout(self, n):
        del self.users[n]
        self.numbers.retire(n)

    def one_shot(self, command):
        n = self.numbers.issue()  # clean: retired in finally
        try:
            return command(n)
        finally:
            self.numbers.retire(n)

    def move(self, old):
        fresh = self.numbers.issue()  # clean: stored in users, retired by logout()
        self.users[fresh] = self.users.pop(old)
        self.numbers.retire(old)
        return fresh

    def batch(self, commands):
        for command in commands:
            n = self.numbers.issue()  # leak: the break keeps the number of the failed command
            if not command(n):
                break
            self.numbers.retire(n)
