"""Meshes, processes and topologies that cannot be: each is one line."""

import pytest

from jax_transformer.errors import InputError
from jax_transformer.runtime.distributed import initialize
from jax_transformer.runtime.sharding import parse_sizes
from jax_transformer.runtime.topologies import data_sheet, topology_devices

MESHES = {  # of eight devices
    "batch=8": ": 'batch' must be one of data, fsdp, tensor",
    "data=8,": ": '' must be one of",
    "data": ": data= must be a number",
    "data=0": ": data=0 must be a number",
    "data=-2": ": data=-2 must be a number",
    "data=2.0": ": data=2.0 must be a number",
    "data=٨": ": data=٨ must be a number",
    "data=2,data=4": ": data is named twice",
    "data=-1,fsdp=-1": ": only one axis",
    "data=4": " is 4 devices, but there are 8",
    "data=16": " is 16 devices, but there are 8",
    "data=3,fsdp=-1": " is 3 devices, but there are 8",
    "data=16,fsdp=-1": " is 16 devices, but there are 8",
}
PROCESSES = {  # coordinator, number of processes, number of this one
    ("host:1", 2, None): "process_id=None: name all of",
    (None, 2, 0): "coordinator=None: name all of",
    ("host:1", None, 0): "num_processes=None: name all of",
    ("host:1", 0, 0): "num_processes=0 must be a whole number, at least 1 and at most 2147483647",
    ("host:1", 10**400, 0): "num_processes=1000",
    ("host:1", 2, 2): "process_id=2 must be a whole number, at least 0 and at most 1",
    ("host:1", 2, -1): "process_id=-1 must be a whole number, at least 0 and at most 1",
    ("host", 2, 0): "coordinator='host' must be host:port",
    ("host:0", 2, 0): "coordinator='host:0' must be host:port",
    ("host:65536", 2, 0): "coordinator='host:65536' must be host:port",
    ("host:x", 2, 0): "coordinator='host:x' must be host:port",
    (":80", 2, 0): "coordinator=':80' must be host:port",
}
TOPOLOGIES = {
    "v9:2x4": ": 'v9' must be one of v4, v5e, v5p, v6e, A100, H100, H200, B200",
    "v5e": ": a slice of v5e has 2 dimensions, each at least 1; as in",
    "v5e:0x4": ": a slice of v5e has 2 dimensions, each at least 1",
    "v4:2x2": ": a slice of v4 has 3 dimensions, each at least 1",
    "v5e:64x64": " has 4,096 chips, but the largest slice of v5e has 256",
}
GPUS = {
    name: f" must be {gpu} and a number from 1 to 8, as {gpu}:8"
    for gpu, names in {"H100": ("H100", "H100:", "H100:0"), "B200": ("B200:16",)}.items()
    for name in names
}
ROWS = [
    *((f"mesh={sizes!r}{said}", parse_sizes, (sizes, 8)) for sizes, said in MESHES.items()),
    *((said, initialize, named) for named, said in PROCESSES.items()),
    *(
        (f"topology={name!r}{said}", function, (name,))
        for name, said in TOPOLOGIES.items()
        for function in (topology_devices, data_sheet)
    ),
    *((f"topology={name!r}{said}", topology_devices, (name,)) for name, said in GPUS.items()),
]


@pytest.mark.parametrize(
    ("message", "function", "arguments"), ROWS, ids=[row[0][:60] for row in ROWS]
)
def test_what_cannot_be_is_refused_in_one_line(message, function, arguments):
    with pytest.raises(InputError) as refused:
        function(*arguments)
    said = str(refused.value)
    assert said.startswith(message)
    assert "\n" not in said
