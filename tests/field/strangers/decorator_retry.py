"""Retrying around RPC channels: decorators, loops with attempts, final cleanup."""
import functools
import time


class Channel:
    def __init__(self, number):
        self.number = number
        self.dead = False

    def ask(self, text):
        if self.dead:
            raise ConnectionResetError(self.number)
        return text.upper()


class Channels:
    def __init__(self):
        self.made = 0
        self.rest = []

    def dial(self):
        if self.rest:
            return self.rest.pop()
        self.made += 1
        return Channel(self.made)

    def hang_up(self, channel):
        self.rest.append(channel)


def retrying(times):
    def wrap(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            for attempt in range(times):
                try:
                    return fn(*args, **kwargs)
                except ConnectionResetError:
                    time.sleep(0.01 * attempt)
            return None

        return inner

    return wrap


@retrying(3)
def ask_once(channels, text):
    channel = channels.dial()  # leak: the reset is raised past hang_up and swallowed by the decorator's retry
    answer = channel.ask(text)
    channels.hang_up(channel)
    return answer


@retrying(3)
def ask_once_safely(channels, text):
    channel = channels.dial()  # clean: near miss, every try hangs up in finally
    try:
        return channel.ask(text)
    finally:
        channels.hang_up(channel)


def ask_until(channels, text, deadline):
    channel = None
    try:
        while time.monotonic() < deadline:
            if channel is None:
                channel = channels.dial()  # clean: near miss, hung up in the handler or in finally, never both
            try:
                return channel.ask(text)
            except ConnectionResetError:
                channels.hang_up(channel)
                channel = None
        return None
    finally:
        if channel is not None:
            channels.hang_up(channel)


def ask_until_quick(channels, text, deadline):
    channel = None
    while time.monotonic() < deadline:
        if channel is None:
            channel = channels.dial()  # leak: the handler sets the name to None without hanging up
        try:
            answer = channel.ask(text)
        except ConnectionResetError:
            channel = None
            continue
        channels.hang_up(channel)
        return answer
    return None


def ask_with_spare(channels, text):
    main = channels.dial()  # clean: near miss, hung up in both arms of the outer try
    try:
        answer = main.ask(text)
    except ConnectionResetError:
        spare = channels.dial()  # clean: near miss, dialled inside the handler, hung up in its own finally
        try:
            answer = spare.ask(text)
        finally:
            channels.hang_up(spare)
            channels.hang_up(main)
        return answer
    channels.hang_up(main)
    return answer


def ask_with_bad_spare(channels, text):
    main = channels.dial()  # leak: on a reset the name moves to the spare and the first is lost
    try:
        return main.ask(text)
    except ConnectionResetError:
        main = channels.dial()  # clean: hung up in finally
        return main.ask(text)
    finally:
        channels.hang_up(main)
