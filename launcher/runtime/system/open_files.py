"""Raise the limit on open files of this process; this module does not import torch, because all commands call it."""

import resource

MANY_FILES = 65536


def allow_many_files() -> None:
    """Raise the limit on open files to the maximum: each shard needs two files, each connection to a rank needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
