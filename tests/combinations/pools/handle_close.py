# take: P.open_window()
# give: X.close()
# gets: optional
class Window:
    def __init__(self, owner, number):
        self._owner = owner
        self.number = number
        self._closed = False

    def close(self):
        if self._closed:
            return
        self._closed = True
        self._owner._closed(self)


class Pool:
    def __init__(self, count):
        self._numbers = list(range(count))
        self._windows = {}

    def open_window(self):
        if not self._numbers:
            return None
        window = Window(self, self._numbers.pop())
        self._windows[window.number] = window
        return window

    def _closed(self, window):
        del self._windows[window.number]
        self._numbers.append(window.number)
