"""Mixtures of experts (``docs/concepts/moe.md``): gates, experts over ranks, and the way of rows between them."""
