"""Exit codes of `python -m infra` and of the Pulumi program."""

from __future__ import annotations

SUCCESS = 0
#: The operation failed; running it again may help.
FAILURE = 1
#: The input is invalid: fix it before running the command again.
USER_ERROR = 2
#: 128 + SIGINT, as shells report it.
INTERRUPTED = 130

#: `doctor` found a problem.
PROBLEM_FOUND = 1
#: `orphans` found a resource that is in no state.
ORPHANS_FOUND = 1
#: `doctor` found no problem, or `orphans` no orphan, but a check could not run.
CHECK_FAILED = 2

#: Pulumi's code for a program that has already printed its error: the engine adds nothing.
ERROR_ALREADY_SHOWN = 32
