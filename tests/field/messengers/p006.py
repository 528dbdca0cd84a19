"""Tray assignment of a departmental print server."""
import itertools


class TrayRack:
    def __init__(self, trays):
        self._open = sorted(trays)
        self._assigned = {}

    def assign(self, job_id):
        if not self._open:
            return None
        tray = self._open.pop(0)
        self._assigned[tray] = job_id
        return tray

    def vacate(self, tray):
        self._assigned.pop(tray, None)
        self._open.append(tray)
        self._open.sort()


class PrintServer:
    def __init__(self, rack, spooler):
        self.rack = rack
        self.spooler = spooler
        self.serial = itertools.count(1)
        self.log = []

    def ticket(self, document):
        job = next(self.serial)
        tray = self.rack.assign(job)  # clean: handed on inside the ticket
        return {"job": job, "tray": tray, "pages": len(document), "copies": 1}

    def print_one(self, document):
        ticket = self.ticket(document)  # clean: the tray of the ticket is vacated
        if ticket["tray"] is None:
            return 0
        self.spooler.run(ticket["tray"], document)
        self.rack.vacate(ticket["tray"])
        return ticket["pages"]

    def print_many(self, documents):
        tickets = []
        for document in documents:
            ticket = self.ticket(document)  # clean: all are vacated in the second loop
            if ticket["tray"] is None:
                break
            tickets.append(ticket)
        for ticket, document in zip(tickets, documents):
            self.spooler.run(ticket["tray"], document)
            self.rack.vacate(ticket["tray"])
        return len(tickets)

    def estimate(self, document):
        ticket = self.ticket(document)  # leak: only pages and copies are read
        seconds = ticket["pages"] * ticket["copies"] * 2.5
        self.log.append(("estimate", ticket["job"], seconds))
        return seconds

    def reprint(self, document, copies):
        ticket = dict(self.ticket(document), copies=copies)  # leak: zero copies return before vacate
        if ticket["tray"] is None:
            return False
        if copies < 1:
            self.log.append(("nothing to do", ticket["job"]))
            return False
        for _ in range(copies):
            self.spooler.run(ticket["tray"], document)
        self.rack.vacate(ticket["tray"])
        return True

    def test_page(self):
        tray = self.rack.assign("self-test")  # clean: vacated unless there was none
        if tray is not None:
            self.spooler.run(tray, ["#" * 60])
            self.rack.vacate(tray)
