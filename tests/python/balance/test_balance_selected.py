"""`pytest -k balance` runs the tests that docs/balancer.md names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_test_file_that_the_page_names_is_selected():
    named = set(
        re.findall(r"tests/(?:python|megatron|gpu|ptx)/[\w/]*test_\w+\.py", (ROOT / "docs/balancer.md").read_text())
    )
    assert len(named) > 10
    marked = re.compile(r"^pytestmark = pytest\.mark\.balance$", re.MULTILINE)
    assert not [
        name for name in sorted(named) if "balance" not in name and not marked.search((ROOT / name).read_text())
    ]
