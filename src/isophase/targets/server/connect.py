"""What a server is: its kind, its limits, and whether it reads exactly the tokens that it is sent."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isophase.errors import EXIT_UNREACHABLE, IsophaseError
from isophase.probes import FILLER, KEYS, Tokenizer
from isophase.targets.base import ServerKind
from isophase.targets.server.http import KEY_VARIABLE, RequestFailedError, ServerClient
from isophase.targets.server.protocols import (
    Chat,
    LlamaCpp,
    OpenAiCompletions,
    ServerProtocol,
    Sglang,
    Vllm,
)
from isophase.targets.strides import Grid, grids_of

_OWNERS: dict[str, ServerKind] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "llama.cpp": "llamacpp"}
_PROBE_ATTEMPTS = 2
# Words that every vocabulary has, the closed one of the bundled models included.
SAMPLE = " ".join([*FILLER[:24], *KEYS[:8]])
_SHORT_SAMPLE = " ".join(FILLER[:4])


class UnreachableError(IsophaseError):
    """The server does not answer. A run that it interrupts resumes when its command is repeated."""

    exit_code = EXIT_UNREACHABLE


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        protocol: how to ask it.
        model: as it calls the model.
        version: empty where it does not say.
        max_length_tokens: longest prompt and answer together; None where it does not say.
        block_tokens: block size of its KV cache; None where it does not say.
        model_path: folder or hub id that it loaded; empty where it does not say.
    """

    protocol: ServerProtocol
    model: str
    version: str = ""
    max_length_tokens: int | None = None
    block_tokens: int | None = None
    model_path: str = ""

    @property
    def grids(self) -> list[Grid]:
        """Fixed grids that the configuration beside the weights names, where this machine can read it."""
        path = Path(self.model_path).expanduser() / "config.json"
        if not self.model_path or not path.is_file():
            return []
        try:
            return grids_of(SimpleNamespace(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, AttributeError):
            return []


def refusal(error: RequestFailedError, what: str) -> IsophaseError:
    """The user's view of a failed request that concerns more than one prompt."""
    if error.status in (401, 403):
        return IsophaseError(
            f"{what} refuses access ({error.reason}).", f"Put the key into the environment variable {KEY_VARIABLE}."
        )
    if error.no_reply or error.status is None:
        return UnreachableError(
            f"{what} cannot be reached: {error.reason}.", "Check the address and that it is running."
        )
    if error.status == 404:
        return IsophaseError(
            f"{what} has no such route or model ({error.reason}).",
            "Check the path (usually /v1), the model's name behind #, and --server.",
        )
    return IsophaseError(f"{what} cannot be used: {error.reason}.", "Check the address and --server.")


def connect(client: ServerClient, model: str, kind: str) -> ServerFacts:
    """Find out what the server is.

    Args:
        client: of the server.
        model: name behind `#`; empty: the only one that is served.
        kind: a `ServerKind`, or `auto`.

    Raises:
        IsophaseError: it cannot be reached, refuses access, or does not serve the model.
    """
    return client.run(_connect(client, model, kind))


async def _connect(client: ServerClient, model: str, kind: str) -> ServerFacts:
    try:
        listing = (await client.get("/models", attempts=_PROBE_ATTEMPTS)).get("data")
    except RequestFailedError as error:
        if error.status not in (404, 405, 501) and error.status != 200:
            raise refusal(error, client.base_url) from error
        listing = None  # not every server lists its models
    served = [entry for entry in listing or [] if isinstance(entry, dict)]
    names = [str(entry.get("id")) for entry in served]
    owners = {str(entry.get("owned_by", "")).lower() for entry in served}
    if kind == "auto":
        kind = next((_OWNERS[owner] for owner in sorted(owners) if owner in _OWNERS), "auto")
    if not model and len(names) == 1:
        model = names[0]
    if not model or (names and model not in names and kind != "llamacpp"):
        asked = f"serves no model {model!r}" if model else "serves several models, and none is named"
        shown = ", ".join(names[:8]) or "none that it lists"
        raise IsophaseError(f"{client.base_url} {asked}.", f"Name one behind #; it serves: {shown}.")
    entry = next((entry for entry in served if entry.get("id") == model), {})
    limit = entry.get("max_model_len") or entry.get("context_length")
    facts = ServerFacts(
        protocol=OpenAiCompletions(model, takes_ids=True),
        model=model,
        max_length_tokens=limit if isinstance(limit, int) else None,
        model_path=str(entry.get("root") or ""),
    )
    if kind == "vllm":
        return await _vllm(client, replace(facts, protocol=Vllm(model)))
    if kind == "sglang":
        return await _sglang(client, replace(facts, protocol=Sglang()))
    if kind == "llamacpp":
        return await _llamacpp(client, replace(facts, protocol=LlamaCpp()))
    if kind == "chat":
        return replace(facts, protocol=Chat(model))
    return replace(facts, protocol=await _plain(client, model, kind))


async def _ask_root(client: ServerClient, route: str) -> dict[str, Any]:
    """A fact that is good to have; an empty object where the server does not give it."""
    try:
        return await client.get(client.root_url + route, attempts=1)
    except RequestFailedError:
        return {}


async def _vllm(client: ServerClient, facts: ServerFacts) -> ServerFacts:
    version = str((await _ask_root(client, "/version")).get("version", ""))
    try:
        metrics = await client.text(client.root_url + "/metrics")
    except RequestFailedError:
        metrics = ""
    found = re.search(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', metrics)
    return replace(facts, version=version, block_tokens=int(found[1]) if found else None)


async def _sglang(client: ServerClient, facts: ServerFacts) -> ServerFacts:
    about, server = await asyncio.gather(_ask_root(client, "/get_model_info"), _ask_root(client, "/get_server_info"))
    limit = facts.max_length_tokens or server.get("context_length")
    page = server.get("page_size")
    return replace(
        facts,
        version=str(server.get("version", "")),
        model_path=str(about.get("model_path") or facts.model_path),
        max_length_tokens=limit if isinstance(limit, int) else None,
        block_tokens=page if isinstance(page, int) and page > 1 else None,
    )


async def _llamacpp(client: ServerClient, facts: ServerFacts) -> ServerFacts:
    about = await _ask_root(client, "/props")
    limit = (about.get("default_generation_settings") or {}).get("n_ctx")
    return replace(
        facts,
        version=str(about.get("build_info", "")),
        max_length_tokens=limit if isinstance(limit, int) else None,
        # A GGUF file: no folder with a tokenizer.json in it.
        model_path="",
    )


async def _plain(client: ServerClient, model: str, kind: str) -> ServerProtocol:
    """The best that an unknown server can do: ids, else text, else chat."""
    for takes_ids in (True, False):
        protocol = OpenAiCompletions(model, takes_ids=takes_ids)
        body = protocol.question([1, 2, 3] if takes_ids else "a", 1, "")
        try:
            protocol.read(await client.post(protocol.url(client.base_url, client.root_url), body))
        except RequestFailedError as error:
            if error.no_reply and error.status is None:
                raise refusal(error, client.base_url) from error
            if error.status in (401, 403):
                raise refusal(error, client.base_url) from error
            if error.status in (404, 405, 501) and kind == "auto":
                break
            if not takes_ids and kind == "openai":
                raise refusal(error, client.base_url) from error
        except (KeyError, TypeError, ValueError, IndexError):
            continue
        else:
            return protocol
    return Chat(model)


def check_tokens(client: ServerClient, facts: ServerFacts, tokenizer: Tokenizer) -> int:
    """Ask one short question and compare what the server read with what it was sent.

    Args:
        client: of the server.
        facts: from `connect`.
        tokenizer: that prompts are made with.

    Returns:
        Tokens that the server adds around a text; 0 where ids are sent.

    Raises:
        IsophaseError: it adds or changes tokens, or its tokenizer is another one.
    """
    return client.run(_check_tokens(client, facts, tokenizer))


async def _check_tokens(client: ServerClient, facts: ServerFacts, tokenizer: Tokenizer) -> int:
    protocol = facts.protocol
    ids = tokenizer.encode(SAMPLE)
    theirs = await _their_ids(client, facts)
    if theirs is not None and theirs != ids:
        raise _mismatch(f"it makes {len(theirs)} tokens of {len(ids)}, or others, of the same text")
    url = protocol.url(client.base_url, client.root_url)

    async def read(prompt: Sequence[int] | str) -> tuple[int | None, tuple[int, ...] | None]:
        try:
            reply = protocol.read(await client.post(url, protocol.question(prompt, 1, "isophase-check")))
        except RequestFailedError as error:
            raise refusal(error, client.base_url) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise IsophaseError(
                f"{client.base_url} sends no reply of a {protocol.kind} server ({error}).", "Check --server."
            ) from error
        return reply.prompt_tokens, reply.echoed_ids

    if protocol.takes_ids:
        sent = [*tokenizer.prefix_ids, *ids]
        count, echoed = await read(sent)
        if (echoed is not None and list(echoed) != sent) or (count is not None and count != len(sent)):
            got = len(echoed) if echoed is not None else count
            raise IsophaseError(
                f"{client.base_url} does not read the tokens that it is sent: {got} instead of {len(sent)}.",
                "It adds a start-of-text or retokenises; serve the model so that it takes ids as they are.",
            )
        if theirs is None and protocol.kind == "openai":
            count, _ = await read(SAMPLE)
            if count is not None and count not in (len(ids), len(sent)):
                raise _mismatch(f"it counts {count} tokens where the tokenizer has {len(ids)}")
        return 0
    long, _ = await read(SAMPLE)
    short, _ = await read(_SHORT_SAMPLE)
    if long is None or short is None:
        return 0
    expected = len(ids) - len(tokenizer.encode(_SHORT_SAMPLE))
    if long - short != expected:
        raise _mismatch(f"it counts {long - short} tokens where the tokenizer has {expected}")
    return long - len(ids)


def _mismatch(how: str) -> IsophaseError:
    return IsophaseError(
        f"the tokenizer does not match the server's: {how}.", "Give --tokenizer the served model's own."
    )


async def _their_ids(client: ServerClient, facts: ServerFacts) -> list[int] | None:
    """The server's own ids of the sample; None where it has no such route."""
    if facts.protocol.kind == "llamacpp":
        body: dict[str, Any] = {"content": SAMPLE, "add_special": False}
    else:
        body = {"model": facts.model, "prompt": SAMPLE, "add_special_tokens": False}
    try:
        tokens = (await client.post(client.root_url + "/tokenize", body, attempts=1)).get("tokens")
        return [int(token) for token in tokens] if isinstance(tokens, list) else None
    except (RequestFailedError, TypeError, ValueError):
        return None
