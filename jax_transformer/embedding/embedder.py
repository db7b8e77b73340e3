"""`Embedder`: texts to vectors in one call."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from jax_transformer.embedding.batched_model import BatchedModel, check_options
from jax_transformer.embedding.pooling import Dense, apply_layers, pool, read_modules
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params, encode
from jax_transformer.storage.hub import local_folder
from jax_transformer.translation import model_folder
from jax_transformer.translation.sources import checked_texts

WINDOW = 4096  # texts that are read and sorted by length together


class Embedder(BatchedModel):
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
        check_options(dtype, max_length, max_tokens)
        folder, self.modules = read_modules(local_folder(model))
        read = model_folder.read(folder, part="encoder", source_lang=source_lang)
        width = read.config.d_model * len(self.modules.modes)
        for layer in (layer for layer in self.modules.layers if isinstance(layer, Dense)):
            inputs, outputs = layer.params["kernel"].shape
            if inputs != width:
                raise InputError(f"{model}: a layer reads {inputs} numbers, but there are {width}")
            width = outputs
        limit = self.modules.max_length if max_length is None else max_length
        super().__init__(read, model, limit=limit, dtype=dtype, max_tokens=max_tokens, mesh=mesh)
        self.special_tokens = special_tokens
        self._function = jax.jit(self._vectors)

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
        texts, done = checked_texts(texts), 0
        while window := [*islice(texts, WINDOW)]:
            yield from self._embed(window, prompt, done)
            done += len(window)

    def _embed(
        self, texts: list[str], prompt: str | None, done: int
    ) -> list[Float32[np.ndarray, " d"]]:
        tokenizer = self.model.tokenizer
        if prompt is None:
            prompt = self.modules.prompts.get(self.modules.default_prompt, "")
        texts = [prompt + text for text in texts]
        texts = [text.lower() for text in texts] if self.modules.lower_case else texts
        rows = self._rows(tokenizer.encode_source, texts, done)
        before, behind = (0, 0) if self.special_tokens else map(len, tokenizer.affixes("source"))
        if prompt and not self.modules.with_prompt:
            before = len(tokenizer.encode_source([prompt])[0]) - len(tokenizer.affixes("source")[1])
        return self._compute(rows, before, behind)

    def _vectors(
        self,
        params: Params,
        src: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        before: Int[Array, ""],
        behind: Int[Array, ""],
    ) -> Float[Array, "B d"]:
        """Return the vectors of sources; `before` first and `behind` last tokens are not pooled."""
        positions = jnp.arange(src.shape[1])
        # Not by the id of padding, which a text may spell.
        read = (positions < lengths[:, None])[:, None, None]
        hidden = encode(params, self.model.config, src, read, execution=self._execution)
        # A text without tokens of its own is pooled with those around it.
        has_own = lengths > before + behind
        starts, ends = jnp.where(has_own, before, 0), jnp.where(has_own, lengths - behind, lengths)
        mask = (positions >= starts[:, None]) & (positions < ends[:, None])
        vectors = apply_layers(pool(hidden, mask, self.modules.modes), self.modules.layers)
        return vectors.astype(jnp.float32)
