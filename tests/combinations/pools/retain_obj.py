# take: P.retain(key)
# give: P.forget(key)
# gets: nothing
class Pool:
    def __init__(self):
        self.refs = {}

    def retain(self, block):
        self.refs[block] += 1

    def forget(self, block):
        self.refs[block] -= 1
