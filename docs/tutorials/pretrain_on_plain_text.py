# %% [markdown]
# # Pre-train on plain text
#
# A model learns a language from text alone: spans of it are hidden, and the model restores them.
# Here the text is German and English dates, so that the training takes seconds. Use your own files
# in the same way.

# %%
import itertools
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

# The commands of this Python's environment, also where that is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

english = "january february march april may june july august september october november december"
german = "januar februar märz april mai juni juli august september oktober november dezember"
months = list(zip(english.split(), german.split()))
pairs = [
    (f"{month} {day}, {year}", f"{day}. {monat} {year}")
    for (month, monat), day, year in itertools.product(months, range(1, 29), range(1950, 2030))
]
random.Random(0).shuffle(pairs)
lines = [line for pair in pairs[:4000] for line in pair]
Path("plain.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
print(lines[:2])

# %% [markdown]
# ## One command trains
#
# `--text` names plain text, one document a line, and `--objective` what it trains: here the span
# corruption of T5. The tokenizer is a unigram model with sentinels, which stand for hidden spans.
# The tokens of each document are cut where a row of the batch ends, so that rows have no padding.


# %%
def run(command):
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


sizes = (
    "--preset t5_v1_1 --d-model 48 --num-heads 4 --d-kv 12 --d-ff 96 --dropout 0 "
    "--num-encoder-layers 1 --num-decoder-layers 1 "
)
printed = run(
    "jax-transformer train --text plain.txt --objective span_corruption --output runs/plain "
    f"{sizes} --vocab-size 300 --sentinels 20 --schedule constant --learning-rate 0.005 "
    "--steps 300 --warmup-steps 20 --max-tokens 1024 --evaluation-interval 300 --label-smoothing 0"
)
print(printed)

# %% [markdown]
# ## The model restores what is hidden
#
# In a source, a sentinel replaces each span. The model writes each sentinel, followed by its span.
# A line of this length has one span of two tokens, hidden at a random place: the model knows how a
# month is spelt. It cannot know a day or a year.

# %%
import numpy as np

import jax_transformer

config, params, tokenizer, _ = jax_transformer.load("runs/plain")
sentinel = tokenizer.token_id("<extra_id_0>")
(ids,) = tokenizer.encode_text(["november 25, 1989"])
sources = [
    [*ids[:begin], sentinel, *ids[begin + 2 :], tokenizer.eos_id] for begin in range(len(ids) - 1)
]
src = jax_transformer.pad(sources, config.pad_id)
best = jax_transformer.generate(params, config, src, max_new_tokens=8)
restored = []
for begin, tokens in enumerate(np.asarray(best.tokens)[:, 0].tolist()):
    source, written = sources[begin], tokens[: int(best.lengths[begin, 0])]
    restored.append(written == [sentinel, *ids[begin : begin + 2], tokenizer.eos_id])
    print("".join(tokenizer.source_texts(source)), "->", "".join(tokenizer.target_texts(written)))
print(f"{sum(restored)} of {len(restored)} spans are restored")
assert sum(restored) >= 6

# %% [markdown]
# ## The model as a folder of transformers
#
# The folder has the tokenizer too. transformers loads it and can train it further; `--init` starts
# from it.

# %%
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

run("jax-transformer convert runs/plain folder --output-layout t5")
model = AutoModelForSeq2SeqLM.from_pretrained("folder")
source = "november <extra_id_0> 1989"
batch = AutoTokenizer.from_pretrained("folder")([source], return_tensors="pt")
src = jax_transformer.pad(tokenizer.encode_source([source]), config.pad_id)
with torch.no_grad():
    theirs = model(**batch, decoder_input_ids=torch.zeros((1, 1), dtype=torch.int64)).logits
ours = jax_transformer.apply(params, config, src, np.zeros((1, 1), np.int32))
print("largest difference of the logits:", np.abs(theirs.numpy() - np.asarray(ours)).max())

printed = run(
    "jax-transformer train --text plain.txt --objective span_corruption --init folder "
    "--output runs/further --schedule constant --learning-rate 0.001 --steps 20 --warmup-steps 5 "
    "--max-tokens 1024 --evaluation-interval 20 --label-smoothing 0"
)
print(*(line for line in printed.splitlines() if "validation loss" in line))

# %% [markdown]
# ## Where to go on
#
# - Continued pre-training of a published T5, and back-translation:
#   [Plain text](../how_to/plain_text.md).
# - Objectives and their settings: [training](../training.md#pre-training-from-plain-text).
