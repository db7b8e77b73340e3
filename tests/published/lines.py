"""58 odd lines."""

# ruff: noqa: RUF001 (the lines are odd on purpose)

LINES = (
    *("", " ", "   ", "\t", "a\tb", "\u00a0", "\u3000a", " tlx", "tlx ", "tlx  6r5", "a \n b"),
    *("\x01", "a\x1fb", "\x7f", "a\x85b", "\u200b", "a\u200bb", "a\u00adb", "\u2060", "a\u200d"),
    *("a\ufeffb", "\ufeff", "\ufe0f", "a\u202eb", "a\u2028b", "\ufffd"),
    *("ＡＢＣ １２３", "ｱｲｳ", "ﬁ Ǆ", "½ ²", "…", "‘’ “”", "a — b", "ı İ ẞ"),
    *("a\u0308 o\u0308", "e\u0301\u0327", "é", "한국어", "\u1112\u1161\u11ab", "漢字 tlx", "жук ж"),
    *("😀", "tlx 👩\u200d👩\u200d👧 🇩🇪", "👍🏽", "ﷺ", "\U0001d518", "▁ tlx▁"),
    *("</s>", "a</s> b", "<pad> a", "<unk>", "<s>a", "a <mask> b", "<extra_id_0> a <extra_id_99>"),
    *("a>>fr<< b", "__de__ de_DE deu_Latn xq <glossary>", "[CLS] a [MASK]", "z" * 300),
)
