"""Provide what a process needs from its machine: files, signals, threads, logs, exit codes."""
