"""The message of a refused conversion is short whatever the tensors are called."""

import pytest

from jax_transformer.convert.report import ConversionError, Report


@pytest.mark.parametrize("name", ["a\n" * 100, "a\u2028b\x1b[2J", "x" * 5000])
def test_a_refusal_is_short_and_the_report_is_whole(name):
    report = Report("reference", hint=f"strip\n{name}")
    for number in range(500):
        report.add("unexpected", f"{name}{number}", f"nearest: {name}")
        report.add("missing", f"{chr(97 + number % 26)}{name}", name)
    refusal = ConversionError(report)
    assert len(str(refusal).splitlines()) <= 22
    assert len(str(refusal)) < 22 * 1000
    assert "\x1b" not in str(refusal)
    assert refusal.report.faults[0].name == f"{name}0"
    assert len(refusal.report.faults) == 1000
