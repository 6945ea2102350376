"""A real vLLM behind the proxy: the official client, streaming and not."""

from __future__ import annotations

import re

import httpx2
import openai
import pytest
from running_proxy import RunningProxy

pytestmark = pytest.mark.slow

QUESTION = "The code of the cellar is 48213. What is the code of the cellar? Answer with the number."
# What differs between two replies of one server to one request.
_OWN = re.compile(rb'"(id|request_id)":"[^"]*"|"created":\d+')


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client(vllm, smollm2_folder, stream):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    asked = {"model": str(vllm.model), "messages": messages, "max_tokens": 16, "temperature": 0, "stream": stream}

    def answer(base_url: str, policy: str) -> tuple[str, str | None]:
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as client:
            raw = client.chat.completions.with_raw_response.create(**asked, extra_headers={"x-isophase-policy": policy})
            parsed, agreement = raw.parse(), raw.headers.get("x-isophase-agreement")
            if not stream:
                return parsed.choices[0].message.content, agreement
            return "".join(event.choices[0].delta.content or "" for event in parsed if event.choices), agreement

    with RunningProxy(vllm.url, strides_tokens=(4,), timeout_seconds=300, tokenizer=str(smollm2_folder)) as proxy:
        straight, _ = answer(vllm.url, "off")
        assert "48213" in straight
        assert answer(proxy.url, "off") == (straight, None)
        voted, agreement = answer(proxy.url, "vote")
        assert "48213" in voted
        agreeing, answered = map(int, agreement.split("/"))
        assert 1 <= agreeing <= answered <= 4
        page = httpx2.get(f"{proxy.root}/metrics", trust_env=False).text
        assert "isophase_shifts_off_total 0.0" in page  # each shift is as many tokens as it should be


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "unknown model"])
def test_same_bytes_with_policy_off(vllm, route, stream):
    body = {"model": str(vllm.model), "max_tokens": 6, "temperature": 0, "stream": stream}
    if route == "completions":
        body |= {"prompt": "The code of the cellar is", "logprobs": 2}
    else:
        body |= {"messages": [{"role": "user", "content": QUESTION}], "logprobs": True}
    if route == "unknown model":
        body["model"], route = "none", "chat/completions"
    with RunningProxy(vllm.url, policy="off", timeout_seconds=300) as proxy:
        straight, through = (
            httpx2.post(f"{url}/{route}", json=body, trust_env=False, timeout=300) for url in (vllm.url, proxy.url)
        )
    assert through.status_code == straight.status_code
    assert through.headers["content-type"] == straight.headers["content-type"]
    assert _OWN.sub(b"", through.content) == _OWN.sub(b"", straight.content)
    assert (b"data: [DONE]" in through.content) == (stream and straight.status_code == 200)
