"""Reading one range of one stored tensor. What is returned is of the bank and the caller's."""


def read_piece(bank, reader, piece):
    part = bank.lease(piece.stop - piece.start, reader.dtype(piece.name))  # clean: handed to the caller
    reader.read_range(piece.name, piece.start, piece.stop, part)
    return part


def read_cast(bank, reader, piece, dtype):
    raw = read_piece(bank, reader, piece)  # clean: near miss, returned itself or ended after the copy
    if raw.dtype == dtype:
        return raw
    cast = bank.lease(raw.numel(), dtype)  # clean: handed to the caller
    cast.copy_(raw)
    bank.end(raw)
    return cast


def read_scaled(bank, reader, piece, scale):
    part = read_piece(bank, reader, piece)  # clean: near miss, scaled in place, the same tensor is returned
    return part.mul_(scale)


def read_transposed(bank, reader, piece, rows):
    """A [cols, rows] tensor from a stored [rows, cols] one."""
    part = read_piece(bank, reader, piece)  # clean: near miss, ended after the transposed copy was made
    cols = part.numel() // rows
    turned = bank.lease(part.numel(), part.dtype)  # clean: leaves in its new shape, the caller ends view(-1)
    turned.view(cols, rows).copy_(part.view(rows, cols).t())
    bank.end(part)
    return turned.view(cols, rows)
