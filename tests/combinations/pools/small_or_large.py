# take: P.take_for(n)
# give: P.shut(X)
class Cells:
    def __init__(self, count):
        self._vacant = [object() for _ in range(count)]

    def lend(self):
        if not self._vacant:
            raise RuntimeError("no cell")
        return self._vacant.pop()

    def settle(self, cell):
        self._vacant.append(cell)


class Pool:
    """Takes by whichever of two methods fits."""

    def __init__(self, cells: Cells):
        self.cells = cells
        self.large = 0

    def _small(self):
        return self.cells.lend()

    def _large(self):
        cell = self.cells.lend()
        self.large += 1
        return cell

    def take_for(self, size):
        take = self._large if size > 64 else self._small
        return take()

    def shut(self, cell):
        self.cells.settle(cell)
