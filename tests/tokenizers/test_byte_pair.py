import hashlib
import json
import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.tokenizers import read_byte_pair, read_files, train_byte_pair, write_files
from tests.tokenizers.conftest import CHARACTERS, LINES

WHITESPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace())


def ids_of(tokenizer, line):
    return tokenizer.encode_source([line])[0][:-1]


def load(content):
    return read_byte_pair({"tokenizer.json": content}, {}, "x")


def edited(tokenizer, edit):
    """Return the content of its file, changed by a function."""
    content = json.loads(tokenizer.contents["tokenizer.json"])
    edit(content)
    return json.dumps(content).encode()


@given(line=st.text(CHARACTERS + WHITESPACE))
def test_decoding_gives_back_the_line_with_single_spaces(tokenizer, line):
    assert tokenizer.decode(ids_of(tokenizer, line)) == " ".join(line.split())


# Without what nobody sees, which is removed.
LINE = st.text(
    st.characters(
        codec="utf-8", exclude_categories=["Cn", "Cf"], exclude_characters="\u034f\u17b4\u17b5"
    )
)
UNSEEN = "\u200b\u00ad\ufeff\u2060\u180e\u2064"
SEEN = "\u200c\u200d\ufe0f\u3164\U000e0067"  # joiners, a variation selector, a filler, a tag


def test_what_nobody_sees_is_removed_from_a_line(with_bytes):
    plain = "das kleine Haus"
    for character in UNSEEN:
        line = f"{character}d{character}as kl{character}eine {character} Haus{character}"
        assert ids_of(with_bytes, line) == ids_of(with_bytes, plain)
    for character in SEEN:
        line = f"das{character} kleine Haus"
        assert with_bytes.decode(ids_of(with_bytes, line)) == line


def test_a_file_of_an_earlier_version_keeps_what_nobody_sees(with_bytes):
    older = load(edited(with_bytes, lambda file: file["normalizer"]["normalizers"].pop(1)))
    assert older.decode(ids_of(older, "d\u00adas")) == "d\u00adas"


@given(line=LINE)
def test_the_bytes_of_unknown_characters_give_them_back(with_bytes, line):
    ids = ids_of(with_bytes, line)
    normalised = " ".join(unicodedata.normalize("NFC", line).split())
    assert with_bytes.decode(ids) == normalised
    assert with_bytes.unk_id not in ids
    unknown = "".join(c for c in normalised if c not in CHARACTERS).encode()
    assert bytes(i - 4 for i in ids if i < 260) == unknown


def test_bytes_are_not_special_tokens_and_their_names_are_text(with_bytes):
    content = with_bytes.contents["tokenizer.json"]
    # The same ids and text by the library alone, which leaves special tokens out.
    library, loaded = tokenizers.Tokenizer.from_str(content.decode()), load(content)
    for line in ("ein 猫, 🐕!", "<0x41> <0xF0>"):
        ids = ids_of(with_bytes, line)
        assert library.encode(line).ids == ids == ids_of(loaded, line)
        assert library.decode(ids, skip_special_tokens=True) == line == loaded.decode(ids)
    assert with_bytes.decode([4 + 0xF0, 4 + 0x9F]) == "\ufffd\ufffd"  # half a character


@given(line=LINE)
def test_an_unknown_character_becomes_one_token_and_one_character(tokenizer, line):
    ids = ids_of(tokenizer, line)
    normalised = " ".join(unicodedata.normalize("NFC", line).split())
    shown = "".join(c if c in CHARACTERS else "\ufffd" for c in normalised)
    assert tokenizer.decode(ids) == shown
    assert ids.count(tokenizer.unk_id) == sum(c not in CHARACTERS for c in normalised)


@pytest.mark.parametrize("text", ["<s>", "</s>", "<pad>", "<unk>", "a<s>d </s></s>", "<pad> <pad>"])
def test_text_like_a_special_token_is_text(tokenizer, text):
    for each in (tokenizer, load(tokenizer.contents["tokenizer.json"])):
        ids = ids_of(each, text)
        assert min(ids) > tokenizer.unk_id
        assert each.decode(ids) == text


def test_a_word_is_the_same_token_before_a_stop_and_however_it_is_composed(tokenizer):
    assert ids_of(tokenizer, "das Haus.")[:-1] == ids_of(tokenizer, "das Haus")
    assert len(ids_of(tokenizer, "Haus")) == 1
    assert ids_of(tokenizer, "Ma\u0308nner") == ids_of(tokenizer, "M\u00e4nner")


def test_special_ids_are_pinned_and_left_out_of_text(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    ids = ids_of(tokenizer, "das Haus")
    assert tokenizer.decode([1, *ids[:1], 0, 2, *ids[1:], 2, 0]) == "das Haus"


def test_each_token_is_shown_by_itself_with_its_space(tokenizer):
    ids = [1, *ids_of(tokenizer, "das Haus. Ж"), 2, 0]
    texts = tokenizer.source_texts(ids)
    assert texts[0] == "<s>"
    assert texts[-3:] == ["<unk>", "</s>", "<pad>"]
    assert "".join(texts[1:-3]) == " das Haus. "
    assert len(texts) == len(ids)
    assert tokenizer.source_texts([]) == []


def test_a_vocabulary_smaller_than_the_alphabet_is_refused():
    for byte_fallback, remedy in ((False, r"tokens$"), (True, r"tokens, and 256 bytes$")):
        needed = len(CHARACTERS) + 4 + 256 * byte_fallback
        for size in (10, 0, -1, needed - 1):
            message = rf"vocab_size={size} must be at least {needed} .*{remedy}"
            with pytest.raises(InputError, match=message):
                train_byte_pair(LINES, size, byte_fallback=byte_fallback)
        tokenizer = train_byte_pair(LINES, needed, byte_fallback=byte_fallback)
        assert tokenizer.src_vocab_size == needed


def test_a_saved_tokenizer_is_loaded_the_same(tmp_path, tokenizer):
    write_files(tmp_path, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = read_byte_pair(read_files(tmp_path, ["tokenizer.json"]), {}, str(tmp_path))
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    canonical = json.dumps(content, sort_keys=True).encode()  # earlier versions have written it
    assert loaded.digest() == tokenizer.digest() == hashlib.sha256(canonical).hexdigest()
    assert loaded.src_vocab_size == tokenizer.src_vocab_size
    assert loaded.encode_source(LINES) == tokenizer.encode_source(LINES)


def test_another_vocabulary_has_another_digest(tokenizer):
    a, e = map(tokenizer.token_id, "ae")
    edits = (
        lambda file: file["model"]["vocab"].update(a=e, e=a),
        lambda file: file["model"]["vocab"].update(qqq=tokenizer.src_vocab_size),
        lambda file: file["model"]["merges"].reverse(),
    )
    digests = [load(edited(tokenizer, edit)).digest() for edit in edits]
    assert len({tokenizer.digest(), *digests}) == 4
    assert load(edited(tokenizer, lambda file: None)).digest() == tokenizer.digest()


FOREIGN = {
    "special token named otherwise": lambda file: file["added_tokens"][1].update(content="[CLS]"),
    "text altered on the way in": lambda file: file.update(normalizer={"type": "Lowercase"}),
    "random merges": lambda file: file["model"].update(dropout=0.5),
    "unknown characters dropped": lambda file: file["model"].update(unk_token=None),
    "gap in the ids": lambda file: file["model"]["vocab"].update(qqq=5000),
    "merge of no tokens": lambda file: file["model"]["merges"].insert(0, ["x\n", "y"]),
    "no model": lambda file: file.pop("model"),
    "the library panics": lambda file: file["model"].update(continuing_subword_prefix="x" * 99),
}
OTHERS = (b"", b"{}", b"null", b"[1]", b"\xff\xfe", b'{"a":' * 5000)


@pytest.mark.parametrize("edit", [*FOREIGN.values(), *OTHERS], ids=[*FOREIGN, *range(len(OTHERS))])
def test_a_foreign_tokenizer_file_is_refused_by_name(tokenizer, edit):
    content = edited(tokenizer, edit) if callable(edit) else edit
    with pytest.raises(InputError) as refusal:
        load(content)
    assert str(refusal.value).startswith("x/tokenizer.json")
