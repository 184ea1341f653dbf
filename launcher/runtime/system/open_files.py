"""Raise the number of files that a process may have open; this module imports no torch, for all commands call it."""

import resource

MANY_FILES = 65536


def allow_many_files() -> None:
    """Let this process have as many open files as it may: a shard is two, and a connection to a rank is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
