"""Whether a request can be voted on, and the same request at every shift."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isophase.errors import IsophaseError
from isophase.mitigate.proxy.headers import as_json
from isophase.mitigate.proxy.settings import ProxySettings
from isophase.mitigate.vote.shifts import NeutralTexts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BYTES_PER_TOKEN = 4
"""For the limit on cost, where no tokenizer counts."""


class UnvotableError(Exception):
    """The request is passed on as it is; the text says why, in words for a header."""


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """A request that can be voted on.

    Attributes:
        route: `CHAT` or `COMPLETIONS`.
        request: the parsed body.
        streamed: whether the client wants a stream.
        wants_usage: whether the stream is to end with the usage.
        wants_log_probabilities: whether the client asked for them itself.
        is_json: whether answers are compared as JSON values.
    """

    route: str
    request: dict[str, Any]
    streamed: bool
    wants_usage: bool
    wants_log_probabilities: bool
    is_json: bool


def read_ballot(route: str, body: bytes) -> Ballot:
    """Read a request.

    Args:
        route: `CHAT` or `COMPLETIONS`.
        body: as the client sent it.

    Raises:
        UnvotableError: it asks for something of which there is no single answer to compare, or is no such request.
            The server is the one to refuse it.
    """
    request = _parsed(body)
    for name, plain in (("n", (None, 1)), ("best_of", (None, 1)), ("echo", (None, False))):
        if request.get(name) not in plain or request.get(name) is True:
            raise UnvotableError(
                f"{name} asks for more than one answer" if name != "echo" else "echo repeats the prompt"
            )
    for name in ("tools", "functions", "tool_choice", "function_call"):
        if request.get(name) not in (None, [], "none"):
            raise UnvotableError("tool calls are not voted on")
    if "audio" in request or request.get("modalities") not in (None, ["text"]):
        raise UnvotableError("only text is voted on")
    _check_text(route, request)
    options = request.get("stream_options")
    form = request.get("response_format")
    return Ballot(
        route=route,
        request=request,
        streamed=request.get("stream") is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        wants_log_probabilities=request.get("logprobs") not in (None, False),
        is_json=isinstance(form, dict) and form.get("type") in ("json_object", "json_schema"),
    )


def cost_tokens(ballot: Ballot, shifts: Sequence[int], body: bytes) -> int:
    """Tokens that a vote may read and write, by a rough count: four bytes of the body each."""
    asked = [ballot.request.get(name) for name in ("max_tokens", "max_completion_tokens")]
    most = max([number for number in asked if isinstance(number, int) and number > 0], default=0)
    return sum(len(body) // _BYTES_PER_TOKEN + shift + most for shift in shifts)


def bodies(
    ballot: Ballot, body: bytes, shifts: Sequence[int], settings: ProxySettings, neutral: NeutralTexts, scored: bool
) -> dict[int, bytes]:
    """The request at every shift.

    Args:
        ballot: of `body`.
        body: as the client sent it; asked without a shift, it stays so where nothing needs a change.
        shifts: neutral tokens.
        settings: where neutral text goes.
        neutral: makes it.
        scored: whether the rule needs log-probabilities.

    Raises:
        UnvotableError: no neutral text makes so many tokens in front of this text.
    """
    changed = ballot.streamed or (scored and not ballot.wants_log_probabilities)
    made = {}
    for shift in shifts:
        if shift == 0 and not changed:
            made[0] = body
            continue
        request = copy.deepcopy(ballot.request)
        for name in ("stream", "stream_options"):
            request.pop(name, None)
        if scored and not ballot.wants_log_probabilities:
            request["logprobs"] = True if ballot.route == CHAT else 1
        try:
            _insert(ballot.route, request, shift, settings.place, neutral)
        except IsophaseError as error:
            raise UnvotableError(error.problem) from error
        made[shift] = as_json(request)
    return made


def user_text(request: dict[str, Any], place: str) -> tuple[dict[str, Any], str] | None:
    """The holder and the name of the text that stands first at a place of a chat request; None: there is no text."""
    message = _message(request["messages"], place)
    if message is None:
        return None
    if isinstance(message["content"], str):
        return message, "content"
    for part in message["content"]:
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return part, "text"
    return None


def _parsed(body: bytes) -> dict[str, Any]:
    def refuse(_: str) -> None:
        raise ValueError

    try:
        request = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise UnvotableError("the body is not JSON") from None
    if not isinstance(request, dict):
        raise UnvotableError("the body is no JSON object")
    return request


def _check_text(route: str, request: dict[str, Any]) -> None:
    if route == COMPLETIONS:
        if not isinstance(request.get("prompt"), str):
            raise UnvotableError("only a prompt that is one text can be shifted")
        return
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise UnvotableError("there are no messages that can be shifted")
    if not any(message.get("role") == "user" for message in messages):
        raise UnvotableError("there is no user message")


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if message.get("role") not in ("user", "system", "developer"):
        return True
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(p, dict) for p in content))


def _insert(route: str, request: dict[str, Any], shift: int, place: str, neutral: NeutralTexts) -> None:
    """Put neutral tokens into a request, in place."""
    if shift == 0:
        return
    if route == COMPLETIONS:
        text = request["prompt"]
        request["prompt"] = neutral.text(shift, text) + text
        return
    found = user_text(request, place)
    if found is None:
        message = _message(request["messages"], place)
        assert message is not None
        text = neutral.text(shift, "")
        message["content"] = [{"type": "text", "text": text}, *message["content"]]
        return
    holder, name = found
    text = holder[name]
    holder[name] = neutral.text(shift, text) + text


def _message(messages: list[dict[str, Any]], place: str) -> dict[str, Any] | None:
    if place == "system" and messages[0].get("role") in ("system", "developer"):
        return messages[0]
    users = [message for message in messages if message.get("role") == "user"]
    if not users:
        return None
    return users[-1] if place == "last-user" else users[0]
