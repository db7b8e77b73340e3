"""A trained model as a folder of CTranslate2, an engine that serves translations on CPUs and GPUs.

The specification is filled from the parameters, so every model whose function CTranslate2 can
express is exported, whether this library has trained it or a Hugging Face folder has brought it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ctranslate2
import jax
import numpy as np
from ctranslate2.specs import common_spec, model_spec, transformer_spec
from jaxtyping import Float

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.export.proof import (
    Proof,
    check_expressible,
    check_proof,
    float32,
    greedy_search,
    prove,
)
from jax_transformer.model.functional import sinusoids_of
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.tokenizers import write_files
from jax_transformer.tokenizers.tokenizer import Side
from jax_transformer.translation.model_folder import TrainedModel

# Fields of which CTranslate2 can express every value, or that change no translation.
FREE = (
    "src_vocab_size tgt_vocab_size d_model num_heads d_kv d_ff max_length num_encoder_layers "
    "num_decoder_layers head_projection attention_scale embedding_scale start_embedding "
    "embedding_norm position_offset position_rounding relative_attention_num_buckets "
    "relative_attention_max_distance relative_attention_bias output_bias output_scale qkv_bias "
    "attention_output_bias feed_forward_bias gated_feed_forward activation norm_epsilon "
    "norm_bias final_norm decoder_final_norm initialization dropout attention_dropout "
    "activation_dropout dropout_placement embedding_dropout final_dropout pad_id bos_id eos_id"
).split()
# The values that it can express of others. Of a field that is in neither, it is the default.
EXPRESSIBLE: Mapping[str, tuple[Any, ...]] = {
    "decoder_attention": ("self_then_cross",),
    "memory_norm": (False,),
    "norm": ("layer_norm", "rms_norm"),
    "norm_placement": ("post", "pre"),
    "decoder_norm_placement": (None, "post", "pre"),
    "positions": (
        *("sinusoidal", "sinusoidal_halves", "sinusoidal_per_column", "sinusoidal_tensor2tensor"),
        *("learned", "relative", "none"),
    ),
    "token_embeddings": ("separate", "shared"),
    "output_projection": ("linear", "tied"),
}
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
# Tokens that `translate_batch` reads and writes at most, unless it is told otherwise.
LIMITS: Mapping[str, int] = {"max_input_length": 1024, "max_decoding_length": 256}
Array = Float[np.ndarray, "..."]


def export_ctranslate2(
    model: TrainedModel,
    folder: Path,
    quantization: Literal["float32", "float16", "int8"] = "float32",
) -> str:
    """Write a folder that `ctranslate2.Translator` loads, with the tokenizer's files beside it.

    Returns a line about the proof, see `check_proof`: greedy translations by both, whose ids must
    be equal in float32. One more source, as long as CTranslate2 reads, is translated without an
    end. Where learned positions end before, the line names the arguments that keep to them.

    Raises:
        InputError: CTranslate2 cannot express a field of the config; the folder cannot be written;
            or a translation differs or stops. Nothing is written.
    """
    config = model.config
    check_expressible(config, EXPRESSIBLE, "CTranslate2", FREE)
    check_writable(folder)
    spec = _specification(config, jax.tree.map(float32, model.params))  # copies: it writes
    sources, targets = (_tokens(side) for side in (model.tokenizer.source, model.tokenizer.target))
    spec.register_source_vocabulary(sources)
    spec.register_target_vocabulary(targets)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    for name in ("bos", "eos", "unk"):
        setattr(spec.config, f"{name}_token", targets[getattr(model.tokenizer, f"{name}_id")])
    spec.config.decoder_start_token = targets[model.generation.get("start_token", config.bos_id)]
    spec.validate()
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    with staged(folder) as staging:
        spec.save(str(staging))
        write_files(staging, model.tokenizer)
        proof = prove(model, greedy_search(model))
        translator = ctranslate2.Translator(str(staging), device="cpu")
        found = list(_translate(translator, model, proof, sources, targets))
        line = check_proof(proof, found, folder, "CTranslate2", quantization == "float32")
        limits = LIMITS
        if config.positions == "learned":
            limits = {name: min(most, config.max_length) for name, most in LIMITS.items()}
            named = ", ".join(f"{name}={value}" for name, value in limits.items())
            line = f"{line}; its positions are learned, so give translate_batch {named}"
        _translate_longest(translator, model, sources, limits)
        return line


def _translate_longest(
    translator: ctranslate2.Translator,
    model: TrainedModel,
    sources: Sequence[str],
    limits: Mapping[str, int],
) -> None:
    """Translate a source of as many tokens as fit, without an end."""
    source = [[sources[model.config.eos_id]] * limits["max_input_length"]]
    length = limits["max_decoding_length"]
    try:
        translator.translate_batch(
            source,
            max_input_length=limits["max_input_length"],
            max_decoding_length=length,
            min_decoding_length=length,
            beam_size=1,
        )
    except RuntimeError as error:
        raise InputError(f"not written, because CTranslate2 stops: {error}") from error


def _specification(
    config: TransformerConfig, params: Mapping[str, Any]
) -> transformer_spec.TransformerSpec:
    has_norm = {"encoder": config.final_norm, "decoder": config.decoder_has_final_norm}
    # A specification of pre-norm layers may have a final norm; those of post-norm layers have none.
    encoder, decoder = (
        kind(
            layers,
            config.num_heads,
            no_final_norm=not has_norm[stack],
            activation=common_spec.Activation[ACTIVATIONS[config.activation]],
            layernorm_embedding=config.embedding_norm,
            relative_attention_bias=config.positions == "relative",
            ffn_glu=config.gated_feed_forward,
            rms_norm=config.norm == "rms_norm",
        )
        for stack, kind, layers in (
            ("encoder", transformer_spec.TransformerEncoderSpec, config.num_encoder_layers),
            ("decoder", transformer_spec.TransformerDecoderSpec, config.num_decoder_layers),
        )
    )
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    embedding_specs = {"source": spec.encoder.embeddings[0], "target": spec.decoder.embeddings}
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        stack_spec, of_stack = getattr(spec, stack), params[stack]
        stack_spec.pre_norm = config.norm_placement_of(stack) == "pre"
        table = "token" if config.token_embeddings == "shared" else side
        embedding_specs[side].weight = params[f"{table}_embedding"]["embedding"]
        scaled = config.embedding_scale == "sqrt_d_model"
        stack_spec.scale_embeddings = float(config.d_model) ** 0.5 if scaled else 1.0
        if config.positions != "relative":
            stack_spec.position_encodings.encodings = _positions(config, params, side)
        if config.embedding_norm:
            _set_norm(stack_spec.layernorm_embedding, params[f"{side}_embedding_norm"])
        if has_norm[stack]:
            _set_norm(stack_spec.layer_norm, of_stack["norm"])
        for number, layer_spec in enumerate(stack_spec.layer):
            _set_layer(layer_spec, of_stack[f"layers_{number}"], config)
            if config.positions == "relative":
                shared = config.relative_attention_bias == "shared"
                holder = of_stack if shared else of_stack[f"layers_{number}"]
                attention = layer_spec.self_attention
                attention.relative_attention_bias = holder["relative_attention_bias"]["embedding"]
                attention.relative_attention_max_distance = np.int32(
                    config.relative_attention_max_distance
                )
    projection = params.get("output_projection", {})
    tied = config.output_projection == "tied"
    weight = embedding_specs["target"].weight if tied else projection["kernel"].T
    spec.decoder.projection.weight = np.ascontiguousarray(weight)
    if config.output_bias:
        spec.decoder.projection.bias = projection["bias"]
    spec.decoder.start_from_zero_embedding = config.start_embedding == "zero"
    if config.output_scale == "inverse_sqrt_d_model":
        spec.decoder.scale_outputs = float(config.d_model) ** -0.5
    return spec


def _positions(config: TransformerConfig, params: Mapping[str, Any], side: str) -> Array:
    """Return the rows that are added to the embeddings of positions from 0 on."""
    if config.positions == "learned":
        return params[f"{side}_positions"]["embedding"][config.position_offset :]
    # As many on both sides: the file has equal tables once.
    length = max(config.max_length, *LIMITS.values())
    if config.positions == "none":
        return np.zeros((length, config.d_model), np.float32)
    return sinusoids_of(config, length, config.d_model).astype(np.float32)


def _set_layer(
    spec: model_spec.LayerSpec, params: Mapping[str, Any], config: TransformerConfig
) -> None:
    _set_attention(spec.self_attention, params, "self_attention", config)
    if "cross_attention" in params:
        _set_attention(spec.attention, params, "cross_attention", config)
    _set_norm(spec.ffn.layer_norm, params["feed_forward_residual"]["norm"])
    network = params["feed_forward"]
    if config.gated_feed_forward:  # the gate has the activation
        _set_linear(spec.ffn.linear_0, network["gate"])
        _set_linear(spec.ffn.linear_0_noact, network["inner"])
    else:
        _set_linear(spec.ffn.linear_0, network["inner"])
    _set_linear(spec.ffn.linear_1, network["outer"])


def _set_attention(
    spec: model_spec.LayerSpec, params: Mapping[str, Any], name: str, config: TransformerConfig
) -> None:
    _set_norm(spec.layer_norm, params[f"{name}_residual"]["norm"])
    attention = params[name]
    inputs = [attention[part] for part in ("query", "key", "value")]
    if config.shares_heads:
        inputs = [_for_all_heads(part, config.num_heads) for part in inputs]
    groups = [inputs] if name == "self_attention" else [inputs[:1], inputs[1:]]
    for linear, group in zip(spec.linear, groups, strict=False):
        joined = {key: np.concatenate([part[key] for part in group], axis=-1) for key in group[0]}
        _set_linear(linear, joined)
    _set_linear(spec.linear[-1], attention["output"])
    spec.queries_scale = 1 / config.attention_divisor


def _for_all_heads(projection: Mapping[str, Array], num_heads: int) -> dict[str, Array]:
    """Return the projection of all heads that one projection of each head is."""
    of_all = {"kernel": np.kron(np.eye(num_heads, dtype=np.float32), projection["kernel"])}
    if "bias" in projection:
        of_all["bias"] = np.tile(projection["bias"], num_heads)
    return of_all


def _set_linear(spec: common_spec.LinearSpec, params: Mapping[str, Array]) -> None:
    spec.weight = np.ascontiguousarray(params["kernel"].T)
    if "bias" in params:
        spec.bias = params["bias"]


def _set_norm(spec: common_spec.LayerNormSpec, params: Mapping[str, Array]) -> None:
    spec.gamma = params["scale"]
    if hasattr(spec, "beta"):
        spec.beta = params.get("bias", np.zeros_like(params["scale"]))


def _tokens(side: Side) -> list[str]:
    """Return a token for each id: one that is missing, or there twice, is named by its id."""
    tokens: dict[str, int] = {}
    for token_id in range(side.vocab_size):
        token = side.segmenter.token(token_id)
        named = f"<id {token_id}>"
        tokens[named if token is None or token in tokens else token] = token_id
    return list(tokens)


def _translate(
    translator: ctranslate2.Translator,
    model: TrainedModel,
    proof: Proof,
    sources: Sequence[str],
    targets: Sequence[str],
) -> Iterator[list[int]]:
    pad_id = model.config.pad_id
    forced = model.generation.get("forced_first_token")
    prefix = None if forced is None else [[targets[forced]]] * len(proof.src)
    results = translator.translate_batch(
        [[sources[token_id] for token_id in row if token_id != pad_id] for row in proof.src],
        prefix,
        beam_size=1,
        max_decoding_length=proof.max_new_tokens,
        min_decoding_length=0,  # a translation may be EOS alone
        suppress_sequences=[[targets[pad_id]]],
        return_end_token=True,
    )
    ids = {token: token_id for token_id, token in enumerate(targets)}
    for result in results:
        yield [ids[token] for token in result.hypotheses[0]]
