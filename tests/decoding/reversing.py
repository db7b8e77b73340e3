"""Small models that are learning to reverse their sources, caught at several stages.

Random weights repeat one token for ever. These models say something else at every step, end their
rows at different ones, and are unsure enough that a beam finds what greedy search does not.
"""

import functools

import numpy as np
import torch

import torch_reference
from jax_transformer import TransformerConfig
from tests.models import unchecked

# One has no ids, and the decoders of the others do nothing in a search that another's does not:
# learned positions as BART's, a relative bias as T5's, or one in each layer as UMT5's.
LIKE_ANOTHER = {"torch_nn", "mbart", "m2m100", "blenderbot", "t5_v1_1", "mt5", "whisper"}
PRESETS = [name for name in TransformerConfig.presets() if name not in LIKE_ANOTHER]
VOCABULARY, LONGEST = 16, 10
MAX_NEW_TOKENS = LONGEST + 1  # with the end; rows that forget it are cut off
STEPS, BETWEEN_STAGES, STAGES = 200, 20, 4


def small_config(preset, vocab_size=VOCABULARY):
    fields = {
        "src_vocab_size": vocab_size,
        "tgt_vocab_size": vocab_size,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "max_length": 2 * LONGEST,
        "dropout": 0.0,
        "initialization": "xavier_uniform",  # unused here: presets that differ in it only are one
    }
    if preset == "marian":  # padding is the last id there, and begins every target
        fields |= {"pad_id": vocab_size - 1, "bos_id": vocab_size - 1}
    if "num_kv_heads" in TransformerConfig.preset_fields(preset):
        fields["num_kv_heads"] = 1
    return TransformerConfig.preset(preset, **fields)


def random_model(config, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch_reference.Transformer(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Scores that are not divided by sqrt(head_dim) need narrower queries.
                narrow = config.attention_scale == "none" and name.endswith("query.weight")
                divisor = parameter.shape[-1] * (config.head_dim if narrow else 1)
                torch.nn.init.normal_(parameter, 0, divisor**-0.5)
    return model


def constant_model(weights):
    """Return a model whose next token has these odds [V], whatever came before."""
    model = random_model(small_config("bias_free_qkv"))
    model.output_projection.weight.data[:] = 0
    model.output_projection.bias.data[:] = torch.log(torch.tensor(weights))
    return model


def pairs(config, batch, random, longest=LONGEST):
    """Return sources of up to `longest` symbols and an end, and their reversals, begun, ended."""
    special = (config.pad_id, config.bos_id, config.eos_id)
    symbols = np.setdiff1d(np.arange(VOCABULARY), special)
    src = np.full((batch, LONGEST + 1), config.pad_id, np.int32)
    tgt = np.full((batch, LONGEST + 2), config.pad_id, np.int32)
    tgt[:, 0] = config.bos_id
    for row, length in enumerate(random.integers(1, longest + 1, batch)):
        sequence = random.choice(symbols, length)
        src[row, : length + 1] = [*sequence, config.eos_id]
        tgt[row, 1 : length + 2] = [*sequence[::-1], config.eos_id]
    return src, tgt


def sources(config, batch, seed, longest=LONGEST):
    """Return ragged sources that no model has been trained on."""
    return pairs(config, batch, np.random.default_rng(1000 + seed), longest)[0]


@functools.cache
def learners(preset):
    """Return four models of this preset, each trained a little further."""
    config = small_config(preset)
    random = np.random.default_rng(PRESETS.index(preset))
    model = random_model(config, seed=PRESETS.index(preset))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, betas=(0.9, 0.98), fused=True)
    stages = []
    with unchecked():
        for step in range(1, STEPS + 1):
            src, tgt = map(torch.from_numpy, pairs(config, 16, random))
            logits = model(src, tgt[:, :-1]).flatten(0, 1)
            labels = tgt[:, 1:].flatten().long()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels, ignore_index=config.pad_id).backward()
            optimizer.step()
            if (STEPS - step) % BETWEEN_STAGES == 0:
                stages.append(torch_reference.Transformer(config))
                stages[-1].load_state_dict(model.state_dict())
    return tuple(stages[-STAGES:])
