"""Asks a plan in a child process that the test may kill. Run by `test_kill.py`.

python asking.py SPEC, then lines on standard input: FOLDER LOG MILLISECONDS. Each line forks a child that
audits into FOLDER, appends every row that it asks to LOG and waits so long before each question. Prints
the child's process id, then, when it has ended, its wait status.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from pathlib import Path

from isophase.audit import run
from isophase.audit.plan import make_plan
from isophase.audit.settings import AuditSettings
from isophase.targets import open_target


class Logged:
    """A target that writes down what it is asked."""

    def __init__(self, target, log, seconds):
        self._target, self._seconds = target, seconds
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __getattr__(self, name):
        return getattr(self._target, name)

    def answer(self, prompts):
        for prompt in prompts:
            os.write(self._log, f"{prompt.item * 8 + prompt.column}\n".encode())
            time.sleep(self._seconds)
        return self._target.answer(prompts)


def main():
    spec = sys.argv[1]
    opener = cache(open_target)
    settings = AuditSettings(targets=(spec,), control="none", items=20, window_tokens=8, records=4, length_tokens=96)
    plan = make_plan(settings, opener, pilot=False)
    if spec.startswith("hf:"):
        import torch

        torch.set_num_threads(1)  # threads do not survive a fork
        assert opener(spec).model  # load once, so that kills fall into the asking
    # Children are killed long before a second is over; they must get somewhere.
    run._FLUSH_SECONDS = 0.05
    for line in sys.stdin:
        folder, log, milliseconds = line.split()
        child = os.fork()
        if not child:
            logged = Logged(opener(spec), log, float(milliseconds) / 1000)
            run.run_plan(plan, Path(folder), lambda _, logged=logged: logged)
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
