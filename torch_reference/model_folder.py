"""A trained model's folder as a module of torch: config.json and model.safetensors, without JAX."""

from pathlib import Path

from safetensors.torch import load_file

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE, WEIGHTS_FILE, model_folder_of
from jax_transformer.storage.reading import file_digest, json_digest, read_json
from torch_reference.model import Transformer


def load(folder: str | Path) -> Transformer:
    """Return the model of a folder that training, or `jax-transformer export`, has written.

    Its parameters are float32, and ready for training: `eval()` switches dropout off.

    Raises:
        InputError: The folder is not that of a model of this library, or its files do not belong
            together. The message is one line.
    """
    folder = model_folder_of(Path(folder))
    path, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if not path.is_file():
        raise InputError(f"{folder}: is not the folder of a trained model: it has no {CONFIG_FILE}")
    description = read_json(path)
    digest = description.pop("config_sha256", None)
    if digest is None:
        raise InputError(
            f"{folder}: is not the folder of a model of this library; write one by "
            f"`jax-transformer export {folder} NEW_FOLDER --to torch`"
        )
    if digest != json_digest(description) or description["sha256"][weights.name] != file_digest(
        weights
    ):
        raise InputError(
            f"{folder}: {path.name} or {weights.name} is not as it was written (sha256 differs); "
            "copy the model again"
        )
    model = Transformer(TransformerConfig.from_dict(description["config"]))
    model.load_state_dict(load_file(weights), strict=True)
    return model
