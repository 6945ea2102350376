"""Errors that users see as one line: what is wrong, the value, the limit, the remedy."""

from __future__ import annotations

EXIT_NONE = 0
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_SENSITIVE = 10
EXIT_INCONCLUSIVE = 11
EXIT_INTERRUPTED = 130


class IsophaseError(Exception):
    """A fault that the user can mend. The command line prints it as one line, without a traceback.

    Args:
        problem: what is wrong, with the offending value and the limit.
        remedy: what to do about it; may be empty.
    """

    exit_code = EXIT_USAGE

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem
        self.remedy = remedy
