"""Model families of Hugging Face transformers: a file for each lineage, one value for each family.

Whatever differs from family to family is in its `Family`; the reader of folders, the command line
and the tests look it up here. A program can add its own: `FAMILIES[family.model_type] = family`.
"""

from collections.abc import Mapping

from jax_transformer.convert.families import (
    bart_lineage,
    gemma_lineage,
    marian,
    t5_lineage,
    whisper,
)
from jax_transformer.convert.families.family import Family
from jax_transformer.errors import InputError

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for lineage in (bart_lineage, t5_lineage, gemma_lineage, marian, whisper)
    for family in lineage.FAMILIES
}
_SOUND = (
    "audioflamingo3 glmasr granite_speech granite_speech_plus moss_transcribe_diarize "
    "musicflamingo nemo_speechlm omniasr qwen2_audio qwen3_asr speech_to_text speecht5 "
    "vibevoice_asr voxtral voxtral_realtime"
).split()
_SPARSE = "its attention is sparse; take facebook/bart-large-cnn, which attends to whole texts"
_EXPERTS = (
    "its layers are mixtures of experts; take a dense model, for example "
    "facebook/nllb-200-distilled-600M or google/flan-t5-base"
)
_SEVERAL = "its decoder predicts several tokens at once; take a BART or an mBART"
_JOINED = "it joins two models, each with blocks of its own"
# Encoder-decoders of transformers that no config of this library describes: why.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("nllb-moe", "nllb_moe", "switch_transformers"), _EXPERTS),
    **dict.fromkeys(("led", "longt5", "bigbird_pegasus", "pegasus_x"), _SPARSE),
    **dict.fromkeys(("prophetnet", "xlm-prophetnet"), _SEVERAL),
    "fsmt": "its tokenizer, of Moses and merged pairs, is not read; take an opus-mt model",
    "blenderbot-small": "its decoder norms the embeddings before the positions are added; take "
    "facebook/blenderbot-400M-distill",
    **dict.fromkeys(
        ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"), _JOINED
    ),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), "it reads sound too; take an NLLB model"),
    **dict.fromkeys(_SOUND, "it reads sound, not text"),
}


def get_family(model_type: object) -> Family:
    """Return the family of a model type."""
    name = model_type if isinstance(model_type, str) else None
    if name in FAMILIES:
        return FAMILIES[name]
    if name in REFUSED:
        fault = f"model_type={name!r} cannot be converted: {REFUSED[name]}"
        raise InputError(f"{fault}; transformers runs it")
    known = ", ".join(FAMILIES)
    raise InputError(f"model_type={model_type!r} is unknown; this library knows {known}")
