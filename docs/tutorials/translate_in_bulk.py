# %% [markdown]
# # Translate in bulk
#
# A file of any length is translated in windows: the memory stays the same, the order stays that
# of the input, and a command that was killed continues where it stopped.
#
# The model of this page is trained in the first cell, on dates, as in [Train your own
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
for name, part in {"train": pairs[:4000], "input": pairs[4000:5000]}.items():
    for side, lines in zip(("en", "de"), zip(*part)):
        Path(f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def run(command, **options):
    done = subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, text=True, check=True, **options
    )
    return done.stdout


run(
    "jax-transformer train --source train.en --target train.de --output runs/dates "
    "--preset pre_norm --d-model 64 --num-heads 4 --d-ff 128 --dropout 0 "
    "--num-encoder-layers 1 --num-decoder-layers 1 --vocab-size 160 "
    "--steps 150 --warmup-steps 50 --max-tokens 1024 --evaluation-interval 150"
)

# %% [markdown]
# ## A file in, a file out
#
# With `--output`, the unfinished file is `output.de.part`. It takes its name when the last line
# is written, so that a file of that name is complete. After a kill, the same command with
# `--resume` continues, and the output is the same byte for byte. An output that is there already is
# refused; `--overwrite` replaces it.

# %%
import time

began = time.perf_counter()
run("jax-transformer translate runs/dates --input input.en --output output.de")
seconds = time.perf_counter() - began
ours, expected = (
    Path(f"{name}.de").read_text("utf-8").splitlines() for name in ("output", "input")
)
right = sum(map(str.__eq__, ours, expected))
print(f"1,000 lines in {seconds:.0f} s, start and compilation included; {right} are right")
assert right > 900

# %% [markdown]
# ## A killed command
#
# Here a window has 64 lines. The command is killed once two windows are on the disk.

# %%
command = "jax-transformer translate runs/dates --input input.en --output again.de --window 64"
process = subprocess.Popen(shlex.split(command))
part = Path("again.de.part")
while process.poll() is None and (not part.exists() or part.stat().st_size < 2000):
    time.sleep(0.01)
process.kill()
process.wait()
print(f"{part.name} has {len(part.read_bytes().splitlines())} lines")
assert not Path("again.de").exists()

run(f"{command} --resume")
assert Path("again.de").read_bytes() == Path("output.de").read_bytes()
print("resumed: the same bytes")

# %% [markdown]
# ## In Python: an iterator in, an iterator out
#
# `Translator` takes any iterable of strings, also one that never ends, and gives results in its
# order. It holds a window of texts in memory. Options have the names of
# [`generate`](../reference/decoding.md#jax_transformer.decoding.generate).

# %%
from jax_transformer import Translator

translator = Translator("runs/dates")
lines = (f"july {day}, 1969" for day in itertools.count(16))
for result in itertools.islice(translator(lines, beam_size=4), 5):
    print(f"{result.score:7.3f}  {result.text}")

# %% [markdown]
# ## Several hypotheses with their scores
#
# A score is the sum of the log-probabilities of a hypothesis, in nats, divided by the length
# penalty. The gap between the first and the second one says how sure the model is.

# %%
for text in ("may 8, 1955", "thursday"):
    for hypothesis in translator(text, beam_size=4, num_hypotheses=3).hypotheses:
        print(f"{text:12} {hypothesis.score:7.3f}  {hypothesis.text}")

# %% [markdown]
# ## Where to go on
#
# - All options of the search, and long texts, sentence by sentence: [Hugging Face
#   folders](../huggingface.md#translating-long-inputs).
# - The same command translates with models of Hugging Face:
#   [Hugging Face folders](../huggingface.md).
# - Many devices: `Translator(..., mesh=jax_transformer.make_mesh("data=-1"))` divides the texts.
# - The speed beside transformers and CTranslate2: [results](../results.md#speed-of-decoding).
