"""Plain text: documents of files, prepared as texts, cut into pieces that fill rows."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.text import parallel_text
from jax_transformer.text.batches import epoch_batches, make_batch, padding_share
from jax_transformer.text.corpus import Corpus, packed_part
from jax_transformer.text.denoising import (
    LONGEST_TEXT,
    MODE_TOKENS,
    OBJECTIVES,
    SENTINEL,
    Objective,
    denoisers,
)
from jax_transformer.text.encoding import special_ids
from jax_transformer.text.parallel_text import Reading, TextFiles
from jax_transformer.text.pieces import FEWEST, Piece, fill_rows
from jax_transformer.text.plan import epoch_layout, plan_epoch, take_rows
from jax_transformer.text.store import with_known_facts
from jax_transformer.tokenizers import train_unigram
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import WORDS, corpus, corpus_of, lines, quiet, sides, trained, write
from tests.tiers import tiered_rows

SENTINELS = [SENTINEL.format(number) for number in range(100)]
TOKENIZER = train_unigram(
    [" ".join(WORDS)] * 9, 220, special_tokens=[*SENTINELS, *MODE_TOKENS], byte_fallback=False
)


def plain(tmp_path, content, documents="lines", bad_lines="refuse"):
    path = tmp_path / "plain.txt"
    path.write_bytes(content)
    reading = Reading(bad_lines=bad_lines, documents=documents)
    return TextFiles((path,), reading=reading)


def ids_of(store, text, **options):
    """Return the ids of the texts, and the ends that they have in the place of targets."""
    found = sides(corpus(store, text, tokenizer=TOKENIZER, **options))
    assert {tuple(target.tolist()) for _, target in found} <= {(0, 1)}
    return [source.tolist() for source, _ in found]


def encoded(*texts):
    return TOKENIZER.encode_text(texts)


def objective_of(name="span_corruption", longest=128, seed=0):
    chosen = OBJECTIVES[name]
    prefixes = tuple(tuple(ids) for ids in TOKENIZER.encode_text([d.prefix for d in chosen]))
    return Objective(chosen, prefixes, special_ids(TOKENIZER, name, chosen), longest, seed)


def texts_of(lengths, name="span_corruption", **options):
    """Return a corpus of texts of random ids, of these lengths."""
    random = np.random.default_rng(1)
    texts = [np.append(random.integers(3, 60, n), [0, 1]).astype(np.uint16) for n in lengths]
    part = packed_part(texts, list(lengths))._replace(objective=objective_of(name, **options))
    return Corpus([part], TOKENIZER.src_vocab_size, TOKENIZER.src_vocab_size)


def settings(**others):
    named = {"batching": "packed", "max_tokens": 1024, "pack_length": 256} | others
    return TrainingConfig(**named)


def test_a_document_is_a_line_or_stands_between_blank_lines(tmp_path):
    content = b"eins zwei\r\n\n \ndrei\nvier eins\n\n\nneun acht"
    store = tmp_path / "store"
    assert ids_of(store, plain(tmp_path, content)) == encoded(
        "eins zwei", "drei", "vier eins", "neun acht"
    )
    found = ids_of(store, plain(tmp_path, content, "blank_lines"))
    assert found == encoded("eins zwei", "drei vier eins", "neun acht")
    joined = [[*ids, 1] for ids in encoded("eins zwei", "drei", "vier eins", "neun acht")]
    assert ids_of(store, plain(tmp_path, content, "joined")) == [[*itertools.chain(*joined)]]


def test_a_long_document_is_several_texts_without_a_token_lost(tmp_path):
    content = " ".join(WORDS * 700)
    found = ids_of(tmp_path / "store", plain(tmp_path, f"eins\n{content}\n".encode()))
    assert found[0] == encoded("eins")[0]
    assert [*itertools.chain(*found[1:])] == encoded(content)[0]
    assert len(found[1:]) > 1
    assert max(map(len, found)) <= LONGEST_TEXT


def test_blocks_of_documents_have_a_bounded_size(tmp_path, monkeypatch):
    text = plain(tmp_path, b"eins zwei drei vier\n" * 40)
    assert [len(block.sources) for block in text.blocks(2**10)] == [4] * 10
    monkeypatch.setattr(parallel_text, "LONGEST_LINE", 50)
    (block,) = plain(tmp_path, b"eins zwei drei\n" * 40, "blank_lines").blocks(2**14)
    assert max(map(len, block.sources)) <= 50  # a document without blank lines is cut
    assert b"\n".join(block.sources).count(b"drei") == 40


def test_a_document_that_spells_a_sentinel_is_a_bad_line(tmp_path):
    content = b"eins zwei\nzwei <extra_id_3> drei\n"
    with pytest.raises(InputError, match=r"plain.txt:2: spells a sentinel or a mask"):
        ids_of(tmp_path / "store", plain(tmp_path, content))
    skipping = corpus(
        tmp_path / "store", plain(tmp_path, content, bad_lines="skip"), tokenizer=TOKENIZER
    )
    assert skipping.counts.bad_lines == (f"{tmp_path / 'plain.txt'}:2",)
    assert len(skipping) == 1


@pytest.mark.parametrize(
    ("name", "noise", "sentinels", "refused"),
    [
        ("span_corruption", (None, None), 0, "up to <extra_id_0>, and the tokenizer has 0; train"),
        ("ul2", (None, None), 1, "up to <extra_id_1>, and the tokenizer has 1; train one with --s"),
        ("span_corruption", (0.5, 1.0), 6, "up to <extra_id_6>, and the tokenizer has 6; train"),
        ("infilling", (None, None), 100, "the token <mask>, which the tokenizer lacks; train one"),
    ],
)
def test_a_tokenizer_without_the_tokens_of_an_objective_is_refused(name, noise, sentinels, refused):
    """With one sentinel more, every short text has an example."""
    chosen = denoisers(name, *noise)

    def ids_of_few(count):
        tokens = [*SENTINELS[:count], *MODE_TOKENS[name == "infilling" :]]
        tokenizer = train_unigram(
            [" ".join(WORDS)] * 9, 120 + count, special_tokens=tokens, byte_fallback=False
        )
        return special_ids(tokenizer, name, chosen)

    with pytest.raises(InputError, match=f"objective='{name}' needs .*{refused}"):
        ids_of_few(sentinels)
    if name != "infilling":
        enough = Objective(chosen, ((),) * len(chosen), ids_of_few(sentinels + 1), 128, 0)
        texts = [(Piece(i, 0, 0, 2 + i % 40, 2 + i % 40, 1), enough) for i in range(400)]
        assert len([*itertools.chain(*fill_rows(texts, (128, 128)))]) >= 400


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_token_of_a_text_is_in_one_piece_of_an_epoch(name):
    lengths = [2, 3, 7, 8, 9, 15, 16, 17, 40, 129, 700, LONGEST_TEXT]
    texts = texts_of(lengths, name)
    seen = defaultdict(list)
    for planned in plan_epoch(texts, settings(), 0):
        for piece in planned.pieces:
            seen[piece.number].append((piece.begin, piece.end))
    assert sorted(seen) == [*range(len(lengths))]
    for number, spans in seen.items():
        ends = [0, *(end for _, end in sorted(spans))]
        assert sorted(spans) == list(itertools.pairwise(ends))
        assert ends[-1] == lengths[number]
        assert min(end - begin for begin, end in spans) >= min(FEWEST, lengths[number])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_has_the_examples_of_its_keys(name):
    texts, training = texts_of([30, 300, 45, 90] * 4, name), settings(seed=5)
    objective = texts.parts[0].objective
    whole = [source for source, _ in texts.read(np.arange(len(texts))).sides()]
    planned = plan_epoch(texts, training, 1)[0]
    batch = make_batch(texts, planned)
    assert batch.src.shape == (planned.rows, planned.length)
    assert batch.tgt_in.shape == batch.tgt_out.shape == (planned.rows, planned.target_length)
    places = Counter()
    for row, piece in zip(planned.member_rows.tolist(), planned.pieces, strict=True):
        places[row] += 1
        key = (objective.seed, 1, piece.number, piece.begin)
        text = whole[piece.number][piece.begin : piece.end]
        source, target = objective.example(text, key)
        assert batch.src[row][batch.src_segments[row] == places[row]].tolist() == source.tolist()
        of_target = batch.tgt_segments[row] == places[row]
        assert batch.tgt_in[row][of_target].tolist() == target[:-1].tolist()
        assert batch.tgt_out[row][of_target].tolist() == target[1:].tolist()
    for rows in (np.array([0, 2]), np.array([1, 3])):
        part = make_batch(texts, take_rows(planned, rows))
        assert all(np.array_equal(mine[rows], its) for mine, its in zip(batch, part, strict=True))


def test_seed_and_epoch_alone_decide_the_examples():
    def sources(seed, epoch):
        texts = texts_of([200] * 10)
        plan = plan_epoch(texts, settings(seed=seed), epoch)
        rows = [row for planned in plan for row in make_batch(texts, planned).src.tolist()]
        return [tuple(row) for row in rows if any(row)]

    first = sources(0, 0)
    assert first == sources(0, 0)
    assert not {*first} & {*sources(0, 1), *sources(1, 0)}


SHORT, LONG, ALL = (8, 40, 3_000), (600, LONGEST_TEXT, 60), None
PADDING = [  # objective, tokens of a row, shortest and longest text and their number, most padding
    ("ul2", 128, (8, 40, 360), 0.05),
    ("ul2", 128, (100, 400, 36), 0.08),
    # The proportion of source and target differs from piece to piece.
    *((name, 512, SHORT, 0.02) for name in ("ul2", "prefix_lm")),
    *((name, 512, (600, LONGEST_TEXT, 240), 0.03) for name in ("ul2", "prefix_lm")),
    *(("infilling", 512, texts, 0.02) for texts in (SHORT, LONG, ALL)),
    *(("span_corruption", 512, texts, 0.02) for texts in (SHORT, LONG, ALL)),
]


@pytest.mark.parametrize(
    ("name", "row", "drawn", "most"),
    tiered_rows(
        PADDING,
        lambda name, row, *_: row == 128,
        lambda name, *_: name in ("ul2", "infilling"),
    ),
)
def test_rows_are_full(name, row, drawn, most):
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / 300, 500) + 1 if drawn is ALL else random.integers(*drawn)
    texts = texts_of(np.minimum(lengths, LONGEST_TEXT).tolist(), name, longest=row)
    plan = plan_epoch(texts, settings(pack_length=row), 0)
    assert padding_share(texts, plan[:-1]) < most


def test_a_row_without_whole_texts_begins_with_the_first_one():
    """So that none waits for the end of the epoch."""
    made = objective_of("prefix_lm")
    rows = fill_rows([(Piece(i, 0, 0, 500, 500, 1), made) for i in range(9)], (128, 128))
    first = [row[0].number for row in rows[:12]]
    assert first == sorted(first)
    assert len({*first}) > 2


def test_an_objective_of_one_denoiser_has_its_mode_token():
    texts = texts_of([30] * 4, "ul2").by_task()
    for name, alone in texts.items():
        (mode,) = [each.prefix for each in OBJECTIVES["ul2"] if each.name == name]
        for source, _ in alone.read_pieces(plan_epoch(alone, settings(), 0)[0].pieces).sides():
            assert source[: len(encoded(mode)[0])].tolist() == encoded(mode)[0]


def test_sentences_end_with_a_full_stop_or_a_question_or_an_exclamation_mark():
    lines = ["eins zwei. drei! vier? fünf, sechs: sieben"] * 9
    tokenizer = train_unigram(lines, 40, special_tokens=MODE_TOKENS, byte_fallback=False)
    ends = special_ids(tokenizer, "infilling", OBJECTIVES["infilling"]).sentence_ends
    texts = [tokenizer.source.segmenter.token(number) for number in ends]
    assert {text[-1] for text in texts} == {".", "!", "?"}


def test_pairs_and_texts_share_rows_by_weight(tmp_path):
    store = tmp_path / "store"
    sources, targets = lines(300)
    pairs = corpus(store, write(tmp_path, sources, targets), tokenizer=TOKENIZER)
    texts = texts_of([50] * 100, "ul2")
    both = Corpus.mixed([pairs, texts], [1.0, 3.0])
    assert both.tasks == ("translation", *(d.name for d in OBJECTIVES["ul2"]))
    training = settings()
    layout = epoch_layout(both, training)
    totals = np.zeros(8, int)
    for numbered in epoch_batches(both, training, layout, 0):
        totals += numbered.task_counts
        assert sum(numbered.task_counts) == len(numbered.planned.pieces)
    # 400 draws: 100 pairs, and 300 of texts that are cut in one or two.
    assert totals[0] == 100
    assert 300 <= totals[1:].sum() < 500
    assert (totals[1:] > 20).all()


def test_a_pair_is_never_cut_and_keeps_its_ids(tmp_path):
    pairs = corpus(tmp_path / "store", write(tmp_path, *lines(60)), tokenizer=TOKENIZER)
    both = Corpus.mixed([pairs, texts_of([40] * 30)], [1.0, 1.0])
    expected = sides(pairs)
    for planned in plan_epoch(both, settings(), 0):
        read = both.read_pieces(planned.pieces).sides()
        for piece, pair in zip(planned.pieces, read, strict=True):
            if piece.number < len(pairs):
                assert all(map(np.array_equal, pair, expected[piece.number]))


def test_the_longest_pair_fits_into_the_shorter_rows():
    pairs = corpus_of([np.arange(3, 10)], [np.arange(3, 104)], TOKENIZER.src_vocab_size, 60)
    both = Corpus.mixed([pairs, texts_of([400] * 10)])
    layout = epoch_layout(both, settings())
    assert (layout.shapes[0][1], layout.target_length) == (256, 100)
    numbers = [p.number for planned in plan_epoch(both, settings(), 0) for p in planned.pieces]
    assert numbers.count(0) == 1


def test_batches_go_on_from_any_place():
    texts, training = texts_of([70] * 50, "ul2"), settings(max_tokens=256)
    layout = epoch_layout(texts, training)
    every = list(epoch_batches(texts, training, layout, 2))
    assert len(every) > 8
    later = epoch_batches(texts, training, layout, 2, (0, 7))
    for one, other in zip(every[7:], later, strict=True):
        assert all(map(np.array_equal, one.batch, other.batch))


def test_a_row_that_is_too_short_for_an_example_is_refused():
    with pytest.raises(InputError, match="a row of 4 and 4 tokens is too short"):
        fill_rows([(Piece(0, 0, 0, 50, 50, 1), objective_of())], (4, 4))


def test_duplicate_documents_are_dropped(tmp_path):
    text = plain(tmp_path, b"eins zwei\ndrei vier\neins zwei\n")
    found = ids_of(tmp_path / "store", text, drop_duplicates=True)
    assert found == encoded("eins zwei", "drei vier")


def test_a_tokenizer_is_trained_on_documents_that_are_cut(tmp_path):
    """Of a document that is longer than a line may be, no character is lost."""
    text = plain(tmp_path, b"abc " * 40 + b"xyz " * 40, documents="blank_lines")
    text = with_known_facts(tmp_path / "store", text, quiet())
    tokenizer = trained(tmp_path / "store", text, 20, 50, quiet())
    for word in ("abc", "xyz"):
        assert tokenizer.unk_id not in tokenizer.encode_source([word])[0]
