"""The operations of aten that a recording may hold, by what the reading needs to know of them."""

# These only move, repeat or copy numbers.
MOVES = frozenset(
    """alias as_strided cat clone constant_pad_nd copy copy_ detach expand flip lift_fresh
    overwrite permute repeat roll select slice split split_with_sizes squeeze squeeze_
    stack t transpose transpose_ unbind unfold unsqueeze unsqueeze_ view _reshape_alias
    _to_copy _unsafe_view select_scatter slice_scatter""".split()
)
# These take the shape or the type of their first argument, and none of its numbers.
SHAPES_ALONE = frozenset(
    """empty_like fill_ full_like new_empty new_empty_strided new_full new_ones new_zeros
    ones_like zero_ zeros_like""".split()
)
PRODUCTS = frozenset("addbmm addmm addmv baddbmm bmm convolution dot mm mv".split())
SOFTMAX = frozenset("_safe_softmax _softmax".split())
LOOK_UPS = frozenset("embedding gather index index_select".split())
RANDOM = frozenset(
    """alpha_dropout bernoulli bernoulli_ dropout exponential_ feature_dropout multinomial
    native_dropout normal_ rand rand_like randint randn randn_like randperm uniform_""".split()
)
# How many numbers these give depends on numbers: at most as many as they are given.
SELECTING = frozenset("index index_put index_put_ masked_scatter nonzero".split())
OTHERS = frozenset(
    """_local_scalar_dense _log_softmax _weight_norm_interface abs add add_ addcdiv addcmul all amax
    amin any arange argmax argmin atan2 bitwise_and bitwise_and_ bitwise_not bitwise_or bitwise_or_
    bitwise_xor bucketize ceil celu clamp clamp_ clamp_max clamp_min cos cos_
    count_nonzero cumprod cumsum diagonal div div_ elu elu_ empty eq equal erf exp exp2
    exp_ expm1 eye floor floor_divide fmod full ge gelu glu gt hardsigmoid hardswish
    hardtanh index_add index_copy index_fill is_nonzero isfinite isinf isnan item le
    leaky_relu leaky_relu_ linalg_vector_norm linspace log log1p log2 logical_and
    logical_and_ logical_not logical_or logical_xor logspace logsumexp lt masked_fill
    masked_fill_ max maximum mean min minimum mish mul mul_ native_group_norm
    native_layer_norm ne neg neg_ norm ones outer pow pow_ prod reciprocal relu relu_
    remainder rms_norm round rsqrt rsqrt_ rsub scalar_tensor scatter scatter_ scatter_add
    searchsorted sigmoid sigmoid_ sign silu silu_ sin sin_ softplus sort sqrt sqrt_ square
    std std_mean sub sub_ sum tan tanh tanh_ threshold topk tril tril_ triu triu_ trunc
    var var_mean where xlogy zeros""".split()
)
ALLOWED = MOVES | SHAPES_ALONE | PRODUCTS | SOFTMAX | LOOK_UPS | SELECTING | OTHERS
OVERWRITE = "overwrite"  # what a tensor holds after a write into the storage that it shares
