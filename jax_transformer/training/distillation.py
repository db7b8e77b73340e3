"""Word-level distillation (Kim and Rush 2016, section 3.1): a student learns a teacher's words."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_transformer.config import SPECIAL_IDS, TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.training.config import TeacherWeight, Temperature

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained model that a student learns from: a pytree, whose arrays are `params` alone.

    Attributes:
        params: The teacher's parameters, which no step changes.
        config: The shape of the teacher; the vocabularies and special ids are the student's.
        weight: Share of `distillation_loss`, above 0 and at most 1; `cross_entropy` has the rest.
        temperature: As of `distillation_loss`.
    """

    params: Params
    config: TransformerConfig = dataclasses.field(metadata=STATIC)
    weight: float = dataclasses.field(default=0.5, metadata=STATIC)
    temperature: float = dataclasses.field(default=1.0, metadata=STATIC)


def check_teacher(teacher: Teacher, config: TransformerConfig) -> None:
    """Refuse a teacher whose ids are not those of the student, and numbers out of range."""
    checked("teacher.weight", teacher.weight, TeacherWeight)
    checked("teacher.temperature", teacher.temperature, Temperature)
    for name in ("source_features", "src_vocab_size", "tgt_vocab_size", *SPECIAL_IDS):
        ours, theirs = getattr(config, name), getattr(teacher.config, name)
        if ours != theirs:
            fault = f"the teacher has {name}={theirs}, but the student {ours}"
            needed = "one kind of source" if name == "source_features" else "one tokenizer"
            raise InputError(f"{fault}; they need {needed}")


def distillation_loss(
    logits: Float[Array | np.ndarray, "batch length vocab"],
    teacher_logits: Float[Array | np.ndarray, "batch length vocab"],
    targets: Int[Array | np.ndarray, "batch length"],
    pad_id: int,
    temperature: float = 1.0,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed cross-entropy of a student against a teacher, and the number of targets.

    At each target that is not padding: minus the sum over the vocabulary of q * log p, in nats,
    where q is the softmax of the teacher's logits and p that of the student's (Kim and Rush 2016,
    section 3.1), in at least float32. A word with q = 0 adds nothing, even where p = 0. No gradient
    goes to the teacher.

    Args:
        logits: The student's [B, T, V].
        teacher_logits: The teacher's, of the same inputs [B, T, V].
        targets: The ids that both predict [B, T].
        pad_id: `config.pad_id`, the id of targets that do not count.
        temperature: T, which divides the logits of both. The loss is multiplied by T squared,
            so that the size of its gradient does not depend on T (Hinton et al. 2015, section 2).

    Raises:
        InputError: The logits of both have other shapes, or the temperature is out of range.
    """
    if logits.shape != teacher_logits.shape:
        raise InputError(f"teacher_logits of shape {teacher_logits.shape} must be {logits.shape}")
    checked("temperature", temperature, Temperature)
    both = logits, jax.lax.stop_gradient(teacher_logits)
    wide = (logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) for logits in both)
    student, teacher = (jax.nn.log_softmax(logits / temperature) for logits in wide)
    shares = jnp.exp(teacher)
    losses = -jnp.sum(shares * jnp.where(shares > 0, student, 0), axis=-1)
    counted = targets != pad_id
    return temperature**2 * jnp.sum(losses, where=counted), jnp.sum(counted)
