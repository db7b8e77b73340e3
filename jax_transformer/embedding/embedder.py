"""`Embedder`: texts to vectors in one call."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.embedding.pooling import (
    Dense,
    SentenceModules,
    apply_layers,
    pool,
    read_modules,
)
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import Execution
from jax_transformer.model.transformer import Params, encode
from jax_transformer.model.tree import in_dtype
from jax_transformer.runtime.sharding import make_mesh, row_sharding, row_shards
from jax_transformer.storage.hub import local_folder
from jax_transformer.text.batches import pad
from jax_transformer.translation import model_folder
from jax_transformer.translation.sources import checked_texts
from jax_transformer.translation.translate import place

SHORTEST = 16  # tokens of the shortest batch; each longer one has twice as many
WINDOW = 4096  # texts that are read and sorted by length together
FEW = 8  # texts of the batch that few texts are


class Embedder:
    """The encoder of a model as a function from texts to vectors.

        embedder = Embedder("sentence-t5-base")
        vectors = embedder(["a text", "another one"])  # float32 [2, d]

    A folder of sentence-transformers says in modules.json what follows the encoder: pooling, dense
    layers, normalization, prompts, the length at which texts are cut. Of any other folder with an
    encoder the vector is the mean of the hidden states. The decoder is not read.

    Args:
        model: A folder, or a name of the hub, as for `Translator`.
        special_tokens: Whether the tokens that the tokenizer puts around a text are pooled, as
            sentence-transformers does. The authors of ProtT5 leave them out.
        source_lang: Code of the language of the texts, for a model with language codes.
        dtype: Type that the parameters of the encoder are converted to; None keeps theirs.
        max_length: Most tokens of a text, special tokens included; longer texts are cut. None is
            the limit that the folder names; a folder that names none refuses a text that is longer
            than the model takes.
        max_tokens: Most tokens of a batch, padding included.
        mesh: The devices, from `make_mesh`; texts are distributed over the axes data and fsdp.

    Raises:
        InputError: As `load`; a module or a setting of one is not supported.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        special_tokens: bool = True,
        source_lang: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        max_tokens: int = 2048,
        mesh: Mesh | None = None,
    ) -> None:
        if dtype not in (None, *model_folder.DTYPES):
            raise InputError(f"dtype={shorten(dtype)} must be 'float32' or 'bfloat16'")
        folder, self.modules = read_modules(local_folder(model))
        read = model_folder.read(folder, part="encoder", source_lang=source_lang)
        read = read.for_text(str(model))
        self.limit = max_length or self.modules.max_length
        if self.limit is not None and read.config.positions != "learned":
            read = read.with_max_length(self.limit, str(model))
        width = read.config.d_model * len(self.modules.modes)
        for layer in (layer for layer in self.modules.layers if isinstance(layer, Dense)):
            inputs, outputs = layer.params["kernel"].shape
            if inputs != width:
                raise InputError(f"{model}: a layer reads {inputs} numbers, but there are {width}")
            width = outputs
        if dtype is not None:
            read = read._replace(params=in_dtype(read.params, dtype))
        self.name, self.mesh = str(model), mesh or make_mesh()
        self.model = place(read, self.mesh)
        self.special_tokens, self.max_tokens = special_tokens, max_tokens
        dtype = jax.tree.leaves(read.params)[0].dtype.name
        execution = execution_on(self.mesh.devices.flat[0], dtype, read.config)
        function = partial(_vectors, config=read.config, modules=self.modules, execution=execution)
        self._compute = jax.jit(function)

    def __repr__(self) -> str:
        """Return one line with the model's name and sizes."""
        return f"Embedder({self.name!r}: {self.model!r})"

    def __call__(
        self, texts: Iterable[str], prompt: str | None = None
    ) -> Float32[np.ndarray, "n d"]:
        """Return the vector of each text, in their order.

        Args:
            texts: The texts.
            prompt: Put before every text, for example `embedder.modules.prompts["query"]`; None is
                the folder's default prompt.
        """
        vectors = [*self.stream(texts, prompt)]
        return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)

    def stream(
        self, texts: Iterable[str], prompt: str | None = None
    ) -> Iterator[Float32[np.ndarray, " d"]]:
        """Yield the vector of each text, in their order; reads a window of texts at a time.

        Args:
            texts: The texts.
            prompt: As of a call.
        """
        if isinstance(texts, str):
            raise InputError(f"texts={shorten(texts)} must be a list of texts")
        texts, done = checked_texts(texts), 0
        while window := [*islice(texts, WINDOW)]:
            yield from self._embed(window, prompt, done)
            done += len(window)

    def _embed(
        self, texts: list[str], prompt: str | None, done: int
    ) -> list[Float32[np.ndarray, " d"]]:
        config, _, tokenizer, _ = self.model
        if prompt is None:
            prompt = self.modules.prompts.get(self.modules.default_prompt, "")
        texts = [prompt + text for text in texts]
        texts = [text.lower() for text in texts] if self.modules.lower_case else texts
        most = config.max_length if self.limit is None else min(self.limit, config.max_length)
        rows = tokenizer.encode_source(texts)
        for index, ids in enumerate(rows):
            if len(ids) > most and self.limit is None:
                raise InputError(
                    f"text {done + index + 1} has {len(ids)} tokens, but the model takes {most}; "
                    "set max_length, at which longer texts are cut"
                )
            if len(ids) > most:
                (rows[index],) = tokenizer.encode_source([texts[index]], most)
        before, behind = (0, 0) if self.special_tokens else map(len, tokenizer.affixes("source"))
        if prompt and not self.modules.with_prompt:
            before = len(tokenizer.encode_source([prompt])[0]) - len(tokenizer.affixes("source")[1])
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(rows):
            by_length.setdefault(_batch_length(len(ids), most), []).append(index)
        vectors: list[Float32[np.ndarray, " d"]] = [np.empty(0, np.float32)] * len(rows)
        for length, members in by_length.items():
            for batch, found in self._batches(rows, members, length, (before, behind)):
                for index, vector in zip(batch, np.asarray(found), strict=False):
                    vectors[index] = vector
        return vectors

    def _batches(
        self, rows: list[list[int]], members: list[int], length: int, left_out: tuple[int, int]
    ) -> list[tuple[list[int], Float[Array, "B d"]]]:
        """Return the members of each batch, and their vectors, which the devices compute.

        A batch has one of two numbers of rows, so that each length is compiled twice at most.
        """
        shards, (before, behind) = row_shards(self.mesh), left_out
        full = shards * max(1, self.max_tokens // length)
        few = min(full, shards * FEW)
        results = []
        while members:
            count = full if len(members) >= full else few  # so at most `few` rows are in vain
            batch, members = members[:count], members[count:]
            ids = [rows[index] for index in np.resize(batch, count)]
            lengths = np.array([len(row) for row in ids], np.int32)
            # A text without tokens of its own is pooled with those around it.
            own = lengths > before + behind
            starts, ends = np.where(own, before, 0), np.where(own, lengths - behind, lengths)
            src = pad(ids, self.model.config.pad_id, length)
            arrays = jax.device_put((src, lengths, starts, ends), row_sharding(self.mesh))
            with jax.set_mesh(self.mesh):
                results.append((batch, self._compute(self.model.params, *arrays)))
        return results


def _batch_length(tokens: int, most: int) -> int:
    """Return the length of the batch of a text: one of few."""
    length = SHORTEST
    while length < tokens:
        length *= 2
    return min(length, most)


def _vectors(
    params: Params,
    src: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    starts: Int[Array, " B"],
    ends: Int[Array, " B"],
    *,
    config: TransformerConfig,
    modules: SentenceModules,
    execution: Execution,
) -> Float[Array, "B d"]:
    """Return the vectors of sources; the positions from `starts` to before `ends` are pooled."""
    positions = jnp.arange(src.shape[1])
    # Not by the id of padding, which a text may spell.
    read = (positions < lengths[:, None])[:, None, None]
    hidden = encode(params, config, src, read, execution=execution)
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    vectors = apply_layers(pool(hidden, mask, modules.modes), modules.layers)
    return vectors.astype(jnp.float32)
