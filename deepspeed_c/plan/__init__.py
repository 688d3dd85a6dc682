"""The memory planner: the bytes of a rank of a training run, phase by phase, before anything is allocated. ``sizes``
describes a model, ``memory`` plans one stage, ``table`` prints it, ``script`` finds the model of a training script,
``cli`` is the command ``deepspeed_c plan``. A plan knows nothing of activations.
"""
