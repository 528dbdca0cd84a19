"""Savepoints over an undo log: kept open until they are dropped or undone."""


class UndoLog:
    def __init__(self, document):
        self.document = document
        self._undo = []
        self._open = set()

    def set(self, key, value):
        self._undo.append((key, self.document.get(key)))
        self.document[key] = value

    def savepoint(self):
        at = (len(self._undo), object())
        self._open.add(at)
        return at

    def undo_to(self, at):
        while len(self._undo) > at[0]:
            self.document.update([self._undo.pop()])
        self.keep(at)

    def keep(self, at):
        self._open.discard(at)
        if not self._open:
            self._undo.clear()


class Editor:
    def __init__(self, log, rules):
        self.log = log
        self.rules = rules

    def apply(self, changes):
        at = self.log.savepoint()  # clean: undone or kept
        for key, value in changes.items():
            self.log.set(key, value)
            if not self.rules.valid(self.log.document):
                self.log.undo_to(at)
                return False
        self.log.keep(at)
        return True

    def rename(self, old, new):
        at = self.log.savepoint()  # leak: a missing key returns with the savepoint open
        if old not in self.log.document:
            return False
        self.log.set(new, self.log.document[old])
        self.log.set(old, None)
        self.log.keep(at)
        return True


def preview(log, changes, render):
    at = log.savepoint()  # clean: undone in finally
    try:
        for key, value in changes.items():
            log.set(key, value)
        return render(log.document)
    finally:
        log.undo_to(at)


def touch(log, keys):
    for key in keys:
        at = log.savepoint()  # leak: kept only when the value is there
        if log.document.get(key) is not None:
            log.set(key, log.document[key])
            log.keep(at)
