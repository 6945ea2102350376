"""A real server, `transformers serve`, with a tiny random model behind the proxy."""

from __future__ import annotations

import httpx2
import openai
import pytest
from running_proxy import RunningProxy
from running_transformers import transformers_serve

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of two layers with a byte-level BPE and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["user: The code is 42 . . .\nassistant: system:"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def upstream(model, tmp_path_factory):
    """The URL of the server; the test is left out where it does not start."""
    with transformers_serve(model, tmp_path_factory.mktemp("log") / "serve.log") as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client(upstream, model, stream):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The code is"}]
    asked = {"model": str(model), "messages": messages, "max_tokens": 6, "temperature": 0, "stream": stream}

    def answer(base_url: str, policy: str) -> tuple[str, str | None]:
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            headers = {"x-isophase-policy": policy}
            raw = client.chat.completions.with_raw_response.create(**asked, extra_headers=headers)
            parsed = raw.parse()
            if not stream:
                return parsed.choices[0].message.content, raw.headers.get("x-isophase-agreement")
            words = [event.choices[0].delta.content or "" for event in parsed if event.choices]
            return "".join(words), raw.headers.get("x-isophase-agreement")

    with RunningProxy(upstream, strides_tokens=(4,), timeout_seconds=120, tokenizer=str(model)) as proxy:
        straight, _ = answer(upstream, "off")
        assert answer(proxy.url, "off") == (straight, None)
        voted, agreement = answer(proxy.url, "vote")
        assert straight
        assert voted
        agreeing, answered = map(int, agreement.split("/"))
        assert 1 <= agreeing <= answered <= 4
        page = httpx2.get(f"{proxy.root}/metrics", trust_env=False).text
        assert "isophase_shifts_off_total 0.0" in page  # each shift is as many tokens as it should be


@pytest.mark.slow
def test_same_bytes(upstream, model):
    body = {"model": str(model), "messages": [{"role": "user", "content": "The code"}], "max_tokens": 4}
    with RunningProxy(upstream, policy="off") as proxy:
        for more in ({"temperature": 0}, {"max_tokens": "x"}):
            replies = [
                httpx2.post(f"{url}/chat/completions", json={**body, **more}, trust_env=False, timeout=120)
                for url in (upstream, proxy.url)
            ]
            assert replies[0].status_code == replies[1].status_code
            if replies[0].status_code == 200:
                first, second = (reply.json()["choices"] for reply in replies)  # ids and times differ by themselves
                assert first == second
            else:
                assert replies[0].content == replies[1].content
