"""A stub of an OpenAI-compatible server over real sockets, with a planted phase effect and faults on demand.

The `model` of a request chooses what happens: `echo` and `weak` answer, `die`, `hang`, `drip`, `garbage`, `html`,
`redirect`, `cut`, `slow-stream`, `huge` and an HTTP status of 400 or more misbehave. `weak` answers wrongly where the
number of neutral tokens before the first user text, mod 4, is 3; `weak-long` where it is anything else but 0.
`slow-stream` writes one word and waits for `released`.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading

WORDS = ["The", " code", " is", " 42", "."]


class StubUpstream:
    """Serves on a thread of its own.

    Args:
        delay: seconds before every answer.
        unit: neutral text whose repeats at the start of the user's text are counted.
    """

    def __init__(self, delay: float = 0.0, unit: str = " .") -> None:
        self.delay, self.unit = delay, unit
        self.bodies: list[dict] = []
        self.raw_bodies: list[bytes] = []
        self.headers: list[list[tuple[str, str]]] = []
        self.lines: list[str] = []
        self.log = True
        self.released = False
        self.requests = self.in_flight = self.most_in_flight = self.hung_up = 0

    def __enter__(self) -> StubUpstream:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._server.close()
            self._loop.call_later(0.02, self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join()
        self._loop.close()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024))
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in head[1:] if line)]
                length = int(dict(headers).get("content-length", 0))
                raw = await reader.readexactly(length)
                self.requests += 1
                if self.log:
                    self.lines.append(head[0])
                    self.headers.append(headers)
                    self.raw_bodies.append(raw)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                # Behind a request comes nothing until it is answered: the other side can only hang up.
                answer = asyncio.ensure_future(self._reply(writer, head[0].split(" ")[1], raw))
                end = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait((answer, end), return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        self.hung_up += 1
                        answer.cancel()
                        break
                    end.cancel()
                    await asyncio.gather(end, return_exceptions=True)
                    if not answer.result():
                        break
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, target: str, raw: bytes) -> bool:
        """Whether the connection stays open."""
        path = target.split("?")[0]
        if path.startswith("/v1/models"):
            return await send(writer, 200, {"object": "list", "data": [{"id": "echo", "object": "model"}]})
        try:
            body = json.loads(raw)
            model = str(body["model"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return await send(writer, 400, {"error": {"message": "no JSON with a model"}})
        if self.log:
            self.bodies.append(body)
        if self.delay:
            await asyncio.sleep(self.delay)
        if (kept := await misbehave(writer, model)) is not None:
            return kept
        if path == "/v1/embeddings":
            return await send(writer, 200, {"object": "list", "data": [{"embedding": [0.5], "index": 0}]})
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return await send(writer, 404, {"error": {"message": "no such path"}})
        try:
            return await self._complete(writer, path.endswith("chat/completions"), model, body)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            return await send(writer, 400, {"error": {"message": f"bad request: {error}"}})

    async def _complete(self, writer: asyncio.StreamWriter, chat: bool, model: str, body: dict) -> bool:
        text = first_user_text(body) if chat else body["prompt"]
        shift = len(re.match(f"(?:{re.escape(self.unit)})*", text).group()) // len(self.unit)  # type: ignore[union-attr]
        wrong = (model == "weak" and shift % 4 == 3) or (model == "weak-long" and shift > 0)
        words = [*WORDS[:3], " 7", "."] if wrong else WORDS
        logs = [-0.7 if wrong else -0.1] * len(words)
        usage = {"prompt_tokens": 20 + shift, "completion_tokens": len(words), "total_tokens": 20 + shift + len(words)}
        name = "chat.completion" if chat else "text_completion"
        top = {"id": "stub-1", "object": name, "created": 1_700_000_000, "model": model}
        if body.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number, word in enumerate(words):
                last = "stop" if number == len(words) - 1 else None
                piece = {"delta": {"content": word}} if chat else {"text": word}
                event = {**top, "object": f"{name}.chunk", "choices": [{"index": 0, **piece, "finish_reason": last}]}
                write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
                await writer.drain()
                while model == "slow-stream" and not self.released:
                    await asyncio.sleep(0.01)
            write_chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        choices = []
        for index in range(body.get("n") or 1):
            choice = {"index": index, "finish_reason": "stop", "logprobs": None}
            if chat:
                choice["message"] = {"role": "assistant", "content": "".join(words)}
                if body.get("response_format"):
                    value = {"code": 7 if wrong else 42}
                    choice["message"]["content"] = json.dumps(value, indent=shift % 3 or None)
                if body.get("logprobs"):
                    choice["logprobs"] = {
                        "content": [{"token": w, "logprob": p} for w, p in zip(words, logs, strict=True)]
                    }
            else:
                choice["text"] = "".join(words)
                if body.get("logprobs"):
                    choice["logprobs"] = {"tokens": words, "token_logprobs": logs}
            choices.append(choice)
        return await send(writer, 200, {**top, "choices": choices, "usage": usage})


def first_user_text(body: dict) -> str:
    content = [m["content"] for m in body["messages"] if m["role"] == "user"][0]  # noqa: RUF015 - IndexError is caught
    return content if isinstance(content, str) else next(p["text"] for p in content if p["type"] == "text")


def write_chunk(writer: asyncio.StreamWriter, part: bytes) -> None:
    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


async def send(
    writer: asyncio.StreamWriter, status: int, body: object, kind: str = "application/json", headers: tuple = ()
) -> bool:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Stub", f"content-type: {kind}", f"content-length: {len(raw)}"]
    writer.write("\r\n".join([*lines, "x-stub: yes", *headers]).encode() + b"\r\n\r\n" + raw)
    await writer.drain()
    return True


async def misbehave(writer: asyncio.StreamWriter, model: str) -> bool | None:
    """Whether the connection stays open; None: the answer follows."""
    if re.fullmatch("[45][0-9][0-9]", model):
        retry = ("retry-after: 7",) if model == "429" else ()
        return await send(writer, int(model), {"error": {"message": f"status {model}"}}, headers=retry)
    if model == "die":
        return False
    if model == "hang":
        await asyncio.sleep(3600)
    if model == "redirect":
        return await send(writer, 307, b"", headers=("location: http://elsewhere.invalid/v1/chat/completions",))
    if model == "garbage":
        writer.write(b"\x00\xffnothing like HTTP\r\n\r\n")
        await writer.drain()
        return False
    if model == "html":
        return await send(writer, 200, b"<html>login</html>", "text/html")
    if model == "cut":
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"cho')
        await writer.drain()
        return False
    if model == "huge":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(64):
            write_chunk(writer, b"x" * (1 << 16))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True
    if model == "drip":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)
    return None
