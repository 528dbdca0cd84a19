# take: P.allocate(4)
# give: P.give_back(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self.free_ids = list(range(count))

    def allocate(self, n):
        if n > len(self.free_ids):
            return None
        ids, self.free_ids = self.free_ids[:n], self.free_ids[n:]
        return ids

    def give_back(self, ids):
        self.free_ids += ids
