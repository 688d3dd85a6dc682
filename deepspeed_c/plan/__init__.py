"""The memory planner: the memory of one rank of a training run, phase by phase, computed before anything is allocated.
``sizes`` describes a model, ``memory`` plans one stage, ``table`` prints it, ``script`` finds the model of a training
script, ``cli`` is the command ``deepspeed_c plan``. ``memory`` itself does not compute activations; ``activations`` and
``timeline`` do.
"""
