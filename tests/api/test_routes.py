"""The table of routes: what it names is there, and the router and the description are made of the same rows."""

from __future__ import annotations

import pytest

from api.endpoint import Endpoint, found
from api.openapi import document
from api.routes import ENDPOINTS, routes


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_every_named_handler_and_struct_exists(endpoint: Endpoint) -> None:
    assert callable(found(endpoint.handler))
    structs = [struct for shape in endpoint.body for struct in shape]
    for struct in (endpoint.answer, endpoint.event, endpoint.error, endpoint.unavailable, endpoint.form, *structs):
        found(struct)


def test_every_described_path_is_routed() -> None:
    routed = {route.path.replace(":path}", "}") for route in routes()}  # type: ignore[attr-defined]
    assert set(document(("model",))["paths"]) == routed - {"/admin/gangs"}
