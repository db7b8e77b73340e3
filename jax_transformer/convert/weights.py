"""Weights from one place to another, and compared in both frameworks: by files and folders."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import files, get_layout
from jax_transformer.convert.families import marian
from jax_transformer.convert.files.checks import faults_named
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.metadata import check_config
from jax_transformer.convert.report import Report
from jax_transformer.convert.transfer import to_params, to_tensors
from jax_transformer.convert.verify import Verification
from jax_transformer.convert.verify import verify as verify_tensors
from jax_transformer.errors import InputError

CONFIG_KEY = "config"  # of a .safetensors file's metadata


def convert(
    source: Path,
    output: Path,
    layout: str,
    output_layout: str,
    config_file: Path | None,
    *,
    strip_prefixes: tuple[str, ...] = (),
    dtype: str | None = None,
    overwrite: bool = False,
) -> list[Report]:
    """Read weights in one layout and write them in another; returns what went where.

    Args:
        source: A weight file; with the layout "marian", a folder of Hugging Face; or a checkpoint
            that train.py has written, whatever the layout.
        output: A weight file, or with the output layout "marian" a folder. A .safetensors file
            also records the config.
        layout: The layout of the source.
        output_layout: The layout of the output.
        config_file: JSON file of the config's fields, of all or of those that differ from its
            "preset", where the source does not record them.
        strip_prefixes: Taken off every name of the source that begins with them.
        dtype: Floating-point type to convert to; None keeps that of each tensor.
        overwrite: Whether an existing output may be replaced.

    Raises:
        InputError: Source, config or output cannot be used; nothing has been written then.
    """
    get_layout(layout), get_layout(output_layout)
    config, params, reports = read_params(source, layout, config_file, strip_prefixes, dtype)
    if output_layout == marian.LAYOUT.name:
        to_huggingface(params, config, output, overwrite=overwrite)
        return reports
    tensors, report = to_tensors(params, config, get_layout(output_layout))
    recorded = {CONFIG_KEY: json.dumps(config.to_dict())}
    metadata = recorded if output.suffix == ".safetensors" else None
    files.write(output, tensors, overwrite=overwrite, metadata=metadata)
    return [*reports, report]


def verify(
    source: Path, layout: str, config_file: Path | None, *, strip_prefixes: tuple[str, ...] = ()
) -> Verification:
    """Run both frameworks on the weights and return the error of every block.

    Arguments and errors as for `convert`; torch must be installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("verify runs torch beside jax; install jax-transformer[torch]")
    if source.is_dir():
        config, params, _ = read_params(source, layout, config_file, strip_prefixes, None)
        tensors, _ = to_tensors(params, config, get_layout("reference"))
        return verify_tensors(tensors, config)
    tensors = files.read(source)
    config = file_config(source, config_file)
    return verify_tensors(tensors, config, layout, strip_prefixes=strip_prefixes)


def read_params(
    source: Path,
    layout: str,
    config_file: Path | None,
    strip_prefixes: tuple[str, ...],
    dtype: str | None,
) -> tuple[TransformerConfig, dict[str, Any], list[Report]]:
    """Return config, parameters and the reports of a source; arguments as for `convert`."""
    if layout == marian.LAYOUT.name:
        config, params = from_huggingface(source, dtype=dtype)
        return config, params, []
    if source.is_dir():
        from jax_transformer.translation.model_folder import load

        model = load(source)
        return model.config, model.params, []
    tensors = files.read(source)
    config = file_config(source, config_file)
    params, report = to_params(
        tensors, config, get_layout(layout), strip_prefixes=strip_prefixes, dtype=dtype
    )
    return config, params, [report]


def file_config(source: Path, config_file: Path | None) -> TransformerConfig:
    """Return the config that a weight file records, or that of the JSON file.

    Raises:
        InputError: There is neither, the JSON is damaged, or the two contradict each other.
    """
    recorded = files.read_metadata(source).get(CONFIG_KEY)
    if config_file is None:
        if recorded is None:
            raise InputError(f"{source}: records no config; name a JSON file of it by --config")
        return _config(source, recorded)
    with faults_named(config_file, "cannot be read", OSError, ValueError):
        config = _config(config_file, config_file.read_text(encoding="utf-8"))
    if recorded is not None:
        check_config(config, _config(source, recorded).to_dict())
    return config


def _config(path: Path, text: str) -> TransformerConfig:
    with faults_named(path, "holds a config that is no JSON", ValueError, RecursionError):
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise InputError(f"{path}: the config must be a JSON object of fields")
        try:
            if "preset" in fields:
                return TransformerConfig.preset(fields.pop("preset"), **fields)
            return TransformerConfig.from_dict(fields)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
