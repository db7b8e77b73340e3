"""The files of each class of tokenizers as folders of the hub have them, trained on a few lines.

Each function writes into a folder and returns the id of every token. `small` are the contents of
the small files, by the names of `write`.
"""

import json

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from jax_transformer.tokenizers.readers.class_settings import M2M100_CODES
from tests.tokenizers.class_folders import write_whisper
from tests.tokenizers.sentencepiece_models import pieces, text, train, vocabulary

LINES = text(1)
FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # ids in the sentencepiece model
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
FIRST = ["<s>", "<pad>", "</s>", "<unk>"]
MASK = AddedToken("<mask>", lstrip=True, special=True)
BPE_MODEL, PIECES = "sentencepiece.bpe.model", "spiece.model"
METASPACE = {"replacement": "▁", "prepend_scheme": "always"}


def write(folder, settings=None, special=None, added=None):
    """Write the small files that have a content."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for name, content in zip(names, (settings, special, added), strict=True):
        if content is not None:
            (folder / name).write_text(json.dumps(content, indent=2))


def numbered(*tokens):
    return {token: number for number, token in enumerate(tokens)}


def templates(single, ids):
    special = [(token, ids[token]) for token in single.split() if token in ids]
    return processors.TemplateProcessing(single=single, special_tokens=special)


def library_of(model, tokens, template, added, *, unk_id, words=False, joins=True, fallback=False):
    """Return the library's tokenizer that transformers 4 made of a sentencepiece model.

    Args:
        words: Whether the text is split at spaces first, as until 2023.
        joins: Whether the normaliser joins spaces.
        fallback: Whether unknown letters become bytes, and nothing is normalised, as in Llama.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    ids, scores = numbered(*tokens), {piece.piece: piece.score for piece in proto.pieces}
    if proto.trainer_spec.model_type == 2:
        cuts = ((t[:i], t[i:], t) for t in pieces(model) for i in range(1, len(t)))
        merges = sorted((ids[t], a, b) for a, b, t in cuts if a in scores and b in scores)
        options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": fallback}
        made = models.BPE(ids, [(a, b) for _, a, b in merges], **options)
    else:
        made = models.Unigram([(token, scores.get(token, 0.0)) for token in tokens], unk_id, False)
    library = tokenizers.Tokenizer(made)
    normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    library.normalizer = normalizers.Sequence([normalizer, spaces]) if joins else normalizer
    split = pre_tokenizers.Metaspace(**METASPACE)
    library.pre_tokenizer = split
    if words:
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    library.decoder = decoders.Metaspace(**METASPACE)
    if fallback:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        library.normalizer, library.pre_tokenizer = normalizers.Sequence(steps), None
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(list(added))
    if template:
        library.post_processor = templates(template, library.get_vocab())
    return library


def saved(folder, library, **small):
    library.save(str(folder / "tokenizer.json"))
    write(folder, **small)
    return library.get_vocab()


def marian(folder, *, codes=(), separate=False, ordered=False, decoder=False, **small):
    """MarianTokenizer: two sentencepiece models and a vocabulary, or one for each."""
    source, target = train(text(1), 130), train(text(2), 160)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    sides = {"vocab.json": vocabulary(source, target, codes=codes)}
    if separate:
        sides = {"vocab.json": vocabulary(source), "target_vocab.json": vocabulary(target)}
        largest = max(map(len, sides.values()))
        sides = {name: ids | {"<pad>": largest - 1} for name, ids in sides.items()}
    if ordered:  # by text, so that the special tokens have ids in the middle
        tokens = sorted(sides["vocab.json"].keys() - {"<pad>"})
        sides = {"vocab.json": numbered(*tokens, "<pad>")}
    for name, ids in sides.items():
        (folder / name).write_text(json.dumps(ids))
    if decoder:
        special = {
            ids[token]: {"content": token, "special": True} for token in ("</s>", "<unk>", "<pad>")
        }
        small["settings"] = {"added_tokens_decoder": special, **small["settings"]}
    write(folder, **small)
    return sides["vocab.json"]


def byte_level(
    folder, *, first=FIRST, last=("<mask>",), outside=(), without="", space=False, **small
):
    """RobertaTokenizer, MvpTokenizer, BlenderbotTokenizer: byte-level byte-pair encoding.

    The tokens in `last` follow the others; those `outside` are not in vocab.json.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"vocab_size": 330, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(special_tokens=list(first), **options)
    library.train_from_iterator(LINES, trainer)
    values = json.loads(library.to_str())
    inside = [token for token in last if token not in outside]
    size = library.get_vocab_size()
    values["model"]["vocab"] |= {token: size + i for i, token in enumerate(inside)}
    library = tokenizers.Tokenizer.from_str(json.dumps(values))
    library.model.save(str(folder))
    library.add_special_tokens([*first, *(MASK if t == "<mask>" else t for t in last)])
    library.decoder = decoders.ByteLevel()
    ids = library.get_vocab()
    if "<s>" in ids:
        ends = ("</s>", ids["</s>"]), ("<s>", ids["<s>"])
        library.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=space)
    if small.get("added"):
        small["added"] = {token: ids[token] for token in outside}
    saved(folder, library, **small)
    for name in without.split():
        (folder / name).unlink()
    return ids


def t5(folder, *, extra=100, json_file=True, bpe=False, more=(), listed=True, **small):
    """T5Tokenizer: a sentencepiece model, and extra ids in descending order above it.

    The tokens in `more` are pieces; the extra ids in tokenizer.json are `listed` as added tokens.
    """
    kind = {"model_type": "bpe"} if bpe else {}
    model = train(LINES, 130, user_defined_symbols=list(more), **T5, **kind)
    (folder / PIECES).write_bytes(model)
    extra_ids = [f"<extra_id_{number}>" for number in range(extra)]
    tokens = [*pieces(model), *reversed(extra_ids)]
    if json_file:
        added = ["<pad>", "</s>", "<unk>", *extra_ids] if listed else []
        options = {"unk_id": 2, "words": not bpe, "joins": bpe}
        library = library_of(model, tokens, "$A </s>", added, **options)
        library.save(str(folder / "tokenizer.json"))
    write(folder, **small)
    return numbered(*tokens)


def pegasus(folder, *, json_file=True, **small):
    """PegasusTokenizer: 103 tokens before the pieces, and <unk> after them."""
    model = train(LINES, 130, **T5)
    (folder / PIECES).write_bytes(model)
    first = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103))]
    tokens, added = [*first, *pieces(model)[2:]], [*first, "<unk>"]
    if json_file:
        library = library_of(model, tokens, "$A </s>", added, unk_id=len(first), words=True)
        library.save(str(folder / "tokenizer.json"))
    write(folder, **small)
    return numbered(*tokens)


def fairseq(folder, *, codes=(), template=None, words=True, bpe=False, joins=True, **small):
    """MBartTokenizer, MBart50Tokenizer, NllbTokenizer, BarthezTokenizer: pieces after four tokens.

    Language codes and <mask> follow; without a template there is no tokenizer.json.
    """
    kind = {"model_type": "bpe"} if bpe else {}
    model = train(LINES, 130, **FAIRSEQ, **kind)
    (folder / BPE_MODEL).write_bytes(model)
    tokens = [*FIRST, *pieces(model)[3:], *codes, "<mask>"]
    if template:
        added = [*FIRST, *codes, MASK]
        options = {"unk_id": 3, "words": words, "joins": joins}
        library = library_of(model, tokens, template, added, **options)
        library.save(str(folder / "tokenizer.json"))
    write(folder, **small)
    return numbered(*tokens)


def m2m100(folder, *, codes="m2m100", more=(), **small):
    """M2M100Tokenizer: a sentencepiece model and vocab.json; codes and made-up words follow.

    The tokens in `more` take the places of made-up words; all added tokens are listed then.
    """
    model = train(LINES, 130, **FAIRSEQ)
    (folder / BPE_MODEL).write_bytes(model)
    tokens = [*FIRST, *reversed(pieces(model)[3:])]
    (folder / "vocab.json").write_text(json.dumps(numbered(*tokens)))
    added = [*(f"__{code}__" for code in M2M100_CODES[codes]), *more]
    made = range(8 - len(more) if codes == "m2m100" else 0)
    ids = numbered(*tokens, *added, *map(str, made))
    if more:
        usual = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        listed = {
            ids[token]: {"content": token, **usual, "special": token != more[0]}
            for token in (*FIRST, *added)
        }
        small["settings"] = {"added_tokens_decoder": listed, **small["settings"]}
        small["added"] = {token: ids[token] for token in added}
    write(folder, **small)
    return ids


def pieces_only(folder, *, monolingual=False, **small):
    """PLBartTokenizer; BartphoTokenizer with dict.txt, a monolingual part of the pieces."""
    model = train(LINES, 130, **FAIRSEQ)
    (folder / BPE_MODEL).write_bytes(model)
    words, codes = pieces(model)[3:], ["__java__", "__python__", "__en_XX__"]
    if monolingual:
        words, codes = words[::2], []
        (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    write(folder, **small)
    return numbered(*FIRST, *words, *codes, "<mask>")


def bert(folder, **small):
    """BertTokenizer: vocab.txt."""
    words = sorted({word.strip(".!?,'") for line in LINES for word in line.split()})
    letters = sorted({letter for line in LINES for letter in line if letter != " "})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    tokens = list(dict.fromkeys([*tokens, *words]))
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    write(folder, **small)
    return numbered(*tokens)


def backend(folder, *, first, template=None, **small):
    """PreTrainedTokenizerFast: a tokenizer.json alone."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace(**METASPACE)
    library.decoder = decoders.Metaspace(**METASPACE)
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=[*first], show_progress=False)
    library.train_from_iterator(LINES, trainer)
    if template:
        library.post_processor = templates(template, library.get_vocab())
    return saved(folder, library, **small)


def llama(folder, **small):
    """LlamaTokenizerFast: byte-pair encoding of a sentencepiece model with bytes."""
    model = train(LINES, 400, model_type="bpe", byte_fallback=True, **LLAMA)
    (folder / PIECES).write_bytes(model)
    extra_ids = [f"<extra_id_{number}>" for number in range(100)]
    added = ["<unk>", "<s>", "</s>", *extra_ids]
    library = library_of(model, pieces(model), "$A </s>", added, unk_id=0, fallback=True)
    return saved(folder, library, **small)


def byt5(folder, *, extra=125, **small):
    """ByT5Tokenizer: no file has its tokens, which are bytes."""
    write(folder, **small)
    extra_ids = (f"<extra_id_{number}>" for number in range(extra))
    return numbered("<pad>", "</s>", "<unk>", *range(256), *extra_ids)


def whisper(folder, *, languages, english=False):
    """WhisperTokenizer: byte pairs, codes of languages, tasks and times; every file it may have."""
    return write_whisper(folder, "published", languages, english=english).get_vocab()


def nothing(folder):
    """No tokenizer: the model is refused before."""
    return numbered("<s>", "<pad>", "</s>", "<unk>")
