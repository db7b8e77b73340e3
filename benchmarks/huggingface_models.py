"""Small Hugging Face models of every family, of random weights, with tokenizers trained on a text.

`build` writes a folder as `save_pretrained` does. Nothing is downloaded.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SIZES = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "scale_embedding": True,
}
T5_KEYS = {
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "dropout": "dropout_rate",
}
FAIRSEQ_IDS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # in a sentencepiece model
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


class Text(NamedTuple):
    """What a tokenizer is trained on: source and target sentences, most tokens of a language."""

    sources: Sequence[str]
    targets: Sequence[str]
    pieces: int

    @property
    def both(self) -> list[str]:
        """All sentences."""
        return [*self.sources, *self.targets]


def build(
    family: str, folder: Path, sources: Sequence[str], targets: Sequence[str], pieces: int
) -> None:
    """Train a tokenizer, draw a model of a family, and write both.

    Args:
        family: A name in `FAMILIES`.
        folder: The folder to write; created.
        sources: Source sentences, English.
        targets: Their translations, German.
        pieces: Most tokens of a language in the tokenizer.
    """
    import torch

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model, tokenizer = FAMILIES[family](folder, Text(sources, targets, pieces), SIZES)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _marian(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    from sentencepiece import SentencePieceProcessor
    from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer

    pieces: dict[str, None] = dict.fromkeys(["</s>", "<unk>"])
    for side, lines in (("source", text.sources), ("target", text.targets)):
        _train_sentencepiece(folder / f"{side}.spm", lines, text.pieces)
        processor = SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        names = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
        pieces |= dict.fromkeys(name for name in names if name not in ("<s>", "<pad>"))
    pieces["<pad>"] = None
    (folder / "vocab.json").write_text(
        json.dumps({piece: index for index, piece in enumerate(pieces)}), "utf-8"
    )
    files = {name: str(folder / f"{name}.spm") for name in ("source", "target")}
    tokenizer = MarianTokenizer(
        files["source"], files["target"], str(folder / "vocab.json"), source_lang="en"
    )
    pad, eos = len(pieces) - 1, 0
    config = MarianConfig(
        vocab_size=len(pieces),
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=eos,
        bos_token_id=eos,
        forced_eos_token_id=eos,
        activation_function="swish",
        **sizes,
    )
    model = MarianMTModel(config)
    model.generation_config = GenerationConfig(
        bad_words_ids=[[pad]],
        decoder_start_token_id=pad,
        eos_token_id=eos,
        forced_eos_token_id=eos,
        max_length=128,
        num_beams=4,
        pad_token_id=pad,
        renormalize_logits=True,
    )
    return model, tokenizer


def _pegasus(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        GenerationConfig,
        PegasusConfig,
        PegasusForConditionalGeneration,
        PegasusTokenizer,
    )

    _train_sentencepiece(folder / "spiece.model", text.both, 2 * text.pieces, **T5_IDS)
    tokenizer = PegasusTokenizer.from_pretrained(folder)
    config = PegasusConfig(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=1,
        activation_function="relu",
        **sizes,
    )
    model = PegasusForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=1,
        length_penalty=0.8,
        max_length=64,
        num_beams=8,
        pad_token_id=0,
    )
    return model, tokenizer


def _byte_level(folder: Path, text: Text, special: Sequence[str]) -> None:
    """Write vocab.json and merges.txt."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + 2 * text.pieces,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.both, trainer)
    tokenizer.model.save(str(folder))


def _bart(
    folder: Path, text: Text, sizes: dict[str, Any], name: str = "Bart", **generation: Any
) -> tuple[Any, Any]:
    import transformers

    _byte_level(folder, text, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer = transformers.RobertaTokenizer.from_pretrained(folder)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    forced = {"forced_bos_token_id": 0, "forced_eos_token_id": 2}
    limits = {"max_length": 64, "num_beams": 4, "early_stopping": True, "no_repeat_ngram_size": 0}
    return _model(name, tokenizer, sizes, ids, ids | forced | limits | generation), tokenizer


def _mvp(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    return _bart(folder, text, sizes, "Mvp", length_penalty=0.6)


def _blenderbot(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    _byte_level(folder, text, ["<pad>", "<s>", "</s>", "<unk>", "<mask>"])
    tokenizer = transformers.BlenderbotTokenizer.from_pretrained(folder)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    limits = {"max_length": 64, "num_beams": 3, "forced_eos_token_id": 2}
    # The class adds no end to a source; its targets need one to be learnt from.
    return _model("Blenderbot", tokenizer, sizes, ids, ids | limits), tokenizer


def _mbart(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    _train_sentencepiece(
        folder / "sentencepiece.bpe.model", text.both, 2 * text.pieces, **FAIRSEQ_IDS
    )
    languages = {"src_lang": "en_XX", "tgt_lang": "de_DE"}
    tokenizer = transformers.MBartTokenizer.from_pretrained(folder, **languages)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    start = {"decoder_start_token_id": tokenizer.convert_tokens_to_ids("de_DE")}
    limits = {"max_length": 64, "num_beams": 5, "early_stopping": True, "forced_eos_token_id": 2}
    return _model("MBart", tokenizer, sizes, ids, ids | start | limits), tokenizer


def _mbart_50(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    _train_sentencepiece(
        folder / "sentencepiece.bpe.model", text.both, 2 * text.pieces, **FAIRSEQ_IDS
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MBart50Tokenizer"}')
    languages = {"src_lang": "en_XX", "tgt_lang": "de_DE"}
    tokenizer = transformers.MBart50Tokenizer.from_pretrained(folder, **languages)
    return _with_forced_language("MBart", tokenizer, sizes, "de_DE"), tokenizer


def _m2m100(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    import transformers
    from sentencepiece import SentencePieceProcessor

    path = folder / "sentencepiece.bpe.model"
    _train_sentencepiece(path, text.both, 2 * text.pieces, **FAIRSEQ_IDS)
    processor = SentencePieceProcessor(model_file=str(path))
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    ids = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab.json").write_text(json.dumps(ids), "utf-8")
    tokenizer = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(path), src_lang="en", tgt_lang="de"
    )
    # The published folders list the codes, so that texts are decoded without them.
    codes = list(tokenizer.lang_code_to_token.values())
    tokenizer.add_special_tokens({"additional_special_tokens": codes})
    rows = len(ids) + len(tokenizer.lang_code_to_id) + 8  # as many as the published models have
    return _with_forced_language("M2M100", tokenizer, sizes, "__de__", rows), tokenizer


def _nllb(folder: Path, text: Text, sizes: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    path = folder / "sentencepiece.bpe.model"
    _train_sentencepiece(path, text.both, 2 * text.pieces, model_type="bpe", **FAIRSEQ_IDS)
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    codes = ["deu_Latn", "eng_Latn", "fra_Latn"]
    tokenizer = transformers.NllbTokenizer.from_pretrained(
        folder, extra_special_tokens=codes, **languages
    )
    return _with_forced_language("M2M100", tokenizer, sizes, "deu_Latn"), tokenizer


def _with_forced_language(
    name: str, tokenizer: Any, sizes: dict[str, Any], code: str, rows: int | None = None
) -> Any:
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    forced = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(code)}
    limits = {"max_length": 64, "num_beams": 5, "early_stopping": True}
    return _model(name, tokenizer, sizes, ids, ids | forced | limits, rows)


def _t5(
    folder: Path, text: Text, sizes: dict[str, Any], name: str = "T5", projection: str = "relu"
) -> tuple[Any, Any]:
    import transformers

    _train_sentencepiece(folder / "spiece.model", text.both, 2 * text.pieces, **T5_IDS)
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder)
    named = {T5_KEYS[key]: value for key, value in sizes.items() if key in T5_KEYS}
    named |= {"d_model": sizes["d_model"], "feed_forward_proj": projection}
    named["d_kv"] = 8 + named["d_model"] // named["num_heads"]  # wider than the usual head
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    limits = {"max_length": 64, "num_beams": 4, "early_stopping": True, "length_penalty": 0.8}
    return _model(name, tokenizer, named, ids, ids | limits), tokenizer


def _model(
    name: str,
    tokenizer: Any,
    sizes: dict[str, Any],
    ids: dict[str, int],
    generation: dict[str, Any],
    rows: int | None = None,
) -> Any:
    """Return a model of random weights of the classes that begin with a name.

    Its table has as many rows as the tokenizer has tokens, if `rows` is None.
    """
    import transformers

    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    rows = len(tokenizer) if rows is None else rows
    model = model_class(config_class(vocab_size=rows, **ids, **sizes))
    model.generation_config = transformers.GenerationConfig(**generation)
    return model


FAMILIES: dict[str, Callable[[Path, Text, dict[str, Any]], tuple[Any, Any]]] = {
    "marian": _marian,
    "pegasus": _pegasus,
    "bart": _bart,
    "mvp": _mvp,
    "blenderbot": _blenderbot,
    "mbart": _mbart,
    "mbart-50": _mbart_50,
    "m2m100": _m2m100,
    "nllb": _nllb,
    "t5": _t5,
    "t5-v1.1": partial(_t5, projection="gated-gelu"),
    "mt5": partial(_t5, name="MT5", projection="gated-gelu"),
    "umt5": partial(_t5, name="UMT5", projection="gated-gelu"),
}


def _train_sentencepiece(path: Path, lines: Sequence[str], size: int, **options: Any) -> None:
    from sentencepiece import SentencePieceTrainer

    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=size,
            character_coverage=1.0,
            minloglevel=2,
            hard_vocab_limit=False,  # a small text may have fewer pieces
            **options,
        )
