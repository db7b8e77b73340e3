"""Speed of the training step beside PyTorch's nn.Transformer: python -m benchmarks.training.

The same weights, batches and work (tied embeddings, label smoothing, Adam), float32 on one core,
the systems called in turn, each block of steps right after a discarded one. The loss of the first
step without dropout says that the work is the same. Needs the extra "bench", and Linux
(sched_setaffinity).
"""

import json
import math
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer import TransformerConfig, convert, functional
from jax_transformer.convert import torch_nn
from jax_transformer.data.batches import Batch
from jax_transformer.host_memory import keep_freed_memory
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, train_step

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 8_000
# d_model, heads, d_ff, layers a side, sentences and tokens a sentence.
SIZES = {"small": (256, 4, 1024, 3, 32, 32), "base": (512, 8, 2048, 6, 16, 64)}
DROPOUTS = (0.0, 0.1)
SETTINGS = TrainingConfig(schedule="constant", learning_rate=1e-4, warmup_steps=1)
STEPS = 3  # of a timed block
PEAK_SIZE = 2048  # rows and columns of the matrices whose product is the peak

System = Callable[[str, float], float]  # of a size and a dropout rate, the block's first loss


def model_config(size: str, dropout: float) -> TransformerConfig:
    """Return the shape of nn.Transformer between tied embeddings."""
    d_model, num_heads, d_ff, layers, _, length = SIZES[size]
    return TransformerConfig.preset(
        "bias_free_qkv",
        src_vocab_size=VOCAB_SIZE,
        tgt_vocab_size=VOCAB_SIZE,
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        dropout=dropout,
        attention_dropout=dropout,
        embedding_dropout="both",
        qkv_bias=True,
        token_embeddings="shared",
        output_projection="tied",
        output_bias=False,
        initialization="vaswani2017",
        max_length=length,
    )


def draw_batch(size: str) -> Batch:
    """Return random pairs, most of them a little padded."""
    *_, rows, length = SIZES[size]
    random = np.random.default_rng(0)
    src, tgt = random.integers(3, VOCAB_SIZE, (2, rows, length + 1), dtype=np.int32)
    for ids in (src, tgt):
        lengths = random.integers(length - length // 8, length + 1, rows)
        ids[np.arange(length + 1) > lengths[:, None]] = TransformerConfig.pad_id
    return Batch(src[:, 1:], tgt[:, :-1], tgt[:, 1:])


def load_ours() -> System:
    """Return the training step of this library, as train.py runs it."""
    keep_freed_memory()
    return _prepared(_our_run)


def load_ours_unkept() -> System:
    """Return the same with the memory of a step handed back to the system after it."""
    return _prepared(_our_run)


def load_torch() -> System:
    """Return the training step of nn.Transformer, as it runs from Python."""
    return _prepared(lambda *task: _torch_run(*task, compiled=False))


def load_torch_compile() -> System:
    """Return the training step of nn.Transformer under torch.compile."""
    return _prepared(lambda *task: _torch_run(*task, compiled=True))


LOADERS = {
    "ours": load_ours,
    "ours, memory not kept": load_ours_unkept,
    "torch": load_torch,
    "torch.compile": load_torch_compile,
}


def _prepared(prepare: Callable[[str, float], Callable[[], float]]) -> System:
    """Return a system that prepares each task once and keeps only the last."""
    kept: dict[tuple[str, float], Callable[[], float]] = {}

    def system(*task: Any) -> float:
        if task not in kept:
            kept.clear()
            kept[task] = prepare(*task)
        return kept[task]()

    return system


def _our_run(size: str, dropout: float) -> Callable[[], float]:
    config = model_config(size, dropout)
    state, batch = init_state(config, SETTINGS), draw_batch(size)

    def run() -> float:
        nonlocal state
        losses = []
        for _ in range(STEPS):
            state, metrics = train_step(state, batch, config, SETTINGS)
            losses.append(metrics.loss)
        return float(jax.device_get(losses)[0])

    return run


def _torch_run(size: str, dropout: float, *, compiled: bool) -> Callable[[], float]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = model_config(size, dropout)
    model = _torch_model(config)
    layout = torch_nn.transformer("body.", token_embedding="table.weight")
    params = init_state(config, SETTINGS).params
    model.load_state_dict(convert.to_torch(params, config, layout))
    loss_of = torch.compile(model) if compiled else model
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=SETTINGS.learning_rate,
        betas=(SETTINGS.adam_beta1, SETTINGS.adam_beta2),
        eps=SETTINGS.adam_epsilon,
        fused=True,
    )
    batch = [torch.from_numpy(ids).long() for ids in draw_batch(size)[:3]]

    def run() -> float:
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return float(losses[0])

    return run


def _torch_model(config: TransformerConfig) -> "torch.nn.Module":
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
                label_smoothing=SETTINGS.label_smoothing,
            )

    return Model()


def matrix_product_peak() -> float:
    """Return the most operations a second that a large float32 product reaches here."""
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(PEAK_SIZE, PEAK_SIZE)), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(10):
        begun = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - begun)
    return 2 * PEAK_SIZE**3 / min(seconds)


def compare(
    systems: dict[str, Connection], size: str, dropout: float, rounds: int
) -> dict[str, Any]:
    """Return the seconds a step of each system in each round, and the first losses."""
    losses, seconds = time_in_turn(systems, (size, dropout), rounds)
    return {
        "size": size,
        "dropout": dropout,
        "losses": losses,
        "seconds": {name: [taken / STEPS for taken in times] for name, times in seconds.items()},
    }


def cells(result: dict[str, Any]) -> list[str]:
    """Return a result as a row of the table."""
    seconds, losses = result["seconds"], result["losses"]
    others = list(LOADERS)[1:]
    return [
        result["size"],
        str(result["dropout"]),
        *(f"{median(taken):.3f}" for taken in seconds.values()),
        *(spread(np.divide(seconds[name], seconds["ours"])) for name in others),
        *(f"{abs(losses[name] - losses['ours']):.1e}" for name in others),
    ]


def main(
    rounds: int = 5, core: int = 0, all_cores: bool = False, json_file: Path | None = None
) -> None:
    """Time the systems on every task, print seconds and ratios.

    Args:
        rounds: How often each system is timed on each task, in turn with the others.
        core: The one core that everything runs on.
        all_cores: Run on all of them instead.
        json_file: Where to write the seconds of every block, if anywhere.
    """
    if not all_cores:
        os.sched_setaffinity(0, {core})  # inherited by the processes begun from here on
    others = list(LOADERS)[1:]
    table = Table("size", "dropout", *(f"{name}, s" for name in LOADERS))
    for heading in (*(f"{name} / ours" for name in others), *(f"loss unlike {n}" for n in others)):
        table.add_column(heading)
    results = []
    systems = start(LOADERS)
    for size in SIZES:
        for dropout in track(DROPOUTS, size):
            results.append(compare(systems, size, dropout, rounds))
            table.add_row(*cells(results[-1]))
    stop(systems)
    versions = {name: version(name) for name in ("jax", "torch")}
    Console().print(table, f"{processor()}. {versions}")
    if json_file is not None:
        record = {"processor": processor(), "versions": versions, "results": results}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
