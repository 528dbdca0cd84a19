class Pty:
    def __init__(self, number):
        self.number = number
        self.lines = []
        self.size = (80, 24)


class PtyPool:
    def __init__(self, count):
        self._ptys = [Pty(n) for n in range(count)]

    def open_pty(self, cols, rows):
        pty = self._ptys.pop()
        pty.size = (cols, rows)
        return pty

    def close_pty(self, pty):
        pty.lines = []
        self._ptys.append(pty)


class Pane:
    def __init__(self, pty, title):
        self.pty = pty
        self.title = title
        self.left = None
        self.right = None


class Window:
    """A binary tree of panes."""

    def __init__(self, pool, cols, rows):
        self.pool = pool
        self.cols, self.rows = cols, rows
        self.root = Pane(pool.open_pty(cols, rows), "shell")  # clean: close walks the tree from the root
        self.popup = None

    def split(self, pane, title):
        if pane.left is None:
            pty = self.pool.open_pty(self.cols // 2, self.rows)  # leak: zoom unhooks the subtree
            pane.left = Pane(pty, title)
            return pane.left
        if pane.right is None:
            pty = self.pool.open_pty(self.cols // 2, self.rows)  # leak: zoom unhooks the subtree
            pane.right = Pane(pty, title)
            return pane.right
        return self.split(pane.left, title)

    def zoom(self, pane):
        hidden = [p.title for p in (pane.left, pane.right) if p is not None]
        pane.left = pane.right = None
        return hidden

    def show_popup(self, title):
        if self.popup is not None:
            self.pool.close_pty(self.popup.pty)
        self.popup = Pane(self.pool.open_pty(40, 10), title)  # clean: old one closed first

    def _close(self, pane):
        if pane is None:
            return 0
        count = self._close(pane.left) + self._close(pane.right) + 1
        self.pool.close_pty(pane.pty)
        return count

    def close(self):
        count = self._close(self.root) + self._close(self.popup)
        self.root = self.popup = None
        return count


def run_command(pool, command, execute):
    pty = pool.open_pty(80, 24)  # clean: closed below
    status = execute(pty.number, command)
    output = list(pty.lines)
    pool.close_pty(pty)
    return status, output
