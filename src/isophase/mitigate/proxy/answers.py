"""What a reply says, made comparable; and a whole reply as the stream that a client asked for."""

from __future__ import annotations

import json
import math
from typing import Any

from isophase.mitigate.proxy.ballot import CHAT, Ballot
from isophase.mitigate.proxy.headers import as_json
from isophase.mitigate.vote.rules import ShiftAnswer


def read_answer(ballot: Ballot, shift_tokens: int, body: bytes) -> ShiftAnswer | None:
    """The answer in a reply; None where it holds none that can be compared.

    Args:
        ballot: what was asked.
        shift_tokens: at which shift.
        body: of a reply with status 200.
    """
    try:
        choice = json.loads(body)["choices"][0]
        answer = _message_key(choice["message"], ballot.is_json) if ballot.route == CHAT else choice["text"].strip()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return ShiftAnswer(
        shift_tokens=shift_tokens, answer=answer, token_log_probabilities=_log_probabilities(ballot.route, choice)
    )


def prompt_tokens(body: bytes) -> tuple[int, int]:
    """Tokens that a reply says were read and written; 0 where it does not say."""
    try:
        usage = json.loads(body)["usage"]
        numbers = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0, 0
    read, written = (number if isinstance(number, int) and number > 0 else 0 for number in numbers)
    return read, written


def without_log_probabilities(body: bytes) -> bytes:
    """A reply as it would be had the proxy not asked for them."""
    reply = json.loads(body)
    for choice in reply["choices"]:
        choice["logprobs"] = None
    return as_json(reply)


def as_stream(ballot: Ballot, body: bytes) -> bytes:
    """A whole reply as server-sent events: role, content, end, usage where it is wanted, `[DONE]`.

    Args:
        ballot: what was asked.
        body: a reply from which `read_answer` read an answer.
    """
    reply = json.loads(body)
    kept = {name: value for name, value in reply.items() if name not in ("choices", "usage", "object")}
    usage = reply.get("usage")
    choice = reply["choices"][0]
    kind = "chat.completion.chunk" if ballot.route == CHAT else "text_completion"
    logs, reason = choice.get("logprobs"), choice.get("finish_reason")
    if ballot.route == CHAT:
        message = dict(choice["message"])
        role = message.pop("role", "assistant")
        pieces = [
            {"delta": {"role": role, "content": ""}, "logprobs": None, "finish_reason": None},
            {"delta": {k: v for k, v in message.items() if v is not None}, "logprobs": logs, "finish_reason": None},
            {"delta": {}, "logprobs": None, "finish_reason": reason},
        ]
    else:
        pieces = [{"text": choice["text"], "logprobs": logs, "finish_reason": reason}]
    more = {"usage": None} if ballot.wants_usage else {}
    events: list[dict[str, Any]] = [{**kept, "object": kind, "choices": [{"index": 0, **p}], **more} for p in pieces]
    if ballot.wants_usage:
        events.append({**kept, "object": kind, "choices": [], "usage": usage})
    return b"".join(b"data: " + as_json(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def _message_key(message: dict[str, Any], is_json: bool) -> str:
    """What two messages are compared by: their text, their JSON value, or whatever else they hold."""
    content = message.get("content")
    if isinstance(content, str) and not message.get("tool_calls"):
        if is_json:
            try:
                return json.dumps(json.loads(content), sort_keys=True)
            except (ValueError, RecursionError):
                pass
        return content.strip()
    kept = {name: message.get(name) for name in ("content", "refusal", "tool_calls")}
    return json.dumps(kept, sort_keys=True)


def _log_probabilities(route: str, choice: dict[str, Any]) -> tuple[float, ...]:
    """Of the tokens; empty where one of them is missing."""
    try:
        logs = choice["logprobs"]
        values = [entry["logprob"] for entry in logs["content"]] if route == CHAT else logs["token_logprobs"]
        numbers = [min(0.0, float(value)) for value in values]
    except (KeyError, TypeError, ValueError):
        return ()
    return tuple(numbers) if all(map(math.isfinite, numbers)) else ()
