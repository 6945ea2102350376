"""The description that the proxy serves, fuzzed: every reply is one that it describes, and none is a crash."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from running_proxy import RunningProxy
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode
from stub_upstream import StubUpstream

from isophase.mitigate.proxy.app import description

OPERATIONS = {
    found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(description()).get_all_operations()
}
REQUIRED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
CHECKED = [CHECKS.get_one(name) for name in (*REQUIRED, "not_a_server_error", "response_headers_conformance")]


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with StubUpstream() as stub, RunningProxy(stub.url, policy="vote", shifts=3) as proxy:
        stub.log = False
        yield proxy.root


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        (label, mode)
        for label, operation in OPERATIONS.items()
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or operation.body or operation.headers
    ],
)
def test_replies_are_as_described(root, label, mode, caplog):
    operation = OPERATIONS[label]

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.validate_response(case.call(base_url=root), checks=CHECKED)

    fuzz()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["chat/completions", "completions"]),
    st.binary(max_size=80) | st.text(max_size=40).map(lambda text: f'{{"model":"echo","prompt":{text}}}'.encode()),
    st.sampled_from(["vote", "align", "off"]),
)
def test_any_body_is_answered(root, route, body, policy):
    headers = {"x-isophase-policy": policy}
    reply = httpx2.post(f"{root}/v1/{route}", content=body, headers=headers, trust_env=False)
    assert reply.status_code < 500
