# %% [markdown]
# # Fine-tune a Hugging Face model and give it back
#
# This library reads a whole folder that `save_pretrained` of transformers wrote: weights,
# tokenizer, generation defaults. This page trains the model further and writes such a folder again.
# transformers computes the same with it.
#
# ## A folder to start from
#
# In your work this is `opus-mt-en-de` or another model of [a known family](../huggingface.md),
# from `hf download`. This page must run without a network, so it makes a small Marian model of
# random weights, with a tokenizer of its own, in the same form.

# %%
import itertools
import json
import os
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import sentencepiece
import torch
import transformers

english = "january february march april may june july august september october november december"
german = "januar februar märz april mai juni juli august september oktober november dezember"
months = list(zip(english.split(), german.split()))
pairs = [
    (f"{month} {day}, {year}", f"{day}. {monat} {year}")
    for (month, monat), day, year in itertools.product(months, range(1, 29), range(1950, 2030))
]
random.Random(0).shuffle(pairs)
for name, part in {"train": pairs[:4000], "test": pairs[4000:4050]}.items():
    for side, lines in zip(("en", "de"), zip(*part)):
        Path(f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines), "utf-8")

folder = Path("marian")
folder.mkdir()
pieces = dict.fromkeys(["</s>", "<unk>"])
for side, language in (("source", "en"), ("target", "de")):
    sentencepiece.SentencePieceTrainer.train(
        input=f"train.{language}",
        model_prefix=str(folder / side),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / f"{side}.model").rename(folder / f"{side}.spm")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
    pieces |= dict.fromkeys(processor.id_to_piece(i) for i in range(processor.get_piece_size()))
pieces["<pad>"] = None
vocabulary = {piece: number for number, piece in enumerate(pieces)}
(folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
tokenizer = transformers.MarianTokenizer(
    *(str(folder / name) for name in ("source.spm", "target.spm", "vocab.json"))
)
torch.manual_seed(0)
config = transformers.MarianConfig(
    vocab_size=len(vocabulary),
    d_model=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=64,
    activation_function="swish",
    scale_embedding=True,
    init_std=64**-0.5,
    pad_token_id=vocabulary["<pad>"],
    decoder_start_token_id=vocabulary["<pad>"],
    eos_token_id=0,
    bos_token_id=0,
    forced_eos_token_id=0,
)
transformers.MarianMTModel(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(sorted(path.name for path in folder.iterdir()))

# %% [markdown]
# ## It comes in whole

# %%

from jax_transformer import load

model = load(folder)
print(model)
print(model.generation)

# %% [markdown]
# ## Trained on here, and given back
#
# `--init` keeps the config, the tokenizer and the generation defaults of the folder. `--freeze`
# would keep a part of the parameters unchanged. `convert --output-layout` writes the folder for
# transformers.


# %%
import shlex
import subprocess
import sys

# The commands of this Python's environment, also where that is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(command, **options):
    done = subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, text=True, check=True, **options
    )
    return done.stdout


printed = run(
    "jax-transformer train --init marian --source train.en --target train.de --output tuned "
    "--steps 150 --warmup-steps 50 --max-tokens 1024 --evaluation-interval 150 --dropout 0"
)
print("\n".join(printed.splitlines()[-8:]))
print(run("jax-transformer convert tuned home --output-layout marian"))

# %% [markdown]
# ## transformers reads it, and writes the same text

# %%
lines = Path("test.en").read_text("utf-8").splitlines()
ours = run("jax-transformer translate home", input=Path("test.en").read_text("utf-8")).splitlines()

tokenizer = transformers.MarianTokenizer.from_pretrained("home")
model = transformers.MarianMTModel.from_pretrained("home").eval()
batch = tokenizer(lines, return_tensors="pt", padding=True)
with torch.no_grad():
    theirs = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)

expected = Path("test.de").read_text("utf-8").splitlines()
right = sum(one == other for one, other in zip(ours, expected))
print(f"{sum(map(str.__eq__, ours, theirs))} of {len(lines)} equal strings, {right} right dates")
print(lines[0], "->", ours[0])
assert ours == theirs
assert right > 40

# %% [markdown]
# ## Where to go on
#
# - Families, tokenizers, language codes and what is refused by name: [Hugging Face
#   folders](../huggingface.md).
# - The measured errors of each family: [Hugging Face, measured](../measured/huggingface.md).
