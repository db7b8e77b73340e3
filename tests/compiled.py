"""What XLA says of a program compiled for a TPU or a GPU: memory, cycles and communication.

XLA writes its estimate of each operation into the text of the compiled program: cycles for a TPU,
times for a GPU, which are cycles here by the GPU's clock. Collectives, sorts, gathers, Pallas
kernels and those of cuDNN carry none; nothing here is timed.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax

GPU_CLOCK = 1.98e9  # cycles a second of an H100; of other GPUs too, as a unit of time
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "token": 0}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# XLA for TPU writes a reduce-scatter as a fusion of an all-reduce and a slice, of this name.
REDUCE_SCATTER = "all-reduce-scatter"
ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'
PALLAS = 'custom_call_target="tpu_custom_call"'
CUBLAS, CUDNN = 'custom_call_target="__cublas', 'custom_call_target="__cudnn'
UNESTIMATED = ("gather", "rng-bit-generator", "scatter", "sort")
# A computation of these operations alone moves, casts or repeats numbers and computes none.
MOVES = (
    *("bitcast", "broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice"),
    *("get-tuple-element", "pad", "parameter", "reshape", "slice", "transpose", "tuple"),
)

NOT_LAUNCHED = (
    *("after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "parameter"),
    *("tuple", "while"),
)

# Kinds of work by the path that JAX gives an operation; the first pattern that is found counts.
# Products with a kernel and moves are recognised by the operations themselves.
KINDS = (
    ("dropout", r"dropout"),
    ("norms", r"norm[/.]"),
    ("embedding", r"embed|position"),
    ("attention", r"(self|cross)_attention[/.]"),
    ("loss", r"jvp\((?!.*Transformer)|evaluation_step\)(?!.*Transformer)|output_projection"),
    ("optimizer", r"train_step\)(?!.*(jvp\(|Transformer))"),
)
KERNELS = r"/(query|key|value|output|inner|gate|outer|output_projection)/"  # of a product


class Collective(NamedTuple):
    """Exchanges of one kind between the devices of a program.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        dtype: As XLA writes it, such as "bf16".
        asynchronous: Whether other work runs while the numbers travel.
        count: Number of such operations; a loop's body counts once.
        num_bytes: Bytes on a device of the whole arrays before they are scattered or after they
            are gathered, all operations together.
    """

    kind: str
    dtype: str
    asynchronous: bool
    count: int
    num_bytes: int


class Loop(NamedTuple):
    """A loop whose number of iterations XLA does not know, such as the steps of a search.

    Attributes:
        path: The path that JAX gives the loop.
        cycles: Estimated cycles of an iteration, by kind of work.
        kernels: Operations that an iteration launches.
    """

    path: str
    cycles: dict[str, int]
    kernels: int


class Report(NamedTuple):
    """What XLA says of a compiled program; bytes and cycles are those of one device.

    Attributes:
        peak: Largest number of bytes in use at a time, arguments included.
        arguments: Bytes of the arguments.
        temporary: Bytes of all arrays that are neither argument nor result.
        cycles: Estimated cycles by kind of work, largest first. A loop counts as often as it runs;
            a loop of `loops` counts once.
        loops: Loops with an unknown number of iterations.
        unestimated: Number of operations without an estimate, by name; "pallas" are kernels. Those
            inside fusions do not count.
        collectives: Exchanges between devices, by kind, dtype and whether they are asynchronous.
        donated: Number of arguments whose memory a result takes.
        kernels: Operations that are launched: those that read or write memory. A loop's body counts
            once.
    """

    peak: int
    arguments: int
    temporary: int
    cycles: dict[str, int]
    loops: tuple[Loop, ...]
    unestimated: dict[str, int]
    collectives: tuple[Collective, ...]
    donated: int
    kernels: int

    @property
    def total_cycles(self) -> int:
        """Estimated cycles of all kinds of work."""
        return sum(self.cycles.values())

    def utilisation(self, flops: float, flops_per_cycle: float) -> float:
        """Return the estimated share of the peak that the model's own FLOPs come to.

        Args:
            flops: FLOPs of the model's products on one device, as `budget.step_flops`.
            flops_per_cycle: Peak of the device: its FLOP/s divided by its clock.
        """
        return flops / (self.total_cycles * flops_per_cycle)


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
        name: Of the result.
        shapes: Dtype and dimensions of the result, several for a tuple.
        opcode: The operation.
        line: The text.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    line: str

    @property
    def path(self) -> str:
        """The path that JAX gives the operation, empty for one that XLA has added."""
        return _group(r'op_name="([^"]*)"', self.line) or ""

    @property
    def cycles(self) -> int | None:
        """XLA's estimate, if it has one."""
        found = _group(r'"estimated_cycles":"(\d+)"', self.line)
        return _cycles_of_gpu(self.line) if found is None else int(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(_width(dtype) * math.prod(shape) for dtype, shape in self.shapes)


Module = dict[str, list[Instruction]]


def _cycles_of_gpu(line: str) -> int | None:
    """Return the estimate of a GPU's kernel, by the best of the models that XLA names.

    "sol" is a table of measured products, "indexing-cost-model" the model of Triton's kernels.
    """
    costs = {}
    for entry in re.findall(r"\{[^{}]*\}", _group(r'"reification_cost":\[(.*?)\]', line) or ""):
        name, time = (_group(rf'"{field}":"?([^",]*)', entry) for field in ("name", "exec_time_us"))
        costs[name] = float(time)
    best = next((name for name in ("indexing-cost-model", "sol", "") if name in costs), None)
    return None if best is None else round(costs[best] * 1e-6 * GPU_CLOCK)


def report(compiled: jax.stages.Compiled) -> Report:
    """Return what XLA says of a program that is compiled for a TPU or a GPU."""
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    module, entry = parse(text)
    loops: list[Loop] = []
    cycles = cycles_by_kind(module, entry, loops)
    return Report(
        peak=memory.peak_memory_in_bytes,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        cycles=dict(cycles.most_common()),
        loops=tuple(loops),
        unestimated=unestimated(module, entry),
        collectives=collectives(module, entry),
        donated=donated(text),
        kernels=kernels(module, entry),
    )


def parse(text: str) -> tuple[Module, str]:
    """Return the computations of a compiled program's text by name, and the name of the first."""
    module, entry, current = {}, "", []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = module[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
            written, rest = _split_type(line[found.end() :])
            opcode = _group(r"\s*([\w\-]+)\(", rest)
            if opcode is not None:
                current.append(Instruction(found[1], _shapes(written), opcode, line))
    return module, entry


def cycles_by_kind(module: Module, computation: str, loops: list[Loop]) -> Counter[str]:
    """Return the estimated cycles of a computation and of all that it calls.

    Args:
        module: Of `parse`.
        computation: A name of the module.
        loops: The loops with an unknown number of iterations are appended to it.
    """
    cycles: Counter[str] = Counter()
    for instruction in module[computation]:
        if instruction.cycles is not None:
            cycles[kind(module, instruction)] += instruction.cycles
            continue
        called = [cycles_by_kind(module, name, loops) for name in _calls(instruction)]
        if instruction.opcode == "while":
            count = _iterations(module, computation, instruction)
            iteration = sum(called, Counter())
            if count is None:
                launched = sum(kernels(module, name) for name in _calls(instruction))
                loops.append(Loop(instruction.path, dict(iteration.most_common()), launched))
            for name, number in iteration.items():
                cycles[name] += number * (1 if count is None else count)
        elif instruction.opcode == "conditional":
            cycles += max(called, key=lambda branch: sum(branch.values()))
        else:
            cycles += sum(called, Counter())
    return cycles


def _iterations(module: Module, computation: str, loop: Instruction) -> int | None:
    """Return how often a loop runs, if it counts up by one from a constant to a constant.

    The loops of `jax.lax.scan` do so. XLA for GPUs writes the number itself.
    """
    if known := _group(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(known)
    condition = {one.name: one for one in module[_group(r"condition=%?([\w.\-]+)", loop.line)]}
    test = next(one for one in condition.values() if one.line.lstrip().startswith("ROOT"))
    if test.opcode != "compare" or "direction=LT" not in test.line:
        return None
    counter, limit = (condition.get(name) for name in _operands(test))
    index = counter and _group(r"index=(\d+)", counter.line)
    outside = {one.name: one for one in module[computation]}
    start = outside.get(_operands(loop)[0])
    if index is None or start is None or start.opcode != "tuple":
        return None
    start = outside.get(_operands(start)[int(index)])
    while start is not None and start.opcode in ("copy", "bitcast"):
        start = outside.get(_operands(start)[0])
    ends = [_group(r" constant\((-?\d+)\)", one.line) if one else None for one in (start, limit)]
    return None if None in ends else max(int(ends[1]) - int(ends[0]), 0)


def kind(module: Module, instruction: Instruction) -> str:
    """Return the kind of work of an operation, for a fusion that of its last operation.

    Products with a kernel are "products"; those of queries, keys and values are "attention".
    """
    inside = [one.opcode for name in _calls(instruction) for one in module.get(name, ())]
    opcodes = inside or [instruction.opcode]
    if "convolution" in opcodes or "dot" in opcodes or CUBLAS in instruction.line:
        path = instruction.path
        own = re.search(r"(self|cross)_attention[/.]", path) and not re.search(KERNELS, path)
        return "attention" if own else "products"
    if set(opcodes) <= set(MOVES):
        return "copies"
    found = (name for name, pattern in KINDS if re.search(pattern, instruction.path))
    return next(found, "other")


def collectives(module: Module, entry: str) -> tuple[Collective, ...]:
    """Return the exchanges between devices, sorted by kind and dtype."""
    counts, sizes = Counter(), Counter()
    for name in scheduled(module, entry):
        for key, size in _collectives_of(module, name, False):
            counts[key] += 1
            sizes[key] += size
    return tuple(Collective(*key, counts[key], sizes[key]) for key in sorted(counts))


def _collectives_of(
    module: Module, computation: str, asynchronous: bool
) -> Iterator[tuple[tuple[str, str, bool], int]]:
    for instruction in module[computation]:
        opcode = instruction.opcode.removesuffix("-start")
        started = asynchronous or opcode != instruction.opcode
        if opcode in COLLECTIVES:
            yield _exchange(module, computation, instruction, opcode, started)
        for name in _calls(instruction) if opcode in ("fusion", "async") else ():
            if name.startswith(REDUCE_SCATTER):
                whole = next(one for one in module[name] if one.opcode == "all-reduce")
                yield _exchange(module, name, whole, "reduce-scatter", started)
            elif opcode == "async" or any(ASYNC_START in one.line for one in module[name]):
                yield from _collectives_of(module, name, True)


def _exchange(
    module: Module, computation: str, instruction: Instruction, opcode: str, asynchronous: bool
) -> tuple[tuple[str, str, bool], int]:
    """Return kind, dtype and asynchrony of a collective, and the bytes of its whole arrays."""
    shapes = instruction.shapes
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        shapes = shapes[len(shapes) // 2 :][:1]  # (operand, result, ...)
    elif instruction.opcode == "reduce-scatter":
        by_name = {one.name: one for one in module[computation]}
        shapes = [shape for name in _operands(instruction) for shape in by_name[name].shapes]
    sizes = Counter()
    for dtype, shape in shapes:
        sizes[dtype] += _width(dtype) * math.prod(shape)
    return (opcode, sizes.most_common(1)[0][0], asynchronous), sizes.total()


def wide_arrays(text: str, width: int, dtype: str = "f32") -> Counter[tuple[int, ...]]:
    """Return the shapes of the arrays of a width that a program writes, and how often.

    Arrays of the shape of an argument do not count: parameters and moments have that shape again
    when they are updated. Numbers inside a fusion do not count: they are never in memory.

    Args:
        text: Of `jax.stages.Compiled.as_text`.
        width: A dimension of the arrays, such as the vocabulary's size.
        dtype: As XLA writes it.
    """
    module, entry = parse(text)
    found, arguments = Counter(), set()
    for name in scheduled(module, entry):
        for instruction in module[name]:
            for kind_of, shape in instruction.shapes:
                if kind_of == dtype and width in shape:
                    if instruction.opcode == "parameter":
                        arguments.add(shape)
                    elif instruction.opcode not in ("bitcast", "get-tuple-element", "tuple"):
                        found[shape] += 1
    return Counter({shape: count for shape, count in found.items() if shape not in arguments})


def donated(text: str) -> int:
    """Return how many arguments give their memory to a result."""
    heading = text.partition("\n")[0]
    aliases = _group(r"input_output_alias=\{(.*?) \}", heading) or ""
    return len(re.findall(r"\(\d+, \{[\d, ]*\}", aliases))


def unestimated(module: Module, entry: str) -> dict[str, int]:
    """Return how many operations carry no estimate, by name, collectives left out."""
    counts: Counter[str] = Counter()
    for name in scheduled(module, entry):
        for instruction in module[name]:
            if PALLAS in instruction.line:
                counts["pallas"] += 1
            elif CUDNN in instruction.line:
                counts["cudnn"] += 1
            elif instruction.opcode in UNESTIMATED and instruction.cycles is None:
                counts[instruction.opcode] += 1
    return dict(counts)


def kernels(module: Module, entry: str) -> int:
    """Return how many operations are launched; arguments as `unestimated`."""
    operations = (one for name in scheduled(module, entry) for one in module[name])
    return sum(one.opcode not in NOT_LAUNCHED for one in operations)


def scheduled(module: Module, entry: str) -> Iterator[str]:
    """Yield the computations whose results are arrays in memory: the first, loops, branches.

    Arguments as `unestimated`.
    """
    seen, left = set(), [entry]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        for instruction in module[name]:
            if instruction.opcode in ("while", "conditional", "call"):
                left += _calls(instruction)


def _calls(instruction: Instruction) -> list[str]:
    """Return the computations that an operation runs; those of a reduction are parts of it."""
    attributes = instruction.line.partition(", metadata=")[0]
    names = re.findall(r"(?:calls|body|condition|\w+_computation)=%?([\w.\-]+)", attributes)
    if instruction.opcode == "call":
        names += re.findall(r"to_apply=%?([\w.\-]+)", attributes)
    branches = _group(r"branch_computations=\{([^}]*)\}", attributes) or ""
    return names + re.findall(r"%?([\w.\-]+)", branches)


def _operands(instruction: Instruction) -> list[str]:
    inside = instruction.line.partition(f" {instruction.opcode}(")[2].partition(")")[0]
    return re.findall(r"%([\w.\-]+)", inside)


def _split_type(text: str) -> tuple[str, str]:
    """Return the type that a line starts with, and the rest; a tuple's type has parentheses."""
    if not text.startswith("("):
        return tuple(text.partition(" ")[::2])
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""


def _shapes(written: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (dtype, tuple(map(int, sizes.split(","))) if sizes else ())
        for dtype, sizes in re.findall(r"([a-z]\w*)\[([\d,]*)\]", written)
    )


def _width(dtype: str) -> int:
    if dtype in BYTES:
        return BYTES[dtype]
    return max(int(_group(r"(\d+)", dtype) or 0) // 8, 1)


def _group(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found and found[1]
