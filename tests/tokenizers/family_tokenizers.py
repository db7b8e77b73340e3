"""Tiny tokenizers of the families, built by their own classes in transformers, as folders."""

import json
import os

import pytest
import tokenizers

from jax_transformer.tokenizers.readers.family_settings import M2M100_CODES
from tests.tokenizers.sentencepiece_models import pieces, text, train

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # ids in the sentencepiece model
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
MODEL = "sentencepiece.bpe.model"
NLLB = ["deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]


def byte_level(folder, special):
    """Write vocab.json and merges.txt; return the number of tokens."""
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


def write_t5(folder, saved=True):
    (folder / "spiece.model").write_bytes(train(text(1), 130, **T5))
    return _saved(transformers.T5Tokenizer, folder, [], saved)


def write_pegasus(folder, cleans=False):
    (folder / "spiece.model").write_bytes(train(text(1), 130, **T5))
    options = {"clean_up_tokenization_spaces": cleans}
    return _saved(transformers.PegasusTokenizer, folder, [], **options)


def _saved(tokenizer_class, folder, names, saved=True, **options):
    """Return the tokenizer of a folder, in which a class has saved its files in place of others."""
    tokenizer = tokenizer_class.from_pretrained(folder, **options)
    if not saved:
        return tokenizer
    for name in names:
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)
