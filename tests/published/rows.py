"""The rows: published checkpoints by name, with their settings, tokenizer files and weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_transformer.tokenizers.readers.class_settings import (
    M2M100_CODES,
    MBART_50_CODES,
    MBART_CODES,
)
from tests.published import configs as c
from tests.published import layouts
from tests.published.folder import WHISPER_LANGUAGES


@dataclass(frozen=True)
class Row:
    """A published checkpoint."""

    name: str
    tokenizer: Callable[[Path], dict[str, int]]
    config: Mapping[str, Any]
    generation: Mapping[str, Any] | None = None
    weights: str = "bin"  # words of `folder.write_weights`
    languages: tuple[str, ...] = ()  # of source and target
    start: str = ""  # of each odd line
    seen: str = ""  # files of which a copy was found: c(onfig), g(eneration), t(okenizer)
    # Columns that are not "equal", with a part of the cell.
    expected: Mapping[str, str] = field(default_factory=dict)


def files(layout, /, name=None, *, config=None, special=None, added=None, **options):
    """Return a layout with the content of its small files; `name` is the tokenizer's class."""
    if name is not None:
        config = {**(config or {}), "tokenizer_class": name}
    small = {"settings": config, "special": special, "added": added}
    return functools.partial(layout, **options, **small)


def refused(name, model_type):
    """Return a row that is refused by its model type."""
    expected = {"load": f"model_type={model_type!r} cannot be converted: ", "logits": "-"}
    return Row(name, layouts.nothing, {"model_type": model_type}, weights="", expected=expected)


def token(content, **flags):
    """Return a token as tokenizer_config.json spells it."""
    usual = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **usual, **flags, "__type": "AddedToken"}


def more(tokens, *listed):
    return {**tokens, "additional_special_tokens": list(listed)}


# A row takes one line or two, as in a table.
# fmt: off
T5_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
M2M_TOKENS = {"bos_token": "<s>", "sep_token": "</s>", **T5_TOKENS}
BART_TOKENS = {**M2M_TOKENS, "cls_token": "<s>", "mask_token": "<mask>"}
BERT_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]",
               "cls_token": "[CLS]", "mask_token": "[MASK]"}
MASK = token("<mask>", lstrip=True, normalized=True)


def marian(source, target, **options):
    return files(layouts.marian, config={"target_lang": target, "source_lang": source}, **options)


TC_CONFIG = {"source_lang": "en", "target_lang": "pt", **T5_TOKENS, "model_max_length": 512,
             "sp_model_kwargs": {}, "separate_vocabs": False, "special_tokens_map_file": None}
TC = functools.partial(files, layouts.marian, "MarianTokenizer", special=T5_TOKENS)
TC_CODES = {"codes": (">>pob<<", ">>por<<"), "ordered": True}
ROMANCE = marian("en", "ROMANCE", codes=(">>fr<<", ">>es<<", ">>pt_BR<<"))
EN_DE = marian("en", "de")
MARIAN = (
    Row("Helsinki-NLP/opus-mt-en-de", EN_DE, c.OPUS, c.OPUS_GENERATION, seen="cgt"),
    Row("Helsinki-NLP/opus-mt-de-en", marian("de", "en"), c.OPUS, c.OPUS_GENERATION),
    Row("Helsinki-NLP/opus-mt-en-ROMANCE", ROMANCE, c.OPUS, c.OPUS_GENERATION, start=">>fr<< "),
    Row("Helsinki-NLP/opus-mt-zh-en", marian("zh", "en"), c.OPUS_2020, seen="c"),
    Row("Helsinki-NLP/opus-mt-tc-big-en-pt", TC(config=TC_CONFIG, **TC_CODES), c.TC_BIG,
        c.TC_GENERATION, "bin half", start=">>pob<< ", seen="cgt"),
    Row("opus-mt-tc-big-en-pt, saved again by transformers 4.44",
        TC(config=TC_CONFIG | {"clean_up_tokenization_spaces": True}, decoder=True, ordered=True),
        c.TC_BIG | {"torch_dtype": "float32"}, c.TC_GENERATION, "safetensors", seen="cgt"),
    Row("Marian with separate_vocabs",
        TC(config=TC_CONFIG | {"separate_vocabs": True}, separate=True), c.SEPARATE,
        c.OPUS_GENERATION),
    Row("opus-mt-en-de with one row more", EN_DE, c.OPUS | c.ONE_MORE, c.OPUS_GENERATION),
)
BYTES = files(layouts.byte_level)
LIMITED = {"model_max_length": 1024}
KOBART_FIRST = ("<s>", "</s>", "<usr>", "<pad>", "<sys>", "<unk>", "<mask>", "<unused0>")
NO_MASK = {"ids": "1 refused"}  # the line with this token, for which the table has no row
BART = (
    Row("facebook/bart-base", BYTES, c.BART_BASE, weights="bin base", seen="c"),
    Row("facebook/bart-large", BYTES, c.BART_LARGE, weights="bin base", seen="c"),
    Row("facebook/bart-large-cnn", BYTES, c.CNN, c.SUMMARY, seen="c", expected=NO_MASK),
    Row("facebook/bart-large-xsum", BYTES, c.CNN | c.XSUM, c.SUMMARY | c.XSUM, expected=NO_MASK),
    Row("facebook/bart-large-mnli", files(layouts.byte_level, config=LIMITED), c.MNLI,
        weights="bin classifier", expected={"greedy": "-", "defaults": "-"}),
    Row("sshleifer/distilbart-cnn-12-6",
        files(layouts.byte_level, config=LIMITED, without="tokenizer.json"), c.DISTILBART,
        expected=NO_MASK),
    Row("fnlp/bart-base-chinese",
        files(layouts.bert, "BertTokenizer", config=BERT_TOKENS, special=BERT_TOKENS), c.CHINESE,
        weights="bin base", seen="c"),
    Row("gogamza/kobart-base-v2",
        files(layouts.backend, "PreTrainedTokenizerFast", first=KOBART_FIRST, special=BART_TOKENS,
              config={"name_or_path": "gogamza/kobart-base-v2"}),
        c.KOBART, weights="bin base", seen="c"),
    Row("RUCAIBox/mvp", files(layouts.byte_level, "MvpTokenizer", config=BART_TOKENS), c.MVP),
)
CC25 = files(layouts.fairseq, codes=MBART_CODES, template="$A </s> en_XX")
ML50 = files(layouts.fairseq, codes=MBART_50_CODES, special=more(BART_TOKENS, *MBART_50_CODES),
             config={"src_lang": None, "tgt_lang": None, **BART_TOKENS, "mask_token": MASK,
                     "tokenizer_file": None, "language_codes": "ML50"})
BARTHEZ = files(layouts.fairseq, template="<s> $A </s>", bpe=True, joins=False)
BARTPHO = files(layouts.pieces_only, "BartphoTokenizer", monolingual=True, config=BART_TOKENS)
TO_DE, TO_EN = {"languages": ("en_XX", "de_DE")}, {"languages": ("de_DE", "en_XX")}
NORMALISED = {"ids": "17 differ"}  # by the sentencepiece model; MBartTokenizer does not
MBART = (
    Row("facebook/mbart-large-cc25", CC25, c.CC25, **TO_DE, seen="c", expected=NORMALISED),
    Row("facebook/mbart-large-en-ro", CC25, c.CC25 | {"decoder_start_token_id": "@ro_RO"},
        languages=("en_XX", "ro_RO"), expected=NORMALISED),
    Row("facebook/mbart-large-50", ML50, c.MBART_50, **TO_DE),
    Row("facebook/mbart-large-50-many-to-many-mmt", ML50, c.ML50, c.ML50_GENERATION, "safetensors",
        **TO_DE, seen="cgt"),
    Row("facebook/mbart-large-50-one-to-many-mmt", ML50, c.ML50, c.ML50_GENERATION, **TO_DE),
    Row("facebook/mbart-large-50-many-to-one-mmt", ML50, c.ML50 | c.FORCED_EN,
        c.ML50_GENERATION | c.FORCED_EN, **TO_EN),
    Row("mbart-large-50-many-to-many-mmt with ten rows more", ML50, c.ML50 | {"vocab_size": "@+10"},
        c.ML50_GENERATION, **TO_DE),
    Row("moussaKam/barthez", BARTHEZ, c.BARTHEZ, weights="bin base", seen="ct"),
    Row("vinai/bartpho-syllable", BARTPHO, c.BARTPHO, weights="bin base",
        expected={"load": "BartphoTokenizer"}),
)
CODES, WMT21 = ([f"__{code}__" for code in M2M100_CODES[key]] for key in ("m2m100", "wmt21"))
M2M_CONFIG = {"src_lang": None, "tgt_lang": None, **M2M_TOKENS, **LIMITED}
M2M = functools.partial(files, layouts.m2m100, "M2M100Tokenizer", config=M2M_CONFIG,
                        special=more(M2M_TOKENS, *CODES))
WMT = files(layouts.m2m100, "M2M100Tokenizer", codes="wmt21", special=more(M2M_TOKENS, *WMT21),
            config=M2M_CONFIG | {"language_codes": "wmt21", "num_madeup_words": 0})
NLLB_CODES = ("ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans")
NLLB_CONFIG = {"src_lang": None, "tgt_lang": None, **BART_TOKENS, "mask_token": MASK}


def nllb(template="eng_Latn $A </s>", **settings):
    return files(layouts.fairseq, "NllbTokenizer", codes=NLLB_CODES, bpe=True, words=False,
                 template=template, config=NLLB_CONFIG | settings,
                 special=more(BART_TOKENS, *NLLB_CODES))


NEW_NLLB = nllb(additional_special_tokens=None, legacy_behaviour=False)
OLD_NLLB = nllb("$A </s> eng_Latn", legacy_behaviour=True)
TO_DE, TO_LATIN = {"languages": ("en", "de")}, {"languages": ("eng_Latn", "deu_Latn")}
M2M_ROWS = (
    Row("facebook/m2m100_418M", M2M(), c.M2M100, c.M2M100_GENERATION, **TO_DE, seen="t"),
    Row("facebook/m2m100_1.2B", M2M(), c.M2M100_LARGE, c.M2M100_GENERATION, **TO_DE),
    Row("facebook/wmt21-dense-24-wide-en-x", WMT, c.WMT21, c.M2M100_GENERATION, "bin shards",
        **TO_DE),
    Row("m2m100_418M with two added tokens, saved by transformers 4",
        M2M(more=("xq", "<glossary>"), config=more(M2M_CONFIG, *CODES, "<glossary>")), c.M2M100,
        c.M2M100_GENERATION, **TO_DE),
    Row("alirezamsh/small100", M2M(), c.M2M100 | {"decoder_layers": 3}, c.M2M100_GENERATION,
        **TO_DE, seen="t"),
    Row("facebook/nllb-200-distilled-600M", nllb(), c.NLLB, c.NLLB_GENERATION, **TO_LATIN,
        seen="cgt"),
    Row("facebook/nllb-200-1.3B", NEW_NLLB, c.NLLB_LARGE, c.NLLB_GENERATION, **TO_LATIN, seen="ct"),
    Row("facebook/nllb-200-3.3B", nllb(), c.NLLB_WIDE, c.NLLB_GENERATION, "bin shards", **TO_LATIN),
    Row("nllb-200-distilled-600M with legacy_behaviour", OLD_NLLB, c.NLLB, c.NLLB_GENERATION,
        **TO_LATIN),
    refused("facebook/nllb-moe-54b", "nllb-moe"),
    # Its tokenizer and its class are code beside the weights, which alone are read.
    Row("ai4bharat/indictrans2-en-indic-dist-200M", layouts.nothing, {"model_type": "IndicTrans"},
        weights="", expected={"load": "cannot read the tokenizer", "logits": "-"}),
)
UNUSED = (f"<unk_{i}>" for i in range(2, 103))
PEGASUS_TOKENS = more({**T5_TOKENS, "mask_token": "<mask_2>"}, "<mask_1>", *UNUSED)
PEGASUS = functools.partial(files, layouts.pegasus, "PegasusTokenizer", special=PEGASUS_TOKENS,
                            config=PEGASUS_TOKENS | {"mask_token_sent": "<mask_1>", "offset": 103})
BYTE_FIRST = ("<pad>", "<s>", "</s>", "<unk>")
CHAT = files(layouts.byte_level, "BlenderbotTokenizer", first=BYTE_FIRST, space=True, added=True,
             outside=("<mask>",), without="tokenizer.json", special=BART_TOKENS,
             config={**BART_TOKENS, "add_prefix_space": True, "model_max_length": 128})
PLBART = files(layouts.pieces_only, "PLBartTokenizer", config=BART_TOKENS)
OTHERS = (
    Row("google/pegasus-xsum", PEGASUS(), c.PEGASUS_XSUM, c.PEGASUS_GENERATION, seen="t"),
    Row("google/pegasus-large", PEGASUS(), c.PEGASUS, seen="ct"),
    Row("google/pegasus-cnn_dailymail", PEGASUS(), c.PEGASUS | {"max_length": 128},
        weights="bin half"),
    Row("tuner007/pegasus_paraphrase", PEGASUS(json_file=False), c.PARAPHRASE),
    refused("google/pegasus-x-base", "pegasus_x"),
    Row("facebook/blenderbot-400M-distill", CHAT, c.BLENDERBOT, weights="bin half", seen="c"),
    Row("facebook/blenderbot-3B", CHAT, c.BLENDERBOT_3B, weights="bin half"),
    refused("facebook/blenderbot_small-90M", "blenderbot-small"),
    Row("uclanlp/plbart-base", PLBART, c.PLBART, expected={"load": "cannot read the tokenizer"}),
    refused("facebook/wmt19-en-de", "fsmt"),
    refused("allenai/led-base-16384", "led"),
    refused("microsoft/prophetnet-large-uncased", "prophetnet"),
)


def extra(count):
    return [f"<extra_id_{number}>" for number in range(count)]


def t5(count=100, **options):
    """Return the files that transformers 4 saved, with all extra ids listed."""
    tokens = more(T5_TOKENS, *extra(count))
    config = tokens | {"extra_ids": count, "model_max_length": 512, "sp_model_kwargs": {}}
    return files(layouts.t5, "T5Tokenizer", extra=count, config=config, special=tokens, **options)


SLOW, EXTRA = t5(json_file=False), extra(100)[::-1]
MT5 = files(layouts.t5, json_file=False, extra=0, special=T5_TOKENS,
            config=T5_TOKENS | {"extra_ids": 0, "additional_special_tokens": None})
MADLAD = files(layouts.t5, "T5Tokenizer", extra=0, more=("<2de>", "<2fr>"), special=T5_TOKENS,
               config=T5_TOKENS | {"extra_ids": 0, "additional_special_tokens": []})
BYT5 = files(layouts.byt5, "ByT5Tokenizer", config=more(T5_TOKENS, *extra(125)), special=T5_TOKENS)
CODE_CONFIG = {key: token(content, normalized=True) for key, content in BART_TOKENS.items()}
CODE_CONFIG = more(CODE_CONFIG, *(token(one, lstrip=True, normalized=True) for one in EXTRA))
CODE = functools.partial(files, layouts.byte_level, "RobertaTokenizer", last=EXTRA, outside=EXTRA,
                         first=(*BYTE_FIRST, "<mask>"), special=more(BART_TOKENS, *EXTRA),
                         config=CODE_CONFIG)
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = files(layouts.llama, "LlamaTokenizerFast", config=LLAMA_TOKENS, special=LLAMA_TOKENS)
T5 = (
    Row("t5-small", files(layouts.t5), c.T5_SMALL, c.T5_GENERATION, seen="c"),
    Row("google-t5/t5-base", t5(), c.T5_BASE, c.T5_GENERATION, "safetensors"),
    Row("google/t5-v1_1-small", SLOW, c.V1_1),
    Row("google/flan-t5-small", t5(), c.FLAN, c.T5_GENERATION, "safetensors", seen="c"),
    Row("google/flan-t5-base", t5(), c.FLAN_BASE, c.T5_GENERATION),
    Row("MBZUAI/LaMini-Flan-T5-248M", t5(), c.FLAN_BASE, c.T5_GENERATION),
    Row("grammarly/coedit-large", t5(), c.FLAN_LARGE, c.T5_GENERATION),
    Row("allenai/unifiedqa-t5-small", SLOW, c.T5_SMALL),
    Row("ai-forever/ruT5-base", SLOW, c.T5_BASE),
    Row("cointegrated/rut5-base", SLOW, c.V1_1_BASE | {"vocab_size": "@+0"}),
    Row("sonoisa/t5-base-japanese", SLOW, c.T5_BASE),
    Row("VietAI/envit5-translation", t5(48, bpe=True, listed=False), c.ENVIT5, seen="ct"),
    Row("google/madlad400-3b-mt", MADLAD, c.MADLAD, c.T5_GENERATION, "safetensors", start="<2de> "),
    # A line that ends with </s>, and U+FFFD in the text of ids.
    Row("google/byt5-small", BYT5, c.BYT5, seen="c", expected={"ids": "2 differ"}),
    Row("Salesforce/codet5-small", CODE(without="tokenizer.json"), c.CODET5),
    Row("Salesforce/codet5-base", CODE(without="tokenizer.json"), c.CODET5_BASE, seen="ct"),
    Row("Salesforce/codet5p-220m", CODE(), c.CODET5_BASE),
    Row("google/mt5-small", MT5, c.MT5, seen="c"),
    Row("google/umt5-small", t5(300), c.UMT5, seen="c"),
    Row("EleutherAI/pile-t5-base", LLAMA, c.PILE, seen="c"),
    refused("google/long-t5-tglobal-base", "longt5"),
    refused("google/switch-base-8", "switch_transformers"),
)
LANGUAGES = tuple(WHISPER_LANGUAGES)  # that of large-v3 alone is the last
HEARD = functools.partial(layouts.whisper, languages=LANGUAGES[:99])
HEARD_ENGLISH = functools.partial(HEARD, english=True)
HEARD_V3 = functools.partial(layouts.whisper, languages=LANGUAGES)


def openai(name, *shape, heads):
    config, generation = c.OPENAI | c.PROMPT, c.whisper_generation(heads, LANGUAGES[:99])
    return Row(f"openai/whisper-{name}", HEARD, config | c.whisper_sizes(*shape), generation,
               "safetensors")


def english(name, config, *shape, heads):
    config = config | c.ENGLISH_PROMPT | c.whisper_sizes(*shape)
    return Row(name, HEARD_ENGLISH, config, c.whisper_generation(heads), "safetensors")


def v3(name, *shape, heads, seen="", **changes):
    config = c.LARGE_V3 | c.whisper_sizes(*shape) | changes
    return Row(name, HEARD_V3, config, c.whisper_generation(heads, LANGUAGES),
               "safetensors half", seen=seen)


WHISPER = (
    openai("tiny", 384, 4, 6, heads=[[2, 2], [3, 0], [3, 2], [3, 3], [3, 4], [3, 5]]),
    english("openai/whisper-tiny.en", c.OPENAI, 384, 4, 6, heads=[[1, 0], [2, 0], [2, 5], [3, 0]]),
    openai("base", 512, 6, 8, heads=[[3, 1], [4, 2], [4, 3], [4, 7], [5, 1], [5, 2], [5, 4]]),
    openai("small", 768, 12, 12, heads=[[5, 3], [5, 9], [8, 0], [8, 4], [8, 7], [8, 8], [9, 0]]),
    openai("medium", 1024, 24, 16, heads=[[13, 15], [15, 4], [15, 15], [16, 1], [20, 0], [23, 4]]),
    openai("large-v2", 1280, 32, 20, heads=[[10, 12], [13, 17], [16, 11], [16, 12], [16, 13]]),
    v3("openai/whisper-large-v3", 1280, 32, 20, heads=[[7, 0], [10, 17], [12, 18], [13, 12]],
       seen="c"),
    v3("openai/whisper-large-v3-turbo", 1280, 32, 20, 4, heads=[[2, 4], [2, 11], [3, 3], [3, 6]],
       **c.WHISPER_END),
    v3("distil-whisper/distil-large-v3", 1280, 32, 20, 2, heads=[[1, 0], [1, 1], [1, 2], [1, 3]],
       **c.WHISPER_END),
    english("distil-whisper/distil-small.en", c.WHISPER | c.MASKS | {"torch_dtype": "float32"},
            768, 12, 12, 4, heads=[[6, 6], [7, 0], [7, 3], [7, 8], [8, 2], [8, 5], [8, 7]]),
)
# fmt: on
ROWS = (*MARIAN, *BART, *MBART, *M2M_ROWS, *OTHERS, *T5, *WHISPER)
