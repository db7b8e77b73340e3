import copy
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jax_transformer.errors import InputError
from jax_transformer.text.bpe_dropout import EVERY_MERGE, BPEDropout
from jax_transformer.tokenizers import parse_byte_pair, separate, train_byte_pair
from tests.tiers import tiered_rows
from tests.tokenizers.conftest import CHARACTERS, LINES

# Unknown letters, marks that combine, symbols, kinds of space, the replacement character
ODD = CHARACTERS + "жQ漢😀\ufffd\u0308\u0301\u0323\u2028\xa0\t"
LINE = st.lists(st.text(ODD) | st.sampled_from(" ".join(LINES).split()) | st.just(" ")).map("".join)


@pytest.fixture(scope="module")
def half(tokenizer):
    return BPEDropout(tokenizer, 0.5)


def encoded(tokenizer, line):
    """Return the ids of a target: BOS, the line, EOS."""
    return np.array([tokenizer.bos_id, *tokenizer.encode_source([line])[0]], np.uint16)


@pytest.fixture(scope="module")
def all_dropped(tokenizer):
    return BPEDropout(tokenizer, 1.0)


@given(line=LINE, cut=st.integers(0, 40))
def test_merges_of_which_none_is_dropped_give_the_ids_of_the_line(tokenizer, half, line, cut):
    ids = encoded(tokenizer, line)[:cut]  # a line may be cut after any token
    assert remerged(half, ids).tolist() == ids.tolist()


def remerged(dropout, ids):
    """Segment every word again, characters first, with no merge dropped."""
    dropout = copy.copy(dropout)
    segment, calls = dropout._segmented, 0

    def undropped(word, numbers, dtype):
        nonlocal calls
        calls += 1
        return segment(word, bytes(len(numbers)), dtype)

    dropout._segment = undropped
    dropout._draw = lambda count, entropy: np.ones(count, np.uint16)
    new = dropout.encode(ids, ())
    assert calls or not (dropout._lengths[ids] > 1).any()
    return new


@given(line=LINE, rate=st.sampled_from([0.1, 0.5, 1.0]), seed=st.integers(0, 9))
def test_the_bytes_of_unknown_characters_stay(with_bytes, line, rate, seed):
    tokenizer, ids = with_bytes, np.array(with_bytes.encode_source([line])[0])
    assert remerged(BPEDropout(tokenizer, 0.5), ids).tolist() == ids.tolist()
    new = BPEDropout(tokenizer, rate).encode(ids, (seed,))
    assert tokenizer.decode(new[:-1]) == tokenizer.decode(ids[:-1])
    assert new[new < 260].tolist() == ids[ids < 260].tolist()


@given(line=LINE, rate=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 9))
def test_the_text_and_the_special_ids_stay(tokenizer, line, rate, seed):
    ids = encoded(tokenizer, line)
    new = BPEDropout(tokenizer, rate).encode(ids, (seed,))
    assert tokenizer.source_texts(new)[0] == "<s>"
    assert tokenizer.source_texts(new)[-1] == "</s>"
    assert "".join(tokenizer.source_texts(new)) == "".join(tokenizer.source_texts(ids))
    assert np.sum(new == tokenizer.unk_id) == np.sum(ids == tokenizer.unk_id)
    assert len(new) >= len(ids)


@given(line=LINE)
def test_rate_1_leaves_characters(tokenizer, all_dropped, line):
    ids = encoded(tokenizer, line)
    new = all_dropped.encode(ids, (1,))
    ordinary = ids[ids > tokenizer.unk_id]
    characters = "".join(tokenizer.source_texts(ordinary))
    assert "".join(tokenizer.source_texts(new[new > tokenizer.unk_id])) == characters
    assert len(new) == len(ids) - len(ordinary) + len(characters)


@pytest.mark.parametrize("place", range(5))
def test_a_word_whose_first_step_drops_everything_is_characters_and_the_others_stay(
    tokenizer, place
):
    words = [" das", " Haus", ",", " das", " Haus"]
    ids = encoded(tokenizer, "das Haus, das Haus")
    assert tokenizer.source_texts(ids)[1:-1] == words
    numbers = np.zeros(len("<") + sum(map(len, words)) + len("<"), np.uint16)
    numbers[1 + sum(map(len, words[:place]))] = EVERY_MERGE
    dropout = BPEDropout(tokenizer, 0.5)
    dropout._draw = lambda count, entropy: numbers[:count]
    new = tokenizer.source_texts(dropout.encode(ids, ()))
    assert new[1:-1] == [*words[:place], *words[place], *words[place + 1 :]]


def test_other_entropy_gives_other_subwords(tokenizer):
    ids = encoded(tokenizer, " ".join(LINES[:3]))
    dropout = BPEDropout(tokenizer, 0.3)
    entropies = [(1, 2, 0, 0), (2, 2, 0, 0), (1, 3, 0, 0), (1, 2, 1, 0), (1, 2, 0, 1), (12, 0, 0)]
    assert len({dropout.encode(ids, entropy).tobytes() for entropy in entropies}) == 6


@pytest.mark.parametrize(
    ("epoch", "texts"),
    [
        (0, " Das| Haus|,| das| |kl|e|i|ne| |H|a|us"),
        (1, " |D|as| H|a|us|,| d|a|s| |kl|ei|n|e| Haus"),
    ],
)
def test_every_platform_and_version_draws_the_same_numbers(tokenizer, epoch, texts):
    ids = np.array(tokenizer.encode_source(["Das Haus, das kleine Haus"])[0][:-1])
    new = BPEDropout(tokenizer, 0.3).encode(ids, (7, 2**70, epoch))
    assert "|".join(tokenizer.source_texts(new)) == texts


def test_the_dtype_of_the_ids_stays_and_changes_no_id(tokenizer):
    dropout = BPEDropout(tokenizer, 0.3)
    for dtype in (np.int32, np.uint16, np.uint32, np.int64):
        ids = encoded(tokenizer, LINES[0]).astype(dtype)
        new = dropout.encode(ids, (1,))
        assert new.dtype == dtype
        assert new.tolist() == BPEDropout(tokenizer, 0.3).encode(ids, (1,)).tolist()
        new += 1  # the array is the caller's


def test_forgetting_words_changes_nothing(tokenizer, monkeypatch):
    ids = encoded(tokenizer, " ".join(LINES[:3]))
    kept = BPEDropout(tokenizer, 0.3)
    before = [kept.encode(ids, (i,)).tolist() for i in range(50)]
    monkeypatch.setattr("jax_transformer.text.bpe_dropout.MOST_CACHED", 4)
    forgetful = BPEDropout(tokenizer, 0.3)
    assert [forgetful.encode(ids, (i,)).tolist() for i in range(50)] == before
    assert forgetful._segment.cache_info().currsize <= 4 < kept._segment.cache_info().currsize
    assert [kept.encode(ids, (i,)).tolist() for i in reversed(range(50))] == before[::-1]


def with_merges(merges):
    """Return a tokenizer of the letters a to e and "(" with the given merges, best first."""
    content = json.loads(train_byte_pair(["a b c d e ("], 20).contents["tokenizer.json"].decode())
    vocab = content["model"]["vocab"]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    content["model"]["merges"] = [list(pair) for pair in merges]
    return parse_byte_pair(json.dumps(content), "merges")


ACROSS = [("(", "a"), ("a", "("), ("a", " "), (" ", "("), ("(", "("), ("(", " "), ("a", "b")]


def test_no_merge_reaches_across_words():
    tokenizer = with_merges(ACROSS)
    dropout = BPEDropout(tokenizer, 0.5)
    for line in map("".join, itertools.product("ab( ж", repeat=4)):
        ids = encoded(tokenizer, line)
        assert remerged(dropout, ids).tolist() == ids.tolist()


def probabilities(word, merges, rate):
    """Return the probability of each segmentation: algorithm 1, over all sets of dropped merges."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    finished, current = Counter(), {tuple(word): 1.0}
    while current:
        following = Counter()
        for symbols, probability in current.items():
            pairs = list(itertools.pairwise(symbols))
            possible = [i for i, pair in enumerate(pairs) if pair in ranks]
            for subset in range(2 ** len(possible)):
                left = [i for bit, i in enumerate(possible) if subset >> bit & 1]
                share = probability * (1 - rate) ** len(left) * rate ** (len(possible) - len(left))
                if not left:
                    finished[symbols] += share
                    continue
                i = min(left, key=lambda i: (ranks[pairs[i]], i))
                following[(*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :])] += share
        current = {symbols: share for symbols, share in following.items() if share}
    return finished


OVERLAPPING = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("c", "d"), ("abc", "d")]
SEPARATE = [("a", "b"), ("c", "d"), ("ab", "cd"), ("abcd", "e")]
MERGES = {"abcde": SEPARATE, "abcd": OVERLAPPING, "ababc": OVERLAPPING, "aaaa": [("a", "a")]}
DRAWS = 4000


RATES = [("ababc", 0.5), ("abcde", 0.1), ("abcd", 0.8), ("aaaa", 0.5)]


@pytest.mark.parametrize(("word", "rate"), tiered_rows(RATES, lambda word, rate: word == "ababc"))
def test_segmentations_are_as_frequent_as_algorithm_1_makes_them(word, rate):
    merges = MERGES[word]
    expected = probabilities(word, merges, rate)
    assert sum(expected.values()) == pytest.approx(1)
    tokenizer = with_merges(merges)
    ids, dropout = np.array(tokenizer.encode_source([word])[0][:-1]), BPEDropout(tokenizer, rate)
    news = (dropout.encode(ids, (5, i)) for i in range(DRAWS))
    # The space that begins a word is left out: it takes part in no merge.
    observed = Counter(tuple(tokenizer.source_texts(new)[1:]) for new in news)
    assert set(observed) <= set(expected)
    common = [symbols for symbols in expected if expected[symbols] * DRAWS >= 5]
    counts = [observed[symbols] for symbols in common]
    shares = [expected[symbols] * DRAWS for symbols in common]
    rare = DRAWS - sum(shares)
    if rare > 1e-6:
        counts, shares = [*counts, DRAWS - sum(counts)], [*shares, rare]
    assert stats.chisquare(counts, shares).pvalue > 1e-4


def test_another_kind_of_tokenizer_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"byte_pair tokenizer, not on separate; .* train a .*$"):
        BPEDropout(separate(tokenizer, tokenizer), 0.1)


def test_an_empty_line_stays_empty(all_dropped):
    assert all_dropped.encode(np.array([], np.uint16), (1,)).tolist() == []
    assert all_dropped.encode(np.array([2], np.uint16), (1,)).tolist() == [2]
