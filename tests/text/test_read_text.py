import random

import pytest

from jax_transformer.errors import InputError
from jax_transformer.text.parallel_text import Text, read_text
from jax_transformer.text.text_files import LONGEST_LINE


def test_pairs_are_never_shifted_by_an_empty_side(write):
    generator = random.Random(0)
    pairs = 1000
    sources = [f"source {number}" for number in range(pairs)]
    targets = [f"target {number}" for number in range(pairs)]
    emptied = generator.sample(range(pairs), 100)
    for place in emptied:
        blank = generator.choice(["", " ", "\t\u2003", "\u2028"])
        side = generator.choice(["source", "target", "both"])
        if side != "target":
            sources[place] = blank
        if side != "source":
            targets[place] = blank

    corpus = read_text(
        write("source", "\n".join(sources).encode()), write("target", "\n".join(targets).encode())
    )

    kept = sorted(set(range(pairs)) - set(emptied))
    found = zip(corpus.sources, corpus.targets, strict=True)
    false = set(found) - {(f"source {number}", f"target {number}") for number in kept}
    print(
        f"\n{len(emptied)} of {pairs:,} pairs emptied on a side or both: {len(false)} false pairs"
    )
    assert not false
    assert corpus.sources == tuple(f"source {number}" for number in kept)
    assert corpus.targets == tuple(f"target {number}" for number in kept)
    assert corpus.dropped_empty == 100


def test_files_of_different_line_counts_are_refused_with_both_counts(write):
    source, target = write("source", b"a\n" * 1200), write("target", b"b\n" * 1199)
    with pytest.raises(InputError) as refusal:
        read_text(source, target)
    for named in (str(source), str(target), "1,200", "1,199"):
        assert named in str(refusal.value)


@pytest.mark.parametrize(("source", "target"), [(b"", b""), (b"a\n\n", b" \nb\n"), (b"\n", b"\n")])
def test_files_without_a_pair_are_refused(write, source, target):
    with pytest.raises(InputError, match="no pair"):
        read_text(write("source", source), write("target", target))


def test_several_files_and_pairs_of_a_tsv_file_read_alike(write):
    sources = [write("source1", b"a\n"), write("source2", b" \nc\n")]
    targets = [write("target1", b"A\n"), write("target2", b"B\nC\n")]
    pairs = [write("pairs1.tsv", b"a\tA\n"), write("pairs2.tsv", b" \tB\nc\tC\n")]
    expected = Text(("a", "c"), ("A", "C"), dropped_empty=1)
    assert read_text(sources, targets) == expected
    assert read_text(pairs) == expected
    assert read_text(str(pairs[0])) == Text(("a",), ("A",))


def test_an_overlong_line_is_refused_by_place(write):
    source, target = write("source", b"a\nb\n"), write("target", b"a\n" + b"b" * (LONGEST_LINE + 1))
    with pytest.raises(InputError) as refusal:
        read_text(source, target)
    assert str(refusal.value).startswith(f"{source} or {target}:2: is longer than 1,048,576 bytes")
