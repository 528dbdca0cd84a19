# HOLD: self._refs[X] += 1
# DROP: self._refs[X] -= 1
class Refs:
    def __init__(self, count):
        self._refs = [0] * count

    def incref(self, block):
        self._refs[block] += 1

    def decref(self, block):
        self._refs[block] -= 1
