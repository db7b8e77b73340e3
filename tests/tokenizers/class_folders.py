"""Tiny tokenizers of the families, built by their own classes in transformers, as folders."""

import json
import os

import pytest
import tokenizers

from jax_transformer.tokenizers import describe, from_description
from jax_transformer.tokenizers.readers.class_settings import EXTRA, FLAGS, M2M100_CODES
from tests.tokenizers import sentencepiece_models
from tests.tokenizers.sentencepiece_models import pieces, text, train

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # ids in the sentencepiece model
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
MODEL = "sentencepiece.bpe.model"
NLLB = ["deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]


def came_back(tokenizer):
    """Return the tokenizer from its description, as JSON, and its files."""
    description = json.loads(json.dumps(describe(tokenizer)))
    return from_description(description, tokenizer.contents, "x")


def byte_level(folder, special):
    """Write vocab.json and merges.txt."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text(1), trainer)
    tokenizer.model.save(str(folder))


def write_bart(folder, saved=True, mask_takes_space=False):
    if mask_takes_space:
        values = {"mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
    byte_level(folder, ["<s>", "<pad>", "</s>", "<unk>"])
    return _saved(transformers.BartTokenizer, folder, ["vocab.json", "merges.txt"], saved)


def write_blenderbot(folder, saved=True, template=False):
    byte_level(folder, ["<pad>", "<s>", "</s>", "<unk>"])
    tokenizer = _saved(
        transformers.BlenderbotTokenizer, folder, ["vocab.json", "merges.txt"], saved
    )
    if template:  # as the files of older versions have it
        values = json.loads((folder / "tokenizer.json").read_text())
        ends = [{"Sequence": {"id": "A", "type_id": 0}}]
        ends.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
        special = {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}
        values["post_processor"] |= {"single": ends, "special_tokens": special}
        (folder / "tokenizer.json").write_text(json.dumps(values))
        tokenizer = transformers.BlenderbotTokenizer.from_pretrained(folder)
    return tokenizer


def write_mbart(folder, saved=True, **languages):
    (folder / MODEL).write_bytes(train(text(1), 130, **FAIRSEQ))
    return _saved(transformers.MBartTokenizer, folder, [MODEL], saved, **languages)


def write_mbart_50(folder, saved=True, **languages):
    (folder / MODEL).write_bytes(train(text(1), 130, **FAIRSEQ))
    if not saved:  # MBartTokenizer has the same file
        values = {"tokenizer_class": "MBart50Tokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return _saved(transformers.MBart50Tokenizer, folder, [], saved, **languages)


def write_nllb(folder, **options):
    (folder / MODEL).write_bytes(train(text(1), 130, model_type="bpe", **FAIRSEQ))
    codes = {"extra_special_tokens": NLLB}
    return _saved(transformers.NllbTokenizer, folder, [], **codes, **options)


def write_m2m100(folder, **languages):
    model = train(text(1), 130, **FAIRSEQ)
    (folder / MODEL).write_bytes(model)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces(model)[3:]]
    ids = {token: number for number, token in enumerate(reversed(tokens[4:]), start=4)}
    ids |= {token: number for number, token in enumerate(tokens[:4])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    codes = [f"__{code}__" for code in M2M100_CODES["m2m100"]]
    values = {"tokenizer_class": "M2M100Tokenizer", "additional_special_tokens": codes}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | languages))
    return transformers.M2M100Tokenizer.from_pretrained(folder)


MARIAN_CLEANS = {
    "clean_up_tokenization_spaces": True,
    "additional_special_tokens": ["<mask_1>"],
    "added_tokens_decoder": {
        "7": {"content": "e", "special": False},
        "8": {"content": ".", "special": True},  # not listed above: decoding keeps it
    },
}


def write_marian(folder, **options):
    sentencepiece_models.write_marian(folder, **options)
    return transformers.MarianTokenizer.from_pretrained(folder)


def begins_with_an_unknown_code(theirs, line):
    code, _ = theirs.remove_language_code(line)
    return bool(code) and "</s>" not in code[0] and code[0] not in theirs.get_vocab()


def write_t5(folder, saved=True):
    (folder / "spiece.model").write_bytes(train(text(1), 130, **T5))
    return _saved(transformers.T5Tokenizer, folder, [], saved)


def write_pegasus(folder, saved=True, cleans=False):
    (folder / "spiece.model").write_bytes(train(text(1), 130, **T5))
    options = {"clean_up_tokenization_spaces": cleans}
    return _saved(transformers.PegasusTokenizer, folder, [], saved, **options)


def write_codet5(folder):
    """Write a folder as CodeT5 has it: RobertaTokenizer, and sentinels in older files."""
    byte_level(folder, ["<pad>", "<s>", "</s>", "<unk>", "<mask>"])
    extra = [f"<extra_id_{number}>" for number in range(9, -1, -1)]
    values = {"tokenizer_class": "RobertaTokenizer", "additional_special_tokens": extra}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    size = len(json.loads((folder / "vocab.json").read_text()))
    ids = {token: i for i, token in enumerate(extra, size)}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_bert(folder, saved=False, **options):
    """Write word pieces, and special tokens that only special_tokens_map.json names."""
    special = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    words = [word.lower() for line in text(1) for word in line.split()]
    letters = sorted({*"".join(words)})
    pieces = [*letters, *(f"##{letter}" for letter in letters), *sorted({*words})[:40]]
    (folder / "vocab.txt").write_text("\n".join([*special.values(), *dict.fromkeys(pieces)]) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", **options})
    )
    named = {f"{key}_token": token for key, token in special.items()}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return _saved(transformers.BertTokenizer, folder, ["vocab.txt"], saved)


def write_byt5(folder, extra_ids=125):
    values = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": extra_ids}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_plain(folder, template=None):
    """Write a tokenizer.json and no class but the general one, as KoBART has it."""
    write_bart(folder)
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    library = tokenizers.Tokenizer.from_str(json.dumps(values | {"post_processor": None}))
    if template is not None:
        ids = [(token, library.token_to_id(token)) for token in ("<s>", "</s>")]
        library.post_processor = tokenizers.processors.TemplateProcessing(template, None, ids)
    library.save(str(path))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_gemma(folder, lines=None, **ends):
    """Write byte-pair encoding with byte pieces, as Gemma has it; `ends` go into its template."""
    special = [f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    library.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=pieces, show_progress=False
    )
    library.train_from_iterator(lines or text(1), trainer)
    model = json.loads(library.to_str())["model"]
    files = {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}
    transformers.GemmaTokenizer(**files, **ends).save_pretrained(folder)
    # Published files have these keys, which transformers 5.24 does not read.
    path = folder / "tokenizer_config.json"
    ignored = {"add_bos_token": True, "add_eos_token": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | ignored))
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_whisper(
    folder, files, languages=("en", "de"), timestamps=True, nothing="nospeech", english=None
):
    """Write byte pairs, and behind them the special tokens and the timestamps of Whisper.

    In English folders, by default those without languages, <|endoftext|> is in vocab.json. `files`
    are "older" (with added_tokens.json), "published" (all that a folder may have) or "saved" by
    transformers.
    """
    byte_level(folder, [])
    eos = "<|endoftext|>"
    names = ["startoftranscript", *languages, "translate", "transcribe", "startoflm"]
    special = [f"<|{name}|>" for name in (*names, "startofprev", nothing, "notimestamps")]
    added = [*special, *(f"<|{i / 50:.2f}|>" for i in range(1501) if timestamps)]
    vocabulary = json.loads((folder / "vocab.json").read_text())
    if not (not languages if english is None else english):
        added = [eos, *added]
    else:
        vocabulary[eos] = len(vocabulary)
    ids = {token: i for i, token in enumerate(added, len(vocabulary))}
    named = {f"{key}_token": eos for key in ("bos", "eos", "pad", "unk")}
    named["additional_special_tokens"] = [eos, *special]
    values = {"tokenizer_class": "WhisperTokenizer", "clean_up_tokenization_spaces": True} | named
    contents = {"vocab": vocabulary, "added_tokens": ids, "special_tokens_map": named}
    contents |= {"tokenizer_config": values, "normalizer": {"colour": "color"}}

    def write(name):
        (folder / f"{name}.json").write_text(json.dumps(contents[name]))

    for name in contents:
        write(name)
    if files == "published":
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        flags = dict.fromkeys(FLAGS, False)
        decoder = {
            str(i): {"content": token, **flags, "special": token in [eos, *special]}
            for token, i in ({eos: vocabulary.get(eos)} | ids).items()
        }
        contents["tokenizer_config"] = values | {"added_tokens_decoder": decoder}
        write("tokenizer_config")
    saved = [path.name for path in folder.iterdir()]
    return _saved(transformers.WhisperTokenizer, folder, saved, files == "saved")


def add_tokens(folder, tokenizer, older):
    """Add a special and an ordinary token, as files of today or of older versions name them.

    Return the tokenizer that transformers reads then.
    """
    size, path = len(tokenizer), folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    values["tokenizer_class"] = type(tokenizer).__name__
    key = next((key for key in EXTRA if values.get(key)), EXTRA[1])
    values[key] = [*values.get(key, []), "<zz>"]
    tokens = {"<zz>": size, "xq": size + 1}
    decoder = values.pop("added_tokens_decoder", {})
    if older:
        old = folder / "added_tokens.json"
        before = json.loads(old.read_text()) if old.exists() else {}
        old.write_text(json.dumps(before | tokens))
    else:
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        for i, token in tokenizer.added_tokens_decoder.items():
            described = {flag: getattr(token, flag) for flag in flags}
            decoder[str(i)] = {"content": str(token), **described}
        for token, i in tokens.items():
            described = dict.fromkeys(flags, False) | {"special": token == "<zz>"}
            decoder[str(i)] = {"content": token, **described}
        values["added_tokens_decoder"] = decoder
    path.write_text(json.dumps(values))
    return type(tokenizer).from_pretrained(folder)


def _saved(tokenizer_class, folder, names, saved=True, **options):
    """Return the tokenizer of a folder, in which a class has saved its files in place of others."""
    tokenizer = tokenizer_class.from_pretrained(folder, **options)
    if not saved:
        return tokenizer
    for name in names:
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)
