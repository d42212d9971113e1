"""Chat templates for tests: our own, one for each format of calls, and published ones if they were fetched."""

from __future__ import annotations

from tests.paths import REPOSITORY
from tests.published_files import published_templates

OWN_TEMPLATES = {
    path.stem: path.read_text() for path in sorted((REPOSITORY / "tests/engine/parsers/templates").glob("*.jinja"))
}
TEMPLATES = OWN_TEMPLATES | published_templates()
