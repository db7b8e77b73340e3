"""Strange models find their config and layout: a client of `convert` that nothing else imports."""

from jax_transformer.porting.compare import compare
from jax_transformer.porting.layouts import get_layout, layouts, layouts_of
from jax_transformer.porting.trainers import TRAINERS, from_trainer

__all__ = ["TRAINERS", "compare", "from_trainer", "get_layout", "layouts", "layouts_of"]
