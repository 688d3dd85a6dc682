"""Objects that programs import by DeepSpeed's names and that nothing else in this package needs; ``alias/modules.py``
maps DeepSpeed's paths to them.
"""
