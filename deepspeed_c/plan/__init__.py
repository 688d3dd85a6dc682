"""The memory planner: what a rank of a training run will hold, phase by phase, before anything is allocated.

``sizes`` says what a model is made of, ``memory`` plans one stage, ``table`` prints it, ``script`` finds the model of
a training script, ``cli`` is the command ``deepspeed_c plan``. A plan knows nothing of activations.
"""
