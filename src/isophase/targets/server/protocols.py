"""How each kind of server is asked for a few greedy tokens, and what its replies mean.

Every sampler is set in every request: servers differ in their defaults, and llama.cpp's are not greedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isophase.targets.base import ServerKind

MOST_ALTERNATIVES = 20
"""Alternatives per position whose log-probability is asked for; more are refused by vLLM's default."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back.

    Attributes:
        output_ids: generated tokens; None where the server gives text only.
        text: the generated text.
        cut_off: whether generation ended because the tokens that were asked for were used up.
        prompt_tokens: how many tokens the server says it read; None where it does not say.
        echoed_ids: the prompt as the server read it; None where it does not say.
        alternatives: per generated position, log-probability by token id, or by token text where the server
            knows no ids.
        cached_tokens: prompt tokens that were not read but taken from an earlier request.
    """

    output_ids: tuple[int, ...] | None
    text: str = ""
    cut_off: bool = False
    prompt_tokens: int | None = None
    echoed_ids: tuple[int, ...] | None = None
    alternatives: tuple[Mapping[int | str, float], ...] = ()
    cached_tokens: int = 0


class ServerProtocol(Protocol):
    """One kind of server. URLs are below the base URL, or start with `/` at the server's root."""

    kind: ServerKind
    takes_ids: bool
    cache: str

    def url(self, base_url: str, root_url: str) -> str:
        """Where questions go."""

    def question(self, prompt: Sequence[int] | str, tokens: int, salt: str) -> dict[str, Any]:
        """Request for `tokens` greedy tokens behind `prompt`; `salt` keeps caches apart."""

    def read(self, reply: dict[str, Any]) -> Reply:
        """Meaning of a reply.

        Raises:
            KeyError, TypeError, ValueError, IndexError: it is not what this server sends.
        """

    def scoring(self, prompt: Sequence[int], continuation: Sequence[int], salt: str) -> dict[str, Any] | None:
        """Request for the log-probability of `continuation`; None where the server cannot say."""

    def read_score(self, reply: dict[str, Any], continuation: Sequence[int]) -> float:
        """Log-probability of `continuation` from the reply to `scoring`."""


class OpenAiCompletions:
    """`/v1/completions` with nothing but documented fields; ids or text."""

    kind: ServerKind = "openai"
    cache = "left as it is: the protocol has no switch"

    def __init__(self, model: str, *, takes_ids: bool) -> None:
        self.model = model
        self.takes_ids = takes_ids

    def url(self, base_url: str, root_url: str) -> str:
        """Completions below the base URL."""
        return base_url + "/completions"

    def question(self, prompt: Sequence[int] | str, tokens: int, salt: str) -> dict[str, Any]:
        """Greedy, with the five alternatives that the protocol allows."""
        return {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "top_p": 1,
            "n": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "logprobs": 5,
            "echo": False,
            "seed": 0,
            "stream": False,
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        """Text, counts and alternatives by text."""
        (choice,) = reply["choices"]
        top = (choice.get("logprobs") or {}).get("top_logprobs") or []
        return Reply(
            output_ids=None,
            text=str(choice["text"]),
            cut_off=choice.get("finish_reason") == "length",
            prompt_tokens=_count(reply, "prompt_tokens"),
            alternatives=tuple({str(token): float(lp) for token, lp in (place or {}).items()} for place in top),
            cached_tokens=_cached(reply),
        )

    def scoring(self, prompt: Sequence[int], continuation: Sequence[int], salt: str) -> dict[str, Any] | None:
        """Not in the protocol's present form."""
        return None

    def read_score(self, reply: dict[str, Any], continuation: Sequence[int]) -> float:
        """Never asked."""
        raise ValueError("this protocol scores nothing")


class Vllm(OpenAiCompletions):
    """vLLM's `/v1/completions`: ids both ways, salted prefix cache, log-probabilities of prompts."""

    kind: ServerKind = "vllm"
    cache = "every request has a salt of its own"

    def __init__(self, model: str) -> None:
        super().__init__(model, takes_ids=True)

    def question(self, prompt: Sequence[int] | str, tokens: int, salt: str) -> dict[str, Any]:
        """As the protocol, and the samplers that vLLM has beside it."""
        return super().question(prompt, tokens, salt) | {
            "logprobs": MOST_ALTERNATIVES,
            "top_k": -1,
            "min_p": 0,
            "repetition_penalty": 1,
            "ignore_eos": False,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        """Ids generated and ids read."""
        (choice,) = reply["choices"]
        plain = super().read(reply)
        ids, echoed = choice.get("token_ids"), choice.get("prompt_token_ids", reply.get("prompt_token_ids"))
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        if ids is None:  # before 0.10: only through the names of the tokens
            ids = [_numbered(token) for token in tokens]
        return Reply(
            output_ids=tuple(map(int, ids)),
            text=plain.text,
            cut_off=plain.cut_off,
            prompt_tokens=plain.prompt_tokens,
            echoed_ids=None if echoed is None else tuple(map(int, echoed)),
            alternatives=tuple(
                {_numbered(str(token)): lp for token, lp in place.items()} for place in plain.alternatives
            ),
            cached_tokens=plain.cached_tokens,
        )

    def scoring(self, prompt: Sequence[int], continuation: Sequence[int], salt: str) -> dict[str, Any] | None:
        """The continuation as the end of a prompt."""
        return self.question([*prompt, *continuation], 1, salt) | {"prompt_logprobs": 0, "logprobs": None}

    def read_score(self, reply: dict[str, Any], continuation: Sequence[int]) -> float:
        """Sum over the last places of the prompt."""
        (choice,) = reply["choices"]
        places = (choice.get("prompt_logprobs") or reply["prompt_logprobs"])[-len(continuation) :]
        return sum(float(place[str(token)]["logprob"]) for place, token in zip(places, continuation, strict=True))


class Sglang:
    """SGLang's own `/generate`."""

    kind: ServerKind = "sglang"
    takes_ids = True
    cache = "every request has a key of its own (extra_key)"

    def url(self, base_url: str, root_url: str) -> str:
        """At the root."""
        return root_url + "/generate"

    def question(self, prompt: Sequence[int] | str, tokens: int, salt: str) -> dict[str, Any]:
        """Greedy, with alternatives."""
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        return source | {
            "sampling_params": {
                "max_new_tokens": tokens,
                "temperature": 0,
                "top_p": 1,
                "top_k": -1,
                "min_p": 0,
                "n": 1,
                "repetition_penalty": 1,
                "presence_penalty": 0,
                "frequency_penalty": 0,
                "ignore_eos": False,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": MOST_ALTERNATIVES,
            "extra_key": salt,
            "stream": False,
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        """Ids from the log-probabilities where `output_ids` is missing."""
        meta = reply["meta_info"]
        chosen = meta.get("output_token_logprobs") or []
        ids = reply.get("output_ids")
        top = meta.get("output_top_logprobs") or []
        return Reply(
            output_ids=tuple(int(i) for i in (ids if ids is not None else [entry[1] for entry in chosen])),
            text=str(reply.get("text", "")),
            cut_off=(meta.get("finish_reason") or {}).get("type") == "length",
            prompt_tokens=None if meta.get("prompt_tokens") is None else int(meta["prompt_tokens"]),
            alternatives=tuple({int(token): float(lp) for lp, token, *_ in place or []} for place in top),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )

    def scoring(self, prompt: Sequence[int], continuation: Sequence[int], salt: str) -> dict[str, Any] | None:
        """Log-probabilities of the input from the last prompt token on."""
        return self.question([*prompt, *continuation], 1, salt) | {"logprob_start_len": len(prompt) - 1}

    def read_score(self, reply: dict[str, Any], continuation: Sequence[int]) -> float:
        """Sum over the last places of the input."""
        places = reply["meta_info"]["input_token_logprobs"][-len(continuation) :]
        if [int(token) for _, token, *_ in places] != list(continuation):
            raise ValueError("scored other tokens than were asked for")
        return sum(float(lp) for lp, *_ in places)


class LlamaCpp:
    """llama.cpp's own `/completion`, whose defaults sample at temperature 0.8 and reuse the last prompt."""

    kind: ServerKind = "llamacpp"
    takes_ids = True
    cache = "switched off (cache_prompt)"

    def url(self, base_url: str, root_url: str) -> str:
        """At the root."""
        return root_url + "/completion"

    def question(self, prompt: Sequence[int] | str, tokens: int, salt: str) -> dict[str, Any]:
        """Greedy, everything else off."""
        return {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n_predict": tokens,
            "temperature": 0,
            "dynatemp_range": 0,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
            "typical_p": 1,
            "xtc_probability": 0,
            "repeat_penalty": 1,
            "repeat_last_n": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "dry_multiplier": 0,
            "mirostat": 0,
            "ignore_eos": False,
            "seed": 0,
            "n_probs": MOST_ALTERNATIVES,
            "post_sampling_probs": False,
            "return_tokens": True,
            "cache_prompt": False,
            "stream": False,
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        """`tokens_evaluated` counts the prompt, what was cached included."""
        if reply.get("truncated"):
            raise ValueError("the server cut the prompt")
        read = reply.get("tokens_evaluated")
        places = reply.get("completion_probabilities") or []
        return Reply(
            output_ids=tuple(map(int, reply["tokens"])),
            text=str(reply.get("content", "")),
            cut_off=reply.get("stop_type") == "limit",
            prompt_tokens=None if read is None else int(read),
            alternatives=tuple(
                {int(entry["id"]): float(entry["logprob"]) for entry in place.get("top_logprobs") or []}
                for place in places
            ),
            cached_tokens=int((reply.get("timings") or {}).get("cache_n") or 0),
        )

    def scoring(self, prompt: Sequence[int], continuation: Sequence[int], salt: str) -> dict[str, Any] | None:
        """llama.cpp gives no log-probabilities of prompts."""
        return None

    def read_score(self, reply: dict[str, Any], continuation: Sequence[int]) -> float:
        """Never asked."""
        raise ValueError("this server scores nothing")


class Chat:
    """`/v1/chat/completions`: one user message; template and tokenisation are the server's."""

    kind: ServerKind = "chat"
    takes_ids = False
    cache = "left as it is: the protocol has no switch"

    # Chat models answer in a sentence.
    slack_tokens = 24

    def __init__(self, model: str) -> None:
        self.model = model

    def url(self, base_url: str, root_url: str) -> str:
        """Chat completions below the base URL."""
        return base_url + "/chat/completions"

    def question(self, prompt: Sequence[int] | str, tokens: int, salt: str) -> dict[str, Any]:
        """Greedy, one message."""
        if not isinstance(prompt, str):
            raise ValueError("a chat endpoint takes text")
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens + self.slack_tokens,
            "temperature": 0,
            "top_p": 1,
            "n": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "seed": 0,
            "stream": False,
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        """The message's text."""
        (choice,) = reply["choices"]
        return Reply(
            output_ids=None,
            text=str(choice["message"].get("content") or ""),
            cut_off=choice.get("finish_reason") == "length",
            prompt_tokens=_count(reply, "prompt_tokens"),
            cached_tokens=_cached(reply),
        )

    def scoring(self, prompt: Sequence[int], continuation: Sequence[int], salt: str) -> dict[str, Any] | None:
        """Not in the protocol."""
        return None

    def read_score(self, reply: dict[str, Any], continuation: Sequence[int]) -> float:
        """Never asked."""
        raise ValueError("this protocol scores nothing")


def _numbered(token: int | str) -> int:
    """Id in a token name such as `token_id:17`."""
    return int(str(token).removeprefix("token_id:"))


def _count(reply: dict[str, Any], name: str) -> int | None:
    value = (reply.get("usage") or {}).get(name)
    return None if value is None else int(value)


def _cached(reply: dict[str, Any]) -> int:
    return int(((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
