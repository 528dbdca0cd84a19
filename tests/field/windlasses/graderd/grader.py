import logging

from .pools import NoJail
from .scope import GradeScope, Ticket, equip, strip

log = logging.getLogger("graderd")


class Grader:
    def __init__(self, jails, licences):
        self.jails = jails
        self.licences = licences
        self.table = {}

    def grade(self, ticket: Ticket):
        try:
            equip(self.jails, self.licences, ticket)  # clean: finally strips what equip() left on the ticket
        except NoJail:
            return None
        try:
            return ticket.jail.run(ticket.source, ticket.tests)
        finally:
            strip(self.jails, self.licences, ticket)

    def grade_scoped(self, ticket: Ticket):
        with GradeScope(self.jails, self.licences, ticket) as t:  # clean: __exit__ strips the ticket
            return t.jail.run(t.source, t.tests)

    def smoke(self, source):
        jail = self.jails.confine_clean()  # leak: an empty source returns with the jail confined
        if jail is None:
            return False
        if not source.strip():
            return False
        ok = jail.run(source, [])["failed"] == 0
        self.jails.parole(jail)
        return ok

    def grade_licensed(self, ticket: Ticket):
        """One-off run without touching the ticket."""
        if not self.licences.sign_out(ticket.product):  # leak: not signed in when no clean jail is there
            return None
        jail = self.jails.confine_clean()  # clean: paroled after the run
        if jail is None:
            log.info("no jail for %s", ticket.key)
            return None
        result = jail.run(ticket.source, ticket.tests)
        self.jails.parole(jail)
        self.licences.sign_in(ticket.product)
        return result

    # -- two-step grading through the HTTP front end ---------------------------

    def prepare(self, ticket: Ticket):
        if ticket.key in self.table:
            return False
        try:
            equip(self.jails, self.licences, ticket)  # leak: expire() takes tickets out of the table without strip
        except NoJail:
            return False
        self.table[ticket.key] = ticket
        return True

    def execute(self, key):
        ticket = self.table.pop(key, None)
        if ticket is None:
            return None
        try:
            return ticket.jail.run(ticket.source, ticket.tests)
        finally:
            strip(self.jails, self.licences, ticket)

    def expire(self, keys):
        for key in keys:
            ticket = self.table.pop(key, None)
            if ticket is not None:
                log.info("ticket %s expired", ticket.key)
