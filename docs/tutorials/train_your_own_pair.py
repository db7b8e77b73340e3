# %% [markdown]
# # Train your own pair
#
# This page trains a translation model from two files of text, whose lines are translations of each
# other. Here the two languages are English and German dates, so that the training takes seconds.
# Use your own files in the same way.

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
for name, part in {"train": pairs[:4000], "test": pairs[4000:4100]}.items():
    for side, lines in zip(("en", "de"), zip(*part)):
        Path(f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines), "utf-8")
print(pairs[0])

# %% [markdown]
# ## One command trains
#
# The tokenizer (a byte-pair encoding that both sides share) is trained on the text, the text is
# encoded once, and 200 pairs are held out for validation. The settings below make the model
# small; without them the command uses settings for some ten thousand sentences. In your work, run
# such a command in a shell; the function here only shows what it prints.


# %%
def run(command, **options):
    done = subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, text=True, check=True, **options
    )
    return done.stdout


printed = run(
    "jax-transformer train --source train.en --target train.de --output runs/dates "
    "--preset pre_norm --d-model 64 --num-heads 4 --d-ff 128 --dropout 0 "
    "--num-encoder-layers 1 --num-decoder-layers 1 --vocab-size 160 "
    "--steps 150 --warmup-steps 50 --max-tokens 1024 --evaluation-interval 150"
)
print(printed)

# %% [markdown]
# The loss does not fall to 0 because of label smoothing: the targets keep 10 % of their
# probability for other tokens, and the lowest possible loss is the entropy of this distribution.
#
# ## The model translates what it has not seen
#
# `jax-transformer translate` reads lines and writes lines.

# %%
with open("test.en", encoding="utf-8") as lines:
    translated = run("jax-transformer translate runs/dates", stdin=lines).splitlines()
expected = Path("test.de").read_text("utf-8").splitlines()
right = sum(one == other for one, other in zip(translated, expected))
print(f"{translated[0]!r}; {right} of {len(expected)} dates are right")
assert right > 90

# %% [markdown]
# In Python the same model is a function from text to text:

# %%
from jax_transformer import Translator

translator = Translator("runs/dates")
result = translator("november 9, 1989", beam_size=4, num_hypotheses=2)
for hypothesis in result.hypotheses:
    print(f"{hypothesis.score:8.3f}  {hypothesis.text}")

# %% [markdown]
# ## What the model attends to
#
# The weights of the attention over the source are an alignment of both texts. A row is a token of
# the target, and says where the decoder looked when it wrote the token. A notebook shows a result,
# as the last line of a cell, as a table of its translations, and an `alignment` as a picture. Here
# the cell draws the picture itself.

# %% alt="Each German token attends to its counterpart: the day, the month, the year"
import matplotlib.pyplot as plt

alignment = translator("november 9, 1989", alignments=True).alignment
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.imshow(alignment.weights, cmap="Greys", vmin=0, vmax=1)
axes.set_xticks(range(len(alignment.source)), alignment.source, rotation=45)
axes.set_yticks(range(len(alignment.target)), alignment.target)
plt.show()

# %% [markdown]
# ## Where to go on
#
# - The folder `runs/dates` holds the model, its log and its checkpoints: [the files of a
#   run](../training.md#the-files-of-a-run).
# - The training may be killed at any moment. `--resume` continues it, and the result is the same
#   bit for bit: [killed runs](../how_to/killed_runs.md).
# - Several files, compressed text, filters and mixtures are in [big corpora](../data.md).
