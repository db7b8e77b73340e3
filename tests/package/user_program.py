"""A user's program, for type checkers alone: what they know of the public face.

mypy refuses an `ignore` that nothing needs, so each one says that a mistake is found.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jax_transformer import (
    Batch,
    Cache,
    Classifier,
    Embedder,
    Execution,
    GenerationConfig,
    Hypotheses,
    InputError,
    SearchExecution,
    Transcriber,
    TransformerConfig,
    Translator,
    apply,
    classification_loss,
    classify,
    convert,
    cross_attention_weights,
    cross_entropy,
    decode,
    decode_step,
    encode,
    generate,
    init_cache,
    init_params,
    load,
    make_mesh,
    make_train_step,
    pad,
    save,
    score,
    select_hypotheses,
)
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.result import TranslationResult

config = TransformerConfig.preset("vaswani2017", d_model=64, num_heads=4, d_ff=128)
assert_type(config, TransformerConfig)
assert_type(config.d_model, int)
TransformerConfig(d_model="64")  # type: ignore[arg-type]
TransformerConfig(width=64)  # type: ignore[call-arg]

params = init_params(jax.random.key(0), config)
assert_type(params, dict[str, Any])
src, tgt = pad([[5, 6, 2], [7, 2]], config.pad_id), pad([[1, 4], [1]], config.pad_id)
logits = apply(params, config, src, tgt, execution=Execution(compute_dtype="bfloat16"))
assert_type(logits, jax.Array)
memory = encode(params, config, src)
assert_type(decode(params, config, tgt, memory), jax.Array)
apply(params, src, tgt)  # type: ignore[call-arg, arg-type]
Execution(compute_dtype="int8")  # type: ignore[arg-type]
SearchExecution(top_k="sorted")  # type: ignore[arg-type]

found = generate(params, config, src, max_new_tokens=9, beam_size=4, num_hypotheses=2)
assert_type(found, Hypotheses)
assert_type(found.scores, jax.Array)
assert_type(generate(params, config, src, GenerationConfig(9, beam_size=4)), Hypotheses)
generate(params, config, src, 9)  # type: ignore[arg-type]
GenerationConfig()  # type: ignore[call-arg]
GenerationConfig(max_new_tokens="9")  # type: ignore[arg-type]
assert_type(score(params, config, src, found.tokens[:, 0]), jax.Array)
assert_type(cross_attention_weights(params, config, src, tgt), jax.Array)
cache = init_cache(params, config, memory, 9)
assert_type(cache, Cache)
step_logits, cache = decode_step(params, config, cache, np.ones((2, 1), np.int32))
assert_type(step_logits, jax.Array)
assert_type(select_hypotheses(cache, np.zeros((2, 1), np.int32)), Cache)

optimizer = optax.adam(1e-3)
train = make_train_step(config, optimizer, label_smoothing=0.1)
params, state, loss = train(params, optimizer.init(params), Batch(src, tgt, tgt), None)
assert_type(params, dict[str, Any])
assert_type(loss, jax.Array)
total, count = cross_entropy(logits, tgt, config.pad_id)
assert_type(total, jax.Array)
make_train_step(config, optimizer, label_smoothing="0.1")  # type: ignore[arg-type]
assert_type(make_mesh("data=-1"), Mesh)

model = load("runs/0")
assert_type(model, TrainedModel)
save("runs/1", model._replace(params=params), overwrite=True)
save("runs/2", (config, params, model.tokenizer))
save("runs/3", 3)  # type: ignore[arg-type]
assert_type(model.config, TransformerConfig)
vectors = Embedder("runs/0", max_length=64)(["a text"], prompt="query: ")
assert_type(vectors.shape, tuple[Any, ...])
Embedder("runs/0", pooling="mean")  # type: ignore[call-arg]
classifier = Classifier("classifier", max_length=64)
assert_type(classifier(["a text"])[0].probabilities, dict[str, float])
assert_type(classifier.zero_shot(["a"], ["sport"])[0].label, str)
assert_type(classify(params, config.with_head("token", labels=["a", "b"]), src), jax.Array)
assert_type(classification_loss(logits, tgt, config)[0], jax.Array)
Classifier("classifier", labels=["a"])  # type: ignore[call-arg]
(heard,) = Transcriber("whisper", batch_size=2)(["a.wav"], language="de")
assert_type(heard.segments[0].start, float)
Transcriber("whisper", language="de")  # type: ignore[call-arg]
translator = Translator("runs/0")
assert_type(translator("a line"), TranslationResult)
assert_type(translator(["a line"]), Iterator[TranslationResult])
assert_type(translator("a line").text, str)
translator(3)  # type: ignore[call-overload]

assert_type(convert.from_torch({}, config), dict[str, Any])
convert.to_torch(params)  # type: ignore[call-arg]
try:
    convert.get_layout("annotated")
except InputError as error:
    assert_type(str(error), str)
