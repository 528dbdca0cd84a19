from dataclasses import dataclass, field

from .pools import Jail, JailPool, LicenceServer, NoJail


@dataclass
class Ticket:
    key: str
    source: str
    tests: list = field(default_factory=list)
    product: str = ""
    jail: Jail | None = None
    licensed: bool = False


class GradeScope:
    """Equips a ticket for the length of a with block."""

    def __init__(self, jails: JailPool, licences: LicenceServer, ticket: Ticket):
        self.jails = jails
        self.licences = licences
        self.ticket = ticket

    def __enter__(self):
        equip(self.jails, self.licences, self.ticket)  # clean: strip() in __exit__, all or nothing on failure
        return self.ticket

    def __exit__(self, et, ev, tb):
        strip(self.jails, self.licences, self.ticket)
        return et is NoJail


def equip(jails, licences, ticket):
    """Jail and licence onto the ticket; raises NoJail with neither kept."""
    if ticket.product:
        ticket.licensed = licences.sign_out(ticket.product)  # clean: near miss, signed in again when there is no jail
        if not ticket.licensed:
            raise NoJail
    try:
        ticket.jail = jails.confine()  # clean: on the ticket until strip()
    except NoJail:
        if ticket.licensed:
            licences.sign_in(ticket.product)
            ticket.licensed = False
        raise


def strip(jails, licences, ticket):
    if ticket.jail is not None:
        jails.parole(ticket.jail)
        ticket.jail = None
    if ticket.licensed:
        licences.sign_in(ticket.product)
        ticket.licensed = False
