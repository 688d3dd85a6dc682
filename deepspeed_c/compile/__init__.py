"""The graph compile backend: gathers and releases of sharded weights, and reductions of gradients, as operators inside
the graphs that ``torch.compile`` makes of a model. See docs/concepts/compile.md.
"""
