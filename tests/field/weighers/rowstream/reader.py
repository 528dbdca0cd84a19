"""Readers over a source with `read_rows(out) -> int`, which gives 0 at the end."""


def iter_rows(buffers, source, stop_token):
    """Yield one row after another (copies) until the source ends or a row starts with stop_token."""
    buf = buffers.draw()  # leak: a row with the stop token returns with the buffer out
    seen = 0
    try_more = True
    while try_more:
        count = source.read_rows(buf)
        try_more = count == buffers.rows
        for row in buf[:count]:
            if row[0] == stop_token:
                source.mark(seen)
                return
            seen += 1
            yield row.copy()
    source.mark(seen)
    buffers.stow(buf)


def iter_columns(buffers, source, columns):
    """Yield tuples of column values; one buffer for the whole run."""
    buf = buffers.draw()  # clean: near miss, the finally runs when the generator ends or is closed
    try:
        while count := source.read_rows(buf):
            block = buf[:count]
            for row in block[:, columns]:
                if (row < 0).all():
                    return
                yield tuple(row.tolist())
            if count < buffers.rows:
                break
    finally:
        buffers.stow(buf)


def iter_blocks(buffers, source):
    """Yield (buffer, rows used). Each buffer belongs to the consumer, who stows it."""
    while True:
        buf = buffers.draw()  # clean: near miss, stowed here when empty, the consumer's otherwise
        count = source.read_rows(buf)
        if count == 0:
            buffers.stow(buf)
            return
        yield buf, count


def load_block(buffers, source, at):
    """The block at a position, in a buffer of the caller's, or None past the end."""
    source.seek(at)
    buf = buffers.draw()  # clean: near miss, returned or stowed
    count = source.read_rows(buf)
    if count < buffers.rows:
        buf[count:] = 0
    if count:
        return buf
    buffers.stow(buf)
    return None
