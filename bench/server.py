"""What the client of a server audit costs: its throughput as a share of the ideal, against a server that only waits.

    python bench/server.py
    python bench/server.py --requests 4000 --in-flight 32 --delay 0.05 --rounds 5

The server is a process of its own; it speaks as vLLM does, echoes the ids it was sent, and answers `--delay` seconds
after a request came. With N in flight the ideal is N / delay requests a second. One request in twenty is a repeat for
the flip rate. Printed are the share of the ideal for every round, their median and range, and the processor time of the
client for a request. Where other programs compete for the processor, real-time priority keeps them out:

    chrt --fifo 50 python bench/server.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2
import stamina

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from fake_server import TOKENIZER, write_tokenizer

from isophase.probes import ProbeSettings, build_probe
from isophase.probes.prompt import Prompt
from isophase.targets.server.target import ServerTarget

MODELS = json.dumps({"data": [{"id": "waiting", "owned_by": "vllm", "max_model_len": 4096}]}).encode()
ANSWER = 7
CHOICE = {
    "text": "x",
    "finish_reason": "length",
    "token_ids": [ANSWER],
    "logprobs": {
        "tokens": [f"token_id:{ANSWER}"],
        "top_logprobs": [{f"token_id:{n}": -float(n) for n in range(1, 21)}],
    },
}


class Waiting(asyncio.Protocol):
    """One connection. Requests come one after another; bodies are not parsed, only the ids are copied."""

    delay = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport, self._read = transport, b""

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or 0):
            return
        self._read = b""
        if head.startswith(b"POST /v1/completions"):
            ids = body.partition(b'"prompt":')[2].partition(b"]")[0] + b"]"
            reply = b'{"choices":[%s,"prompt_token_ids":%s}]}' % (json.dumps(CHOICE)[:-1].encode(), ids)
            asyncio.get_running_loop().call_later(self.delay, self._send, b"200 OK", reply)
        elif head.startswith(b"GET /v1/models"):
            self._send(b"200 OK", MODELS)
        else:
            self._send(b"404 Not Found", b"{}")

    def _send(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)


def serve(delay: float, pipe: Connection) -> None:
    async def run() -> None:
        Waiting.delay = delay
        server = await asyncio.get_running_loop().create_server(Waiting, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


def ask(target: ServerTarget, prompts: list[Prompt]) -> tuple[int, float, float]:
    """Requests, seconds, and seconds of this process's own time."""
    began, worked = time.perf_counter(), time.process_time()
    answers = [answer for _, answer in target.stream(prompts)]
    seconds, work = time.perf_counter() - began, time.process_time() - worked
    assert all(answer.correct for answer in answers), answers[0]
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
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(given.delay, theirs))
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}/v1#waiting"
    try:
        with tempfile.TemporaryDirectory() as folder:
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
            # Built before: what a prompt costs to make is not what a request costs. The server answers all alike.
            prompts = [replace(probe.prompt(row), answer_ids=(ANSWER,)) for row in range(given.requests)]
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
        ours.send("end")
        server.join()


if __name__ == "__main__":
    main()
