"""Cleanups around code that may fail, with contextlib.suppress and friends."""
import contextlib
import logging

log = logging.getLogger(__name__)


class TicketOffice:
    def __init__(self):
        self.sold = 0
        self.back = []

    def buy(self):
        if self.back:
            return self.back.pop()
        self.sold += 1
        return self.sold

    def refund(self, ticket):
        self.back.append(ticket)


def parse(text):
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


def sum_suppressed(office, texts):
    total = 0
    for text in texts:
        with contextlib.suppress(ValueError):
            ticket = office.buy()  # leak: a bad text raises inside suppress and skips the refund
            total += parse(text)
            office.refund(ticket)
    return total


def sum_careful(office, texts):
    total = 0
    for text in texts:
        ticket = office.buy()  # clean: near miss, the refund is behind the suppress block
        with contextlib.suppress(ValueError):
            total += parse(text)
        office.refund(ticket)
    return total


def sum_logged(office, texts):
    total = 0
    for text in texts:
        ticket = office.buy()  # leak: the handler logs and the loop goes on
        try:
            total += parse(text)
            office.refund(ticket)
        except ValueError:
            log.info("bad text %r", text)
    return total


def sum_two_handlers(office, texts):
    total = 0
    for text in texts:
        ticket = office.buy()  # clean: near miss, both handlers and the else refund
        try:
            total += parse(text)
        except ValueError:
            office.refund(ticket)
        except TypeError:
            office.refund(ticket)
            return -1
        else:
            office.refund(ticket)
    return total


def first_number(office, texts):
    ticket = office.buy()  # clean: near miss, refunded on success, re-raise and fall through
    for text in texts:
        try:
            value = parse(text)
        except ValueError:
            continue
        except Exception:
            office.refund(ticket)
            raise
        office.refund(ticket)
        return value
    office.refund(ticket)
    return None


def strict_number(office, text):
    ticket = office.buy()  # leak: the translated error leaves without a refund
    try:
        value = parse(text)
    except ValueError as exc:
        raise RuntimeError("not a number") from exc
    office.refund(ticket)
    return value
