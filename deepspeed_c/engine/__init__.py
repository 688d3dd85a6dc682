"""The engine: forward, backward and step, and the parts that are built and checked around them."""
