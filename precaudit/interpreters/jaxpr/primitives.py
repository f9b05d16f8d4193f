"""What the FP64 shadow does with every primitive it knows; one it does not know is refused."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bound", "rule", "call", "refused"]


@dataclass(frozen=True)
class Lifting:
    """How a primitive is lifted, and why so; of a call, the parameter that holds its body."""

    kind: Kind
    why: str = ""
    body: str = ""


CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "composite": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_dce_call": "fun_jaxpr",
    "linear_call": "callee",
}

SCATTERS = "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"
PRODUCTS = "dot_general conv_general_dilated ragged_dot_general"

RULES = {
    "convert_element_type": "between floats: nothing; to a float: FP64; else as written",
    "reduce_precision": "nothing: a rounding",
    "bitcast_convert_type": "an integer's bits are read in the format written; a float's are refused, but its sign",
    "reduce": "its reducer is evaluated in FP64",
    "reduce_window": "its reducer is evaluated in FP64",
    "custom_linear_solve": "the operator and the solver are evaluated in FP64",
    "scan": "its body is evaluated in FP64",
    "while": "condition and body are evaluated in FP64; a batched condition keeps what has ended",
    "cond": "its branches are evaluated in FP64",
    "shard_map": "its body is evaluated in FP64, on the same mesh; differences of shards are not declared",
    "psum_invariant": "as psum",
    "all_gather_invariant": "as all_gather",
    "pvary": "nothing: what differs between shards is not declared any more",
    "empty": "zeros: what is read before it is written means nothing",
    "empty2": "zeros: what is read before it is written means nothing",
    "layout_constraint": "nothing: a layout",
} | dict.fromkeys(PRODUCTS.split(), "the result in FP64, precision and algorithm dropped")
RULES |= dict.fromkeys(SCATTERS.split(), "a function of one element (`lax.scatter_apply`) is evaluated in FP64")
RULES |= dict.fromkeys(["debug_callback", "debug_print", "inspect_sharding", "dce_sink"], "left out: gives no value")

# Bound again with floats in FP64: what they compute does not depend on the format.
BOUND = """
all_gather all_to_all axis_index pmax pmin ppermute psum reduce_scatter
abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e broadcast_in_dim cbrt
ceil cholesky cholesky_update clamp clz complex concatenate conj copy cos cosh cumlogsumexp cummax cummin cumprod
cumsum device_put digamma div dynamic_slice dynamic_update_slice eig eigh eq eq_to erf erf_inv erfc exp exp2 expm1 fft
floor gather ge gt hessenberg householder_product igamma igamma_grad_a igammac imag integer_pow iota
is_finite le le_to lgamma log log1p log2 logistic lt lt_to lu lu_pivots_to_permutation max min mul mulhi name ne neg
not one_minus_square optimization_barrier or ormqr pad platform_index polygamma polynomial population_count pow qr
random_clone random_bits random_fold_in random_seed random_split random_unwrap random_wrap real reduce_and reduce_max
reduce_min reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_min reduce_window_sum reduce_xor
regularized_incomplete_beta rem reshape reshard rev round rsqrt schur select_and_gather_add select_and_scatter_add
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt
square squeeze stack stop_gradient sub svd symmetric_product tan tanh threefry2x32 tile top_k transpose
triangular_solve tridiagonal tridiagonal_solve unstack xor zeta
"""

REFUSED = {
    "its meaning lies outside the jaxpr": """
        pallas_call pure_callback io_callback ffi_call tpu_custom_call call_exported custom_partitioning
        cudnn_fusion dot_product_attention_fwd dot_product_attention_bwd dot_product_attention_fp8_fwd
        dot_product_attention_fp8_bwd scaled_matmul core_map jaxpr_call call_hi_primitive call_hi_primitive_linearized
    """,
    "what it gives is a matter of the format's bits": "nextafter scaled_dot stochastic_round",
    "the numbers sampled depend on the format": "random_gamma rng_uniform",
    "the device chooses what it gives": "approx_top_k rng_bit_generator",
    "it is of shards, and no whole value": """
        global_array_to_host_local_array host_local_array_to_global_array
        xla_pmap all_gather_done all_gather_reduced all_gather_reduced_start
        all_gather_start all_to_all_done all_to_all_start full_to_shard pbroadcast pbroadcast_done
        pbroadcast_dynamic
        pbroadcast_start pgather ppermute_done ppermute_start precv preduced psend psum_done
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter_done
        reduce_scatter_start reduced_vary_cast reduced_vary_cast_p shard_to_full unreduced_psum unreduced_psum_start
        unreduced_reduce_scatter unreduced_reduce_scatter_start
        unreduced_pmax unreduced_pmin vary_unreduced_cast vary_unreduced_cast_p
    """,
    "JAX itself evaluates it in a compiled program alone": "relayout",
    "it reads or writes memory that has a format": """
        accum_grad_in_ref addupdate atomic_cas atomic_rmw bitcast box_get box_set create_linear empty_ref free_ref
        freeze get log_extend log_read masked_load masked_swap new_box new_log new_ref pin run_scoped run_state swap
        unpin
    """,
    "it belongs to kernels": """
        broadcast_to delay dma_start dma_wait get_barrier_semaphore get_global max_contiguous mosaic_gpu_p multiple_of
        num_programs pack_elementwise program_id reciprocal remove_memory_space repeat roll semaphore_read
        semaphore_signal semaphore_wait unpack_elementwise with_memory_space_constraint
    """,
    "JAX makes it between tracing and compiling; no program holds it": """
        add_dependency after_all create_token custom_jvp_call_jaxpr custom_lin custom_transpose_call dce_sential
        dim_as_value dimension_size eval_jaxpr from_edtype geqp3 geqrf iota_2x32_shape philox2x32 philox4x32 prng_join
        prng_random_bits prng_seed prng_split remat_opt select_and_scatter shape_assertion stage threefry4x32 tie
        to_edtype unreachable check zeros_like
    """,
}

UNKNOWN = Lifting("refused", "this version of precaudit does not know it")
TABLE: dict[str, Lifting] = {
    **{name: Lifting("bound") for name in BOUND.split()},
    **{name: Lifting("rule", why) for name, why in RULES.items()},
    **{name: Lifting("call", "its body is evaluated in FP64", body) for name, body in CALLS.items()},
    **{name: Lifting("refused", why) for why, names in REFUSED.items() for name in names.split()},
}

HEADER = """# What the FP64 shadow does with every primitive

`precaudit.interpreters.jaxpr.shadow` evaluates a program's jaxpr with every float in FP64 and every complex number in
complex128. Integers, booleans and PRNG keys stay as they are. One of four things happens to a primitive:

- **bound**: the same primitive runs on FP64 operands. Parameters that name a result's format are raised, and the
  result's shape and format are checked.
- **rule**: a function of `rules.py` computes it in FP64.
- **call**: its body is entered.
- **refused**: `CannotLift` names it and the line of the program; `--lift NAME=module:function` gives its meaning. A
  primitive that is not in this table is refused.

Custom derivative rules count where a derivative is traced before the shadow: `shadow(grad(f))` has them,
`grad(shadow(f))` is the derivative of the formula.

This file is generated: `make schemas`.

| primitive | in FP64 | how, or why not |
| --- | --- | --- |
"""


def lifting(name: str) -> Lifting:
    """Return how a primitive is lifted; one that is not in the table is refused."""
    return TABLE.get(name, UNKNOWN)


def primitives_page() -> str:
    """Return docs/shadow.md."""
    rows = (f"| `{name}` | {how.kind} | {how.why} |\n" for name, how in sorted(TABLE.items()))
    return HEADER + "".join(rows)
