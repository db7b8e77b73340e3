"""A run killed before any change of its output is started again by the line of a supervisor."""

from collections import Counter

import pytest

from tests.programs import run_python
from tests.tiers import tiered


@pytest.mark.parametrize("every", tiered([1, 5], [], [5]))
def test_a_run_may_be_killed_at_every_change_of_its_output_and_started_again(tmp_path, every):
    done = run_python("-m", "tests.commands.killed_starts", tmp_path, every, timeout=600)
    ways = Counter(done.stdout.splitlines())
    counts = {way: ways[way] for way in ("started", "resumed", "overwritten")}
    print(counts)
    assert min(counts.values()) >= 10 // every
