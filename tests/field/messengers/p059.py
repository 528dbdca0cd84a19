"""Re-entrant guards around a leased console of a simulator."""
import threading


class Consoles:
    def __init__(self, screens):
        self._spare = list(screens)

    def open_console(self):
        return self._spare.pop()

    def close_console(self, screen):
        screen.clear()
        self._spare.append(screen)


class ConsoleGuard:
    def __init__(self, consoles):
        self.consoles = consoles
        self.screen = None
        self.depth = 0

    def __enter__(self):
        if self.depth == 0:
            self.screen = self.consoles.open_console()  # clean: closed by the outermost exit
        self.depth += 1
        return self.screen

    def __exit__(self, *exc):
        self.depth -= 1
        if self.depth == 0:
            self.consoles.close_console(self.screen)
            self.screen = None


class Simulator:
    def __init__(self, consoles, world):
        self.consoles = consoles
        self.world = world
        self._guard = ConsoleGuard(consoles)
        self.mutex = threading.Lock()

    def shared(self):
        return self._guard

    def show(self, text):
        with self.shared() as screen:  # clean: exits with the block
            screen.write(text)

    def report(self):
        with self.shared() as screen:  # clean: nested entries are counted
            screen.write(f"tick {self.world.tick}")
            for body in self.world.bodies:
                self.show(repr(body))

    def debug(self, keep_open):
        screen = self.consoles.open_console()  # leak: kept open, but nobody keeps the screen
        screen.write(f"debug at {self.world.tick}")
        if keep_open:
            return len(self.world.bodies)
        self.consoles.close_console(screen)
        return 0

    def splash(self, lines):
        guard = ConsoleGuard(self.consoles)
        screen = guard.__enter__()  # clean: exited by hand
        for line in lines:
            screen.write(line)
        guard.__exit__(None, None, None)

    def width(self):
        with self.mutex:
            guard = ConsoleGuard(self.consoles)
            return guard.__enter__().columns  # leak: entered for the width, never exited
