"""The training step of a run, compiled once for each pair of settings; other settings of it."""

import functools

import jax

from jax_transformer.training.step import make_run_step

CONSTANT = {"schedule": "constant"}
ADAPTER = {"lora_rank": 2}
# Another value of each setting, and the settings beside which it acts.
OTHER_SETTINGS = {
    "steps": (3000, {"cooldown_steps": 1}),
    "schedule": ("constant", {}),
    "warmup_steps": (500, {}),
    "learning_rate_factor": (0.5, {}),
    "learning_rate": (0.5, CONSTANT),
    "cooldown_steps": (1, {}),
    "optimizer": ("muon", {}),
    "adam_beta1": (0.8, {}),
    "adam_beta2": (0.9, {}),
    "adam_epsilon": (1e-6, {}),
    "weight_decay": (0.1, {}),
    "clip_norm": (1.0, {}),
    "spike_factor": (3.0, {}),
    "freeze": (("encoder/*",), {}),
    "freeze_rows": (9, {}),
    "lora_rank": (3, ADAPTER),
    "lora_alpha": (5.0, ADAPTER),
    "lora_targets": (("*/output",), ADAPTER),
    "lora_whole": (("*_embedding/*",), ADAPTER),
    "lora_dropout": (0.2, ADAPTER),
    "num_microbatches": (2, {}),
    "ema_decay": (0.5, {}),
    "compute_dtype": ("bfloat16", {}),
    "gradient_dtype": ("float32", {"compute_dtype": "bfloat16"}),
    "remat": ("layers", {}),
    "scan_layers": (True, {}),
    "objective": ("ul2", {}),
    "noise_density": (0.5, {}),
    "mean_span_length": (2.0, {}),
    "label_smoothing": (0.2, {}),
    "max_tokens": (1000, {}),
    "batching": ("packed", {}),
    "bucket_count": (3, {}),
    "pack_length": (64, {}),
    "evaluation_interval": (2, {}),
    "select_by": ("bleu", {}),
    "patience": (3, {}),
    "keep_checkpoints": (5, {}),
    "bpe_dropout": (0.5, {}),
    "spec_augment": (True, {}),
    "seed": (1, {}),
}


@functools.cache
def run_step(config, settings):
    """Return the step of a run on one device; the state handed in is donated."""
    return jax.jit(make_run_step(config, settings), donate_argnames="state")
