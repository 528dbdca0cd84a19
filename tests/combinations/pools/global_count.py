# take: enter_section()
# give: leave_section()
# gets: answer
# type: object
_LIMIT = 8
_inside = 0
_guard = threading.Lock()


def enter_section():
    global _inside
    with _guard:
        if _inside >= _LIMIT:
            return False
        _inside += 1
        return True


def leave_section():
    global _inside
    with _guard:
        _inside -= 1
