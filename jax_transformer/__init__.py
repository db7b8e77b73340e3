"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back.

    config = TransformerConfig.preset("vaswani2017", d_model=64, num_heads=4, d_ff=128)
    params = init_params(jax.random.key(0), config)
    logits = apply(params, config, src, tgt)

The model is a function of its parameters, a nested dict of arrays:

    TransformerConfig        the shape of a model; TransformerConfig.presets() names some
    init_params              fresh parameters
    apply, encode, decode    logits; the memory of sources; logits from a memory
    classify                 scores of labels, by a model with a classification head
    Execution                how it is computed: dtype, attention, memory; an argument of each call
    SearchExecution          the same, with what only a search needs
    Transformer              the Flax module behind these functions

Decoding:

    generate                 greedy search, beam search or sampling; returns Hypotheses
    GenerationConfig         its options: lengths, beam, penalties, rules on the tokens
    score                    log-probabilities of given targets; also cross_attention_weights
    init_cache, decode_step  one token at a time, with a Cache; also select_hypotheses

Training:

    pad, Batch               ragged ids as an array; the arrays that a step reads
    cross_entropy            the loss, with label smoothing
    classification_loss      the loss of a classification head
    make_train_step          a step for any optimizer of optax
    make_mesh, parameter_shardings    devices, and where the parameters lie on them

Models on disk, and errors:

    train                    a run on pairs of texts, as the command makes it; returns a Translator
    Translator               text to text: a trained model as a function of strings
    Embedder                 texts to vectors: an encoder, and what sentence-transformers adds
    Classifier               texts to labels: sequences, pairs, tokens, zero-shot
    Transcriber              sounds to text: a Whisper model, with times and subtitles
    load, save               a trained model, of this library or of Hugging Face; its tokenizer
    convert                  (import jax_transformer.convert) weights from torch, and back
    adapters                 (import jax_transformer.adapters) LoRA, and folders of PEFT
    InputError               what cannot be used, and the remedy, in one line

`jax-transformer --help` names the commands; README.md and docs/ say more. Every name is imported
at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not run `__getattr__`
    from jax_transformer.classification.classifier import Classifier as Classifier
    from jax_transformer.commands.train_pairs import train as train
    from jax_transformer.config import TransformerConfig as TransformerConfig
    from jax_transformer.decoding import Cache as Cache
    from jax_transformer.decoding import GenerationConfig as GenerationConfig
    from jax_transformer.decoding import Hypotheses as Hypotheses
    from jax_transformer.decoding import cross_attention_weights as cross_attention_weights
    from jax_transformer.decoding import decode_step as decode_step
    from jax_transformer.decoding import generate as generate
    from jax_transformer.decoding import init_cache as init_cache
    from jax_transformer.decoding import score as score
    from jax_transformer.decoding import select_hypotheses as select_hypotheses
    from jax_transformer.embedding.embedder import Embedder as Embedder
    from jax_transformer.errors import InputError as InputError
    from jax_transformer.kernels.execution import Execution as Execution
    from jax_transformer.kernels.execution import SearchExecution as SearchExecution
    from jax_transformer.model.transformer import Transformer as Transformer
    from jax_transformer.model.transformer import apply as apply
    from jax_transformer.model.transformer import classify as classify
    from jax_transformer.model.transformer import decode as decode
    from jax_transformer.model.transformer import encode as encode
    from jax_transformer.model.transformer import init_params as init_params
    from jax_transformer.model.tree import parameter_shardings as parameter_shardings
    from jax_transformer.runtime.sharding import make_mesh as make_mesh
    from jax_transformer.text.batches import Batch as Batch
    from jax_transformer.text.batches import pad as pad
    from jax_transformer.training.classification import classification_loss as classification_loss
    from jax_transformer.training.objective import cross_entropy as cross_entropy
    from jax_transformer.training.step import make_train_step as make_train_step
    from jax_transformer.transcription.transcriber import Transcriber as Transcriber
    from jax_transformer.translation.model_folder import load as load
    from jax_transformer.translation.model_folder import save as save
    from jax_transformer.translation.translator import Translator as Translator

__version__ = "0.5.0"
_NAMES_IN = {
    "classification.classifier": "Classifier",
    "commands.train_pairs": "train",
    "config": "TransformerConfig",
    "decoding": "Cache GenerationConfig Hypotheses cross_attention_weights decode_step generate "
    "init_cache score select_hypotheses",
    "embedding.embedder": "Embedder",
    "errors": "InputError",
    "kernels.execution": "Execution SearchExecution",
    "model.tree": "parameter_shardings",
    "model.transformer": "Transformer apply classify decode encode init_params",
    "runtime.sharding": "make_mesh",
    "text.batches": "Batch pad",
    "training.classification": "classification_loss",
    "training.objective": "cross_entropy",
    "training.step": "make_train_step",
    "transcription.transcriber": "Transcriber",
    "translation.model_folder": "load save",
    "translation.translator": "Translator",
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names.split()}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_transformer.errors import naming_the_extra

    with naming_the_extra(f"{__name__}.{name}"):
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    from importlib.util import find_spec

    names = {*globals(), *__all__}  # `help` imports each of them
    return sorted(
        names
        if find_spec("tokenizers")
        else names
        - {"load", "save", "Translator", "Embedder", "Classifier", "Transcriber", "train"}
    )
