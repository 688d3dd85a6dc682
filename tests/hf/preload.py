"""The modules that are imported before the ranks of tests/hf are forked: first the alias, then the stack, which looks
for ``deepspeed``.
"""

import deepspeed_c

deepspeed_c.install_as_deepspeed()

import accelerate  # noqa: F401
import peft  # noqa: F401
import transformers
from transformers import LlamaForCausalLM, Trainer  # noqa: F401  (transformers imports by need)
from trl import DPOTrainer, SFTTrainer  # noqa: F401

import tests.deepspeed_c.inject.preload  # noqa: F401  (the families that are cut)

transformers.utils.logging.set_verbosity_error()
