"""No config takes time or memory that the weights behind it do not: a thousand that try."""

import json

import pytest

from tests.hostile_configs import BYTES, SECONDS
from tests.programs import run_python
from tests.tiers import tiered


@pytest.mark.parametrize("count", tiered([200, 1000], [], [200]))
def test_hostile_configs_are_refused_or_read_alike(count):
    found = json.loads(run_python("-m", "tests.hostile_configs", count, 0, timeout=600).stdout)
    print({name: value for name, value in found.items() if name != "fell"})
    assert found["fell"] == []
    assert found["tried"] == found["refused"] + found["accepted"] == count
    assert found["accepted"] > count // 100
    assert found["slowest"][0] < SECONDS, found["slowest"]
    assert found["largest"][0] < BYTES, found["largest"]
