# %% [markdown]
# # Export and serve
#
# This page exports a trained model for programs that know nothing of this library, and serves it.
# It needs the extras `[train]`, `[export]`, `[ctranslate2]` and `[ray]`.
#
# The model is trained in the first cell, on dates, as in [Train your own
# pair](../tutorials/train_your_own_pair.py).

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
for name, part in {"train": pairs[:4000], "input": pairs[4000:4100]}.items():
    for side, lines in zip(("en", "de"), zip(*part)):
        Path(f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def run(command, **options):
    done = subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, text=True, check=True, **options
    )
    return done.stdout


run(
    "jax-transformer train --source train.en --target train.de --output runs/dates "
    "--preset vaswani2017 --d-model 64 --num-heads 4 --d-ff 128 --dropout 0 "
    "--num-encoder-layers 1 --num-decoder-layers 1 --vocab-size 160 "
    "--steps 150 --warmup-steps 50 --max-tokens 1024 --evaluation-interval 150"
)
expected = run("jax-transformer translate runs/dates --input input.en")
print(*expected.splitlines()[:3], sep="\n")

# %% [markdown]
# ## Out to CTranslate2
#
# An export is checked before its folder gets its name: the program that will run it and this
# library translate the same random sources, and every token must be equal. If the check fails,
# nothing is left behind.

# %%
print(run("jax-transformer export runs/dates served --to ctranslate2"))
print(*sorted(path.name for path in Path("served").iterdir()), sep="\n")

# %% [markdown]
# The next cell imports only CTranslate2 and tokenizers. Its three options make its search equal to
# that of this library.

# %%
import ctranslate2
import tokenizers

tokenizer = tokenizers.Tokenizer.from_file("served/tokenizer.json")
translator = ctranslate2.Translator("served")
sources = [
    [*tokenizer.encode(line).tokens, "</s>"]
    for line in Path("input.en").read_text("utf-8").splitlines()
]
found = translator.translate_batch(
    sources, beam_size=1, suppress_sequences=[["<pad>"]], min_decoding_length=0
)
texts = [
    tokenizer.decode([tokenizer.token_to_id(token) for token in result.hypotheses[0]])
    for result in found
]
print(f"{sum(map(str.__eq__, texts, expected.splitlines()))} of {len(texts)} texts are equal")
assert texts == expected.splitlines()

# %% [markdown]
# ## Out to StableHLO
#
# The next cell writes the same model as programs for CPUs, GPUs and TPUs. The folder's README.md
# holds a Python program that translates lines; it imports only jax, numpy, safetensors and
# tokenizers.

# %%
print(run("jax-transformer export runs/dates programs --to stablehlo"))
readme = Path("programs/README.md").read_text("utf-8")
program = readme.split("```python\n")[1].split("```")[0]
Path("run_programs.py").write_text(program, "utf-8")
with open("input.en", encoding="utf-8") as lines:
    texts = run(f"{sys.executable} run_programs.py programs greedy", stdin=lines)
assert texts == expected
print(texts[: texts.index("\n", 60)])

# %% [markdown]
# [Export a model](../export.md) compares the targets: what each can express, its speed, its size
# in float16 and int8.
#
# ## A server
#
# For one machine, [serve.py](../serving.md) of the standard library is enough.
# [ray_serve.py](../examples/ray_serve.py) serves a model on [Ray Serve](https://docs.ray.io).
# Copy it and change it: it is your program then. Requests of different clients share one search,
# and no answer depends on the others. The server speaks LibreTranslate's JSON.

# %%
import shutil
import urllib.error
import urllib.request

import jax_transformer

if not Path("ray_serve.py").exists():  # a download, or that of a checkout
    examples = Path(jax_transformer.__file__).parents[1] / "docs" / "examples"
    shutil.copy(examples / "ray_serve.py", ".")
model = Path("runs/dates").absolute()
command = f"serve run --address local ray_serve:app model={model} source=en target=de"
server = subprocess.Popen(
    shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)

# %% [markdown]
# `--address local` starts Ray on this machine alone; without it, the cluster that `RAY_ADDRESS`
# names serves the model. A replica translates batches of every size before it is ready, so that no
# request waits for a compilation.

# %%
import json
import time


def ask(**fields):
    request = urllib.request.Request(
        "http://localhost:8000/translate",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refusal:
        return json.load(refusal)


while True:
    try:
        answer = ask(q="july 16, 1969", source="en", target="de")
        break
    except OSError:
        assert server.poll() is None
        time.sleep(1)
print(answer)
print(ask(q=["may 8, 1955", "july 4, 2001"], source="en", target="de"))
print(ask(q="july 16, 1969", source="en", target="fr"))

# %% [markdown]
# The last request named a language that this server does not offer: status 400, and one line.

# %%
server.terminate()
server.wait()

# %% [markdown]
# ## Where to go on
#
# - [Many machines, and serving](../serving.md): replicas, limits, what happens when one dies, and
#   what was measured.
# - The same command exports a model of Hugging Face: `jax-transformer export opus-mt-en-de OUT`.
