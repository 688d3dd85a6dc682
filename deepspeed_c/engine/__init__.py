"""The engine: forward, backward and step, and what is built and checked around them."""
