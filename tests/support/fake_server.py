"""A real HTTP server with a planted phase effect and faults on demand.

python fake_server.py '{"port": 0, "kind": "vllm"}' serves until it is killed and prints its port first.

It speaks the dialects of vLLM, SGLang and llama.cpp, plain completions with ids or text, and chat. Prompts are of
style `pairs`: the last token is a key, the token behind its first occurrence the answer, and wrong where the key's
position is at the weak residue.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
import threading
from collections import Counter
from pathlib import Path

from isophase.probes.lexicon import VALUES
from isophase.targets.planted import WordTokenizer

REASONS = {200: "OK", 302: "Found", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
           429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip
TOKENIZER = WordTokenizer()
VALUE_IDS = TOKENIZER.encode(" ".join(VALUES))


def write_tokenizer(folder: Path) -> Path:
    """The words of the bundled models as tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(TOKENIZER._words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return folder


class FakeServer:
    """Serves on a thread of its own.

    Args:
        kind: vllm, sglang, llamacpp, openai, openai-text or chat.
        period, weak: residue `weak` mod `period` is answered wrongly; period 0: nothing is.
        faults: ordinal of a distinct prompt -> [fault, times]; times -1: for ever.
        delay: seconds before every answer.
        keys: accepted bearer tokens; empty: any.
        denial: status for other tokens.
        bos: put a token before every prompt of ids.
        block: block size in the metrics (vllm); 0: none.
        flips: answer every second time wrongly, so that repeats differ.
        limit: context length that is told.
        forget: what is not offered, such as "/tokenize" or "usage".
        offset: shifts the ids of /tokenize: another tokenizer.
        broken: stale (short prompts see the request before), order (all do), batch (answers depend on what is in
            flight), warm (a known salt changes the answer), decode (generated tokens differ from prefilled ones),
            random.
    """

    def __init__(self, kind="vllm", *, model="planted", port=0, period=0, weak=7, faults=None, delay=0.0, keys=(),
                 bos=False, block=0, flips=False, limit=4096, forget=(), offset=0, log=True, broken="",
                 denial=401):  # fmt: skip
        self.kind, self.model, self.port = kind, model, port
        self.period, self.weak, self.delay = period, weak, delay
        self.faults = {int(k): tuple(v) for k, v in (faults or {}).items()}
        self.keys, self.bos, self.block, self.flips, self.limit = keys, bos, block, flips, limit
        self.forget, self.offset, self.log, self.broken = set(forget), offset, log, broken
        self.denial = denial
        self.salts: set[str] = set()
        self.before: list[int] = []
        self.order: dict[str, int] = {}
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.in_flight = self.most_in_flight = self.requests = 0

    # life

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_):
        def stop():
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._server.close()
            self._loop.call_later(0.02, self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join()
        self._loop.close()

    def _run(self, ready):
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def spec(self):
        return f"{self.url}#{self.model}"

    # HTTP

    async def _serve(self, reader, writer):
        try:
            while first := await reader.read(1):
                if first == b"\x16":  # a TLS greeting
                    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    break
                lines = (first + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._reply(writer, method, path, headers, json.loads(raw) if raw else {}):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, writer, method, path, headers, body):
        """Whether the connection stays open."""
        if self.log:
            self.headers.append(headers)
        if self.keys and headers.get("authorization", "").removeprefix("Bearer ") not in self.keys:
            # As real ones do: the refused key is repeated.
            return await send(
                writer, self.denial, {"error": {"message": "no: " + headers.get("authorization", "nothing")}}
            )
        if path in self.forget:
            return await send(writer, 404, {"detail": "Not Found"})
        if method == "GET":
            return await self._facts(writer, path)
        if path == "/tokenize":
            text = body["content"] if self.kind == "llamacpp" else body["prompt"]
            return await send(writer, 200, {"tokens": [n + self.offset for n in TOKENIZER.encode(text)]})
        if path == "/detokenize":
            return await send(writer, 200, {"prompt": TOKENIZER.decode(body["tokens"])})
        route = {"sglang": "/generate", "llamacpp": "/completion", "chat": "/v1/chat/completions"}
        if path != route.get(self.kind, "/v1/completions"):
            return await send(writer, 404, {"detail": "Not Found"})
        began = self._loop.time()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.requests += 1
        try:
            return await self._answer(writer, body, began)
        finally:
            self.in_flight -= 1

    async def _facts(self, writer, path):
        if path == "/v1/models":
            owner = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}.get(self.kind, "someone")
            entry = {"id": self.model, "owned_by": owner}
            if self.kind != "llamacpp":
                entry["max_model_len"] = self.limit
            return await send(writer, 200, {"data": [entry]})
        if path == "/version" and self.kind == "vllm":
            return await send(writer, 200, {"version": "fake"})
        if path == "/metrics" and self.block:
            text = f'vllm:cache_config_info{{block_size="{self.block}",cache_dtype="auto"}} 1.0\n'
            return await send(writer, 200, text.encode(), "text/plain")
        if path == "/props":
            return await send(writer, 200, {"default_generation_settings": {"n_ctx": self.limit}})
        if path == "/get_server_info":
            return await send(writer, 200, {"version": "fake", "page_size": self.block or 1})
        return await send(writer, 404, {"detail": "Not Found"})

    async def _answer(self, writer, body, began):
        if self.kind == "chat":
            prompt = body["messages"][0]["content"]
        else:
            prompt = body.get("input_ids", body.get("prompt", body.get("text")))
        text = isinstance(prompt, str)
        if self.kind == "openai-text" and not text:
            return await send(writer, 400, {"error": {"message": "prompt must be a string"}})
        ids = TOKENIZER.encode(prompt) if text else list(prompt)
        scoring = bool(body.get("prompt_logprobs") is not None or body.get("logprob_start_len", -1) >= 0)
        name = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        if self.log:
            self.bodies.append(body)
        if len(ids) > 40 and not scoring:
            self.order.setdefault(name, len(self.order))
            self.asked[name] += 1
            fault, times = self.faults.get(self.order[name], ("", 0))
            if fault and (times < 0 or self.asked[name] <= times):
                handled = await misbehave(writer, fault)
                if handled is not None:
                    return handled
            else:
                fault = ""
        else:
            fault = ""
        wanted = body.get("max_tokens", body.get("n_predict", body.get("sampling_params", {}).get("max_new_tokens", 1)))
        output, right = self._model(ids, wanted, self.asked[name])
        output = self._break(output, ids, body)
        payload = json.dumps(self._format(ids, output, right, scoring, fault)).encode()
        if self.delay:
            # From the request's arrival: what this server itself needs is part of it.
            await asyncio.sleep(max(0.0, began + self.delay - self._loop.time()))
        return await send(writer, 200, payload * 2 if fault == "duplicate" else payload)

    def _model(self, ids, wanted, times):
        """Tokens that the planted model writes, and the right first one."""
        places = [p for p, i in enumerate(ids[:-1]) if i == ids[-1] and ids[p + 1] in VALUE_IDS]
        if not places:
            return [3] * wanted, 3
        right = ids[places[0] + 1]
        weak = self.period and places[0] % self.period == self.weak
        weak = weak or (self.flips and times % 2 == 0)
        other = VALUE_IDS[(VALUE_IDS.index(right) + 1) % len(VALUE_IDS)]
        return [other if weak else right, *[3] * (wanted - 1)], right

    def _break(self, output, ids, body):
        """What a faulty server would say."""
        salt, before = body.get("cache_salt", ""), self.before
        known, self.before = salt in self.salts, ids
        self.salts.add(salt)
        wrong = {
            "stale": len(ids) <= 3 and len(before) > 3 and before[0] % 2 == 0,
            "order": len(before) % 3 == 0,
            "batch": self.in_flight > 2,
            "warm": known and len(ids) > 3,
            "random": self.requests % 3 == 0,
        }.get(self.broken, False)
        if self.broken == "decode" and len(output) > 2:
            return [*output[:2], output[2] + 1, *output[3:]]
        return [token + 1 for token in output] if wrong else output

    def _format(self, ids, output, right, scoring, fault):
        read = [3, *ids] if self.bos else ids
        echoed = [*read[:-1], read[-1] + 1] if fault == "echo" else read
        likely, rare = math.log(0.9), math.log(0.05)
        usage = {} if "usage" in self.forget else {"usage": {"prompt_tokens": len(read)}}
        top = [{**{right: rare}, token: likely} if n == 0 else {token: likely} for n, token in enumerate(output)]
        words = [TOKENIZER.decode([token]) for token in output]
        if self.kind == "vllm":
            choice = {
                "text": " ".join(words), "finish_reason": "length", "token_ids": output, "prompt_token_ids": echoed,
                "logprobs": {"tokens": [f"token_id:{t}" for t in output],
                             "top_logprobs": [{f"token_id:{t}": lp for t, lp in place.items()} for place in top]},
            }  # fmt: skip
            if scoring:
                choice["prompt_logprobs"] = [None, *({str(i): {"logprob": -1.5}} for i in ids[1:])]
            return {"choices": [choice], **usage}
        if self.kind == "sglang":
            meta = {
                "prompt_tokens": len(read), "finish_reason": {"type": "length"}, "cached_tokens": 0,
                "output_token_logprobs": [[likely, t, None] for t in output],
                "output_top_logprobs": [[[lp, t, None] for t, lp in place.items()] for place in top],
                "input_token_logprobs": [[-1.5, t, None] for t in ids],
            }  # fmt: skip
            return {"text": " ".join(words), "output_ids": output, "meta_info": meta}
        if self.kind == "llamacpp":
            places = [{"top_logprobs": [{"id": t, "logprob": lp} for t, lp in place.items()]} for place in top]
            return {
                "content": " ".join(words), "tokens": output, "tokens_evaluated": len(read), "truncated": False,
                "stop_type": "limit", "completion_probabilities": places, "timings": {"cache_n": 0},
            }  # fmt: skip
        if self.kind == "chat":
            usage = {"usage": {"prompt_tokens": len(ids) + 9}} if usage else {}
            message = {"role": "assistant", "content": f"It is {words[0]}."}
            return {"choices": [{"message": message, "finish_reason": "stop"}], **usage}
        logprobs = {"tokens": words, "top_logprobs": [{TOKENIZER.decode([t]): lp for t, lp in p.items()} for p in top]}
        return {"choices": [{"text": " " + " ".join(words), "finish_reason": "length", "logprobs": logprobs}], **usage}


async def send(writer, status, body, kind="application/json", headers=()):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"content-type: {kind}", f"content-length: {len(raw)}", *headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
    await writer.drain()
    return True


async def misbehave(writer, fault):
    """Whether the connection stays open; None: the answer follows."""
    if fault in ("429", "500", "503", "400"):
        return await send(writer, int(fault), {"error": {"message": f"fault {fault}"}})
    if fault == "429-retry-after":
        return await send(writer, 429, {"error": "slow down"}, headers=["retry-after: 0.2"])
    if fault == "redirect":
        return await send(writer, 302, {}, headers=["location: http://elsewhere.invalid/v1/completions"])
    if fault == "html":
        return await send(writer, 200, b"<html>login</html>", "text/html")
    if fault == "truncated":
        return await send(writer, 200, b'{"choices": [{"text": "re')
    if fault == "cut-body":
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"cho')
        await writer.drain()
        return False
    if fault == "drop":
        return False
    if fault == "hang":
        await asyncio.sleep(3600)
    if fault == "drip":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)
    if fault == "huge":
        return await send(writer, 200, b'{"choices": "' + b"x" * (50 << 20) + b'"}')
    if fault == "endless":
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n{"choices": "')
        while True:
            writer.write(b"x" * (1 << 16))
            await writer.drain()
    if fault == "empty":
        return await send(writer, 200, {"choices": []})
    if fault == "slow":
        await asyncio.sleep(0.2)
    return None


if __name__ == "__main__":
    with FakeServer(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}")) as running:
        print(running.port, flush=True)
        threading.Event().wait()
