"""The training step of this library and of PyTorch's nn.Transformer: one model, batch and work.

Tied embeddings, label smoothing and Adam; both start from the same weights.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jax_transformer import TransformerConfig, convert
from jax_transformer.convert.layouts import torch_nn
from jax_transformer.model import functional
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, make_run_step, training_execution

if TYPE_CHECKING:
    import torch

Steps = Callable[[], float]  # makes some training steps, returns the loss of the first one ever


class Size(NamedTuple):
    """A model and its batch.

    Attributes:
        layers: Of the encoder, and of the decoder.
        rows: Sentence pairs of the batch.
        length: Tokens of the longest source, and of the longest target.
    """

    d_model: int
    num_heads: int
    d_ff: int
    layers: int
    vocab_size: int
    rows: int
    length: int


def model_config(size: Size, dropout: float) -> TransformerConfig:
    """Return the shape of nn.Transformer between tied embeddings."""
    return TransformerConfig.preset(
        "bias_free_qkv",
        src_vocab_size=size.vocab_size,
        tgt_vocab_size=size.vocab_size,
        d_model=size.d_model,
        num_heads=size.num_heads,
        d_ff=size.d_ff,
        num_encoder_layers=size.layers,
        num_decoder_layers=size.layers,
        dropout=dropout,
        attention_dropout=dropout,
        embedding_dropout="both",
        qkv_bias=True,
        token_embeddings="shared",
        output_projection="tied",
        output_bias=False,
        initialization="vaswani2017",
        max_length=size.length,
    )


def draw_batch(size: Size) -> Batch:
    """Return random pairs, most of them a little padded."""
    rows, length = size.rows, size.length
    random = np.random.default_rng(0)
    src, tgt = random.integers(3, size.vocab_size, (2, rows, length + 1), dtype=np.int32)
    for ids in (src, tgt):
        lengths = random.integers(length - length // 8, length + 1, rows)
        ids[np.arange(length + 1) > lengths[:, None]] = TransformerConfig.pad_id
    return Batch(src[:, 1:], tgt[:, :-1], tgt[:, 1:])


def prepared(prepare: Callable[..., Steps]) -> Callable[..., float]:
    """Return a system that prepares each task once and keeps only the last."""
    kept: dict[tuple, Steps] = {}

    def system(*task: Any) -> float:
        if task not in kept:
            kept.clear()
            kept[task] = prepare(*task)
        return kept[task]()

    return system


def our_steps(size: Size, dropout: float, settings: TrainingConfig, steps: int) -> Steps:
    """Return what makes training steps as train.py does, on the first device."""
    config = model_config(size, dropout)
    execution = training_execution(jax.devices()[0], config, settings)
    make_step = jax.jit(make_run_step(config, settings, execution), donate_argnums=0)
    state, batch = init_state(config, settings), jax.device_put(draw_batch(size))
    losses: list[jax.Array] = []

    def run() -> float:
        nonlocal state
        for _ in range(steps):
            state, metrics = make_step(state, batch)
            losses.append(metrics.loss)
        return float(jax.device_get(losses)[0])

    return run


def torch_steps(
    size: Size,
    dropout: float,
    settings: TrainingConfig,
    steps: int,
    *,
    compiled: bool,
    device: str = "cpu",
    compile_backend: str = "inductor",
) -> Steps:
    """Return what makes training steps of nn.Transformer, by fused Adam.

    Args:
        size: Of model and batch.
        dropout: Rate, attention weights included.
        settings: Of Adam; where they name bfloat16, the forward pass runs under autocast.
        steps: Of a call.
        compiled: Whether by torch.compile.
        device: "cpu" or "cuda".
        compile_backend: Backend of torch.compile.
    """
    import torch

    config = model_config(size, dropout)
    model = _torch_model(config, settings.label_smoothing)
    table = convert.Row("table.weight", "token_embedding/embedding")
    layout = convert.Layout("body", (table, *torch_nn.transformer("body.").rows))
    params = init_state(config, settings).params
    model.load_state_dict(convert.to_torch(params, config, layout))
    model.to(device)
    loss_of = torch.compile(model, backend=compile_backend) if compiled else model
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )
    batch = [torch.from_numpy(ids).long().to(device) for ids in draw_batch(size)[:3]]
    bfloat16 = settings.compute_dtype == "bfloat16"
    losses: list[torch.Tensor] = []

    def run() -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
                loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return float(losses[0])

    return run


def _torch_model(config: TransformerConfig, label_smoothing: float) -> "torch.nn.Module":
    """Return nn.Transformer between tied embeddings, and its loss."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(config.tgt_vocab_size, config.d_model)
            self.body = torch.nn.Transformer(
                config.d_model,
                config.num_heads,
                config.num_encoder_layers,
                config.num_decoder_layers,
                config.d_ff,
                config.dropout,
                batch_first=True,
                layer_norm_eps=config.norm_epsilon,
            )
            self.dropout = torch.nn.Dropout(config.dropout)
            positions = functional.sinusoidal_positions(config.max_length, config.d_model)
            positions = torch.from_numpy(positions).float()
            self.register_buffer("positions", positions, persistent=False)
            later = torch.ones(config.max_length, config.max_length, dtype=torch.bool).triu(1)
            self.register_buffer("later", later, persistent=False)

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.table(ids) * math.sqrt(config.d_model) + self.positions)

        def forward(
            self, src: torch.Tensor, tgt_in: torch.Tensor, tgt_out: torch.Tensor
        ) -> torch.Tensor:
            padding = src == config.pad_id
            hidden = self.body(
                self.embed(src),
                self.embed(tgt_in),
                tgt_mask=self.later,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_key_padding_mask=tgt_in == config.pad_id,
                tgt_is_causal=False,
            )
            return torch.nn.functional.cross_entropy(
                (hidden @ self.table.weight.T).flatten(0, 1),
                tgt_out.flatten(),
                ignore_index=config.pad_id,
                label_smoothing=label_smoothing,
            )

    return Model()
