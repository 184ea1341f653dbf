"""Name every exit code of a run; docs/runs.md explains them."""

COMPLETE = 0
UNUSABLE = 2  # any command: the request cannot be met as it is
BROKEN = 3  # the gradient, the loss or the weights are not finite
ELSEWHERE = 4  # sweep.py: all finished, except for runs that other processes are training
REQUEUE = 85  # stopped on request, checkpoint written: restart
HUNG = 86  # nothing moved for train.hang_minutes
CORRUPT = 87  # a node computed wrong numbers, or has a broken GPU: restart without it
UNSAVED = 88  # something essential could not be written, perhaps only for a while: restart
UNREACHED = 89  # a run that has trained, or a job, could not reach data, a disk, ...: restart
INTERRUPTED = 130  # any command: Ctrl-C, as in shells
UNREAD = 141  # any command: the reader of the output has gone, as in shells
CRASHED = 1  # any command, by Python itself: a bug, with its traceback; or another rank has ended

STATES = {COMPLETE: "complete", BROKEN: "diverged", REQUEUE: "stopped", HUNG: "hung"}
"""State of a run that ended with a code; after any other code it is "failed"."""
