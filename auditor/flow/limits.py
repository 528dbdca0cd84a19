"""When a lease is given up on."""


class TooManyStates(Exception):
    """There are too many ways to hold the lease at one place; widening would have to guess."""
