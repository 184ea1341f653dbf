"""Give every exit code of a run its name; docs/runs.md says what each means."""

COMPLETE = 0
UNUSABLE = 2  # of every command: the request cannot be met as it stands
BROKEN = 3  # the gradient, the loss or the weights are not finite
REQUEUE = 85  # stopped on request, checkpoint written: start me again
HUNG = 86  # nothing moved for train.hang_minutes
CORRUPT = 87  # a node computed wrong numbers, or has a broken GPU: start me again without it
UNSAVED = 88  # what a run cannot do without could not be written, which may be otherwise in a while: start me again
UNREACHED = 89  # what a run that has trained, or a job that begins, did not reach (data, disk, ...): start me again
INTERRUPTED = 130  # of every command: Ctrl-C, as shells have it
UNREAD = 141  # of every command: who read the output wants no more of it, as shells have it
CRASHED = 1  # of every command, by Python itself: a bug, with its traceback

STATES = {COMPLETE: "complete", BROKEN: "diverged", REQUEUE: "stopped", HUNG: "hung"}
"""States of a run that ended with a code; after any other it is "failed"."""
