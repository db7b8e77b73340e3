"""The report of a small program that is compiled for a TPU, and of texts as XLA writes them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.runtime.topologies import topology_devices
from tests import compiled
from tests.compiled import Collective, report

WIDTH, ROWS, TURNS = 1024, 8192, 5

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("libtpu")
    return make_mesh("data=4,fsdp=2", topology_devices("v5e:2x4"))


def compile_on(mesh, function, *arguments, **options):
    """Compile a function; each argument is (axes, shape, dtype)."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for axes, shape, dtype in arguments
    ]
    return jax.jit(function, **options).lower(*shapes).compile()


@pytest.fixture(scope="module")
def step(mesh):
    """One product with its gradient: the kernel is gathered, its gradient reduced; donated."""

    def step(kernel, x):
        def loss(kernel):
            return jnp.sum((x @ kernel.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

        return kernel - jax.grad(loss)(kernel)

    kernel = (None, "fsdp"), (WIDTH, WIDTH), jnp.float32
    rows = (("data", "fsdp"),), (ROWS, WIDTH), jnp.bfloat16
    places = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    return compile_on(mesh, step, kernel, rows, donate_argnums=0, out_shardings=places)


def test_memory_is_that_of_xla(step):
    found = report(step)
    assert found.arguments == WIDTH * WIDTH * 4 // 2 + ROWS * WIDTH * 2 // 8
    assert found.peak >= found.arguments
    assert found.temporary == step.memory_analysis().temp_size_in_bytes
    assert found.donated == 1


def test_products_are_most_of_the_cycles_of_a_product(step):
    found = report(step)
    assert found.cycles["products"] > found.total_cycles / 2
    flops = 2 * 2 * ROWS / 8 * WIDTH * WIDTH  # forward, and the kernel's gradient
    assert 0.3 < found.utilisation(flops, 131_072.0) < 1


def test_collectives_are_counted_with_their_bytes(step):
    whole = WIDTH * WIDTH * 2
    found = {one.kind: one for one in report(step).collectives}
    assert found["all-gather"]._replace(asynchronous=False) == Collective(
        "all-gather", "bf16", False, 1, whole
    )
    reduced = found["reduce-scatter"]
    assert (reduced.dtype, reduced.count, reduced.num_bytes) == ("bf16", 1, whole)


@pytest.mark.parametrize("turns", [1, TURNS])
def test_a_loop_of_known_length_counts_as_often_as_it_runs(mesh, turns):
    def loops(x, limit):
        """A scan, and a loop that ends when it likes."""
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=turns + 1)
        return jax.lax.while_loop(lambda x: x[0, 0] < limit, lambda x: jnp.tanh(x @ x), x)

    text = compile_on(
        mesh, loops, ((), (WIDTH, WIDTH), jnp.float32), ((), (), jnp.float32)
    ).as_text()
    found = []
    cycles = compiled.cycles_by_kind(*compiled.parse(text), found)
    (loop,) = found
    assert loop.path.endswith("while")
    assert cycles["products"] == pytest.approx((turns + 2) * loop.cycles["products"], rel=0.05)


def test_wide_arrays_are_those_in_memory(mesh):
    def logits(x, table):
        wide = x @ table.T
        return jax.lax.optimization_barrier(wide.astype(jnp.float32)), table * 2

    vocab = 384
    rows = (("data", "fsdp"),), (ROWS, WIDTH), jnp.bfloat16
    table = (), (vocab, WIDTH), jnp.float32
    text = compile_on(mesh, logits, rows, table).as_text()
    assert set(compiled.wide_arrays(text, vocab)) == {(ROWS // 8, vocab)}  # not the table's shape


# What no small program contains, as the compiler writes it.
ASYNCHRONOUS = """HloModule step, is_scheduled=true

%fused (param: bf16[256,512]) -> (bf16[512,512], u32[]) {
  %param = bf16[256,512]{1,0} parameter(0)
  %all-gather.1 = bf16[512,512]{1,0} all-gather(%param), channel_id=1, dimensions={0}
  ROOT %custom-call = (bf16[512,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) custom-call(%all-gather.1),\
 custom_call_target="AsyncCollectiveStart"
}

%piece (param.1: bf16[256,512]) -> bf16[512,512] {
  %param.1 = bf16[256,512]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[512,512]{1,0} all-gather(%param.1), channel_id=1, dimensions={0}
}

ENTRY %main (x: bf16[256,512], y: f32[8]) -> bf16[512,512] {
  %x = bf16[256,512]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %fusion = (bf16[512,512]{1,0}, u32[]) fusion(%x), kind=kCustom, calls=%fused
  %kernel = bf16[512]{0} custom-call(%y), custom_call_target="tpu_custom_call"
  %start = (f32[8]{0}, f32[16]{0}) all-gather-start(%y), channel_id=2, dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %sum = f32[8]{0} all-reduce(%y), channel_id=3
  ROOT %last = bf16[512,512]{1,0} fusion(%x, %fusion), kind=kCustom, calls=%piece
}
"""


def test_a_gather_that_is_spread_over_fusions_is_one_asynchronous_gather():
    module, entry = compiled.parse(ASYNCHRONOUS)
    assert compiled.collectives(module, entry) == (
        Collective("all-gather", "bf16", True, 1, 512 * 512 * 2),
        Collective("all-gather", "f32", True, 1, 16 * 4),
        Collective("all-reduce", "f32", False, 1, 8 * 4),
    )


def test_kernels_without_an_estimate_are_counted():
    assert compiled.unestimated(*compiled.parse(ASYNCHRONOUS)) == {"pallas": 1}


# Paths as JAX writes them for this library's programs.
PATHS = {
    "jit(train_step)/jvp(Transformer)/Transformer.encode/encoder/layers_0/"
    "self_attention_residual/dropout/lt": "dropout",
    "jit(train_step)/transpose(jvp(Transformer))/Transformer.decode/decoder/layers_0/"
    "cross_attention_residual/norm/reduce_sum": "norms",
    "jit(train_step)/jvp(Transformer)/Transformer.encode/encoder/layers_0/"
    "self_attention_residual/self_attention/sub": "attention",
    "jit(train_step)/jvp(Transformer)/Transformer.decode/Transformer.embed/"
    "token_embedding/gather": "embedding",
    "jit(step)/jit(train_step)/jvp()/reduce_sum": "loss",
    "jit(step)/jit(train_step)/jit(_where)/select_n": "optimizer",
    "jit(_search)/while/body/top_k": "other",
}


PRODUCTS = {
    "self_attention_residual/self_attention/bhtk,bhsk->bhts/dot_general": "attention",
    "self_attention/self_attention.project/query/dot_general": "products",
    "cross_attention_residual/cross_attention/output/dot_general": "products",
    "feed_forward_residual/feed_forward/inner/dot_general": "products",
}


@pytest.mark.parametrize(("path", "kind"), (PATHS | PRODUCTS).items())
def test_the_path_of_an_operation_says_its_kind(path, kind):
    opcode, called = ("convolution", "") if path in PRODUCTS else ("fusion", "calls=%f, ")
    line = f'  %x = f32[8]{{0}} {opcode}(%y), {called}metadata={{op_name="{path}"}}'
    instruction = compiled.Instruction("x", (("f32", (8,)),), opcode, line)
    inside = compiled.Instruction("z", (("f32", (8,)),), "add", "")
    assert compiled.kind({"f": [inside]}, instruction) == kind


# As XLA for GPUs writes it: the first model's entry has no name.
COST = (
    '"reification_cost":[{"end_to_end_cycles":99.5,"exec_time_us":0.5,"name":""},'
    '{"end_to_end_cycles":0,"exec_time_us":2.5,"name":"sol"}]'
)


@pytest.mark.parametrize(
    ("line", "cycles"),
    [
        (COST, 2.5e-6 * compiled.GPU_CLOCK),
        (COST.replace("sol", "indexing-cost-model"), 2.5e-6 * compiled.GPU_CLOCK),
        (COST.replace("sol", "another"), 0.5e-6 * compiled.GPU_CLOCK),
        ("", None),
    ],
)
def test_the_estimate_of_a_gpus_kernel_is_that_of_the_best_model(line, cycles):
    assert compiled.Instruction("x", (), "fusion", line).cycles == cycles


def test_only_what_is_launched_counts_as_a_kernel():
    text = """
%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
}

%fused (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%q, %q)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %c = f32[8]{0} copy(%x)
  ROOT %w = f32[8]{0} while(%c), condition=%fused, body=%body
}
"""
    assert compiled.kernels(*compiled.parse(text)) == 3  # copy, fusion, and the condition's add
