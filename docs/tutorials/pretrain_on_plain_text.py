# %% [markdown]
# # Pre-train on plain text
#
# A model learns a language from text alone: spans of it are hidden, and the model restores them.
# Here the text is German and English dates, so that the training takes seconds; then a few pairs
# teach the model to translate. Your own files go the same way.

# %%
import itertools
import json
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
Path("few.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs[:300]), "utf-8")
Path("valid.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs[9000:9100]), "utf-8")
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
    "--steps 150 --warmup-steps 20 --max-tokens 1024 --evaluation-interval 150 --label-smoothing 0"
)
print(printed)

# %% [markdown]
# ## The model restores what is hidden
#
# A source has a sentinel in the place of each span. The model writes each sentinel, and the span.

# %%
import numpy as np

import jax_transformer

config, params, tokenizer, _ = jax_transformer.load("runs/plain")
source = "november <extra_id_0>, 1989"
src = jax_transformer.pad(tokenizer.encode_source([source]), config.pad_id)
best = jax_transformer.generate(params, config, src, max_new_tokens=8)
ids = np.asarray(best.tokens)[0, 0, : int(best.lengths[0, 0])]
print(source, "->", "".join(tokenizer.target_texts(ids)))

# %% [markdown]
# ## A few pairs teach it to translate
#
# `--init` begins from the weights. The same pairs alone, from fresh weights, learn less.

# %%
fine_tuning = (
    "jax-transformer train --source few.tsv --valid-source valid.tsv --init runs/plain "
    "--steps 100 --warmup-steps 20 --schedule constant --learning-rate 0.003 --max-tokens 1024 "
    "--bucket-count 1 --evaluation-interval 100 "
)
run(f"{fine_tuning} --output runs/fine")
run(f"{fine_tuning} --fresh-weights --output runs/alone")
for name in ("fine", "alone"):
    last = json.loads(Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()[-1])
    print(name, {key: round(last[key], 2) for key in ("validation_loss", "validation_bleu")})

# %% [markdown]
# ## Where to go on
#
# - `jax-transformer convert runs/plain FOLDER --output-layout t5` writes a folder that transformers
#   loads and trains on.
# - Continued pre-training of a published T5, and back-translation:
#   [Plain text](../how_to/plain_text.md).
# - Objectives and their settings: [training](../training.md#pre-training-from-plain-text).
