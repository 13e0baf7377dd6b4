"""The target: what a model folder says of itself, read without loading the model.

``describe``      the whole of it, as a contract holds it
``config``        ``config.json``, normalised so that two versions of Transformers give one digest
``rope``          its rotary embedding, in the layouts of Transformers 4 and 5
``families``      what a config does not say, as a table
``checkpoint``    safetensors headers, bytes of one tensor
``keytensors``    embedding, final norm and lm_head by name
``rows``          single rows and blocks of rows of a large matrix
``ends``          the final norm and the head, computed in NumPy
``tokenizer``     digests of tokenizer and chat template
``jsonfiles``     JSON files, or where they break
"""

from __future__ import annotations

from hsformat.target.describe import MEASURED, NORM_WEIGHT, TargetDescription, UnknownFamily, describe
from hsformat.target.families import FAMILIES, Family
from hsformat.target.keytensors import Role, key_tensors, load_key_tensor

__all__ = [
    "FAMILIES",
    "MEASURED",
    "NORM_WEIGHT",
    "Family",
    "Role",
    "TargetDescription",
    "UnknownFamily",
    "describe",
    "key_tensors",
    "load_key_tensor",
]
