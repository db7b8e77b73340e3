"""How tests compile: quickly as a rule, and as users do where that is what a test is about."""

import jax

# Small models compile for longer than they run: leave out what only makes code faster. Each flag
# of XLA with its value in the tests, and XLA's own.
FLAGS = {
    "xla_backend_optimization_level": (0, 3),
    "xla_llvm_disable_expensive_passes": (True, False),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
if jax.__version_info__ < (0, 11):  # later ones have no other code than the emitters'
    FLAGS["xla_cpu_use_fusion_emitters"] = (False, True)

QUICKLY = " ".join(f"--{name}={str(quick).lower()}" for name, (quick, _) in FLAGS.items())
AS_USERS_DO = {name: default for name, (_, default) in FLAGS.items()}  # options of a compilation
