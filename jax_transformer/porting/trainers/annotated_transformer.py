"""The Annotated Transformer (harvardnlp, 2022): a bare state_dict; nothing else is recorded.

Source of the facts: its public notebook. Sizes come from the shapes, the number of heads from the
caller or the notebook (8), all else from the notebook. Its vocabulary is a file of pickled objects
of torchtext, which is not read.
"""

from __future__ import annotations

import re
from typing import Any

from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.layouts.torch_nn import layer_rows, linear, norm
from jax_transformer.convert.table import Buffer, Layout, Row
from jax_transformer.model.tree import STACKS
from jax_transformer.porting.trainers.trainer import Settings, Trainer, TrainerCheckpoint

SETTINGS = Settings("annotated_transformer", {}, {"num_heads": 8})
LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
PROJECTIONS = ("linears.0", "linears.1", "linears.2", "linears.3")
NORM = ("a_2", "b_2")


def _layout() -> Layout:
    rows = [
        Row("src_embed.0.lut.weight", "source_embedding/embedding"),
        Row("tgt_embed.0.lut.weight", "target_embedding/embedding"),
        *linear("generator.proj", "output_projection"),
    ]
    attentions = {"self_attention": ("self_attn", "sublayer.0.norm")}
    for stack in STACKS:
        feed_forward = ("feed_forward.w_1", "feed_forward.w_2", f"sublayer.{len(attentions)}.norm")
        rows += layer_rows(f"{stack}.layers", stack, attentions, PROJECTIONS, feed_forward, NORM)
        rows += norm(f"{stack}.norm", f"{stack}/norm", NORM)
        attentions["cross_attention"] = ("src_attn", "sublayer.1.norm")
    buffers = tuple(Buffer(f"{side}_embed.1.pe", PositionTable()) for side in ("src", "tgt"))
    return Layout("annotated_transformer", tuple(rows), buffers)


def _fields(model: TrainerCheckpoint) -> dict[str, Any]:
    layers = {match.groups() for name in model.tensors if (match := LAYER.match(name))}
    src_vocab_size, d_model = model.shape("src_embed.0.lut.weight")
    return {
        "src_vocab_size": src_vocab_size,
        "tgt_vocab_size": model.shape("tgt_embed.0.lut.weight")[0],
        "d_model": d_model,
        "num_heads": model.settings["num_heads"],
        "d_ff": model.shape("encoder.layers.0.feed_forward.w_1.weight")[0],
        "num_encoder_layers": sum(stack == "encoder" for stack, _ in layers),
        "num_decoder_layers": sum(stack == "decoder" for stack, _ in layers),
        "max_length": model.shape("src_embed.1.pe", axes=3)[1],
        "norm": "std_norm",
        "norm_epsilon": 1e-6,
        "norm_placement": "pre",
        "final_norm": True,
        "pad_id": 2,
        "bos_id": 0,
        "eos_id": 1,
    }


TRAINER = Trainer(
    "annotated_transformer",
    marks=({"src_embed.0.lut.weight", "generator.proj.weight"},),
    read=lambda checkpoint: TrainerCheckpoint(checkpoint.arrays(checkpoint.content), SETTINGS),
    fields=_fields,
    tokenizer=lambda model, config: None,
    remedy=(
        "with its classes at hand, m = torch.load('model.pt', weights_only=False); "
        "torch.save(m.state_dict(), 'plain.pt')"
    ),
    layout=_layout(),
    records_heads=False,
)
