"""How many mistakes of ports the usual criteria let pass: python -m benchmarks.tolerances.

Three presets learn to reverse rows of ids. Every mistake is then made in the trained model, and its
logits of other rows are compared with the right ones, in float64. Needs the extra test.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from jax_transformer import Batch, TransformerConfig, apply, init_params, make_train_step
from jax_transformer.convert.table import flatten, nest

SIZES = {"d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "src_vocab_size": 60}
SIZES |= {"tgt_vocab_size": 60, "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.0}
ROWS, LENGTH = 32, 12
ALL = "norm_epsilon=1e-12 norm_epsilon=1e-08 "
FIELDS = {  # that are wrong, one at a time
    "vaswani2017": f"{ALL} attention_scale=none activation=gelu norm=std_norm "
    "embedding_scale=none positions=sinusoidal_halves",
    "bart": f"{ALL} attention_scale=none activation=gelu_tanh norm=std_norm "
    "embedding_scale=sqrt_d_model",
    "t5_v1_1": f"{ALL} attention_scale=head_dim activation=gelu norm=layer_norm "
    "relative_attention_max_distance=32",
}
PARAMETERS = {  # one that is wrong: a square kernel, the columns of the heads, a bias
    "encoder/layers_0/self_attention/value/kernel": jnp.transpose,
    "decoder/layers_1/cross_attention/query/kernel": lambda kernel: (
        kernel.reshape(len(kernel), SIZES["num_heads"], -1).swapaxes(1, 2).reshape(kernel.shape)
    ),
    "decoder/layers_0/feed_forward/outer/bias": jnp.zeros_like,
}
forward = jax.jit(apply, static_argnames="config")


def main(seeds: tuple[int, ...] = (0, 1, 2), steps: int = 2000) -> None:
    """Print how many mistakes each criterion passes, of each seed; `steps` are of a training."""
    made = [[each for name in FIELDS for each in mistakes(name, seed, steps)] for seed in seeds]
    print(f"| accepted by | of {len(made[0])} mistakes it passes, with the seeds {seeds} |")
    print("|---|---|")
    for name in made[0][0]:
        print(f"| {name} | {', '.join(str(sum(one[name] for one in each)) for each in made)} |")


def batch_of(config: TransformerConfig, random: np.random.Generator) -> Batch:
    """Return random rows of several lengths, and the same reversed."""
    src = np.full((ROWS, LENGTH), config.pad_id, np.int32)
    tgt = np.full((ROWS, LENGTH + 1), config.pad_id, np.int32)
    tgt[:, 0] = config.bos_id
    for row, length in enumerate(random.integers(4, LENGTH + 1, ROWS)):
        src[row, :length] = ids = 4 + random.permutation(56)[:length]
        tgt[row, 1 : length + 1] = ids[::-1]
    return Batch(src, tgt[:, :-1], tgt[:, 1:])


def mistakes(preset: str, seed: int, steps: int) -> Iterator[dict[str, bool]]:
    """Yield which criteria pass each mistake in a model that is trained first."""
    config, random = TransformerConfig.preset(preset, **SIZES), np.random.default_rng(seed)
    params = init_params(jax.random.key(seed), config)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    step, state = jax.jit(make_train_step(config, optimizer)), optimizer.init(params)
    for _ in range(steps):
        params, state, loss = step(params, state, batch_of(config, random))
    batch = batch_of(config, random)
    print(f"{preset}, seed {seed}: loss {loss:.3f}", flush=True)
    with jax.enable_x64(True):
        flat = flatten(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params))
        wrong = [(config, flat, {"src_mask": np.ones((ROWS, 1, 1, LENGTH), bool)})]  # padding
        for name, value in (field.split("=") for field in FIELDS[preset].split()):
            wrong.append((replace(config, **{name: type(getattr(config, name))(value)}), flat, {}))
        changes = {name: PARAMETERS[name] for name in PARAMETERS if name in flat}
        wrong += [(config, flat | {n: change(flat[n])}, {}) for n, change in changes.items()]
        right, *others = (
            forward(nest(leaves), config, batch.src, batch.tgt_in, **options)
            for config, leaves, options in [(config, flat, {}), *wrong]
        )
        yield from (accepted(right, other, batch.tgt_out != config.pad_id) for other in others)


def accepted(right: jax.Array, wrong: jax.Array, real: np.ndarray) -> dict[str, bool]:
    """Return which criteria the logits [B, T, V] of a wrong model meet at all target tokens."""
    right, wrong = right[real], wrong[real]
    p, q = jax.nn.log_softmax(right), jax.nn.log_softmax(wrong)
    divergence, apart = (jnp.exp(p) * (p - q)).sum(-1).max(), jnp.abs(right - wrong).max()
    error = apart / max(1, jnp.abs(right).max())
    found = {f"KL {bound}": divergence <= bound for bound in (0.1, 0.015)}
    found["the same greedy token"] = (right.argmax(-1) == wrong.argmax(-1)).all()
    found |= {f"atol {bound:.0e}": apart <= bound for bound in (1e-1, 1e-5)}
    ours = {"ours, float32: 2e-6": error <= 2e-6, "ours, float64: 1e-14": error <= 1e-14}
    return {name: bool(value) for name, value in (found | ours).items()}


if __name__ == "__main__":
    tyro.cli(main)
