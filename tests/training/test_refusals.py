"""Settings, teachers and batches with which no step can be made: each is one line."""

import dataclasses
import re

import numpy as np
import optax
import pytest

from jax_transformer import InputError, TransformerConfig, cross_entropy, make_train_step
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.distillation import Teacher, check_teacher, distillation_loss
from jax_transformer.training.objective import batch_loss
from jax_transformer.training.step import init_state
from tests.models import random_params, small_config, unchecked

NAN, INFINITE = float("nan"), float("inf")
STUDENT = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
COUNTS = "steps warmup_steps max_tokens bucket_count evaluation_interval patience"
COUNTS += " keep_checkpoints num_microbatches pack_length"
OUT_OF_RANGE = dict.fromkeys(COUNTS.split(), (0, -1)) | {
    "label_smoothing": (1.0, -0.1, NAN),
    "adam_beta1": (1.0, NAN),
    "adam_beta2": (-0.5,),
    "adam_epsilon": (0.0,),
    "clip_norm": (0.0, NAN, INFINITE),
    "weight_decay": (-0.1,),
    "learning_rate_factor": (INFINITE,),
    "cooldown_steps": (-1,),
    "seed": (-1, 2**32),
}
for setting in dataclasses.fields(TrainingConfig):
    if "int" in str(setting.type):  # what no device counts
        OUT_OF_RANGE[setting.name] = (*OUT_OF_RANGE.get(setting.name, ()), 10**23, -(10**23))
SETTINGS = {
    "steps=2.5 must be a whole number, at least 1": {"steps": 2.5},
    "steps='a' must be a whole number": {"steps": "a"},
    "freeze='encoder/*' must be a list, each item a text": {"freeze": "encoder/*"},
    "scan_layers='no' must be True or False": {"scan_layers": "no"},
    "remat='layer' must be one of 'dots', 'layers', 'none'": {"remat": "layer"},
    "compute_dtype='float16' must be one of": {"compute_dtype": "float16"},
    "clip_norm=inf must be a finite number, above 0 or None": {"clip_norm": INFINITE},
    "pack_length=128 must be at most max_tokens=64": {"batching": "packed", "max_tokens": 64},
    "cooldown_steps=1 must be 0 for schedule=": {"cooldown_steps": 1, "schedule": "cosine"},
} | {f"{name}={value}": {name: value} for name, row in OUT_OF_RANGE.items() for value in row}
FROZEN = {
    "freeze='decodr/layers_0/*' matches no parameter; the nearest are decoder/layers_0/": (
        "encoder/* decodr/layers_0/*"
    ),
    "freeze='encoder' matches no parameter; the nea": "encoder",
    "freeze='x' matches no parameter; the nearest are ": "encoder/* x",
    "freeze='*coder/* token*' leaves no parameter to train; name fewer of decoder/*, encoder/*, "
    "token_embedding/*": "*coder/* token*",
}
PACKED_NOT = {
    "shared_heads": "decoder_attention='self_over_memory'",
    "torch_nn": "token_embeddings='none'",
    "merged": "decoder_attention='merged'",
}
OTHER_VOCABULARY = small_config("vaswani2017", src_vocab_size=43, tgt_vocab_size=43)


def packed_loss(name):
    config = small_config(name, pad_id=0, bos_id=1, eos_id=2)
    ids = np.ones((2, 6), np.int32)
    return batch_loss(random_params(config), Batch(ids, ids, ids, ids, ids), config, 0.0)


def smoothed_step(value):
    return make_train_step(TransformerConfig(), optax.sgd(0.1), label_smoothing=value)


def smoothed_loss(value):
    return cross_entropy(np.zeros((1, 2, 5)), np.ones((1, 2), np.int32), 0, value)


LOGITS = np.zeros((3, 7, 11))
ROWS = [
    *((message, TrainingConfig, fields) for message, fields in SETTINGS.items()),
    *(
        (message, init_state, {"config": STUDENT, "training_config": words})
        for message, words in FROZEN.items()
    ),
    *(
        (f"{fault} cannot be trained packed; set batching='buckets'", packed_loss, {"name": name})
        for name, fault in PACKED_NOT.items()
    ),
    *(
        ("label_smoothing=", function, {"value": value})
        for function in (smoothed_step, smoothed_loss)
        for value in (False, "0.1", np.float32(1), NAN, None)
    ),
    (
        "the teacher has src_vocab_size=43, but the student 41; they need one tokenizer",
        check_teacher,
        {"teacher": Teacher({}, OTHER_VOCABULARY), "config": STUDENT},
    ),
    (
        "teacher.weight=0.0 must be a finite number, above 0 and at most 1",
        check_teacher,
        {"teacher": Teacher({}, STUDENT, 0.0), "config": STUDENT},
    ),
    (
        "teacher.temperature=0.0 must be a finite number, at least 0.01 and at most 100",
        check_teacher,
        {"teacher": Teacher({}, STUDENT, temperature=0.0), "config": STUDENT},
    ),
    (
        "teacher_logits of shape (3, 7, 10) must be (3, 7, 11)",
        distillation_loss,
        {
            "logits": LOGITS,
            "teacher_logits": LOGITS[..., 1:],
            "targets": np.ones((3, 7), np.int32),
            "pad_id": 0,
        },
    ),
]


@pytest.mark.parametrize(
    ("message", "function", "arguments"), ROWS, ids=[row[0][:60] for row in ROWS]
)
def test_what_cannot_train_is_refused_in_one_line(message, function, arguments):
    words = arguments.get("training_config")
    if words is not None:
        arguments = arguments | {"training_config": TrainingConfig(freeze=tuple(words.split()))}
    with unchecked(), pytest.raises(InputError) as refused:
        function(**arguments)
    said = str(refused.value)
    assert said.startswith(message)
    assert "\n" not in said
    assert message != "label_smoothing=" or re.fullmatch(r".* must be a finite number.*", said)
