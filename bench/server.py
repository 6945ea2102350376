"""What the client of a server audit costs: throughput as a share of the ideal, against a server that only waits.

    python bench/server.py
    python bench/server.py --requests 4000 --in-flight 32 --delay 0.05 --rounds 5

The server is a process of its own and answers every request `--delay` seconds after it came; with N in flight the
ideal is N / delay requests a second. One request in twenty is a repeat for the flip rate. Printed are the share of the
ideal for every round, their median and range, and the processor time of the client for a request.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
import stamina

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from fake_server import TOKENIZER, write_tokenizer

from isophase.probes import ProbeSettings, build_probe
from isophase.probes.prompt import Prompt
from isophase.targets.server import ServerTarget


def ask(target: ServerTarget, prompts: list[Prompt]) -> tuple[int, float, float]:
    """Requests, seconds, and seconds of this process's own time."""
    began, worked = time.perf_counter(), time.process_time()
    answers = [answer for _, answer in target.stream(prompts)]
    seconds, work = time.perf_counter() - began, time.process_time() - worked
    assert all(answer.status == "ok" for answer in answers)
    return len(answers) + sum(answer.repeat_agrees is not None for answer in answers), seconds, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="prompts per round")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that the server waits")
    parser.add_argument("--length", type=int, default=160, help="tokens per prompt")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(
        f"python {platform.python_version()}, httpx2 {httpx2.__version__}, "
        f"stamina {stamina.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{given.requests:,} prompts of {given.length} tokens a round, {given.in_flight} in flight, "
        f"{1000 * given.delay:g} ms each"
    )
    settings = {"kind": "vllm", "delay": given.delay, "log": False}
    script = Path(__file__).resolve().parent.parent / "tests" / "support" / "fake_server.py"
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, script, json.dumps(settings)], stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1#planted"
            words = write_tokenizer(Path(folder) / "words")
            target = ServerTarget(url, tokenizer=str(words), concurrency=given.in_flight)
            probe = build_probe(
                ProbeSettings(
                    probe="records",
                    items=-(-given.requests // 24),
                    records=6,
                    length_tokens=given.length,
                    window_tokens=24,
                    seed=0,
                ),
                TOKENIZER,
            )
            # Built before: what a prompt costs to make is not what a request costs.
            prompts = [probe.prompt(row) for row in range(given.requests)]
            ask(target, prompts[: 4 * given.in_flight])  # connections, caches
            shares, costs = [], []
            for _ in range(given.rounds):
                requests, seconds, work = ask(target, prompts)
                shares.append(requests * given.delay / given.in_flight / seconds)
                costs.append(1000 * work / requests)
                print(f"{requests / seconds:,.0f} requests/s, {shares[-1]:.1%} of the ideal", flush=True)
            print(
                f"share of the ideal: median {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}); "
                f"client: {statistics.median(costs):.2f} ms of one core for a request"
            )
        finally:
            server.kill()


if __name__ == "__main__":
    main()
