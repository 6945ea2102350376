"""Tokenizers for servers: a `tokenizer.json`, or the server's own route. Neither needs transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any

from isophase.errors import IsophaseError
from isophase.targets.server.connect import refusal
from isophase.targets.server.http import RequestFailedError

_REMEDY = "Give --tokenizer a folder with tokenizer.json, such a file, or a hub id."


class FileTokenizer:
    """A `tokenizer.json` as probes need it.

    Args:
        source: file, folder that holds one, or hub id.

    Raises:
        IsophaseError: it cannot be read.
    """

    def __init__(self, source: str) -> None:
        from tokenizers import Tokenizer  # slow to import

        path = Path(source).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        looks_local = source.startswith((".", "/", "~")) or path.exists()
        if looks_local and not path.is_file():
            raise IsophaseError(f"there is no tokenizer {str(path)!r}.", _REMEDY)
        try:
            if looks_local:
                raw = path.read_text(encoding="utf-8")
                self._tokenizer = Tokenizer.from_str(raw)
            else:
                self._tokenizer = Tokenizer.from_pretrained(source)
                raw = self._tokenizer.to_str()
        # The library raises bare Exception for most faults.
        except Exception as error:
            reason = shorten(str(error), 200) or type(error).__name__
            raise IsophaseError(f"cannot read the tokenizer {source!r}: {reason}", _REMEDY) from error
        # A file may cut or pad what it encodes; prompts must come out whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.source = str(path.resolve()) if looks_local else source
        self.digest = sha256(raw.encode()).hexdigest()[:16]
        with_special, without = self._tokenizer.encode("a").ids, self.encode("a")
        self.prefix_ids: tuple[int, ...] = ()
        for cut in range(len(with_special) - len(without) + 1):
            if with_special[cut : cut + len(without)] == without:
                self.prefix_ids = tuple(with_special[:cut])
                break

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens kept."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


class RemoteTokenizer:
    """The server's tokenize and detokenize routes; answers are kept, probes ask the same words again.

    Args:
        ask: posts a body to a route at the server's root.
        kind: of the server; llama.cpp names its fields differently.
        model: as the server calls it.
    """

    source = ""
    digest = "server"

    def __init__(self, ask: Callable[[str, dict[str, Any]], dict[str, Any]], kind: str, model: str) -> None:
        self._ask, self._kind, self._model = ask, kind, model
        self._encode = lru_cache(maxsize=20_000)(self._encode_once)
        self._decode = lru_cache(maxsize=20_000)(self._decode_once)
        with_special, without = self._encode_once("a", special=True), list(self._encode_once("a"))
        extra = len(with_special) - len(without)
        self.prefix_ids = with_special[:extra] if list(with_special[extra:]) == without else ()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        with self._faults():
            return list(self._encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens kept."""
        with self._faults():
            return self._decode(tuple(map(int, ids)))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except RequestFailedError as error:
            raise refusal(error, "the server's tokenizer") from error

    def _encode_once(self, text: str, special: bool = False) -> tuple[int, ...]:
        if self._kind == "llamacpp":
            body: dict[str, Any] = {"content": text, "add_special": special}
        else:
            body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        return tuple(map(int, self._ask("/tokenize", body)["tokens"]))

    def _decode_once(self, ids: tuple[int, ...]) -> str:
        reply = self._ask("/detokenize", {"model": self._model, "tokens": list(ids)})
        return str(next(reply[name] for name in ("prompt", "content", "text") if name in reply))
