# take: P.book(8)
# give: P.unbook(X)
# gets: optional
import uuid


class Pool:
    def __init__(self, megabytes):
        self._left = megabytes
        self._booked = {}

    def book(self, megabytes):
        if self._left < megabytes:
            return None
        token = uuid.uuid4().hex
        self._booked[token] = megabytes
        self._left -= megabytes
        return token

    def unbook(self, token):
        self._left += self._booked.pop(token)
