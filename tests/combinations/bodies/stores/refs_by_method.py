# HOLD: self.retain(X)
# DROP: self.release(X)
class Blocks:
    def __init__(self, count):
        self._refs = {}
        self._free = list(range(count))

    def allocate(self):
        if not self._free:
            return None
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def retain(self, block):
        self._refs[block] += 1

    def release(self, block):
        self._refs[block] -= 1
        if self._refs[block] == 0:
            del self._refs[block]
            self._free.append(block)
