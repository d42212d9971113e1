"""The table of routes names handlers and structs that exist."""

from __future__ import annotations

import pytest

from api.endpoint import Endpoint, found
from api.routes import ENDPOINTS


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_every_named_handler_and_struct_exists(endpoint: Endpoint) -> None:
    assert callable(found(endpoint.handler))
    structs = [struct for shape in endpoint.body for struct in shape]
    for struct in (endpoint.answer, endpoint.event, endpoint.error, endpoint.unavailable, endpoint.form, *structs):
        found(struct)
