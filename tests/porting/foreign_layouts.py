"""The true layouts of the foreign models, written by hand as their authors would have to."""

from functools import partial

from jax_transformer.convert import Buffer, Layout, Operation, Row, transpose
from jax_transformer.convert.layouts.torch_nn import linear, norm
from jax_transformer.convert.position_table import PositionTable

SELF, CROSS, NETWORK = "self_attention", "cross_attention", "feed_forward"
PARTS = ("query", "key", "value", "output")


def fused(name, path, parts, stack="rows", operation=transpose):
    """Return the rows of a weight and a bias that hold these parts of the block at `path`."""
    kernels = tuple(f"{path}/{part}/kernel" for part in parts)
    biases = tuple(f"{path}/{part}/bias" for part in parts)
    return [
        Row(f"{name}.weight", kernels, operation, stack=stack),
        Row(f"{name}.bias", biases, stack="heads" if stack == "heads" else "rows"),
    ]


def column_linear(name, path):
    """Return the rows of a product from the right: its kernel is as ours."""
    return [Row(f"{name}.weight", f"{path}/kernel"), Row(f"{name}.bias", f"{path}/bias")]


def attention(prefix, path, names, parts=PARTS):
    return [
        row
        for name, part in zip(names, parts, strict=True)
        for row in linear(f"{prefix}.{name}", f"{path}/{part}")
    ]


def embeddings(source, target):
    return [Row(source, "source_embedding/embedding"), Row(target, "target_embedding/embedding")]


def learned_positions(source, target, operation=Operation()):  # noqa: B008 - it is frozen
    return [
        Row(source, "source_positions/embedding", operation),
        Row(target, "target_positions/embedding", operation),
    ]


def side_rows(stacks, write):
    """Return what `write(foreign layer, own layer, decoder?)` gives for both stacks."""
    encoder, decoder = stacks
    return [
        *write(f"{encoder}", "encoder/layers_{i}", False),
        *write(f"{decoder}", "decoder/layers_{i}", True),
    ]


def fused_rows():
    def layer(name, own, decoder):
        rows = [
            *fused(f"{name}.attn.qkv", f"{own}/{SELF}", PARTS[:3])[:1],
            *linear(f"{name}.attn.out", f"{own}/{SELF}/output"),
            *norm(f"{name}.ln_1", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.ln_2", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.mlp.up", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.mlp.down", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            rows += fused(f"{name}.cross.kv", f"{own}/{CROSS}", PARTS[1:3])[:1]
            rows += attention(f"{name}.cross", f"{own}/{CROSS}", ("q", "out"), ("query", "output"))
            rows += norm(f"{name}.ln_x", f"{own}/{CROSS}_residual/norm")
        return rows

    return [
        Row("tok_emb.weight", "token_embedding/embedding"),
        Row("lm_head.weight", "token_embedding/embedding"),
        *learned_positions("src_pos_emb.weight", "tgt_pos_emb.weight"),
        *side_rows(("enc.blocks.{i}", "dec.blocks.{i}"), layer),
        *norm("enc.ln_f", "encoder/norm"),
        *norm("dec.ln_f", "decoder/norm"),
    ]


def keys_before_queries():
    order = ("key", "query", "value")

    def layer(name, own, decoder):
        rows = [
            *fused(f"{name}.mixer.kqv", f"{own}/{SELF}", order),
            *linear(f"{name}.mixer.proj", f"{own}/{SELF}/output"),
            *norm(f"{name}.mixer_norm", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.ff_norm", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.expand", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.shrink", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            rows += fused(f"{name}.reader.kqv", f"{own}/{CROSS}", order)
            rows += linear(f"{name}.reader.proj", f"{own}/{CROSS}/output")
            rows += norm(f"{name}.reader_norm", f"{own}/{CROSS}_residual/norm")
        return rows

    return [
        *embeddings("words_in.weight", "words_out.weight"),
        *side_rows(("readers.{i}", "writers.{i}"), layer),
        *linear("head", "output_projection"),
    ]


def fused_columns():
    columns = {"stack": "columns", "operation": Operation()}

    def layer(name, own, decoder):
        rows = [
            *fused(f"{name}.attn.c_attn", f"{own}/{SELF}", PARTS[:3], **columns),
            *column_linear(f"{name}.attn.c_proj", f"{own}/{SELF}/output"),
            *norm(f"{name}.ln_1", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.ln_2", f"{own}/{NETWORK}_residual/norm"),
            *column_linear(f"{name}.mlp.c_fc", f"{own}/{NETWORK}/inner"),
            *column_linear(f"{name}.mlp.c_proj", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            cross = f"{name}.crossattention"
            rows += fused(f"{cross}.c_attn", f"{own}/{CROSS}", PARTS[1:3], **columns)
            rows += column_linear(f"{cross}.q_attn", f"{own}/{CROSS}/query")
            rows += column_linear(f"{cross}.c_proj", f"{own}/{CROSS}/output")
            rows += norm(f"{name}.ln_cross_attn", f"{own}/{CROSS}_residual/norm")
        return rows

    return [
        *embeddings("encoder.wte.weight", "decoder.wte.weight"),
        *learned_positions("encoder.wpe.weight", "decoder.wpe.weight"),
        *side_rows(("encoder.h.{i}", "decoder.h.{i}"), layer),
        *norm("encoder.ln_f", "encoder/norm"),
        *norm("decoder.ln_f", "decoder/norm"),
    ]


def fused_heads():
    def layer(name, own, decoder):
        rows = [
            *fused(f"{name}.self_attn.qkv_proj", f"{own}/{SELF}", PARTS[:3], "heads"),
            *linear(f"{name}.self_attn.o_proj", f"{own}/{SELF}/output"),
            *norm(f"{name}.norm1", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.norm2", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.linear_net.0", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.linear_net.3", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            cross, path = f"{name}.cross_attn", f"{own}/{CROSS}"
            rows += fused(f"{cross}.kv_proj", path, PARTS[1:3], "heads")
            rows += attention(cross, path, ("q_proj", "o_proj"), ("query", "output"))
            rows += norm(f"{name}.norm3", f"{path}_residual/norm")
        return rows

    return [
        *embeddings("model.net.embed.src.weight", "model.net.embed.tgt.weight"),
        *side_rows(("model.net.encoder.{i}", "model.net.decoder.{i}"), layer),
        *linear("model.net.output_net", "output_projection"),
    ]


def clones():
    names = [f"linears.{index}" for index in range(4)]
    own_norm = partial(norm, scale="a_2", bias="b_2")

    def layer(name, own, decoder):
        blocks = (SELF, CROSS, NETWORK) if decoder else (SELF, NETWORK)
        rows = [
            *attention(f"{name}.self_attn", f"{own}/{SELF}", names),
            *linear(f"{name}.feed_forward.w_1", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.feed_forward.w_2", f"{own}/{NETWORK}/outer"),
        ]
        for index, block in enumerate(blocks):
            rows += own_norm(f"{name}.sublayer.{index}.norm", f"{own}/{block}_residual/norm")
        return rows + attention(f"{name}.src_attn", f"{own}/{CROSS}", names) if decoder else rows

    return [
        *embeddings("src_embed.0.lut.weight", "tgt_embed.0.lut.weight"),
        *side_rows(("encoder.layers.{i}", "decoder.layers.{i}"), layer),
        *own_norm("encoder.norm", "encoder/norm"),
        *own_norm("decoder.norm", "decoder/norm"),
        *linear("generator.proj", "output_projection"),
    ]


def mean_free():
    names = ("wq", "wk", "wv", "wo")

    def scale(name, path):
        return [Row(f"{name}.g", f"{path}/scale")]

    def layer(name, own, decoder):
        rows = [
            *attention(f"{name}.attention", f"{own}/{SELF}", names),
            *scale(f"{name}.attention_norm", f"{own}/{SELF}_residual/norm"),
            *scale(f"{name}.ffn_norm", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.ffn.w1", f"{own}/{NETWORK}/gate"),
            *linear(f"{name}.ffn.w3", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.ffn.w2", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            rows += attention(f"{name}.context_attention", f"{own}/{CROSS}", names)
            rows += scale(f"{name}.context_norm", f"{own}/{CROSS}_residual/norm")
        return rows

    return [
        *embeddings("input_table.weight", "output_table.weight"),
        *side_rows(("encoder_blocks.{i}", "decoder_blocks.{i}"), layer),
        *scale("encoder_norm", "encoder/norm"),
        *scale("decoder_norm", "decoder/norm"),
        *linear("output", "output_projection"),
    ]


def kernels():
    def layer(name, own, decoder):
        rows = []
        attentions = {"W": ("self", SELF)} | ({"U": ("cross", CROSS)} if decoder else {})
        for letter, (_, block) in attentions.items():
            for short, part in zip("qkvo", PARTS, strict=True):
                rows += [Row(f"{name}.{letter}{short}", f"{own}/{block}/{part}/kernel")]
        for short, part in (("i", "inner"), ("f", "outer")):
            rows += [Row(f"{name}.W{short}", f"{own}/{NETWORK}/{part}/kernel")]
            rows += [Row(f"{name}.b{short}", f"{own}/{NETWORK}/{part}/bias")]
        for short, block in (*attentions.values(), ("ff", NETWORK)):
            path = f"{own}/{block}_residual/norm"
            rows += [Row(f"{name}.gain_{short}", f"{path}/scale")]
            rows += [Row(f"{name}.shift_{short}", f"{path}/bias")]
        return rows

    return [
        *embeddings("encoder.word.weight", "decoder.word.weight"),
        *learned_positions("encoder.place.weight", "decoder.place.weight"),
        *norm("encoder.start", "source_embedding_norm"),
        *norm("decoder.start", "target_embedding_norm"),
        *side_rows(("encoder.layer{i}", "decoder.layer{i}"), layer),
        Row("to_words", "output_projection/kernel"),
        Row("words_bias", "output_projection/bias"),
    ]


def letters():
    def layer(name, own, decoder):
        rows = [
            *attention(f"{name}.s", f"{own}/{SELF}", "abcd"),
            *norm(f"{name}.n2", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.n1", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.e", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.f", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            rows += attention(f"{name}.t", f"{own}/{CROSS}", "abcd")
            rows += norm(f"{name}.n3", f"{own}/{CROSS}_residual/norm")
            rows += norm(f"{name}.n4", f"{own}/memory_norm")
        return rows

    return [
        *embeddings("u.weight", "w.weight"),
        *side_rows(("enc_layers.{i}", "dec_layers.{i}"), layer),
        *linear("z", "output_projection"),
    ]


def torch_attention(name, path):
    """Return the rows of a torch.nn.MultiheadAttention."""
    kernels = tuple(f"{path}/{part}/kernel" for part in PARTS[:3])
    biases = tuple(f"{path}/{part}/bias" for part in PARTS[:3])
    return [
        Row(f"{name}.in_proj_weight", kernels, transpose),
        Row(f"{name}.in_proj_bias", biases),
        *linear(f"{name}.out_proj", f"{path}/output"),
    ]


def unnormed_decoder():
    def layer(name, own, decoder):
        rows = [
            *torch_attention(f"{name}.mha", f"{own}/{SELF}"),
            *norm(f"{name}.pre", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.pre_mlp", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.mlp.0", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.mlp.2", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            rows += torch_attention(f"{name}.mha_cross", f"{own}/{CROSS}")
            rows += norm(f"{name}.pre_cross", f"{own}/{CROSS}_residual/norm")
        return rows

    return [
        *embeddings("source.weight", "target.weight"),
        *side_rows(("encode.stages.{i}", "decode.stages.{i}"), layer),
        *norm("encode.ln_post", "encoder/norm"),
        *linear("classify", "output_projection"),
    ]


def sequence_first():
    def layer(name, own, decoder):
        first, last = ("ln_c", "ln_b") if decoder else ("ln_b", "ln_a")
        rows = [
            *torch_attention(f"{name}.attn", f"{own}/{SELF}"),
            *norm(f"{name}.{first}", f"{own}/{SELF}_residual/norm"),
            *norm(f"{name}.{last}", f"{own}/{NETWORK}_residual/norm"),
            *linear(f"{name}.lin_a", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.lin_b", f"{own}/{NETWORK}/outer"),
        ]
        if decoder:
            rows += torch_attention(f"{name}.xattn", f"{own}/{CROSS}")
            rows += norm(f"{name}.ln_a", f"{own}/{CROSS}_residual/norm")
        return rows

    return [
        *embeddings("emb_src.weight", "emb_trg.weight"),
        *side_rows(("up.{i}", "down.{i}"), layer),
        *linear("fc", "output_projection"),
    ]


def norm_inside():
    names = ("w_qs", "w_ks", "w_vs", "fc")

    def layer(name, own, decoder):
        rows = [
            *linear(f"{name}.pos_ffn.w_1", f"{own}/{NETWORK}/inner"),
            *linear(f"{name}.pos_ffn.w_2", f"{own}/{NETWORK}/outer"),
            *norm(f"{name}.pos_ffn.layer_norm", f"{own}/{NETWORK}_residual/norm"),
        ]
        attentions = {"slf_attn": SELF} | ({"enc_attn": CROSS} if decoder else {})
        for foreign, block in attentions.items():
            rows += attention(f"{name}.{foreign}", f"{own}/{block}", names)
            rows += norm(f"{name}.{foreign}.layer_norm", f"{own}/{block}_residual/norm")
        return rows

    tables = ("encoder.word_emb.weight", "decoder.word_emb.weight", "word_prj.weight")
    return [
        *(Row(table, "token_embedding/embedding") for table in tables),
        *norm("encoder.layer_norm", "source_embedding_norm"),
        *norm("decoder.layer_norm", "target_embedding_norm"),
        *side_rows(("encoder.layer_stack.{i}", "decoder.layer_stack.{i}"), layer),
    ]


def wrapped():
    def layer(name, own, decoder):
        last = 2 if decoder else 1
        network, path = f"{name}.{last}.fn", f"{own}/{NETWORK}"
        rows = [
            *norm(f"{name}.{last}.norm", f"{path}_residual/norm"),
            *fused(f"{network}.0", path, ("inner", "gate")),
            *linear(f"{network}.3", f"{path}/outer"),
        ]
        for index, block in enumerate((SELF, CROSS) if decoder else (SELF,)):
            module, path = f"{name}.{index}", f"{own}/{block}"
            rows += norm(f"{module}.norm", f"{path}_residual/norm")
            rows += fused(f"{module}.fn.to_kv", path, PARTS[1:3])[:1]
            rows += attention(f"{module}.fn", path, ("to_q", "to_out.0"), ("query", "output"))
        return rows

    return [
        *embeddings("src_emb.weight", "tgt_emb.weight"),
        *learned_positions("src_pos", "tgt_pos", Operation(shape=(1, "max_length", "d_model"))),
        *side_rows(("enc.layers.{i}", "dec.layers.{i}"), layer),
        *norm("enc.norm", "encoder/norm"),
        *norm("to_logits.0", "decoder/norm"),
        *linear("to_logits.1", "output_projection"),
    ]


BUFFERS = {
    "keys_before_queries": {"timing": ("length", "d_model")},
    "clones": dict.fromkeys(("src_embed.1.pe", "tgt_embed.1.pe"), (1, "length", "d_model")),
    "unnormed_decoder": {"position_encoding": (1, "length", "d_model")},
    "sequence_first": {"positional.pe": ("length", 1, "d_model")},
    "norm_inside": {
        f"{side}.pos_table": (1, "length", "d_model") for side in ("encoder", "decoder")
    },
}
ROWS = {
    write.__name__: write
    for write in (
        fused_rows,
        keys_before_queries,
        fused_columns,
        fused_heads,
        clones,
        mean_free,
        kernels,
        letters,
        unnormed_decoder,
        sequence_first,
        norm_inside,
        wrapped,
    )
}


def layout(name):
    """Return the layout of one of the twelve models."""
    shapes = BUFFERS.get(name, {})
    buffers = (Buffer(foreign, PositionTable(shape)) for foreign, shape in shapes.items())
    return Layout(name, tuple(ROWS[name]()), tuple(buffers))
