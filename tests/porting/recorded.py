"""Records a module as its user does: by the printed program, with other settings in its text."""

import os
import re
import tempfile

import numpy as np
import torch

from jax_transformer import convert
from jax_transformer.porting import program, read_recording
from jax_transformer.storage.weights.trained import plain_names

SHORT = "[(17, 13), (5, 9)]"  # source and target tokens of two runs
CALL = re.compile(r"def call\(.*?\n\n\n", re.DOTALL)


def edited(pad_id, sizes, call="", lengths=SHORT, changes=()):
    """Return the printed program with other settings, another call, and other pieces of text."""
    settings = {"SOURCES": f"SOURCES, TARGETS = {sizes}", "PAD": f"PAD = {pad_id}"}
    settings |= {"LENGTHS": f"LENGTHS = {lengths}"}
    text = program()
    for name, line in settings.items():
        text = re.sub(rf"^{name} = .*", line, text, flags=re.MULTILINE)
    text = CALL.sub(lambda _: f"{call}\n\n\n", text) if call else text
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def write(module, path, pad_id=None, sizes=None, **edits):
    """Execute the printed program, which writes the recording; a module may know both itself."""
    text = edited(module.pad if pad_id is None else pad_id, sizes or module.vocabularies, **edits)
    text = text.replace("\nrecord_all()\n", f"\nrecord_all({str(path)!r})\n")
    torch.manual_seed(0)
    exec(compile(text, "program.py", "exec"), {"model": module})


def record(module, pad_id=None, sizes=None, **edits):
    """Return what `read_recording` reads of the file that the program writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "recorded.pt")
        write(module, path, pad_id, sizes, **edits)
        return read_recording(path)


def tensors_of(module, dropped=()):
    """Return the weights and buffers by the names that `weight_files.read_trained` gives them."""
    tensors = {name: x for name, x in module.state_dict().items() if name not in dropped}
    names = plain_names(tensors)
    return {names[name]: x.numpy().copy() for name, x in tensors.items() if name in names}


def check_home(tensors, suggestion):
    """Every tensor comes back bit for bit; returns the parameters."""
    config, layout = suggestion.config, suggestion.layout
    params, _ = convert.to_params(tensors, config, layout)
    back, _ = convert.to_tensors(params, config, layout)
    computed = {buffer.foreign for buffer in layout.buffers} | {*layout.unused}
    assert back.keys() == tensors.keys() - set(layout.unused)
    for name in tensors.keys() - computed:
        np.testing.assert_array_equal(back[name], tensors[name])
    return params
