from collections import defaultdict
import logging

log = logging.getLogger("spooler")


class TrayPool:
    def __init__(self, trays):
        self._open = set(trays)
        self._busy = set()

    def seize(self):
        tray = self._open.pop()
        self._busy.add(tray)
        return tray

    def vacate(self, tray):
        self._busy.discard(tray)
        self._open.add(tray)

    def spare(self):
        return len(self._open)


class Spooler:
    def __init__(self, trays):
        self.trays = trays
        self.jobs = defaultdict(list)
        self.duplex = {}
        self.pages = 0

    def add_page(self, job, page):
        tray = self.trays.seize()  # leak: printed vacates only the last tray of the job
        self.jobs[job].append(tray)
        self.pages += 1
        log.debug("page %s of %s on %s", page, job, tray)

    def printed(self, job):
        held = self.jobs.pop(job, [])
        if held:
            self.trays.vacate(held[-1])
        return len(held)

    def start_duplex(self, job):
        if job in self.duplex:
            return
        front = self.trays.seize()  # clean: end_duplex vacates both
        back = self.trays.seize()  # clean: end_duplex vacates both
        self.duplex[job] = {"front": front, "back": back, "sheets": 0}

    def turn(self, job):
        entry = self.duplex[job]
        entry["front"], entry["back"] = entry["back"], entry["front"]
        entry["sheets"] += 1

    def end_duplex(self, job):
        entry = self.duplex.pop(job, None)
        if entry is None:
            return 0
        for side in ("front", "back"):
            self.trays.vacate(entry[side])
        return entry["sheets"]


class BannerPrinter:
    def __init__(self, trays):
        self.trays = trays
        self.tray = None
        self.lines = []

    def begin(self, title):
        self.tray = self.trays.seize()  # leak: finish returns before vacate when there are no lines
        self.lines = [title] if title else []

    def finish(self):
        tray, self.tray = self.tray, None
        if not self.lines:
            return ""
        text = "\n".join(self.lines)
        self.lines = []
        self.trays.vacate(tray)
        return text

    def test_page(self):
        tray = self.trays.seize()  # clean: vacated below
        log.info("test page on %s, %d spare", tray, self.trays.spare())
        self.trays.vacate(tray)
