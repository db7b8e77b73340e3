"""The Annotated Transformer (harvardnlp, 2022): a bare state_dict; nothing else is recorded.

Source of the facts: its public notebook. Sizes come from the shapes, the number of heads from the
caller or the notebook (8), all else from the notebook. Its vocabulary is a file of pickled objects
of torchtext, which is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.layouts.torch_nn import layer_rows, linear, norm
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import Buffer, Layout, Row
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers.trainer import Model, Settings, Trainer, build
from jax_transformer.storage.weights.torch_file import Checkpoint

# Attentions by their names, in the order of their residual connections.
ATTENTIONS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "src_attn"},
}
EMBEDDINGS = {"source": "src_embed", "target": "tgt_embed"}
LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
FIRST_INNER = "encoder.layers.0.feed_forward.w_1.weight"
SETTINGS = Settings("annotated_transformer", {}, {"num_heads": 8})


def _layout() -> Layout:
    rows = linear("generator.proj", "output_projection")
    for side, name in EMBEDDINGS.items():
        rows.append(Row(f"{name}.0.lut.weight", f"{side}_embedding/embedding"))
    for stack, attentions in ATTENTIONS.items():
        norms = [f"sublayer.{index}.norm" for index in range(len(attentions) + 1)]
        rows += layer_rows(
            f"{stack}.layers.{{i}}",
            f"{stack}/layers_{{i}}",
            {own: (attentions[own], name) for own, name in zip(attentions, norms, strict=False)},
            [f"linears.{place}" for place in range(4)],
            ("feed_forward.w_1", "feed_forward.w_2", norms[-1]),
            ("a_2", "b_2"),
        )
        rows += norm(f"{stack}.norm", f"{stack}/norm", "a_2", "b_2")
    tables = tuple(Buffer(f"{name}.1.pe", PositionTable()) for name in EMBEDDINGS.values())
    return Layout("annotated_transformer", tuple(rows), tables)


def _recognises(content: Mapping[str, Any]) -> bool:
    return "src_embed.0.lut.weight" in content and "generator.proj.weight" in content


def _read(checkpoint: Checkpoint) -> Model:
    return Model(checkpoint.arrays(checkpoint.content), SETTINGS)


def _config(model: Model) -> TransformerConfig:
    matches = [match for name in model.tensors if (match := LAYER.match(name))]
    layers = {
        stack: len({match[2] for match in matches if match[1] == stack}) for stack in ATTENTIONS
    }
    source = model.shape("src_embed.0.lut.weight")
    table = model.tensors.get("src_embed.1.pe")
    if table is None or table.ndim != 3:
        raise InputError("the checkpoint has no table 'src_embed.1.pe'; is it of another program?")
    return build(
        "annotated_transformer",
        {
            "src_vocab_size": source[0],
            "tgt_vocab_size": model.rows("tgt_embed.0.lut.weight"),
            "d_model": source[1],
            "num_heads": model.settings["num_heads"],
            "d_ff": model.rows(FIRST_INNER),
            "num_encoder_layers": layers["encoder"],
            "num_decoder_layers": layers["decoder"],
            "max_length": table.shape[1],
            "norm": "std_norm",
            "norm_epsilon": 1e-6,
            "norm_placement": "pre",
            "final_norm": True,
            "pad_id": 2,
            "bos_id": 0,
            "eos_id": 1,
        },
    )


TRAINER = Trainer(
    "annotated_transformer",
    _layout(),
    _recognises,
    _read,
    _config,
    lambda model, config: None,
    remedy=(
        "with its classes at hand, m = torch.load('model.pt', weights_only=False); "
        "torch.save(m.state_dict(), 'plain.pt')"
    ),
    records_heads=False,
)
