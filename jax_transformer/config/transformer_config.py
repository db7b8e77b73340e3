"""The shape of a model; imports neither jax nor torch, because both frameworks read it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, no_type_check

from msgspec import Meta

from jax_transformer.config.declared import check_fields, check_names, declarations, short_repr
from jax_transformer.config.presets import PRESETS
from jax_transformer.errors import InputError, shorten

LARGEST = 2**31 - 1  # of a whole number: lengths, ids and positions are int32 on a device
MOST_LAYERS = 10_000  # of a stack; the deepest published models have 1,000

Size = Annotated[int, Meta(ge=1, le=LARGEST)]
Layers = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
DecoderLayers = Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
Id = Annotated[int, Meta(ge=0, le=LARGEST)]
Rate = Annotated[float, Meta(ge=0, le=1)]
NormKind = Literal[
    "layer_norm",
    "std_norm",
    "biased_std_norm",
    "unbiased_layer_norm",
    "rms_norm",
    "zero_centered_rms_norm",
]
NormPlacement = Literal["post", "pre", "sandwich"]
Stack = Literal["encoder", "decoder"]
# Neither 0 nor infinite in float32.
Positive = Annotated[float, Meta(ge=2.0**-126, lt=2.0**128)]

SPECIAL_IDS = ("pad_id", "bos_id", "eos_id")  # fields

# What the encoder may have for itself: each is a field, and one more behind "encoder_".
ENCODER_SIZES = ("d_model", "num_heads", "num_kv_heads", "d_ff", "max_length")
# The fields of a model that has no logits of tokens.
WITHOUT_OUTPUT: dict[str, Any] = {
    "output_projection": "none",
    "output_bias": False,
    "output_scale": "none",
    "logit_softcap": None,
}
WITHOUT_HEAD: dict[str, Any] = {
    "head": "none",
    "head_start": "bos",
    "head_dropout": 0.0,
    "labels": (),
    "problem_type": None,
}
# What an encoder alone has in the place of the fields of a decoder.
ENCODER_ALONE: dict[str, Any] = {
    "num_decoder_layers": 0,
    **WITHOUT_OUTPUT,
    "decoder_norm_placement": None,
    "decoder_final_norm": None,
    "memory_norm": False,
    "decoder_attention": "self_then_cross",
    "start_embedding": "token",
}
# A field with this value: what other fields must then be.
REQUIRED: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("head_projection", "shared", {"d_kv": None}),
    ("norm", "rms_norm", {"norm_bias": False}),
    ("norm", "zero_centered_rms_norm", {"norm_bias": False}),
    ("norm_placement", "pre", {"dropout_placement": "sublayer"}),
    ("norm_placement", "sandwich", {"dropout_placement": "sublayer"}),
    ("decoder_norm_placement", "pre", {"dropout_placement": "sublayer"}),
    ("decoder_norm_placement", "sandwich", {"dropout_placement": "sublayer"}),
    ("token_embeddings", "none", {"start_embedding": "token", "source_features": None}),
    ("output_projection", "none", {"output_bias": False, "output_scale": "none"}),
    ("num_decoder_layers", 0, ENCODER_ALONE),
    ("head", "none", WITHOUT_HEAD),
    ("head", "sequence", WITHOUT_OUTPUT),
    ("head", "token", {"num_decoder_layers": 0, "head_start": "bos"}),
    ("decoder_attention", "self_over_memory", {"norm_placement": "post", "memory_norm": False}),
    ("decoder_attention", "self_over_memory", {"sliding_window": None, "source_features": None}),
    ("decoder_attention", "merged", {"memory_norm": False}),
    ("decoder_attention", "ssru_then_cross", {"sliding_window": None}),
    ("sliding_window", None, {"sliding_window_pattern": None, "sliding_window_theta": None}),
    ("sliding_window", None, {"encoder_window": "each_side"}),
    ("qkv_bias", False, {"key_bias": True}),
)
# A field with this value joins the widths of the encoder and the decoder.
EQUAL_WIDTHS = (
    ("token_embeddings", "shared"),
    ("head_projection", "shared"),
    ("decoder_attention", "self_over_memory"),
    ("decoder_attention", "merged"),
)


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of an encoder-decoder Transformer (Vaswani et al. 2017) and of its variants.

    Frozen, hashable (a static argument of `jax.jit`) and checked on construction: no number, width
    or length of a table is above `LARGEST`. No field is a run mode: a `dropout_key` in a call
    switches dropout on.

    Attributes:
        src_vocab_size: Number of source token ids.
        tgt_vocab_size: Number of target token ids.
        source_features: Width of the vectors of a source of sound, as the bands of its log-mel
            spectrogram: `src` is then [batch, frames, source_features], all frames are attended,
            and two convolutions of width 3, the second with stride 2, each with GELU, make a
            position of the encoder of two frames (Radford et al. 2022, section 2.2). None means
            that sources are token ids.
        d_model: Width of the residual stream; a multiple of `num_heads` unless `d_kv` is given.
        num_heads: Attention heads.
        d_kv: Width of a head's queries and keys (section 3.2.2); None is d_model // num_heads.
        d_v: Width of a head's values; None is that of its keys.
        num_kv_heads: Heads of the keys and values, each of which serves a group of consecutive
            query heads (Ainslie et al. 2023); None is `num_heads`.
        d_ff: Inner width of the feed-forward network.
        encoder_d_model: `d_model` of the encoder, if it differs from that of the decoder.
        encoder_num_heads: The same for `num_heads`.
        encoder_num_kv_heads: The same for `num_kv_heads`.
        encoder_d_ff: The same for `d_ff`.
        encoder_max_length: The same for `max_length`, of sources of sound, behind the convolutions.
        num_encoder_layers: Layers of the encoder, at most 10,000.
        num_decoder_layers: Layers of the decoder, at most 10,000. 0 is an encoder alone, which has
            no parameters of the target side: only `encode` can be called.
        max_length: The longest source or target, in tokens: a bound by the position table, without
            one (`positions` "relative", "rotary" or "none") only the default limit of texts.
        token_embeddings: "separate" tables for source and target, one "shared" table, or "none":
            `src` and `tgt` are then vectors [batch, length, d_model] instead of ids.
        embedding_scale: Factor on token embeddings: "sqrt_d_model" (section 3.4) or "none".
        start_embedding: What the decoder reads for BOS: its "token" embedding, or, as in Marian, a
            "zero" vector.
        positions: Position table added to the embeddings (section 3.5): "sinusoidal" has sine
            and cosine interleaved; "sinusoidal_halves" has all sines, then all cosines;
            "sinusoidal_per_column" gives each column its own exponent (2c/d_model for column c,
            even columns sine, odd ones cosine); "sinusoidal_tensor2tensor" has all sines, then
            all cosines, of frequencies from 1 to exactly 1/10000; "learned" has a table of
            parameters for each side; "none" adds nothing, nor does "relative": a learned bias for
            the distance of query and key is added to the scores of self-attentions (Raffel et al.
            2020, section 2.1). "rotary" rotates the queries and keys of self-attentions by their
            positions (Su et al. 2021, section 3.2.2): column c with column c + n / 2 of the n
            rotated columns.
        position_offset: Row of the position table that belongs to the first token. A learned
            table has max_length + position_offset rows.
        position_rounding: Type whose precision the sinusoids have: "float16" or "bfloat16" where
            the model was published with a table in this type, "none" for the exact ones.
        relative_attention_num_buckets: Rows of a table of relative biases, each for a distance or,
            far away, for a range of distances.
        relative_attention_max_distance: Distance from which on all distances share a bucket.
        relative_attention_bias: "shared" has one table for all layers of a stack, "per_layer"
            one for each layer.
        rotary_theta: Base of the frequencies of rotary positions: theta**(-2c / n) for column c.
        rotary_scaling: What rotary positions are divided by (Chen et al. 2023).
        rotary_fraction: Share of a head's columns, the first ones, that is rotated.
        sliding_window: Positions that a query of the decoder's self-attention sees: its own and
            the nearest earlier ones (Beltagy et al. 2020, section 3.1); None means all of them.
        sliding_window_pattern: Of each so many layers of a stack, the last one has no window.
            None means that every layer has it.
        sliding_window_theta: `rotary_theta` of the layers with a window, whose positions are not
            scaled; None means both as in the other layers.
        encoder_window: What the encoder's queries see where there is a window: "each_side"
            `sliding_window` positions on each side, "split" as many as the decoder's, the own one
            in the middle.
        embedding_norm: Whether embeddings plus positions are normed, before their dropout.
        output_projection: Last product: "linear" has its own matrix, "tied" reuses the target
            embedding table, "none" returns hidden states [batch, length, d_model].
        output_bias: Whether the output projection adds a bias.
        output_scale: Factor on the hidden states before the output projection: "none" or
            "inverse_sqrt_d_model".
        logit_softcap: Bound of the logits, as `attention_softcap`.
        head: What `classify` computes in the place of logits of tokens: "none", or scores of
            `labels`. "sequence" reads the decoder's output at the last EOS of the source, where
            the source, moved by one, is the target, and has a dense layer, tanh and a product
            (Lewis et al. 2020, section 3.1); "token" has one product at each position of an
            encoder alone, as T5ForTokenClassification.
        head_start: First token of that target: "bos", or as in mBART the source's "last_token".
        head_dropout: Dropout before each product of the head.
        labels: Names of what the head scores, in their order.
        problem_type: What the scores are, as in transformers: logits of one of the labels, logits
            of each label by itself, or the numbers of a "regression". None is a regression of one
            label, and one of several labels.
        attention_scale: Divisor of the attention scores: "head_dim" is sqrt(head_dim) (section
            3.2.1), "d_model" is sqrt(d_model), "none" is 1, a number is its square root.
        attention_softcap: Bound c of the attention scores, which become c tanh(score / c) before
            masks (Gemma Team 2024, section 2); None means no bound.
        query_key_norm: Whether queries and keys are normed, each head for itself (Henry et al.
            2020).
        head_projection: "full" has (d_model, d_model) matrices for query, key and value;
            "shared" splits the heads first and multiplies each by the same (head_dim, head_dim).
        qkv_bias: Whether the query, key and value projections add a bias.
        key_bias: Whether the key projection does, where the others do. Its gradient is 0: it adds
            one number to all scores of a query, and the softmax does not change.
        attention_output_bias: Whether the attention's output projection adds a bias.
        feed_forward_bias: Whether the feed-forward projections add a bias.
        gated_feed_forward: Whether the inner projection is multiplied by the activation of a
            third projection, the gate (Shazeer 2020), in place of its own activation.
        activation: Feed-forward nonlinearity; "gelu" is exact (erf), "gelu_tanh" its
            approximation, "silu" is also called swish.
        norm: "layer_norm" divides by sqrt(biased variance + epsilon) (Ba et al. 2016, as
            torch.nn.LayerNorm); "std_norm" divides by (unbiased standard deviation + epsilon),
            "biased_std_norm" by (biased standard deviation + epsilon), "unbiased_layer_norm" by
            sqrt(unbiased variance + epsilon); "rms_norm" divides by sqrt(mean square + epsilon),
            without a mean and without a bias (Zhang and Sennrich 2019);
            "zero_centered_rms_norm" is the same with the factor 1 + scale.
        norm_epsilon: The epsilon of every norm.
        norm_bias: Whether the norms add a bias.
        norm_placement: "post" norms after the residual addition, as the paper (section 3.1);
            "pre" norms the sublayer's input (Xiong et al. 2020); "sandwich" norms its input and
            its output (Ding et al. 2021).
        decoder_norm_placement: The placement in the decoder; None means as `norm_placement` says.
        final_norm: Whether the encoder ends in a norm, and the decoder too.
        decoder_final_norm: Whether the decoder ends in a norm; None means as `final_norm` says.
        memory_norm: Whether each decoder layer norms the memory it attends to.
        decoder_attention: "self_then_cross" is the paper's decoder layer; "self_over_memory" runs
            the causal self-attention over the encoder's output, feeds the result as the values of
            the second attention and adds the residual to them. It needs targets as long as their
            sources, and targets do not attend to each other. "merged" is one attention to targets
            and memory side by side, with the same projections (T5Gemma 2). "ssru_then_cross" has
            a recurrence in the place of the self-attention (Kim et al. 2019, section 3.1): a target
            mask then says where its state continues, and rotary positions are the encoder's alone.
        dropout: Dropout of sublayers and embeddings.
        attention_dropout: Rate on the attention weights; None means `dropout`.
        activation_dropout: Rate inside the feed-forward network; None means `dropout`.
        dropout_placement: "sublayer" drops each sublayer's output before the residual addition
            (section 5.4); "norm" drops the output of each norm.
        embedding_dropout: Where embeddings plus positions are dropped: "both" sides, only the
            "decoder", or "none".
        final_dropout: Whether the outputs of both final norms are dropped.
        initialization: How `init_params` draws parameters. "vaswani2017": Xavier uniform
            matrices, zero biases, embeddings normal with deviation d_model**-0.5.
            "xavier_uniform": every matrix, the embeddings too. "xavier_uniform_fused": the same
            with query, key and value as one (3 d_model, d_model) matrix, as
            torch.nn.Transformer. "torch_default": what torch.nn.Linear and Embedding draw.
            "normal": matrices and embeddings normal with deviation 0.02, zero biases. "t5":
            embeddings and the output projection normal with deviation 1, other matrices with
            inputs**-0.5, and the query's with (inputs * head_dim)**-0.5, because T5 does not
            divide its scores; zero biases.
        pad_id: Id of padding, in source and target.
        bos_id: Id of BOS, the first token of every target; may equal `pad_id`.
        eos_id: Id of EOS, the last token of every source and target.
    """

    src_vocab_size: Size = 37_000
    tgt_vocab_size: Size = 37_000
    source_features: Size | None = None
    d_model: Size = 512
    num_heads: Size = 8
    d_kv: Size | None = None
    d_v: Size | None = None
    num_kv_heads: Size | None = None
    d_ff: Size = 2048
    encoder_d_model: Size | None = None
    encoder_num_heads: Size | None = None
    encoder_num_kv_heads: Size | None = None
    encoder_d_ff: Size | None = None
    encoder_max_length: Size | None = None
    num_encoder_layers: Layers = 6
    num_decoder_layers: DecoderLayers = 6
    max_length: Size = 512
    token_embeddings: Literal["separate", "shared", "none"] = "separate"
    embedding_scale: Literal["sqrt_d_model", "none"] = "sqrt_d_model"
    start_embedding: Literal["token", "zero"] = "token"
    positions: Literal[
        "sinusoidal",
        "sinusoidal_halves",
        "sinusoidal_per_column",
        "sinusoidal_tensor2tensor",
        "learned",
        "relative",
        "rotary",
        "none",
    ] = "sinusoidal"
    position_offset: Id = 0
    position_rounding: Literal["none", "float16", "bfloat16"] = "none"
    relative_attention_num_buckets: Size = 32
    relative_attention_max_distance: Size = 128
    relative_attention_bias: Literal["shared", "per_layer"] = "shared"
    rotary_theta: Positive = 10_000.0
    rotary_scaling: Positive = 1.0
    rotary_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    sliding_window: Size | None = None
    sliding_window_pattern: Size | None = None
    sliding_window_theta: Positive | None = None
    encoder_window: Literal["each_side", "split"] = "each_side"
    embedding_norm: bool = False
    output_projection: Literal["linear", "tied", "none"] = "linear"
    output_bias: bool = True
    output_scale: Literal["none", "inverse_sqrt_d_model"] = "none"
    logit_softcap: Positive | None = None
    head: Literal["none", "sequence", "token"] = "none"
    head_start: Literal["bos", "last_token"] = "bos"
    head_dropout: Rate = 0.0
    labels: tuple[str, ...] = ()
    problem_type: (
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ) = None
    attention_scale: Literal["head_dim", "d_model", "none"] | Positive = "head_dim"
    attention_softcap: Positive | None = None
    query_key_norm: bool = False
    head_projection: Literal["full", "shared"] = "full"
    qkv_bias: bool = True
    key_bias: bool = True
    attention_output_bias: bool = True
    feed_forward_bias: bool = True
    gated_feed_forward: bool = False
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    norm: NormKind = "layer_norm"
    norm_epsilon: Positive = 1e-5
    norm_bias: bool = True
    norm_placement: NormPlacement = "post"
    decoder_norm_placement: NormPlacement | None = None
    final_norm: bool = False
    decoder_final_norm: bool | None = None
    memory_norm: bool = False
    decoder_attention: Literal[
        "self_then_cross", "self_over_memory", "merged", "ssru_then_cross"
    ] = "self_then_cross"
    dropout: Rate = 0.1
    attention_dropout: Rate | None = None
    activation_dropout: Rate | None = None
    dropout_placement: Literal["sublayer", "norm"] = "sublayer"
    embedding_dropout: Literal["both", "decoder", "none"] = "both"
    final_dropout: bool = False
    initialization: Literal[
        "vaswani2017", "xavier_uniform", "xavier_uniform_fused", "torch_default", "normal", "t5"
    ] = "xavier_uniform"
    pad_id: Id = 0
    bos_id: Id = 1
    eos_id: Id = 2

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_fields(self)
        for fault in self._faults():
            raise InputError(fault)
        try:
            encoder = self.stack("encoder")
        except InputError as error:
            raise InputError(f"of the encoder's sizes, {error}") from error
        for field, value in EQUAL_WIDTHS:
            if encoder.d_model != self.d_model and getattr(self, field) == value:
                raise InputError(
                    f"encoder_d_model={self.encoder_d_model} must be d_model={self.d_model} where "
                    f"{field}={value!r}"
                )

    @classmethod
    def preset(cls, name: str, /, **overrides: Any) -> TransformerConfig:
        """Return a described implementation by name, with fields replaced.

        Args:
            **overrides: Fields of this class that differ from the preset.

        Raises:
            InputError: The name, a field or a value is unknown.
        """
        if not isinstance(name, str) or name not in PRESETS:
            known = ", ".join(PRESETS)
            raise InputError(f"preset={shorten(name)} is unknown; choose one of {known}")
        return cls.from_dict(PRESETS[name] | overrides)

    @classmethod
    def preset_fields(cls, name: str) -> dict[str, Any]:
        """Return the fields that a preset names; the others have their defaults."""
        return dict(PRESETS[name])

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Return the names that `preset` knows."""
        return tuple(PRESETS)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """Return the config with these fields, the others at their defaults.

        Raises:
            InputError: A field or a value is unknown.
        """
        check_names(fields, declarations(cls))
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON."""
        return dataclasses.asdict(self) | {"labels": [*self.labels]}

    def explicit(self) -> dict[str, Any]:
        """Return every field by name, where a field is None with the value that None stands for."""
        encoder = self.stack("encoder")
        sizes = ENCODER_SIZES if self.source_features else ENCODER_SIZES[:-1]
        return self.to_dict() | {
            "d_kv": self.head_dim,
            "d_v": self.value_dim,
            "num_kv_heads": self.key_heads,
            **{f"encoder_{size}": getattr(encoder, size) for size in sizes},
            "encoder_num_kv_heads": encoder.key_heads,
            "decoder_norm_placement": self.norm_placement_of("decoder"),
            "decoder_final_norm": self.decoder_has_final_norm,
            "attention_dropout": self.attention_dropout_rate,
            "activation_dropout": self.activation_dropout_rate,
        }

    def part(self, name: str) -> TransformerConfig:
        """Return the config of a part of the model.

        Args:
            name: "whole", or "encoder" for the encoder alone.

        Raises:
            InputError: The model has no such part.
        """
        if name not in ("whole", "encoder"):
            raise InputError(f"part={shorten(name)} must be 'whole' or 'encoder'")
        if name == "whole":
            return self
        return dataclasses.replace(self.stack("encoder"), **ENCODER_ALONE, **WITHOUT_HEAD)

    def with_head(self, head: Literal["sequence", "token"], **fields: Any) -> TransformerConfig:
        """Return the config of a classifier: with a head in the place of the output projection.

        Args:
            head: "token" leaves the decoder out.
            **fields: `labels`, and what else is of the head.

        Raises:
            InputError: A field or a value is unknown, or the model cannot have the head.
        """
        base = self.part("encoder") if head == "token" else self
        return self.from_dict({**base.to_dict(), **WITHOUT_OUTPUT, "head": head, **fields})

    def stack(self, name: Stack) -> TransformerConfig:
        """Return the config as the blocks of a stack read it: with the sizes of that stack."""
        own = {size: getattr(self, f"encoder_{size}") for size in ENCODER_SIZES}
        sizes = {size: value for size, value in own.items() if value is not None}
        if name == "decoder" or not sizes:
            return self
        encoder = self.to_dict() | sizes | {f"encoder_{size}": None for size in own}
        return TransformerConfig.from_dict(encoder)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads if self.d_kv is None else self.d_kv

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.d_v is None else self.d_v

    @property
    def shares_heads(self) -> bool:
        """Whether one projection serves all heads."""
        return self.head_projection == "shared"

    @property
    def attention_divisor(self) -> float:
        """What the attention scores are divided by."""
        widths = {"head_dim": self.head_dim, "d_model": self.d_model, "none": 1}
        return math.sqrt(widths.get(self.attention_scale, self.attention_scale))

    @property
    def key_heads(self) -> int:
        """Heads of the keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def rotated_columns(self) -> int:
        """Columns of a head that rotary positions rotate."""
        return int(self.head_dim * self.rotary_fraction)

    def window_of(self, stack: Stack, layer: int) -> tuple[int, int] | None:
        """Return how many earlier and later positions a layer's queries see; None is all.

        Args:
            layer: Number of the layer in its stack, from 0.
        """
        size, pattern = self.sliding_window, self.sliding_window_pattern
        if size is None or (pattern and (layer + 1) % pattern == 0):
            return None
        if stack == "decoder":
            return size - 1, 0
        return (size, size) if self.encoder_window == "each_side" else ((size - 1) // 2, size // 2)

    def norm_placement_of(self, stack: Stack) -> NormPlacement:
        """Return where the norms of a stack's sublayers stand."""
        own = self.decoder_norm_placement if stack == "decoder" else None
        return own or self.norm_placement

    @property
    def reads_ids(self) -> bool:
        """Whether sources are token ids, and not vectors."""
        return self.token_embeddings != "none" and self.source_features is None

    def positions_of(self, frames: int) -> int:
        """Return the encoder's positions of so many frames or ids of a source."""
        return frames if self.source_features is None else (frames + 1) // 2

    @property
    def has_position_table(self) -> bool:
        """Whether a position table is added to the embeddings, which limits their length."""
        return self.positions not in ("relative", "rotary", "none")

    @property
    def has_shared_relative_bias(self) -> bool:
        """Whether each stack has one table of relative biases."""
        return self.positions == "relative" and self.relative_attention_bias == "shared"

    @property
    def has_relative_bias_per_layer(self) -> bool:
        """Whether each layer has its own table of relative biases."""
        return self.positions == "relative" and self.relative_attention_bias == "per_layer"

    @property
    def decoder_has_final_norm(self) -> bool:
        """Whether the decoder ends in a norm; `final_norm` says it of the encoder."""
        return self.final_norm if self.decoder_final_norm is None else self.decoder_final_norm

    @property
    def generates(self) -> bool:
        """Whether the model has targets to generate: an encoder and a classifier have none."""
        return self.num_decoder_layers > 0 and self.head == "none"

    @property
    def num_labels(self) -> int:
        """Number of scores of the head."""
        return len(self.labels)

    @property
    def scores_are(self) -> str:
        """What the scores of the head are: `problem_type`, or what None stands for."""
        usual = "regression" if self.num_labels == 1 else "single_label_classification"
        return self.problem_type or usual

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate on the attention weights."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def activation_dropout_rate(self) -> float:
        """Dropout rate inside the feed-forward network."""
        return self.dropout if self.activation_dropout is None else self.activation_dropout

    def _faults(self) -> Iterator[str]:
        """Yield a line for each combination of fields that no model can have."""
        for field, value, others in REQUIRED:
            if getattr(self, field) == value:
                for name, required in others.items():
                    if (other := getattr(self, name)) != required:
                        yield f"{name}={other!r} must be {required!r} where {field}={value!r}"
        if self.d_kv is None and self.d_model % self.num_heads:
            yield (
                f"num_heads={self.num_heads} must divide d_model={self.d_model} without remainder, "
                "or d_kv must give the width of a head"
            )
        if self.num_heads * self.head_dim > LARGEST:
            yield f"num_heads={self.num_heads} times d_kv={self.d_kv} must be at most {LARGEST}"
        for name in SPECIAL_IDS:
            token_id, vocab_size = getattr(self, name), self.tgt_vocab_size
            if name != "bos_id":  # padding and EOS also occur in sources
                vocab_size = min(vocab_size, self.src_vocab_size)
            if token_id >= vocab_size:
                yield f"{name}={token_id} must be an id from 0 to {vocab_size - 1}"
        if self.eos_id == self.pad_id:
            yield f"eos_id={self.eos_id} must differ from pad_id={self.pad_id}"
        if self.num_heads % self.key_heads:
            yield f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
        if self.shares_heads and self.key_heads != self.num_heads:
            yield f"num_kv_heads={self.num_kv_heads} must be None where head_projection='shared'"
        unbiased = self.norm in ("std_norm", "unbiased_layer_norm")
        if unbiased and self.d_model == 1:
            yield f"d_model=1 has no unbiased deviation; norm={self.norm!r} needs 2 or more"
        if unbiased and self.query_key_norm and self.head_dim == 1:
            yield "a head of width 1 has no unbiased deviation; query_key_norm=True needs 2 or more"
        if self.final_dropout and not (self.final_norm and self.decoder_has_final_norm):
            yield (
                "final_dropout=True drops the outputs of both final norms; it needs "
                f"final_norm=True, not {self.final_norm}, and decoder_final_norm=None, not "
                f"{self.decoder_final_norm}"
            )
        if self.token_embeddings == "shared" and self.src_vocab_size != self.tgt_vocab_size:
            yield (
                f"token_embeddings='shared' needs equal vocabularies, but src_vocab_size="
                f"{self.src_vocab_size} and tgt_vocab_size={self.tgt_vocab_size}"
            )
        if self.head != "none" and (not self.labels or len({*self.labels}) < self.num_labels):
            yield f"labels={shorten(self.labels)} must name what the head scores, each once"
        if self.head == "sequence" and not self.num_decoder_layers:
            yield "head='sequence' reads the decoder's output, but num_decoder_layers=0"
        if self.head == "sequence" and not self.reads_ids:
            yield "head='sequence' reads the last EOS of ids, but sources are vectors"
        if not self.source_features and self.encoder_max_length not in (None, self.max_length):
            yield f"encoder_max_length={self.encoder_max_length} needs source_features"
        if self.source_features and self.token_embeddings == "shared":
            yield "token_embeddings='shared' needs sources of ids: set 'separate'"
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            yield "problem_type='single_label_classification' needs two labels or more"
        if self.token_embeddings == "none" and self.output_projection == "tied":
            yield "output_projection='tied' needs a table: token_embeddings must not be 'none'"
        if self.decoder_attention == "self_over_memory":
            if self.norm_placement_of("decoder") != "post":
                yield (
                    f"decoder_norm_placement={self.decoder_norm_placement!r} must be 'post' where "
                    "decoder_attention='self_over_memory'"
                )
            if self.positions == "rotary":
                yield (
                    "decoder_attention='self_over_memory' has no distances between targets; "
                    "positions='rotary' needs 'self_then_cross'"
                )
        if self.decoder_attention != "self_then_cross" and self.positions == "relative":
            yield (
                f"decoder_attention={self.decoder_attention!r} adds no bias of distances; "
                "positions='relative' needs 'self_then_cross'"
            )
        yield from self._faults_of_positions()

    def _faults_of_positions(self) -> Iterator[str]:
        kind = self.positions
        pairs = kind in ("sinusoidal", "sinusoidal_halves", "sinusoidal_per_column")
        if pairs and self.d_model % 2:
            yield (
                f"d_model={self.d_model} must be even for positions={kind!r}, "
                "which pairs sines with cosines"
            )
        if kind == "sinusoidal_tensor2tensor" and self.d_model < 4:
            yield (
                f"d_model={self.d_model} must be at least 4 for positions={kind!r}, "
                "which needs two frequencies"
            )
        if self.max_length + self.position_offset > LARGEST:
            yield (
                f"max_length={self.max_length} plus position_offset={self.position_offset} must be "
                f"at most {LARGEST}"
            )
        if self.position_offset and kind not in ("learned", "sinusoidal_tensor2tensor"):
            yield (
                f"position_offset={self.position_offset} must be 0 for positions={kind!r}; only "
                "'learned' and 'sinusoidal_tensor2tensor' have an offset"
            )
        if self.position_rounding != "none" and not kind.startswith("sinusoidal"):
            yield (
                f"position_rounding={self.position_rounding!r} must be 'none' for "
                f"positions={kind!r}, which has no sinusoids"
            )
        owners = {"relative": "relative", "rotary": "rotary", "sliding_window_theta": "rotary"}
        for field in dataclasses.fields(self):
            value, first = getattr(self, field.name), field.name.partition("_")[0]
            owner = owners.get(field.name, owners.get(first, kind))
            if owner != kind and value != field.default:
                yield f"{field.name}={value!r} needs positions={owner!r}, not {kind!r}"
        if kind == "rotary" and (self.rotated_columns < 2 or self.rotated_columns % 2):
            yield (
                f"rotary_fraction={self.rotary_fraction} of heads of {self.head_dim} columns is "
                f"{self.rotated_columns}, which must be an even number above 0"
            )
        # A side of the encoder has half of the buckets; half of these hold one distance each.
        buckets = self.relative_attention_num_buckets
        if buckets < 4:
            yield f"relative_attention_num_buckets={buckets} must be at least 4"
        if self.relative_attention_max_distance <= buckets // 2:
            yield (
                f"relative_attention_max_distance={self.relative_attention_max_distance} must "
                f"exceed half of relative_attention_num_buckets={buckets}: so many distances have "
                "a bucket each"
            )
