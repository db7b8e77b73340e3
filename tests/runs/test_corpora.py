"""The text of a run: what is held out, mixed, kept and prepared only once."""

import contextlib
import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from jax_transformer import InputError
from jax_transformer.runs.arguments import Arguments
from jax_transformer.runs.corpora import encode_corpora, read_corpora, try_corpora
from jax_transformer.text import prepare as preparing
from jax_transformer.text import samples
from jax_transformer.text.parallel_text import Text
from jax_transformer.text.samples import held_out
from jax_transformer.text.store import read_entry, write_entry
from tests.text.texts import refuse_lines

QUIET = Console(file=io.StringIO(), soft_wrap=True)


def numbered(pairs, blank=()):
    sources = ["" if number in blank else str(number) for number in range(pairs)]
    targets = [f"<{number}>" for number in range(pairs)]
    return Text(tuple(sources), tuple(targets))


@pytest.mark.parametrize(("pairs", "count"), [(2, 1), (60, 40), (3000, 1000)])
def test_each_held_out_pair_has_text_on_both_sides(tmp_path, pairs, count):
    blank = range(0, pairs, 7)[1:]
    count = min(count, pairs - len(blank) - 1)
    numbers, validation = held_out(tmp_path, numbered(pairs, blank), count, 3, QUIET)
    assert len(numbers) == count == len(set(numbers.tolist()))
    assert numbers.tolist() == sorted(numbers.tolist())
    assert not set(numbers.tolist()) & set(blank)
    assert validation.sources == tuple(map(str, numbers))
    assert validation.targets == tuple(f"<{number}>" for number in numbers)


def test_the_seed_alone_chooses_and_the_choice_is_kept(tmp_path, monkeypatch):
    text = numbered(200)
    chosen = {seed: held_out(tmp_path, text, 20, seed, QUIET)[0].tolist() for seed in (3, 4)}
    assert chosen[3] != chosen[4]
    monkeypatch.setattr(samples, "chosen_pairs", None)  # the text is not read again
    assert held_out(tmp_path, text, 20, 3, QUIET)[0].tolist() == chosen[3]


@pytest.mark.parametrize(("pairs", "count"), [(1, 1), (5, 5), (5, 6)])
def test_a_split_without_training_pairs_is_refused(tmp_path, pairs, count):
    with pytest.raises(InputError, match=f"valid_pairs={count} leaves none of {pairs} pairs"):
        held_out(tmp_path, numbered(pairs), count, 0, QUIET)


@pytest.fixture
def settings(tmp_path):
    """Return the settings of a text of 300 pairs, some of them blank, long, unequal or repeated."""
    words = ["eins zwei", "drei", "vier fünf sechs", "sieben acht"]
    sources = [f"{words[number % 4]} {number // 8}" for number in range(300)]
    targets = [line.upper() for line in sources]
    sources[5] = " "
    sources[6] = targets[6] = "lang " * 50
    targets[7] = "eins zwei drei vier fünf sechs sieben acht neun"
    for side, lines in (("de", sources), ("en", targets)):
        (tmp_path / f"train.{side}").write_text("\n".join(lines) + "\n")
        (tmp_path / f"valid.{side}").write_text("\n".join(lines[:4]) + "\n")
    return Arguments(
        source=(tmp_path / "train.de",),
        target=(tmp_path / "train.en",),
        valid_source=(tmp_path / "valid.de",),
        valid_target=(tmp_path / "valid.en",),
        vocab_size=80,
        tokenizer_pairs=10**6,
        model={"max_length": 40},
        prepared=tmp_path / "store",
    )


def encode(settings):
    return encode_corpora(read_corpora(settings, None, QUIET), settings, QUIET)


def test_filters_drop_and_count_pairs(settings):
    def dropped(**changes):
        found = encode(replace(settings, **changes)).training
        assert len(found) == 300 - sum(found.counts.dropped.values())
        return found.counts.dropped

    plain = {"dropped for an empty side": 1, "dropped as too long": 1}
    assert dropped() == plain
    assert dropped(max_ratio=4.0) == plain | {"dropped for unequal lengths": 1}
    sources, targets = (
        path.read_text().splitlines() for (path,) in (settings.source, settings.target)
    )
    pairs = list(zip(sources, targets, strict=True))
    assert dropped(drop_duplicates=True) == plain | {"dropped as duplicates": 300 - len(set(pairs))}
    assert dropped(longest_side=12)["dropped as too long"] > 1


def test_a_pair_with_a_side_that_nobody_sees_is_dropped(settings):
    path = settings.target[0]
    lines = path.read_text().splitlines()
    lines[10:13] = ["\u200b", "\u00ad\ufeff", " \u2060\ufe0f"]
    path.write_text("\n".join(lines))
    found = encode(replace(settings, drop_duplicates=True)).training
    assert found.counts.dropped["dropped for an empty side"] == 4


def test_bad_lines_of_training_and_validation_are_dropped_and_reported(settings):
    sources, valid_targets = settings.source[0], settings.valid_target[0]
    good = encode(settings)
    for path, number in ((sources, 20), (valid_targets, 2)):
        lines = path.read_bytes().split(b"\n")
        lines[number - 1] = b"\xff"
        path.write_bytes(b"\n".join(lines))
        place = f"{path}:{number}:1"
        with pytest.raises(InputError, match=f"^{place}: byte 0xff is not UTF-8"):
            encode(settings)
        sources.write_bytes(sources.read_bytes().replace(b"\xff", b"drei"))
    sources.write_bytes(sources.read_bytes().replace(b"drei", b"\xff", 1))
    skipping = replace(settings, bad_lines="skip")
    corpora = encode(skipping)
    training, validation = corpora.report
    assert "1 dropped for a bad line, 1 dropped for an empty side; 297 pairs of" in training
    assert training.endswith(f"; first bad lines: {sources}:2:1")
    assert "4 pairs read, 1 dropped for a bad line; 3 pairs of" in validation
    assert validation.endswith(f"; first bad lines: {valid_targets}:2:1")
    assert len(corpora.validation) == len(corpora.validation_text.sources) == 3
    assert try_corpora(read_corpora(skipping, None, QUIET), skipping, QUIET) == (training,)
    assert good.sha256 != corpora.sha256


def test_a_held_out_pair_that_the_tokenizer_refuses_is_dropped_too(settings, monkeypatch):
    settings = replace(
        settings, valid_source=None, valid_target=None, valid_pairs=40, bad_lines="skip"
    )
    corpora = read_corpora(settings, None, QUIET)
    refuse_lines(monkeypatch, "encode_source", "drei 3", "is no source")
    refused = sum("drei 3" in line for line in corpora.validation[0].sources)
    assert refused > 1
    found = encode_corpora(corpora, settings, QUIET)
    assert len(found.validation) == 40 - refused
    assert len(found.validation_text.sources) == 40 - refused
    assert not any("drei 3" in line for line in found.validation_text.sources)
    assert f"{refused:,} dropped for a bad line" in found.report[1]
    assert "; first bad lines: pair " in found.report[1]
    with pytest.raises(InputError, match=r"^pair \d+: is no source"):
        encode_corpora(corpora, replace(settings, bad_lines="refuse"), QUIET)


def test_a_text_read_in_another_way_is_prepared_anew(settings):
    skipping = replace(settings, bad_lines="skip")
    first, second = encode(settings), encode(skipping)
    assert first.sha256 != second.sha256
    assert first.training.parts[0].folder != second.training.parts[0].folder
    assert first.training.counts == second.training.counts  # no line is bad


def test_a_dry_run_reports_what_is_kept_and_writes_no_shard(settings):
    corpora = read_corpora(settings, None, QUIET)
    reported = try_corpora(corpora, settings, QUIET)
    assert not (settings.store / "corpora").exists()
    assert encode_corpora(corpora, settings, QUIET).report[:1] == reported
    assert "298 pairs of" in reported[0]


def test_a_text_is_encoded_once_and_the_digest_tells_what_of(settings, monkeypatch):
    first = encode(settings)
    monkeypatch.setattr(preparing, "prepare", None)  # nothing is encoded again
    monkeypatch.setattr(samples, "train_byte_pair", None)
    again = encode(settings)
    assert again.sha256 == first.sha256
    every = np.arange(len(first.training))
    np.testing.assert_array_equal(first.training.read(every).ids, again.training.read(every).ids)
    monkeypatch.undo()
    path = settings.source[0]
    path.write_text(path.read_text().replace("drei 7", "drei 9"))
    assert encode(settings).sha256 != first.sha256


def test_the_text_of_another_run_is_refused_before_its_duplicates_are_searched(
    settings, monkeypatch
):
    settings = replace(settings, drop_duplicates=True)
    corpora = read_corpora(settings, None, QUIET)
    monkeypatch.setattr(preparing, "repeated_pairs", lambda *_: pytest.fail("searched"))
    with pytest.raises(InputError, match="text's sha256="):
        encode_corpora(corpora, settings, QUIET, "0" * 64)


def test_the_digest_is_of_the_validation_text_and_not_of_its_ids(settings):
    digests = set()
    for unknown in "♠♣":
        settings.valid_target[0].write_text(f"EINS {unknown}\n" * 4)
        digests.add(encode(settings).sha256)
    assert len(digests) == 2
    tokenizer = read_corpora(settings, None, QUIET).tokenizer
    assert unknown not in tokenizer.decode(tokenizer.encode_source([unknown])[0][:-1])


def test_held_out_pairs_are_not_trained_on(settings):
    found = encode(replace(settings, valid_source=None, valid_target=None, valid_pairs=20))
    assert len(found.validation_text.sources) == 20
    assert found.training.counts.dropped["held out for validation"] == 20


def test_files_with_weights_are_mixed_by_them(settings):
    source, target = settings.source * 2, settings.target * 2
    mixed = replace(settings, source=source, target=target, weights=(3.0, 1.0))
    corpus = encode(mixed).training
    assert len(corpus) == 2 * 298
    numbers = corpus.draw(0, range(400))[0]
    assert np.count_nonzero(numbers < 298) == 300
    of_first = numbers[numbers < 298].tolist()
    assert len(set(of_first[:298])) == 298  # every pair before one occurs again
    place = int(np.flatnonzero(numbers >= 298)[0])
    single = encode(settings).training.read(numbers[[place]] - 298)
    np.testing.assert_array_equal(np.concatenate(corpus.read(numbers).sides()[place]), single.ids)


def test_files_that_were_prepared_one_by_one_are_a_mix_without_more_work(
    settings, monkeypatch, tmp_path
):
    tokenizer = read_corpora(settings, None, QUIET).tokenizer
    other = tuple((tmp_path / f"other.{side}",) for side in ("de", "en"))
    sides = (settings.source, settings.target), other
    for (path,), (copy,) in zip(*sides, strict=True):
        copy.write_text(path.read_text().replace("drei 7", "drei 9"))

    def prepared(source, target, weights=None):
        changed = replace(settings, source=source, target=target, weights=weights)
        return encode_corpora(read_corpora(changed, tokenizer, QUIET), changed, QUIET).training

    alone = [prepared(*files) for files in sides]
    monkeypatch.setattr(preparing, "prepare", None)  # nothing is encoded again
    for (source, target), (next_source, next_target) in (sides, sides[::-1]):
        mixed = prepared(source + next_source, target + next_target, (1.0, 1.0))
        assert len(mixed) == sum(map(len, alone))


def test_a_weight_for_each_of_the_sources_is_needed(settings):
    source, target = settings.source * 2, settings.target * 2
    with pytest.raises(InputError, match="weights="):
        encode(replace(settings, source=source, target=target, weights=(1.0,)))


def test_a_model_too_short_for_all_is_refused(settings):
    with pytest.raises(InputError, match="max_length=2 leaves none of 4 pairs; raise it"):
        encode(replace(settings, model={"max_length": 2}))


@pytest.mark.parametrize("kind", ["texts", "held_out", "tokenizers"])
def test_a_damaged_entry_of_the_store_is_refused_in_one_line(settings, kind):
    settings = replace(settings, valid_source=None, valid_target=None, valid_pairs=20)
    encode(settings)
    (entry,) = (settings.store / kind).glob("*.json")
    for content in (b"", b"[1, 2", b"{}", b"\xff"):
        entry.write_bytes(content)
        with pytest.raises(InputError, match="delete it") as refused:
            encode(settings)
        assert str(entry) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_no_flipped_bit_of_an_entry_of_the_store_is_read(tmp_path):
    path, generator = tmp_path / "entry.json", np.random.default_rng(7)
    content = [[3, 17, 40], ["ein Haus", "größer", '\t"'], {"merges": ["a b", "ab c"]}]
    write_entry(path, content)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        # A bit may also change the case of a digit of an escape, which has the same value.
        with contextlib.suppress(InputError):
            assert read_entry(path, list) == content
