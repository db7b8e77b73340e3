"""What the gate lets through."""

from benchmarks.gate import show


def test_what_is_slower_in_the_median_is_named():
    rounds = [
        {"old": {"step": 1.0, "search": 2.0}, "new": {"step": ours, "search": 2.0}}
        for ours in (0.9, 1.05, 1.2)
    ]
    table, slower = show(rounds, limit=1.03)
    assert slower == ["step"]
    assert list(table.columns[-1].cells) == ["0.90 - 1.05 - 1.20", "1.00 - 1.00 - 1.00"]
    assert show(rounds, limit=1.06)[1] == []
