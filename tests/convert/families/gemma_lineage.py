"""Small models of T5Gemma and T5Gemma 2: sizes and values drawn by a seed."""

import sys
import types

import numpy as np
import torch
import transformers

TYPES = ("full_attention", "sliding_attention")
# The smallest tower: text does not pass it.
VISION = {
    "model_type": "siglip_vision_model",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), 1),
    **{"num_attention_heads": 1, "image_size": 4, "patch_size": 4},
}


def drawn_model(model_type, seed):
    """Return a model whose configuration is drawn; windows are shorter than texts of the tests."""
    chance = np.random.default_rng(seed)
    is_first = model_type == "t5gemma"

    def pick(*values):
        return values[chance.integers(len(values))]

    pattern = pick(1, 2, 3, 9)
    shared = {
        "head_dim": pick(4, 6, 8),
        "query_pre_attn_scalar": int(chance.integers(16, 64)),
        "rms_norm_eps": pick(1e-6, 1e-5),
        "sliding_window": int(
            chance.integers(2, 6)
        ),  # of 1, the cache of transformers 5.24 is wrong
        "hidden_activation": pick("gelu_pytorch_tanh", "silu"),
        "final_logit_softcapping": pick(None, 3.0),
        "attn_logit_softcapping": pick(None, 2.0),
        "max_position_embeddings": 64,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    full = {"rope_type": "default", "rope_theta": pick(1e4, 1e6, 50.0)}
    if pick(True, False):
        full |= {"rope_type": "linear", "factor": pick(2.0, 8.0)}
    local = {"rope_type": "default", "rope_theta": pick(1e4, 30.0)}
    shared["rope_parameters"] = full if is_first else dict(zip(TYPES, (full, local), strict=True))

    def stack():
        kv_heads, layers = pick(1, 2, 3), int(chance.integers(1, 4))
        return {
            "hidden_size": 24 if not is_first else pick(12, 18, 24),
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * pick(1, 2),
            "intermediate_size": int(chance.integers(11, 30)),
            "num_hidden_layers": layers,
            "layer_types": [TYPES[(i + 1) % pattern != 0] for i in range(layers)],
            "vocab_size": 61 if not is_first else pick(53, 61),
        }

    stacks = [{**shared, **stack()} for _ in range(2)]
    return model_of(model_type, *stacks, tie_word_embeddings=not is_first or pick(True, False))


def model_of(model_type, encoder, decoder, **others):
    """Return a model of these two configurations; the last token ends images."""
    if model_type == "t5gemma":
        config = transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, **others)
        return transformers.T5GemmaForConditionalGeneration(config)
    images = {"vision_config": VISION, "mm_tokens_per_image": 1}
    encoder = {"text_config": encoder, "eoi_token_index": encoder["vocab_size"] - 1, **images}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=decoder, **others)
    return transformers.T5Gemma2ForConditionalGeneration(config)


def random_model(model_type, seed, dtype=torch.float64):
    """Return a model of transformers whose every leaf is random; one in float64 is exact."""
    model = random_leaves(drawn_model(model_type, seed).to(dtype).eval(), seed)
    if dtype == torch.float64:
        set_exact(model)
    return model


def random_leaves(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for leaf in model.parameters():
        deviation = leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 0.3
        leaf.data.normal_(0.0, deviation, generator=generator)
    return model


def set_exact(model):
    """Let norms, angles, factors and softmax be computed in float64, not in float32."""
    sys.modules[type(model).__module__].eager_attention_forward = _attention
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = types.MethodType(_norm, module)
        elif name.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(_angles, module)
        elif hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)


def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def _angles(self, x, position_ids, layer_type=None):
    rule = self.config.rope_parameters
    rule = rule if layer_type is None else rule[layer_type]
    exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64) / self.config.head_dim
    angles = position_ids[..., None] / (rule["rope_theta"] ** exponents * rule.get("factor", 1.0))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _attention(module, query, key, value, mask, dropout=0.0, scaling=None, softcap=None, **_):
    groups = module.num_key_value_groups
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=dtype).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights
