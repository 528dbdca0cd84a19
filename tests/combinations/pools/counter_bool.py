# take: P.try_take()
# give: P.put_back()
# gets: answer
class Pool:
    def __init__(self, tickets):
        self._tickets = tickets

    def try_take(self):
        if self._tickets == 0:
            return False
        self._tickets -= 1
        return True

    def put_back(self):
        self._tickets += 1
