"""Policy align: the text is aligned to where the chat template puts it; what cannot be says so."""

from __future__ import annotations

import json

import pytest

from isophase.mitigate.align.text import LocatingTokenizer

TEMPLATE = "{% for m in messages %}the ? {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}? the{% endif %}"


@pytest.fixture
def templated(words_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((words_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


@pytest.fixture
def visible(monkeypatch):
    """The bundled words know no white space, so lines are moved by words."""
    from isophase.mitigate.proxy import aligning

    plain = aligning.align_text
    monkeypatch.setattr(aligning, "align_text", lambda *a, **k: plain(*a, **k, unit=" the"))


def test_lines_start_where_they_should_behind_the_template(stub, proxy, http, ask, templated, visible):
    curve = (0.1, 0.9, 0.1, 0.1)  # phase 1 alone is strong
    server = proxy(policy="align", tokenizer=str(templated), phase_accuracy=curve)
    text = "? ? the the ?\nthe ? ? the the\n? the the ? ?"
    reply = http.post(f"{server.url}/chat/completions", json=ask("echo", text=text))
    assert reply.status_code == 200
    sent = stub.bodies[0]["messages"]
    assert sent[0] == {"role": "system", "content": "Be brief."}
    page = "".join(f"the ? {m['content']}\n" for m in sent)
    words = LocatingTokenizer(str(templated))
    places = {line: len(words.encode(page[: page.index(line)])) for line in ("? ? the the ?", "? the the ? ?")}
    assert {place % 4 for place in places.values()} == {1}
    assert int(reply.headers["x-isophase-added-tokens"]) > 0
    assert "x-isophase-agreement" not in reply.headers


def test_completions_and_requests_that_ask_for_it(stub, proxy, http, templated, visible):
    server = proxy(policy="vote", tokenizer=str(templated), phase_accuracy=(0.1, 0.9, 0.1, 0.1))
    body = {"model": "echo", "prompt": "? ? the the ?\nthe ?"}
    reply = http.post(f"{server.url}/completions", json=body, headers={"x-isophase-policy": "align"})
    assert reply.headers["x-isophase-added-tokens"] == "4"
    assert stub.bodies[0]["prompt"].split("\n")[-1] == "the ?"


def test_without_a_tokenizer_or_a_template(stub, proxy, http, ask, words_folder):
    align = {"x-isophase-policy": "align"}
    reply = http.post(f"{proxy().url}/chat/completions", json=ask("echo"), headers=align)
    assert reply.headers["x-isophase-added-tokens"] == "none; the proxy was given no tokenizer"
    server = proxy(tokenizer=str(words_folder))
    reply = http.post(f"{server.url}/chat/completions", json=ask("echo"), headers=align)
    assert reply.headers["x-isophase-added-tokens"] == "none; the tokenizer's folder has no chat template"
    assert stub.raw_bodies[0] == stub.raw_bodies[1]


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no') }}", "nothing", "{{ messages[9].x.y }}"])
def test_templates_that_do_not_help(stub, proxy, http, ask, templated, template):
    (templated / "chat_template.jinja").write_text(template)
    server = proxy(policy="align", tokenizer=str(templated))
    reply = http.post(f"{server.url}/chat/completions", json=ask("echo"))
    assert reply.status_code == 200
    assert reply.headers["x-isophase-added-tokens"].startswith("none; the ")
