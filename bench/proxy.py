"""What `isophase serve` adds to a request: latency through the proxy against the same stub server asked directly.

    python bench/proxy.py
    python bench/proxy.py --requests 2000 --in-flight 64 --delay 0.5

Stub, proxy and load are a process each. Rounds ask the stub directly and through the proxy in turns, the same body,
over connections that stay open; the difference of the medians is taken per round, and its median and range are
printed. `--delay` is what the stub waits before it answers: without it, many requests in flight measure the
queue in front of the stub rather than the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import httptools
import httpx2
import starlette
import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from stub_upstream import StubUpstream

BODY = {
    "model": "echo",
    "max_tokens": 8,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The code? " * 200}],
}


def serve_stub(delay: float, pipe: Connection) -> None:
    with StubUpstream(delay) as stub:
        stub.log = False
        pipe.send(stub.url)
        pipe.recv()


def start_proxy(upstream: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "isophase.cli.main", "serve", "--upstream", upstream, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--concurrency", "4096"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    port = json.loads(process.stderr.readline())["port"]
    # The log must be read, or the proxy waits for room in the pipe.
    subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    return process, f"http://127.0.0.1:{port}/v1"


async def ask(url: str, requests: int, in_flight: int, headers: dict[str, str], delay: float) -> list[float]:
    """Milliseconds of each request. Clients start one after another: together they would queue for each other."""
    taken: list[float] = []
    rest = iter(range(requests))

    async def worker(number: int) -> None:
        await asyncio.sleep(delay * number / in_flight)
        async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
            for _ in rest:
                began = time.perf_counter()
                reply = await client.post(f"{url}/chat/completions", json=BODY, headers=headers)
                taken.append(1000 * (time.perf_counter() - began))
                assert reply.status_code == 200, reply.text

    await asyncio.gather(*map(worker, range(in_flight)))
    return taken


def resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="per round and side")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--delay", type=float, default=0.5, help="seconds; more than one in flight only")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(
        f"python {platform.python_version()}, httpx2 {httpx2.__version__}, starlette {starlette.__version__}, "
        f"uvicorn {uvicorn.__version__}, httptools {httptools.__version__}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, {len(json.dumps(BODY)):,} bytes a request, {given.rounds} rounds"
    )
    context = multiprocessing.get_context("spawn")
    for in_flight in given.in_flight:
        delay = given.delay if in_flight > 1 else 0.0
        ours, theirs = context.Pipe()
        stub = context.Process(target=serve_stub, args=(delay, theirs))
        stub.start()
        upstream = ours.recv()
        proxy, url = start_proxy(upstream)
        sides = {"off": (url, {"x-isophase-policy": "off"}), "vote over 4": (url, {"x-isophase-policy": "vote"})}
        for side, (place, headers) in sides.items():
            asyncio.run(ask(place, 2 * in_flight, in_flight, headers, delay))  # connections, caches
            added, direct = [], []
            before = resident_mib(proxy.pid)
            for _ in range(given.rounds):
                direct.append(statistics.median(asyncio.run(ask(upstream, given.requests, in_flight, {}, delay))))
                through = statistics.median(asyncio.run(ask(place, given.requests, in_flight, headers, delay)))
                added.append(through - direct[-1])
            print(
                f"{in_flight} in flight, stub waits {1000 * delay:g} ms, policy {side}: "
                f"direct {statistics.median(direct):.1f} ms, added {statistics.median(added):.2f} ms "
                f"({min(added):.2f} to {max(added):.2f}); {given.rounds * given.requests:,} requests, "
                f"proxy {before:.0f} to {resident_mib(proxy.pid):.0f} MiB",
                flush=True,
            )
        proxy.terminate()
        proxy.wait()
        ours.send("end")
        stub.join()


if __name__ == "__main__":
    main()
