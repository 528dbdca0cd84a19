"""What the last step of a path says, by how the lease was lost."""

from auditor.flow.lease import Loss

LAST_WORDS = {
    Loss.RETURN: "returns here, still holding it",
    Loss.FALL_THROUGH: "the function ends, still holding it",
    Loss.NEXT_TURN: "acquired again here while the last one is still held",
    Loss.RAISE: "leaves by this exception, still holding it",
    Loss.CALL: "leaves by this exception, still holding it",
    Loss.CANCEL: "leaves by cancellation, still holding it",
    Loss.CLOSE: "leaves by GeneratorExit, still holding it",
    Loss.DISCARDED: "nothing keeps the result",
    Loss.REBOUND: "its only name is bound to something else here",
    Loss.DELETED: "its only name is deleted here",
    Loss.OVERWRITTEN: "its only place is overwritten here",
    Loss.DROPPED: "its container's entries are dropped here",
}
