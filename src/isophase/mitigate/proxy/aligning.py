"""Policy `align`: one request, the lines of its first user text aligned to where the model will read them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isophase.errors import IsophaseError
from isophase.mitigate.align.text import LocatingTokenizer, align_text
from isophase.mitigate.proxy.ballot import CHAT, Ballot, UnvotableError, read_ballot, user_text
from isophase.mitigate.proxy.headers import as_json
from isophase.mitigate.proxy.settings import ProxySettings
from isophase.mitigate.proxy.upstream import Call

_LONGEST_CHARACTERS = 200_000
"""Longer texts are passed on: aligning them would hold up everybody else's requests."""


class Aligner:
    """Aligns requests.

    Args:
        settings: of the proxy.
        tokenizer: of the model; None: nothing can be aligned.
    """

    def __init__(self, settings: ProxySettings, tokenizer: LocatingTokenizer | None) -> None:
        self._settings, self._tokenizer = settings, tokenizer

    def aligned(self, path: str, call: Call) -> tuple[Call, int]:
        """The request with neutral tokens in it, and their number.

        Raises:
            UnvotableError: it has no text to align, or it is not known where the model will read it.
        """
        if self._tokenizer is None:
            raise UnvotableError("the proxy was given no tokenizer")
        ballot = read_ballot(path, call.body)
        request = ballot.request
        found = user_text(request, self._settings.place) if path == CHAT else (request, "prompt")
        if found is None:
            raise UnvotableError("there is no text to align")
        holder, name = found
        if len(holder[name]) > _LONGEST_CHARACTERS:
            raise UnvotableError(f"more than {_LONGEST_CHARACTERS} characters are not aligned")
        curve = self._settings.phase_accuracy
        try:
            done = align_text(
                holder[name],
                self._tokenizer,
                len(curve) or min(self._settings.strides_tokens),
                curve,
                offset_tokens=self._offset(ballot, holder[name]) if path == CHAT else None,
            )
        except IsophaseError as error:
            raise UnvotableError(error.problem) from error
        holder[name] = done.text
        return call._replace(body=as_json(request)), done.added_tokens

    def _offset(self, ballot: Ballot, text: str) -> int:
        """Tokens of the chat template before the text, by rendering it as the server does."""
        assert self._tokenizer is not None
        messages = ballot.request["messages"]
        if self._template is None:
            raise UnvotableError("the tokenizer's folder has no chat template")
        try:
            page = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError) as error:
            raise UnvotableError("the chat template does not take these messages") from error
        # Templates may strip a message; then nobody knows where its first line stands.
        if page.count(text) != 1:
            raise UnvotableError("the chat template does not keep the text as it is")
        return len(self._tokenizer.encode(page[: page.index(text)]))

    @cached_property
    def _special(self) -> dict[str, Any]:
        """Names of special tokens that templates use."""
        config = self._config
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(name)
            found[name] = value.get("content", "") if isinstance(value, dict) else value or ""
        return found

    @cached_property
    def _folder(self) -> Path:
        assert self._tokenizer is not None
        return Path(self._tokenizer.source).parent

    @cached_property
    def _config(self) -> dict[str, Any]:
        try:
            read = json.loads((self._folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    @cached_property
    def _template(self) -> Any:
        """The compiled template; None where there is none. It is code of the model's maker, hence the sandbox."""
        text = self._config.get("chat_template")
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        if not isinstance(text, str):
            return None

        def refuse(message: str) -> None:
            raise ValueError(message)

        # As transformers sets it up, so that the page is the one that the server makes.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        try:
            return environment.from_string(text)
        except TemplateError:
            return None
