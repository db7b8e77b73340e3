"""Strange models find their config and layout: a client of `convert` and of `parity`."""

from jax_transformer.porting.layouts import get_layout, layouts, layouts_of
from jax_transformer.porting.recording import Recording, program, read_recording
from jax_transformer.porting.suggestion import Suggestion, suggest
from jax_transformer.porting.trainers import TRAINERS, from_trainer
from jax_transformer.porting.verification import record_model, verify, verify_recording

__all__ = ["TRAINERS", "Recording", "Suggestion", "from_trainer", "get_layout", "layouts"]
__all__ += ["layouts_of", "program", "read_recording", "record_model", "suggest", "verify"]
__all__ += ["verify_recording"]
