"""The unigram language model of sentencepiece, with the tokens that denoising needs.

Kudo 2018, "Subword Regularization", section 3.2. The tokens library reads the pieces, as
transformers does; the ids of the first tokens are those of T5.
"""

import io
import re
from collections.abc import Iterable, Sequence

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jax_transformer.errors import InputError, one_line
from jax_transformer.tokenizers.byte_pair import UNKNOWN_CHARACTER, text_normalizer
from jax_transformer.tokenizers.readers.library import TOKENIZER_JSON, read_library
from jax_transformer.tokenizers.readers.model_files import TOKENIZER_FILE
from jax_transformer.tokenizers.segmenters import MARK
from jax_transformer.tokenizers.tokenizer import Tokenizer

SPECIAL_TOKENS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}  # ids 0 to 2, as in T5
IDS = {"pad_id": 0, "bos_id": 0, "eos_id": 1, "unk_id": 2}
LONGEST_LINE = 2**20  # bytes of a line that sentencepiece trains on
THREADS = 16  # of the trainer, whatever the machine: its sums depend on their number


def train_unigram(
    lines: Iterable[str],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (),
    byte_fallback: bool = False,
) -> Tokenizer:
    """Learn a vocabulary of the pieces of words that give the text the highest likelihood.

    Text is normalised as by `train_byte_pair`. transformers reads the tokenizer.json.

    Args:
        lines: Text of both sides.
        vocab_size: Most entries, special tokens and bytes included.
        special_tokens: The last entries, for example sentinels.
        byte_fallback: Whether the vocabulary also has the 256 bytes.

    Raises:
        InputError: The characters of the text do not fit into the vocabulary.
    """
    written, normalizer = io.BytesIO(), normalizers.Sequence(text_normalizer())
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(normalizer.normalize_str, lines),
            model_writer=written,
            vocab_size=vocab_size - len(special_tokens),
            hard_vocab_limit=False,
            character_coverage=1.0,
            byte_fallback=byte_fallback,
            normalization_rule_name="identity",
            max_sentence_length=LONGEST_LINE,
            num_threads=THREADS,
            minloglevel=2,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
        )
    except (RuntimeError, OSError) as error:
        characters = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        least = (int(characters[1]) if characters else 1) + len(special_tokens)
        fault = one_line(str(error))
        if vocab_size < least:
            entries = f"{len(special_tokens)} special tokens and each character of the text"
            fault = f"vocab_size={vocab_size} must be at least {least}: {entries} are entries"
        raise InputError(fault) from error
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    pieces += [(token, 0.0) for token in special_tokens]
    library = tokenizers.Tokenizer(models.Unigram(pieces, IDS["unk_id"], byte_fallback))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always")
    library.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    spaces = decoders.Replace(MARK, " "), decoders.Replace("<unk>", UNKNOWN_CHARACTER)
    joined = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence([*spaces, *joined])
    library.add_special_tokens([*SPECIAL_TOKENS.values(), *special_tokens])
    settings = IDS | {"source_suffix": [1], "target_suffix": [1], "special_tokens": SPECIAL_TOKENS}
    # The class of transformers that reads tokenizer.json as it is.
    settings |= {"class_name": "TokenizersBackend"}
    contents = {TOKENIZER_FILE: library.to_str().encode()}
    return read_library(TOKENIZER_JSON, contents, settings, "the trained tokenizer")
