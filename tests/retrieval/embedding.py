"""Embeds files in a child process that the test may kill. Run by `test_index.py`.

python embedding.py MODEL, then lines on standard input: FOLDER DOCS MILLISECONDS. Each line forks a child that embeds
the files of DOCS into FOLDER, and waits so long behind each group of two documents. Prints the child's process id and,
when it has loaded everything, `ready`; then, when it has ended, its wait status. LanceDB has threads, which do not
survive a fork, so only children load it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from isophase.retrieval import Encoder, LateChunker
from isophase.retrieval.index.documents import list_files
from isophase.retrieval.late import chunker as late
from isophase.retrieval.late.rules import parse_rule


def main() -> None:
    torch.set_num_threads(1)
    encoder = Encoder(sys.argv[1])
    late._GROUP_DOCUMENTS = 2
    for line in sys.stdin:
        folder, docs, milliseconds = line.split()
        child = os.fork()
        if not child:
            from isophase.retrieval.index.tables import build_index

            print(os.getpid(), flush=True)
            chunker = LateChunker(encoder, rule=parse_rule("fixed(8)"), offsets=2)
            build_index(
                Path(folder), chunker, "fixed(8)", list_files([Path(docs)]),
                lambda done, total, wait=float(milliseconds): time.sleep(wait / 1000),
            )  # fmt: skip
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
