"""Tiny sentencepiece models, trained on generated text, and the odd strings of tokenizer tests."""

# ruff: noqa: RUF001 (the odd strings are odd on purpose)

import io
import json
import random

import sentencepiece

SPECIAL = ("</s>", "<unk>", "<pad>")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text(seed, lines=300, alphabet=f"{LETTERS}äöüßéñ0123456789"):
    """Return lines of words that frequency and letters make learnable."""
    chance = random.Random(seed)
    words = ["".join(chance.choices(alphabet, k=chance.randint(1, 7))) for _ in range(80)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    ends = [".", "!", "?", " .", ", " + words[0] + "'s"]
    return [
        " ".join(chance.choices(words, weights, k=chance.randint(2, 9))) + chance.choice(ends)
        for _ in range(lines)
    ]


def train(lines, vocab_size, **options):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def pieces(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def vocabulary(*models, codes=()):
    """Return the ids of a vocab.json as Marian has them: EOS 0, <unk> 1, padding last."""
    tokens = ["</s>", "<unk>", *codes]
    tokens += [piece for model in models for piece in pieces(model) if piece != "<s>"]
    return {token: number for number, token in enumerate(dict.fromkeys([*tokens, "<pad>"]))}


def write_marian(folder, codes=(">>fra<<", ">>deu<<"), separate=False, **tokenizer_config):
    """Write the files of a Marian tokenizer; return the size of its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    # The models join pieces differently: one has byte pieces.
    source, target = train(text(1), 130), train(text(2), 370, byte_fallback=True)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    if separate:
        tokenizer_config["separate_vocabs"] = True
        sides = {"vocab.json": vocabulary(source), "target_vocab.json": vocabulary(target)}
        size = max(map(len, sides.values()))
        for name, ids in sides.items():  # padding has the same id in both
            ids["<pad>"] = size - 1
            (folder / name).write_text(json.dumps(ids))
    else:
        ids = vocabulary(source, target, codes=codes)
        size = len(ids)
        (folder / "vocab.json").write_text(json.dumps(ids))
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return size


def odd_strings(lines, count=1100):
    """Return strings that break tokenizers: each odd piece alone, then mixtures with text."""
    odd = [
        *("", " ", "   ", "\t", "\n", "\r\n", "\x00", "\x01", "\x1f", "\x7f", "\x85", "\u00a0"),
        *("\u200b", "\u200d", "\u2028", "\u3000", "\ufeff", "\ufffd", "\u00ad", "\u202e", "▁"),
        *("ＡＢＣ", "１２３", "ｱｲｳ", "ﬁ", "Ǆ", "½", "²", "…", "‘’“”", "—", "ı", "İ", "ß", "ẞ"),
        *("a\u0308", "e\u0301\u0327", "o\u0308u\u0308", "\u0308", "한국", "\u1112\u1161\u11ab"),
        *("😀", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "漢字", "жук", "ﷺ", "\U0001d518", "\U0010fffd"),
        *("</s>", "<unk>", "<pad>", "<s>", "<mask_1>", "<unk_7>", "< /s>", "＜/s＞", "</s></s>"),
        *(">>fra<<", ">>", "<<", ">> <<", "a>>fra<<", " >>fra<<", "</s>>>fra<<", ">>fra", "fra<<"),
        *("'s", "n't", " .", " ' ", "...", "!!", "a  b", "&amp;", "<br>", "\\n", "%s", "{}"),
    ]
    chance = random.Random(0)
    strings = [*odd, *lines[:100]]
    for line, piece in zip(lines, odd, strict=False):
        strings += [line + piece, piece + line]
    while len(strings) < count:
        words = [*chance.choice(lines).split(), *chance.choices(odd, k=chance.randint(1, 4))]
        chance.shuffle(words)
        strings.append(chance.choice(["", " "]).join(words))
    return strings
